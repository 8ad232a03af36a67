"""Where the time of our step goes, by timing the kernels' launchers from outside."""

import contextlib
import functools
import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.engines import Engine
from benchmarks.timing import ENOUGH_QUIET, Watch
from benchmarks.workloads import Batch

if TYPE_CHECKING:
    from benchmarks.step_case import Case

_LAUNCHERS = ("open_batch", "find", "pool", "gather", "update")
_DEVICE_LAUNCHERS = ("open_batch", "find", "find_and_gather", "find_or_insert", "pool", "gather", "update")
# About 5 ms of an H200: longer than the host needs to launch a step.
SLEEP_CYCLES = 10_000_000
# Functions outside of ``group.kernels``: phase -> where the caller looks the name up.
_INSIDE = {
    "find": ("dynamicemb.table.cpu.find_or_insert", "find"),
    "insert": ("dynamicemb.table.cpu.find_or_insert", "insert"),
    "initialize": ("dynamicemb.table.cpu.find_or_insert", "initialize"),
    "group": ("dynamicemb.table.cpu.update", "group_by_row"),
    "check": ("dynamicemb.embedding.module", "check_batch"),
}
_DEVICE_INSIDE = {
    "find": ("dynamicemb.table.triton.find_or_insert", "find_and_list"),
    "elect": ("dynamicemb.table.triton.find_or_insert", "elect"),
    "insert": ("dynamicemb.table.triton.find_or_insert", "insert"),
    "initialize": ("dynamicemb.table.triton.find_or_insert", "initialize_leaders"),
    "settle": ("dynamicemb.table.triton.find_or_insert", "settle"),
    "group": ("dynamicemb.table.triton.update", "group_by_row"),
}


class _Stopwatch:
    """Adds up the seconds spent in wrapped functions, by phase; time in an inner phase is not counted in the outer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total = time.perf_counter() - begin
                self.seconds[phase] += total - self._inner.pop()
                self._inner[-1] += total

        return timed


def measure_phases(case: "Case", engine: Engine, sample: list[Batch]) -> dict[str, float]:
    """Return the median ms of each phase of our eager step, and of the whole as ``total``.

    Args:
        case: the case.
        engine: one whose module is ours.
        sample: one batch per repetition; the first warms up.
    """
    measure = _device_phases if case.device == "cuda" else _host_phases
    counted = measure(engine, sample)
    return {phase: 1e3 * statistics.median(row.get(phase, 0.0) for row in counted) for phase in counted[-1]}


def _host_phases(engine: Engine, sample: list[Batch]) -> list[dict[str, float]]:
    """Return the seconds of every repetition; ``python`` is what no launcher accounts for (autograd included)."""
    stopwatch = _Stopwatch()
    rows: list[tuple[bool, dict[str, float]]] = []
    for batch in sample:
        if engine.prepare is not None:
            engine.prepare(engine, batch)
        with _wrapped(engine.module.tables, stopwatch.wrap, _LAUNCHERS, _INSIDE):
            stopwatch.seconds.clear()
            watch = Watch()
            begin = time.perf_counter()
            engine.step(batch)
            total = time.perf_counter() - begin
        phases = dict(stopwatch.seconds)
        rows.append((watch.quiet(), {**phases, "python": total - sum(phases.values()), "total": total}))
    quiet = [row for is_quiet, row in rows[1:] if is_quiet]
    return quiet if len(quiet) >= ENOUGH_QUIET else [row for _, row in rows[1:]]


def _device_phases(engine: Engine, sample: list[Batch]) -> list[dict[str, float]]:
    """Return the device's seconds of every repetition; ``other`` is its work outside of the launchers, and its waits.

    The device first sleeps while the host launches the whole step, so that what is measured is the device alone.
    """
    rows = []
    for batch in sample:
        if engine.prepare is not None:
            engine.prepare(engine, batch)
        recorder = _EventRecorder()
        with _wrapped(engine.module.tables, recorder.wrap, _DEVICE_LAUNCHERS, _DEVICE_INSIDE):
            torch.cuda._sleep(SLEEP_CYCLES)
            recorder.wrap("total", engine.step)(batch)
        rows.append(recorder.seconds())
    return rows[1:]


class _EventRecorder:
    """Puts a pair of events around wrapped functions; time in an inner phase is not counted in the outer."""

    def __init__(self) -> None:
        # Of each call: its phase, that of the call around it, and its events.
        self._calls: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._around = [""]

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self._around.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                end.record()
                self._around.pop()
                self._calls.append((phase, self._around[-1], begin, end))

        return timed

    def seconds(self) -> dict[str, float]:
        """Wait for the device and return the sum of each phase, ``other`` and ``total`` last."""
        torch.cuda.synchronize()
        sums: dict[str, float] = defaultdict(float)
        total = 0.0
        for phase, around, begin, end in self._calls:
            seconds = begin.elapsed_time(end) / 1e3
            sums[phase] += seconds
            sums[around] -= seconds
            total += seconds if phase == "total" else 0.0
        # What is left of the whole, and of what is around it, is nobody's.
        other = sums.pop("total")
        sums.pop("", None)
        return {**sums, "other": other, "total": total}


@contextlib.contextmanager
def _wrapped(
    group: Any, wrap: Callable[..., Any], launchers: tuple[str, ...], inside: dict[str, tuple[str, str]]
) -> Iterator[None]:
    """Replace launchers by their timed twins; those that the kernels do not have count as what remains."""
    kernels = group.kernels
    timed = {name: wrap(name, getattr(kernels, name)) for name in launchers if hasattr(kernels, name)}
    with contextlib.ExitStack() as stack:
        for phase, (path, name) in inside.items():
            # Launchers have the names of their modules, so a dotted path would find the function.
            module = importlib.import_module(path)
            stack.enter_context(mock.patch.object(module, name, wrap(phase, getattr(module, name))))
        group.kernels = SimpleNamespace(**{**vars(kernels), **timed})
        try:
            yield
        finally:
            group.kernels = kernels
