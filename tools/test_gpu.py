"""Run every suite that has CUDA tests and print one line per suite.

With pytest-xdist all suites run at once, spread over processes; without, one after the other, each in its own process.
A kernel that reads out of bounds poisons the CUDA context of its process and fails whatever runs there next. So a suite
that failed among others runs again alone; its line is that of the second run.

    python tools/test_gpu.py [options of pytest]
    python tools/test_gpu.py --sanitize     # the kernels' suites under compute-sanitizer's memcheck
"""

import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_COLLECTED = 5
PYTEST = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--tb=short"]
# More processes than this wait for each other on one GPU.
MOST_PROCESSES = 14
# Each of them starts ranks of its own: three that share a GPU and more over NCCL, at 500 MB of a GPU each, and three on
# the CPU. A rank takes up to a gigabyte of host memory.
GPU_BYTES_PER_PROCESS = 4 * 2**30
HOST_BYTES_PER_PROCESS = 7 * 2**30

# What memcheck looks at, each in a process of its own: the suites that call the kernels directly, and whole steps; of a
# suite what fits pytest's -k. Without torch's cache of memory nothing can be captured in a graph.
SANITIZED = [
    ("test_open_batch", ""),
    ("test_triton_index", "every_byte and not many_shapes"),
    ("test_triton_index", "full_buckets or any_order"),
    ("test_triton_index", "not captured and not every_byte and not full_buckets and not any_order"),
    ("test_triton_initialize", ""),
    ("test_triton_rows", ""),
    ("test_triton_update", "not captured"),
    ("test_find_insert", ""),
    ("test_cuda_step", "never_waits"),
    ("test_expiry", "not captured"),
    ("test_admission", "not captured and not waits"),
]


@dataclass
class Suite:
    """Outcome of one test file."""

    counts: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    def line(self, name: str) -> str:
        """Return the report's line."""
        counts = ", ".join(f"{n} {word}" for word, n in sorted(self.counts.items(), reverse=True))
        return f"{name:40s} {counts:40s} {self.seconds:7.1f} s"

    @property
    def failed(self) -> bool:
        """Whether a test failed or could not run."""
        return bool(self.counts["failed"] or self.counts["error"])


def suites_with_cuda() -> list[str]:
    """Return the test files that may have CUDA tests, relative to the root."""
    files = sorted(Path(ROOT, "tests").glob("**/test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if re.search(r"\bcuda\b|\bbackend\b|\bgpu_ranks\b", f.read_text())]


def file_of(suite: str) -> str:
    """Return the test file of a suite, relative to the root. The names of test files are unique over all folders."""
    (found,) = Path(ROOT, "tests").glob(f"**/{suite}.py")
    return str(found.relative_to(ROOT))


def run_pytest(
    arguments: list[str], environment: dict[str, str] | None = None, wrapper: tuple[str, ...] = ()
) -> tuple[dict[str, Suite], subprocess.CompletedProcess[str]]:
    """Run pytest; return what each suite did, and the process."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*wrapper, *PYTEST, *arguments, f"--junitxml={report}"]
        variables = {**os.environ, **(environment or {})}
        run = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
        )
        suites: dict[str, Suite] = {}
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                # "tests.table.test_x" or "tests.table.test_x.Class"; "name" has the file that cannot be imported.
                name = next(
                    part for part in f"{case.get('classname')}.{case.get('name')}".split(".") if part[:5] == "test_"
                )
                suite = suites.setdefault(name, Suite())
                kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
                words = {"failure": "failed"}
                suite.counts[words.get(kind := next(iter(kinds), "passed"), kind)] += 1
                suite.seconds += float(case.get("time", 0))
    return suites, run


def count_processes() -> int:
    """Return how many processes this machine can run the suites in."""
    import torch

    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fit = min(torch.cuda.get_device_properties(0).total_memory // GPU_BYTES_PER_PROCESS, host // HOST_BYTES_PER_PROCESS)
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1, fit))


def run_all(options: list[str]) -> dict[str, Suite]:
    """Run the suites, print their lines as they become known."""
    files = suites_with_cuda()
    processes = count_processes()
    if find_spec("xdist") and processes > 1:
        # Suites last from a second to minutes: whoever is done takes from the others.
        suites, run = run_pytest([*files, "-n", str(processes), "--dist", "worksteal", *options])
        if not suites:
            print(run.stdout)
            return {"pytest": Suite(Counter(error=1))}
        for name, suite in sorted(suites.items()):
            if not suite.failed:
                print(suite.line(name), flush=True)
        # Said at once, with the reasons: a second run may pass, or never end.
        if run.returncode:
            print(run.stdout[-6000:], flush=True)
        alone = [file_of(name) for name, suite in sorted(suites.items()) if suite.failed]
    else:
        suites, alone = {}, files
    for file in alone:
        name = Path(file).stem
        own, run = run_pytest([file, *options])
        if run.returncode == NO_TESTS_COLLECTED:
            continue
        suites[name] = own.get(name, Suite(Counter(error=1)))
        print(suites[name].line(name), flush=True)
        if run.returncode:
            print(run.stdout, flush=True)
    return suites


def sanitize() -> int:
    """Run the kernels' suites under memcheck, all at once; returns the exit status."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        print("compute-sanitizer, of the CUDA toolkit, is not installed")
        return 1
    # With host backtraces the tool never lets go of the Python frames it has seen, nor of what they hold: steps that
    # nobody waits for stay outstanding.
    wrapper = (tool, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5", "--show-backtrace", "device")
    # Every tensor is then an allocation of its own, whose ends memcheck knows.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def check(what: tuple[str, str]) -> bool:
        name, chosen = what
        start = time.monotonic()
        suites, run = run_pytest([file_of(name), *(["-k", chosen] if chosen else [])], variables, wrapper)
        suite = suites.get(name, Suite(Counter(error=1)))
        suite.seconds = time.monotonic() - start
        found = re.findall(r"ERROR SUMMARY: (\d+) error", run.stdout) or ["no summary"]
        print(f"{suite.line(f'{name} {chosen}'.strip()[:40])} memcheck errors: {', '.join(found)}", flush=True)
        good = run.returncode == 0 and found == ["0"]
        if not good:
            print(run.stdout[-8000:], flush=True)
        return good

    with ThreadPoolExecutor(len(SANITIZED)) as pool:
        return 0 if all(list(pool.map(check, SANITIZED))) else 1


def main() -> None:
    """Run the suites; exit 1 when one fails or when no CUDA test ran."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no CUDA device: `make test-gpu` has nothing to run")
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if "--sanitize" in sys.argv:
        sys.exit(sanitize())
    start = time.monotonic()
    suites = run_all(sys.argv[1:])
    passed = sum(suite.counts["passed"] for suite in suites.values())
    failed = [name for name, suite in sorted(suites.items()) if suite.failed]
    print(f"{passed} passed in {time.monotonic() - start:.0f} s; failing suites: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed or passed == 0 else 0)


if __name__ == "__main__":
    main()
