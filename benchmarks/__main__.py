"""Command line: ``python -m benchmarks [--device cpu|cuda] [--cases NAME ...] [--phases]``.

Besides steps of tables alone there are ``torchrec_*`` (collections under TorchRec, on ``--ranks`` processes),
``host_*`` (time of the host, launches, torch ops) and ``size_*`` (tables of 10^6 to 10^9 rows); on the CPU their names
begin with ``cpu_``. ``--against FOLDER`` runs our engines of the cases with the package of another checkout too.

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
from benchmarks.against import Limits, run_against
from benchmarks.cases import CASES, AnyCase, ShardedCase, select
from benchmarks.kinds import run_case
from benchmarks.machine import default_name, describe
from benchmarks.report_kinds import print_kinds
from benchmarks.timing import describe_error
from benchmarks.turns import Effort

RESULTS = Path(__file__).resolve().parent / "results"

# Turns, timed steps of each, undisturbed repetitions wanted, limit in seconds, steps of a loop without a wait.
_EFFORT = {"cpu": (15, 4, 24, 30.0, 300), "cuda": (8, 6, 0, 6.0, 300)}
_QUICK = {"cpu": (3, 2, 0, 10.0, 50), "cuda": (3, 4, 0, 2.0, 100)}


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
    parser.add_argument("--loop", type=int, help="steps without a wait, for host time (default 300)")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the cases under TorchRec (default 1)")
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="compare our engines with those of another checkout, in turns"
    )
    parser.add_argument("--max-rows", type=int, default=2**31, help="shrink tables, for a quick try")
    parser.add_argument("--max-ids", type=int, default=2**31, help="shrink batches, for a quick try")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON lines and plot")
    parser.add_argument("--name", help="names of the files there (default: cpu, or the GPU's name as h200)")
    parser.add_argument("--commit", help="of the sources, where they are no git checkout")
    args = parser.parse_args(argv)
    defaults = (_QUICK if args.quick else _EFFORT)[args.device]
    for option, value in zip(("rounds", "steps", "quiet", "seconds", "loop"), defaults, strict=True):
        if getattr(args, option) is None:
            setattr(args, option, value)
    if args.threads is None and args.device == "cpu":
        args.threads = 2
    if args.ranks < 1 or (args.ranks > 1 and args.against):
        parser.error(f"--ranks is {args.ranks}; it has to be 1 or more, and 1 with --against, which compares one rank")
    if args.against and (args.phases or args.report or args.page):
        parser.error("--against compares times alone: leave out --phases, --report and --page")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; returns 1 if a case failed."""
    args = parse(argv)
    console = Console(width=200)
    cases = _on_ranks(select(args.cases, args.device), args.ranks)
    if args.list:
        for case in cases:
            console.print(case.name)
        return 0
    if args.page:
        return _write_page(args.out, console)
    if args.threads:
        torch.set_num_threads(args.threads)
    # Times of our engines alone are no answers to the questions of the page.
    suffix = "_against" if args.against else ""
    path = args.out / f"{args.name or default_name(args.device)}{suffix}.jsonl"
    if args.report:
        lines = report.read_json(path, [case.name for case in cases])
    else:
        lines = _run(args, cases, path, console)
    good = [line for line in lines if "error" not in line]
    if good and not args.against:
        _report(good, path, args.out, console)
    for line in lines:
        if "error" in line:
            console.print(f"{line['case']} FAILED: {line['error']}", markup=False)
    return 0 if len(good) == len(lines) else 1


def _on_ranks(cases: list[AnyCase], ranks: int) -> list[AnyCase]:
    """Return the cases under TorchRec on so many ranks; one rank leaves every case as it is.

    Raises:
        ValueError: several ranks for a case that has one.
    """
    if ranks == 1:
        return cases
    others = [case.name for case in cases if not isinstance(case, ShardedCase)]
    if others:
        raise ValueError(f"--ranks {ranks} is for cases under TorchRec; {others[0]} has one rank: name other --cases")
    return [case.on_ranks(ranks) for case in cases if isinstance(case, ShardedCase)]


def _report(lines: list[report.Line], path: Path, folder: Path, console: Console) -> None:
    """Print the tables of results, and draw the pictures of their file."""
    steps = [line for line in lines if line.get("kind", "step") == "step"]
    if steps:
        report.print_results(steps, console)
    print_kinds(lines, console)
    report.print_phases(lines, console)
    # A run of a few cases leaves the others in the pictures.
    if not plot.plot(_latest(path), folder, path.stem):
        console.print("no pictures: matplotlib is not installed, or no question is about these cases")


def _write_page(folder: Path, console: Console) -> int:
    """Write the page of the measurements, and draw the pictures of every file of results."""
    page.write(folder, page.PAGE)
    drawn = [path for file in sorted(folder.glob("*.jsonl")) for path in _drawn(file, folder)]
    console.print(f"{page.PAGE}, {len(drawn)} pictures", markup=False, soft_wrap=True)
    return 0


def _drawn(file: Path, folder: Path) -> list[Path]:
    """Draw the pictures of a file of results."""
    lines = _latest(file)
    return plot.plot(lines, folder, file.stem) if lines else []


def _latest(path: Path) -> list[report.Line]:
    """Return the last result of every case of a file; lines of other tools, as those of the matrix, have no case."""
    lines = report.read_all(path)
    return list({line["case"]: line for line in lines if "case" in line and "error" not in line}.values())


def _run(args: argparse.Namespace, cases: list[AnyCase], path: Path, console: Console) -> list[dict[str, Any]]:
    """Run cases one after another; each adds its line to the file when it is done, or the reason why it failed."""
    machine = describe(args.device, args.commit)
    effort = Effort(args.rounds, args.steps, args.quiet, args.seconds, args.phases, args.loop)
    console.print(" ".join(f"{key}={value}" for key, value in machine.items()), markup=False)
    lines = []
    for case in cases:
        try:
            _release(args.device)
            if args.against:
                limits = Limits(args.max_rows, args.max_ids, args.threads)
                line = run_against(case, effort, args.against, limits)
            else:
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
