"""Results as a table, as JSON lines and as a plot."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.timing import ENOUGH_QUIET

Line = dict[str, Any]


def print_results(lines: list[Line], console: Console) -> None:
    """Print one line per engine and case, then memory and warnings."""
    table = Table(title=f"copy bandwidth {max(line['copy_gbps'] for line in lines):.1f} GB/s", title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for name in (
        "ms",
        "min ms",
        "cpu ms",
        "M ids/s",
        "GB/s",
        "% copy",
        "ratio",
        "min ratio",
        "cpu ratio",
        "target",
        "quiet",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        for key in ("baseline", "ours"):
            table.add_row(*_cells(line, key), end_section=key == "ours")
    console.print(table)
    for line in lines:
        if line["note"]:
            console.print(f"{line['case']}: {line['note']}")
        if line["evicted_per_step"]:
            console.print(f"{line['case']}: {line['evicted_per_step']:.0f} evictions a step")
    _print_memory(lines, console)
    busiest = max(max(line["load"]) for line in lines)
    if busiest > lines[0]["cores"] + 0.5:
        console.print(
            f"The machine was shared: load up to {busiest} on {lines[0]['cores']} cores. Times are of the quiet "
            f"repetitions where each engine has at least {ENOUGH_QUIET}, else of all; then trust the minima."
        )


def _cells(line: Line, key: str) -> list[str]:
    result = line[key]
    cells = [
        line["case"] if key == "baseline" else "",
        result["name"],
        f"{result['ms']:.3f}",
        f"{result['min_ms']:.3f}",
        f"{result['cpu_ms']:.3f}",
        f"{result['ids_per_s'] / 1e6:.2f}",
        f"{result['gbps']:.2f}",
        f"{result['copy_percent']:.0f}",
    ]
    quiet = f"{line['quiet'][key == 'ours']}/{line['repetitions']}"
    if key == "baseline":
        return [*cells, "1.00", "1.00", "1.00", "", quiet]
    target = line["target"]
    verdict = "" if target is None else f"{target:.2f} {'ok' if line['ratio'] <= target else 'MISSED'}"
    return [*cells, f"{line['ratio']:.2f}", f"{line['min_ratio']:.2f}", f"{line['cpu_ratio']:.2f}", verdict, quiet]


def _print_memory(lines: list[Line], console: Console) -> None:
    table = Table(title="memory", title_justify="left")
    table.add_column("case", no_wrap=True)
    for name in ("rows MB", "index MB", "index B/slot", "load", "baseline MB"):
        table.add_column(name, justify="right", no_wrap=True)
    seen = set()
    for line in lines:
        memory = line["ours"]["memory"]
        row = (
            f"{memory['rows'] / 1e6:.1f}",
            f"{memory['index'] / 1e6:.1f}",
            f"{line['index_bytes_per_slot']:.1f}",
            f"{line['load_factor']:.3f}",
            f"{sum(line['baseline']['memory'].values()) / 1e6:.1f}",
        )
        if row not in seen:
            table.add_row(line["case"], *row)
        seen.add(row)
    console.print(table)


def print_phases(lines: list[Line], console: Console) -> None:
    """Print the median ms of every phase of our steps."""
    names = list(dict.fromkeys(name for line in lines for name in line["phases_ms"] if name != "total"))
    table = Table(title="phases of our step, median ms", title_justify="left")
    table.add_column("case", no_wrap=True)
    for name in [*names, "total"]:
        table.add_column(name, justify="right")
    for line in lines:
        phases = line["phases_ms"]
        table.add_row(line["case"], *(f"{phases[name]:.3f}" if name in phases else "" for name in [*names, "total"]))
    console.print(table)


def append_json(lines: list[Line], path: Path) -> None:
    """Append one JSON line per case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps(_rounded(line)) + "\n")


def _rounded(value: Any) -> Any:
    """Round floats to 5 significant digits, inside of lists and dicts too."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def plot(lines: list[Line], path: Path) -> bool:
    """Draw the ratio of each case to its baseline, with the targets; returns False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.36 * len(lines)), layout="constrained")
    for position, line in enumerate(lines):
        reached = line["target"] is None or line["ratio"] <= line["target"]
        axes.barh(position, line["ratio"], color="#4878a8" if reached else "#c05040")
        label = f" {line['ratio']:.2f}   {line['ours']['ms']:.3g} ms vs {line['baseline']['ms']:.3g} ms"
        axes.text(line["ratio"], position, label, va="center", fontsize=8)
        if line["target"] is not None:
            axes.plot([line["target"]] * 2, [position - 0.45, position + 0.45], color="black", linewidth=2)
    axes.set_yticks(range(len(lines)), [line["case"] for line in lines])
    axes.invert_yaxis()
    axes.axvline(1.0, color="gray", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.5 * max(line["ratio"] for line in lines))
    axes.set_xlabel("time / baseline in the same run (black: target)")
    first = lines[0]
    axes.set_title(f"{first['cpu']}, {first['threads']} threads, {first['commit']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
