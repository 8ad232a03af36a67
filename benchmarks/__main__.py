"""Command line: ``python -m benchmarks [--device cpu|cuda] [--cases NAME ...] [--phases]``.

``python -m benchmarks --page`` measures nothing: it writes docs/measurements.md and the pictures from the results.

On a machine that runs other things too, set ``OMP_WAIT_POLICY=passive``: threads that spin at a barrier otherwise keep
the core from the thread they wait for, and a parallel region takes milliseconds instead of microseconds.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import page, plot, report
from benchmarks.cases import CASES, Case, select
from benchmarks.machine import default_name, describe
from benchmarks.runner import Effort, describe_error, run_case

RESULTS = Path(__file__).resolve().parent / "results"

# Turns, timed steps of each, undisturbed repetitions wanted, limit in seconds.
_EFFORT = {"cpu": (15, 4, 24, 30.0), "cuda": (8, 6, 0, 6.0)}
_QUICK = {"cpu": (3, 2, 0, 10.0), "cuda": (3, 4, 0, 2.0)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=sorted(CASES), default=device, help="default: cuda where there is a GPU")
    parser.add_argument(
        "--cases", nargs="*", default=[], metavar="NAME", help="cases, as 'adam_train' or '*_eval'; default all"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--report", action="store_true", help="measure nothing: report the last line of every case")
    parser.add_argument("--page", action="store_true", help="measure nothing: write docs/measurements.md and pictures")
    parser.add_argument("--phases", action="store_true", help="add where the time of our step goes")
    parser.add_argument("--quick", action="store_true", help="fewer turns and steps")
    parser.add_argument("--threads", type=int, help="threads of torch, and thereby of numba (default 2 on the CPU)")
    parser.add_argument("--rounds", type=int, help="turns per engine (default 15, on a GPU 8)")
    parser.add_argument("--steps", type=int, help="timed steps of a turn (default 4, on a GPU 6)")
    parser.add_argument("--quiet", type=int, help="undisturbed repetitions wanted (default 24, on a GPU 0)")
    parser.add_argument("--seconds", type=float, help="limit for the turns of a case (default 30, on a GPU 6)")
    parser.add_argument("--max-rows", type=int, default=2**31, help="shrink tables, for a quick try")
    parser.add_argument("--max-ids", type=int, default=2**31, help="shrink batches, for a quick try")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON lines and plot")
    parser.add_argument("--name", help="names of the files there (default: cpu, or the GPU's name as h200)")
    parser.add_argument("--commit", help="of the sources, where they are no git checkout")
    args = parser.parse_args(argv)
    defaults = (_QUICK if args.quick else _EFFORT)[args.device]
    for option, value in zip(("rounds", "steps", "quiet", "seconds"), defaults, strict=True):
        if getattr(args, option) is None:
            setattr(args, option, value)
    if args.threads is None and args.device == "cpu":
        args.threads = 2
    return args


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; returns 1 if a case failed."""
    args = parse(argv)
    console = Console(width=200)
    cases = select(args.cases, args.device)
    if args.list:
        for case in cases:
            console.print(case.name)
        return 0
    if args.page:
        return _write_page(args.out, console)
    if args.threads:
        torch.set_num_threads(args.threads)
    path = args.out / f"{args.name or default_name(args.device)}.jsonl"
    if args.report:
        lines = report.read_json(path, [case.name for case in cases])
    else:
        lines = _run(args, cases, path, console)
    good = [line for line in lines if "error" not in line]
    if good:
        report.print_results(good, console)
        report.print_phases(good, console)
        # A run of a few cases leaves the others in the pictures.
        if not plot.plot(_latest(path), args.out, path.stem):
            console.print("no pictures: matplotlib is not installed, or no question is about these cases")
    for line in lines:
        if "error" in line:
            console.print(f"{line['case']} FAILED: {line['error']}", markup=False)
    return 0 if len(good) == len(lines) else 1


def _write_page(folder: Path, console: Console) -> int:
    """Write the page of the measurements, and draw the pictures of every file of results."""
    page.write(folder, page.PAGE)
    drawn = [path for file in sorted(folder.glob("*.jsonl")) for path in plot.plot(_latest(file), folder, file.stem)]
    console.print(f"{page.PAGE}, {len(drawn)} pictures", markup=False, soft_wrap=True)
    return 0


def _latest(path: Path) -> list[report.Line]:
    """Return the last result of every case of a file."""
    return list({line["case"]: line for line in report.read_all(path) if "error" not in line}.values())


def _run(args: argparse.Namespace, cases: list[Case], path: Path, console: Console) -> list[dict[str, Any]]:
    """Run cases one after another; each adds its line to the file when it is done, or the reason why it failed."""
    machine = describe(args.device, args.commit)
    effort = Effort(args.rounds, args.steps, args.quiet, args.seconds, args.phases)
    console.print(" ".join(f"{key}={value}" for key, value in machine.items()), markup=False)
    lines = []
    for case in cases:
        try:
            _release(args.device)
            line = run_case(case.shrink(args.max_rows, args.max_ids), effort)
        except Exception as error:
            line = {"case": case.name, "error": describe_error(error)}
        # The report rounds what the file has, so that it is the same when it is made from the file.
        lines.append(report.rounded({**machine, **line}))
        report.append_json(lines[-1:], path)
        console.print(report.one_line(line), markup=False, soft_wrap=True)
    return lines


def _release(device: str) -> None:
    """Free what the case before has left, so that every case has the whole memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
