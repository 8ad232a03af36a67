"""Tables for people and for README.md."""

from collections.abc import Iterable, Sequence


def markdown(title: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a titled table."""
    lines = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in [header, *rows]]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join([title, "", *lines, ""])
