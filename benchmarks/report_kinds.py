"""Results of the cases that are no single step of tables on their own: TorchRec, host time, table sizes."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

Line = dict[str, Any]

_TITLES = {
    "torchrec": "steps under TorchRec, median ms; the ratio is to the faster static plan",
    "host": "time of an eager step on the host, ms, best loop; the ratio is to FBGEMM",
    "size": "the same ids in tables of several sizes, median ms; the ratio is to the smallest",
}
_COUNTS = ("launches", "copies", "kernels", "ops")


def print_kinds(lines: list[Line], console: Console) -> None:
    """Print a table for each kind of case, then what a reader has to know about the lines."""
    for kind, title in _TITLES.items():
        of_kind = [line for line in lines if line.get("kind") == kind]
        if of_kind:
            console.print(_table(title, of_kind))
        for line in of_kind:
            for text in remarks(line):
                console.print(f"{line['case']}: {text}", markup=False, soft_wrap=True)


def remarks(line: Line) -> list[str]:
    """Return what a reader has to know about a line."""
    found = [f"{name} did not run: {error}" for name, error in line["errors"].items()]
    if "torchrec_share" in line:
        found.append(f"TorchRec itself, around a constant lookup, takes {line['torchrec_share']:.0%} of our step")
    found += [f"outputs differ from {name} by at most {most:.2g}" for name, most in line.get("differences", {}).items()]
    if line.get("inserted_per_step"):
        found.append(f"our tables take in {line['inserted_per_step']:.1f} ids a step: not the same work")
    if any(line.get("inserted", {}).values()):
        found.append(f"tables took in ids while they were timed, not the same work: {line['inserted']}")
    return found


def _table(title: str, lines: Iterable[Line]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ["case", "ids", "engine", "ms", "fastest ms", "ratio", "short loop ms", "device ms", *_COUNTS]
    rows = []
    for line in lines:
        for number, (name, result) in enumerate(line["engines"].items()):
            counts = result.get("counts") or line.get("counts", {}).get(name, {})
            cells = [line["case"] if number == 0 else "", f"{line['ids']:,}" if number == 0 else "", name]
            cells += [_number(result[key], 3) for key in ("ms", "min_ms")] + [_number(result["ratio"], 2)]
            cells += [_number(result.get(key), 3) for key in ("burst_ms", "device_ms")]
            cells += [_number(counts.get(key), 0) for key in _COUNTS]
            rows.append((cells, number == len(line["engines"]) - 1))
    # Columns that only other kinds fill stay away.
    shown = [c for c in range(len(columns)) if any(cells[c] for cells, _ in rows)]
    for c in shown:
        table.add_column(columns[c], justify="left" if c in (0, 2) else "right", no_wrap=True)
    for cells, ends in rows:
        table.add_row(*(cells[c] for c in shown), end_section=ends)
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
