"""What all tests share: the kernel interpreter switch, the `backend` fixture, hypothesis profiles, the test count."""

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

# Before torch loads OpenMP, whose threads would otherwise spin at barriers and keep the core from other tests' threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

# Triton decides when a kernel is decorated whether it will be compiled or interpreted, its own library included, so the
# switch must be set before triton's first import. Without a GPU one process then tests `cpu` and `interpret`.
if not HAS_CUDA:
    assert "triton" not in sys.modules, "triton was imported before TRITON_INTERPRET could be set"
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

try:
    import triton  # noqa: F401

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

# GPU images without a network may lack hypothesis; test files that need it skip themselves there.
try:
    from hypothesis import settings
except ImportError:
    pass
else:
    settings.register_profile("dev", deadline=None, max_examples=25)
    settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def reason_to_skip(backend: str) -> str | None:
    """Say what this process lacks to run `backend`, or None."""
    if backend == "interpret":
        if not HAS_TRITON:
            return "triton is not installed"
        if not INTERPRETED:
            return "kernels are compiled in this process (set TRITON_INTERPRET=1 to interpret them)"
    if backend == "cuda":
        if not HAS_CUDA:
            return "no CUDA device"
        if INTERPRETED:
            return "kernels are interpreted in this process (TRITON_INTERPRET=1)"
    return None


@pytest.fixture(params=["cpu", "interpret", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest) -> str:
    """Run the test once per backend: `cpu` (numba), `interpret` (Triton on the CPU), `cuda` (Triton compiled)."""
    reason = reason_to_skip(request.param)
    if reason:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture
def device(backend: str) -> torch.device:
    """Return the device on which the tensors of `backend` live."""
    return torch.device("cuda" if backend == "cuda" else "cpu")


@pytest.fixture
def tensors_on_device(device: torch.device) -> Iterator[None]:
    """Make new tensors where the backend's tables live."""
    # On the CPU they are there anyway, and the context would look at every call of torch.
    with device if device.type != "cpu" else nullcontext():
        yield


def drop_stale_kernels() -> None:
    """Delete compiled numba kernels older than the newest source: numba notices changes of the same file only."""
    folder = Path(__file__).resolve().parent.parent / "dynamicemb" / "table" / "cpu"
    newest = max(source.stat().st_mtime for source in folder.glob("*.py"))
    for compiled in folder.glob("__pycache__/*.nb[ic]"):
        if compiled.stat().st_mtime < newest:
            compiled.unlink(missing_ok=True)


class ExecutedTests:
    """Counts the tests that ran to a verdict (skipped ones do not count) and fails the session below a minimum."""

    def __init__(self, minimum: int) -> None:
        self.minimum = minimum
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped:
            self.count += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.count < self.minimum and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.minimum:
            return
        verdict = "enough" if self.count >= self.minimum else "TOO FEW"
        terminalreporter.write_line(f"executed tests: {self.count}, at least {self.minimum} wanted: {verdict}")


# Suites whose kernels one sort of case tests as well as another; the interpreter takes minutes for all of them.
THINNED_SUITES = ("test_triton_rows.py", "test_triton_update.py")
THINNING = 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a GPU; leave out cases of THINNED_SUITES that are skipped, or interpreted beyond every fourth."""
    for item in items:
        if "gpu_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cuda)
    if config.getoption("--every-interpreted"):
        return
    kept, left_out = [], []
    for item in items:
        backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        thin = item.path.name in THINNED_SUITES and backend in ("cpu", "interpret")
        drop = thin and (backend == "cpu" or zlib.crc32(item.nodeid.encode()) % THINNING)
        (left_out if drop else kept).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=100, help="how many collections and batches are drawn")
    parser.addoption("--every-interpreted", action="store_true", help="run every case in Triton's interpreter")
    parser.addoption("--every-operation", action="store_true", help="kill ranks before every operation of a dump")
    parser.addoption("--min-tests", type=int, default=0, help="fail when fewer tests were executed (skips not counted)")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        drop_stale_kernels()
    if HAS_TRITON and INTERPRETED:
        from tests.support import fast_interpreter

        fast_interpreter.install()
    # Spread over processes, the one that started them sees all reports.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ExecutedTests(config.getoption("--min-tests")), "executed-tests")
