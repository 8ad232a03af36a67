"""Results as tables and as JSON lines."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.timing import ENOUGH_QUIET

Line = dict[str, Any]

_WAYS = ("fbgemm TBE eager", "fbgemm TBE graph", "dynamicemb eager", "dynamicemb graph")


def print_results(lines: list[Line], console: Console) -> None:
    """Print one line per engine and case, then comparisons, memory and warnings."""
    table = _table(f"copy bandwidth {max(line['copy_gbps'] for line in lines):.1f} GB/s", ["case", "engine"])
    for name in ("ms", "min ms", "cpu ms", "M ids/s", "GB/s", "% copy"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("ratio", "min ratio", "cpu ratio", "target", "quiet"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        for number, name in enumerate(line["engines"]):
            table.add_row(*_cells(line, name, number == 0), end_section=number == len(line["engines"]) - 1)
    console.print(table)
    if any(line["device"] == "cuda" for line in lines):
        _print_ways([line for line in lines if line["device"] == "cuda"], console)
    _print_memory(lines, console)
    for line in lines:
        for text in _remarks(line):
            console.print(f"{line['case']}: {text}", markup=False, soft_wrap=True)
    busiest = max(max(line["load"]) for line in lines)
    if busiest > lines[0]["cores"] + 0.5:
        console.print(
            f"The machine was shared: load up to {busiest} on {lines[0]['cores']} cores. Times are of the quiet "
            f"repetitions where each engine has at least {ENOUGH_QUIET}, else of all; then trust the minima."
        )


def one_line(line: Line) -> str:
    """Return a result in a few words."""
    if "error" in line:
        return f"{line['case']} FAILED: {line['error']}"
    times = ", ".join(f"{name} {result['ms']:.3f}" for name, result in line["engines"].items())
    ratio = line["engines"][line["ours"]]["ratio"]
    return f"{line['case']}: {times} ms; ratio {_number(ratio)} {_verdict(line, line['ours'])}".rstrip()


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _verdict(line: Line, name: str) -> str:
    target, ratio = line["targets"].get(name), line["engines"][name]["ratio"]
    if target is None or ratio is None:
        return ""
    return f"{target:.2f} {'ok' if ratio <= target else 'MISSED'}"


def _cells(line: Line, name: str, first: bool) -> list[str]:
    result = line["engines"][name]
    return [
        line["case"] if first else "",
        name,
        f"{result['ms']:.3f}",
        f"{result['min_ms']:.3f}",
        f"{result['cpu_ms']:.3f}",
        f"{result['ids_per_s'] / 1e6:.2f}",
        f"{result['gbps']:.2f}",
        f"{result['copy_percent']:.0f}",
        *(_number(result[key]) for key in ("ratio", "min_ratio", "cpu_ratio")),
        _verdict(line, name),
        f"{result['quiet']}/{result['repetitions']}",
    ]


def _print_ways(lines: list[Line], console: Console) -> None:
    """Print eager against eager, and graph against both, in one row per case."""
    columns = ["unique", "new/step", "evicted/step", *(f"{name} ms" for name in _WAYS)]
    table = _table("dynamicemb against FBGEMM: time / time in the same run", ["case"])
    for name in [*columns, "eager / eager", "graph / eager", "graph / graph", "target", "eager target"]:
        table.add_column(name, justify="right")
    for line in lines:
        times = [line["engines"].get(name, {}).get("ms") for name in _WAYS]
        tbe_eager, tbe_graph, our_eager, our_graph = times
        ratios = (_ratio(our_eager, tbe_eager), _ratio(our_graph, tbe_eager), _ratio(our_graph, tbe_graph))
        eager = _verdict(line, line["ours_eager"]) if line["ours_eager"] != line["ours"] else ""
        table.add_row(
            line["case"],
            *(f"{line[key]:.0f}" for key in ("unique", "inserted_per_step", "evicted_per_step")),
            *(_number(ms, 3) for ms in times),
            *(_number(ratio) for ratio in ratios),
            _verdict(line, line["ours"]),
            eager,
        )
    console.print(table)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs


def _remarks(line: Line) -> list[str]:
    """Return what a reader has to know about a line."""
    remarks = [line["note"]] if line["note"] else []
    remarks += [f"{name} did not run: {error}" for name, error in line["errors"].items()]
    if line["clock"] == "wall, loop of steps":
        remarks.append("wall clock of a loop of steps with one wait at its end: the host bounds eager steps")
    if "growth_ns_per_id" in line:
        remarks.append(f"growth takes {line['growth_ns_per_id']:.1f} ns for each id held")
    if line["evicted_per_step"]:
        remarks.append(f"{line['evicted_per_step']:.0f} evictions a step")
    if line.get("failed_per_step"):
        remarks.append(f"{line['failed_per_step']:.0f} ids a step found no place")
    return remarks


def _print_memory(lines: list[Line], console: Console) -> None:
    table = _table("memory", ["case"])
    for name in ("rows MB", "index MB", "index B/slot", "load", "baseline MB"):
        table.add_column(name, justify="right", no_wrap=True)
    seen = set()
    for line in lines:
        memory = line["engines"][line["ours"]]["memory"]
        baseline = sum(line["engines"][line["baseline"]]["memory"].values()) / 1e6 if line["baseline"] else None
        row = (
            f"{memory['rows'] / 1e6:.1f}",
            f"{memory['index'] / 1e6:.1f}",
            f"{line['index_bytes_per_slot']:.1f}",
            f"{line['load_factor']:.3f}",
            _number(baseline, 1),
        )
        if row not in seen:
            table.add_row(line["case"], *row)
        seen.add(row)
    console.print(table)


def print_phases(lines: list[Line], console: Console) -> None:
    """Print the median ms of every phase of our steps, where they were measured."""
    lines = [line for line in lines if "phases_ms" in line]
    if not lines:
        return
    names = list(dict.fromkeys(name for line in lines for name in line["phases_ms"] if name != "total"))
    title = "phases of our eager step, median ms (steps of tables alone on a GPU: of the device; else of the host)"
    table = _table(title, ["case"])
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
            file.write(json.dumps(line) + "\n")


def read_json(path: Path, cases: list[str]) -> list[Line]:
    """Return the last line of each of the cases that the file has, in the order of ``cases``."""
    last = {line["case"]: line for line in read_all(path)}
    return [last[case] for case in cases if case in last]


def read_all(path: Path) -> list[Line]:
    """Return all lines of a file, the oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def rounded(value: Any) -> Any:
    """Round floats to 5 significant digits, inside of lists and dicts too."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
