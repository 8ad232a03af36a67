"""Results as a picture."""

from pathlib import Path
from typing import Any

_REACHED, _MISSED = "#4878a8", "#c05040"
_HEIGHT = 0.4


def plot(lines: list[dict[str, Any]], path: Path) -> bool:
    """Draw the ratio of each case to its baseline, with the targets; returns False without matplotlib.

    The bar is the engine that has the target, diamonds are the others, black lines the targets.
    """
    lines = [line for line in lines if line["baseline"]]
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.36 * len(lines)), layout="constrained")
    for position, line in enumerate(lines):
        _draw(axes, position, line)
    axes.set_yticks(range(len(lines)), [line["case"] for line in lines])
    axes.invert_yaxis()
    axes.axvline(1.0, color="gray", linewidth=0.8, linestyle="--")
    ratios = [engine["ratio"] for line in lines for engine in line["engines"].values()]
    axes.set_xlim(0, 1.5 * max(ratios, default=1))
    baselines = ", ".join(dict.fromkeys(line["baseline"] for line in lines))
    axes.set_xlabel(f"time / {baselines} in the same run (black: target)")
    if lines:
        first = lines[0]
        hardware = first.get("gpu") or f"{first['cpu']}, {first['threads']} threads"
        axes.set_title(f"{hardware}, {first['commit']}", fontsize=9)
        _legend(figure, axes, lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _draw(axes: Any, position: int, line: dict[str, Any]) -> None:
    ours, base = line["engines"][line["ours"]], line["engines"][line["baseline"]]
    target = line["targets"].get(line["ours"])
    reached = target is None or ours["ratio"] <= target
    axes.barh(position, ours["ratio"], color=_REACHED if reached else _MISSED)
    others = {name: result for name, result in line["engines"].items() if name not in (line["ours"], line["baseline"])}
    for name, result in others.items():
        axes.plot(result["ratio"], position, "D", color=_marker(name), markersize=4)
    right = max([ours["ratio"], *(result["ratio"] for result in others.values())])
    label = f"   {ours['ratio']:.2f}   {ours['ms']:.3g} ms vs {base['ms']:.3g} ms"
    axes.text(right, position, label, va="center", fontsize=8)
    if target is not None:
        axes.plot([target] * 2, [position - _HEIGHT, position + _HEIGHT], color="black", linewidth=2)


def _marker(name: str) -> str:
    return "#f0a030" if name.startswith("dynamicemb") else "#808080"


def _legend(figure: Any, axes: Any, lines: list[dict[str, Any]]) -> None:
    """Explain bars and diamonds, where there are diamonds."""
    bars = list(dict.fromkeys(line["ours"] for line in lines))
    diamonds = dict.fromkeys(
        name for line in lines for name in line["engines"] if name not in (line["ours"], line["baseline"])
    )
    if not diamonds:
        return
    axes.barh(0, 0, color=_REACHED, label=" or ".join(bars))
    for name in diamonds:
        axes.plot([], [], "D", color=_marker(name), markersize=4, label=name)
    figure.legend(fontsize=8, loc="outside lower right", ncols=1 + len(diamonds))
