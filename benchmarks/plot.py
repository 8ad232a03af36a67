"""Results as pictures, one for each question."""

from pathlib import Path
from typing import Any

from benchmarks.questions import QUESTIONS, Line, Question, Times, answered, target_of

_OURS, _THEIRS = "#2f6db3", "#8a8a8a"
_STYLES = {
    "dynamicemb, in a graph": {"marker": "o", "color": _OURS, "markersize": 8},
    "dynamicemb, eager": {"marker": "o", "color": _OURS, "markersize": 8, "markerfacecolor": "white"},
    "dynamicemb": {"marker": "o", "color": _OURS, "markersize": 8},
    "TorchRec around a constant lookup": {"marker": "s", "color": _THEIRS, "markersize": 6},
    "FBGEMM, in a graph": {"marker": "D", "color": _THEIRS, "markersize": 6},
    "target": {"marker": "|", "color": "black", "markersize": 14, "markeredgewidth": 2.5},
    "target, in a graph": {"marker": "|", "color": "black", "markersize": 14, "markeredgewidth": 2.5},
}
# Equal times must not cover each other.
_LANES = {"dynamicemb, eager": 0.17, "FBGEMM, in a graph": -0.17, "TorchRec around a constant lookup": -0.17}


def plot(lines: list[Line], folder: Path, name: str) -> list[Path]:
    """Draw a picture for each question to which there are answers.

    Args:
        lines: of one file of results.
        folder: where the pictures go.
        name: of that file, without its ending; a picture is ``<name>_<question>.png``.

    Returns:
        The pictures; none without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    paths = []
    for question in QUESTIONS:
        rows = answered(question, [line for line in lines if line.get("device") == question.device])
        if question.pictured and rows:
            paths.append(folder / f"{name}_{question.name}.png")
            _draw(question, rows, paths[-1])
    return paths


def points(question: Question, line: Line) -> dict[str, float]:
    """Return what a picture shows of a line: ratios by the names of the legend."""
    times = Times.of(line)
    if question.device == "cpu":
        ratios = {"dynamicemb": times.eager}
    elif line["baseline"].startswith("fbgemm"):
        ratios = {
            "dynamicemb, in a graph": times.graph_to_eager,
            "dynamicemb, eager": times.eager,
            "FBGEMM, in a graph": None if times.base_graph is None else times.base_graph / (times.base_eager or 1),
        }
    else:
        ratios = {"dynamicemb, in a graph": times.graph, "dynamicemb, eager": times.eager}
    if "a constant lookup" in line["engines"]:
        ratios["TorchRec around a constant lookup"] = line["engines"]["a constant lookup"]["ratio"]
    ratios["target, in a graph" if times.our_graph else "target"] = target_of(line)
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _draw(question: Question, rows: list[tuple[str, Line]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 2.1 + 0.42 * len(rows)), layout="constrained")
    most = 1.0
    for position, (_, line) in enumerate(rows):
        ratios = points(question, line)
        most = max(most, *ratios.values())
        for name, ratio in ratios.items():
            height = position + _LANES.get(name, 0)
            axes.plot(ratio, height, linestyle="none", label=name, **_STYLES[name])
    axes.set_yticks(range(len(rows)), [words.replace("`", "") for words, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.06 * most)
    axes.axvline(1.0, color="gray", linewidth=1, linestyle="--")
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    eager = ", eager" if question.device == "cuda" and question.beside == "FBGEMM" else ""
    axes.set_xlabel(f"time / time of {question.beside}{eager} (dashed: equal; left is faster)")
    first = rows[0][1]
    hardware = first.get("gpu") or f"{first['cpu']}, {first['threads']} threads"
    commits = ", ".join(dict.fromkeys(line["commit"][:7] for _, line in rows))
    figure.suptitle(f"{question.title}\n{hardware}, commit {commits}", fontsize=11)
    _write_times(axes, rows)
    _explain(figure, axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _write_times(axes: Any, rows: list[tuple[str, Line]]) -> None:
    """Write our time in ms, in a graph where there is one, to the right of each row."""
    right = axes.secondary_yaxis("right")
    times = [Times.of(line) for _, line in rows]
    right.set_yticks(range(len(rows)), [f"{time.our_graph or time.our_eager:#.3g} ms" for time in times])
    right.tick_params(length=0)
    graph = any(time.our_graph for time in times)
    axes.set_title("ours, in a graph" if graph else "ours", loc="right", fontsize=9)


def _explain(figure: Any, axes: Any) -> None:
    """Draw the legend under the axes, in as many rows as the width asks for."""
    by_name = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [name for name in _STYLES if name in by_name]
    if len(names) > 1:
        handles = [by_name[name] for name in names]
        figure.legend(handles, names, fontsize=9, loc="outside lower center", ncols=len(names), frameon=False)
