"""Run every suite that has CUDA tests, each in its own process, and print one line per suite.

A kernel that reads out of bounds poisons the CUDA context of its process, so suites do not share one.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_COLLECTED = 5


def main() -> None:
    """Run the suites; exit 1 when one fails or when no CUDA test ran."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no CUDA device: `make test-gpu` has nothing to run")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed, passed = [], 0
    for suite in sorted(Path(ROOT, "tests").glob("**/test_*.py")):
        if not re.search(r"\bcuda\b|\bbackend\b", suite.read_text()):
            continue
        start = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "cuda",
            "-q",
            "--tb=short",
            str(suite.relative_to(ROOT)),
            *sys.argv[1:],
        ]
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode == NO_TESTS_COLLECTED:
            continue
        counts = {
            word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", run.stdout.splitlines()[-1])
        }
        passed += counts.get("passed", 0)
        line = ", ".join(f"{n} {word}" for word, n in counts.items()) or f"exit status {run.returncode}"
        print(f"{suite.stem:40s} {line:40s} {time.monotonic() - start:6.1f} s", flush=True)
        if run.returncode != 0:
            failed.append(suite.stem)
            print(run.stdout, flush=True)
    print(f"{passed} passed; failing suites: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed or passed == 0 else 0)


if __name__ == "__main__":
    main()
