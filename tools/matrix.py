"""Run suites under several interpreters and releases of torch, fbgemm_gpu and torchrec, one environment at a time.

    python3 tools/matrix.py --pythons python3.11 python3.12 --torch 2.11 2.12 2.13 2.14 [--suites tests/table ...]

Each environment is made in a temporary folder (set TMPDIR to choose where) and removed after its run. Where there is no
CPU build of torch, the default build comes with its CUDA libraries: such an environment takes 8 GB of disk. Nothing
here runs in continuous integration. The results are appended to `benchmarks/results/matrix.jsonl`, and printed as a
table. Standard library only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))
import setup

RESULTS = setup.ROOT / "benchmarks" / "results" / "matrix.jsonl"
# What a release may break: the sharded collections, torch's checkpoints, and the kernels.
SUITES = ["tests/sharding", "tests/checkpoint/test_state_dict*.py", "tests/table"]
COLUMNS = ("python", "torch", "fbgemm_gpu", "torchrec", "passed", "failed", "seconds", "what stopped it")
VERSIONS = """
import json, platform, fbgemm_gpu, torch, torchrec
found = {"python": platform.python_version(), "torch": torch.__version__, "fbgemm_gpu": fbgemm_gpu.__version__}
print(json.dumps({**found, "torchrec": torchrec.__version__}))
"""


def releases_of(torch: str) -> tuple[str, str, str]:
    """Return a triple for pip: `2.12` is the latest release of that series, `2.12.1` that one."""
    series = ".".join(torch.split(".")[:2])
    if series not in setup.TRIPLES:
        sys.exit(f"--torch: {torch} is not among {', '.join(setup.TRIPLES)}; add its triple to tools/setup.py")
    fbgemm, torchrec = setup.TRIPLES[series]
    return (torch if torch.count(".") > 1 else f"{torch}.*", f"{fbgemm}.*", f"{torchrec}.*")


def files_of(suites: list[str]) -> list[str]:
    """Return the folders and files that patterns name, relative to the root."""
    found = [sorted(setup.ROOT.glob(pattern)) for pattern in suites]
    for pattern, paths in zip(suites, found, strict=True):
        if not paths:
            sys.exit(f"--suites: nothing is called {pattern}")
    return [str(path.relative_to(setup.ROOT)) for paths in found for path in paths]


def outcome_of(output: str) -> dict[str, int]:
    """Return how many tests passed and failed, by pytest's closing line; errors count as failures."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", output.splitlines()[-1])}
    return {"passed": counts.get("passed", 0), "failed": counts.get("failed", 0) + counts.get("error", 0)}


def run_one(python: str, torch: str, files: list[str], spread: list[str]) -> dict[str, object]:
    """Make an environment, run the suites in it, and return the row of the table."""
    row: dict[str, object] = {"python": python, "torch": torch, "date": date.today().isoformat()}
    start = time.monotonic()
    with TemporaryDirectory(prefix="matrix-") as folder:
        # The set-up stops its process where a step fails: it is one of its own.
        releases = json.dumps([folder, *releases_of(torch)])
        done = subprocess.run([python, __file__, "--install", releases], stdout=sys.stderr, check=False)
        if done.returncode:
            return row | {"passed": 0, "failed": 0, "seconds": 0, "what stopped it": "the set-up; its words are above"}
        interpreter = Path(folder, "bin", "python")
        environment = {**os.environ, "PYTHONPATH": str(setup.ROOT), "OMP_WAIT_POLICY": "passive"}
        # The kernels that numba compiled belong to one release of numba and of this interpreter.
        environment["NUMBA_CACHE_DIR"] = str(Path(folder, "numba"))
        asked = subprocess.run([interpreter, "-c", VERSIONS], capture_output=True, text=True, env=environment)
        if asked.returncode:
            return row | {"passed": 0, "failed": 0, "seconds": 0, "what stopped it": asked.stderr.splitlines()[-1]}
        row |= json.loads(asked.stdout.splitlines()[-1])
        start = time.monotonic()
        command = [str(interpreter), "-m", "pytest", "-q", "-m", "not cuda", "-p", "no:cacheprovider", *spread, *files]
        run = subprocess.run(command, cwd=setup.ROOT, env=environment, capture_output=True, text=True)
        print(run.stdout[-3000:], file=sys.stderr, flush=True)
        row |= outcome_of(run.stdout)
        row["seconds"] = round(time.monotonic() - start)
        if run.returncode and not row["failed"]:
            row["what stopped it"] = f"pytest ended with status {run.returncode}"
    return row


def table_of(rows: list[dict[str, object]]) -> str:
    """Return rows as aligned text."""
    lines = [COLUMNS, *([str(row.get(column, "")) for column in COLUMNS] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip() for line in lines)


def main() -> None:
    """Run the combinations that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--torch", nargs="+", default=list(setup.TRIPLES), help="releases of torch")
    parser.add_argument("--suites", nargs="+", default=SUITES, help="patterns of test files and folders")
    parser.add_argument("--spread", default="-n 2", help="how pytest-xdist spreads the tests (default: %(default)s)")
    parser.add_argument("--install", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.install:
        folder, *releases = json.loads(arguments.install)
        setup.install(Path(folder), releases=tuple(releases))
        return
    files = files_of(arguments.suites)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=setup.ROOT, capture_output=True, text=True)
    rows = []
    for python in arguments.pythons:
        for torch in arguments.torch:
            row = run_one(python, torch, files, arguments.spread.split())
            rows.append(row | {"commit": commit.stdout.strip(), "suites": arguments.suites})
            with RESULTS.open("a") as results:
                results.write(json.dumps(rows[-1]) + "\n")
            print(table_of(rows[-1:]), flush=True)
    print(table_of(rows))
    if any(row["failed"] or not row["passed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
