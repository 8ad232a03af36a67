"""Command line: ``python -m benchmarks [--cases NAME ...] [--phases]``.

On a machine that runs other things too, set ``OMP_WAIT_POLICY=passive``: threads that spin at a barrier otherwise keep
the core from the thread they wait for, and a parallel region takes milliseconds instead of microseconds.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import report
from benchmarks.cases import CASES, select
from benchmarks.machine import describe
from benchmarks.runner import Effort, run_case

RESULTS = Path(__file__).resolve().parent / "results"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--cases", nargs="*", default=[], metavar="NAME", help="cases, as 'adam_train' or '*_eval'; default all"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--phases", action="store_true", help="add where the time of our step goes")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch, and thereby of numba (default 2)")
    parser.add_argument("--rounds", type=int, default=15, help="turns per engine (default 15)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn (default 4)")
    parser.add_argument("--quiet", type=int, default=24, help="undisturbed repetitions wanted (default 24)")
    parser.add_argument("--seconds", type=float, default=30.0, help="limit for the turns of a case (default 30)")
    parser.add_argument("--max-rows", type=int, default=2**31, help="shrink tables, for a quick try")
    parser.add_argument("--max-ids", type=int, default=2**31, help="shrink batches, for a quick try")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON lines and plot")
    parser.add_argument("--name", default="cpu", help="names of the files there (default cpu)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    args = parse(argv)
    console = Console(width=160)
    if args.list:
        for case in CASES:
            console.print(case.name)
        return 0
    torch.set_num_threads(args.threads)
    machine = describe()
    effort = Effort(args.rounds, args.steps, args.quiet, args.seconds, args.phases)
    lines = []
    for case in select(args.cases):
        console.print(f"running {case.name} ...", style="dim")
        lines.append({**machine, **run_case(case.shrink(args.max_rows, args.max_ids), effort)})
        report.append_json(lines[-1:], args.out / f"{args.name}.jsonl")
    console.print(" ".join(f"{key}={value}" for key, value in machine.items()))
    report.print_results(lines, console)
    if args.phases:
        report.print_phases(lines, console)
    if not report.plot(lines, args.out / f"{args.name}.png"):
        console.print("no plot: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
