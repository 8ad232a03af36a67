"""Where the time of our step goes, by timing the kernels' launchers from outside."""

import contextlib
import functools
import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.engines import Engine
from benchmarks.timing import ENOUGH_QUIET, Watch
from benchmarks.workloads import Batch

_LAUNCHERS = ("advance", "find", "pool", "gather", "update")
# Functions outside of ``group.kernels``: phase -> where the caller looks the name up.
_INSIDE = {
    "find": ("dynamicemb.table.cpu.find_or_insert", "find"),
    "insert": ("dynamicemb.table.cpu.find_or_insert", "insert"),
    "initialize": ("dynamicemb.table.cpu.find_or_insert", "initialize"),
    "group": ("dynamicemb.table.cpu.update", "group_by_row"),
    "check": ("dynamicemb.embedding.module", "check_batch"),
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


def measure_phases(engine: Engine, sample: list[Batch]) -> dict[str, float]:
    """Return the median ms of each phase of our step; ``python`` is what no launcher accounts for (autograd included).

    Args:
        engine: one whose module is ours.
        sample: one batch per repetition; the first warms up.
    """
    stopwatch = _Stopwatch()
    rows: list[tuple[bool, dict[str, float]]] = []
    with _timed_launchers(engine.module.tables, stopwatch):
        for batch in sample:
            stopwatch.seconds.clear()
            watch = Watch()
            begin = time.perf_counter()
            engine.step(batch)
            total = time.perf_counter() - begin
            phases = dict(stopwatch.seconds)
            rows.append((watch.quiet(), {**phases, "python": total - sum(phases.values()), "total": total}))
    quiet = [row for is_quiet, row in rows[1:] if is_quiet]
    counted = quiet if len(quiet) >= ENOUGH_QUIET else [row for _, row in rows[1:]]
    return {phase: 1e3 * statistics.median(row.get(phase, 0.0) for row in counted) for phase in counted[-1]}


@contextlib.contextmanager
def _timed_launchers(group: Any, stopwatch: _Stopwatch) -> Iterator[None]:
    kernels = group.kernels
    timed = {name: stopwatch.wrap(name, getattr(kernels, name)) for name in _LAUNCHERS}
    with contextlib.ExitStack() as stack:
        for phase, (path, name) in _INSIDE.items():
            # Launchers have the names of their modules, so a dotted path would find the function.
            module = importlib.import_module(path)
            stack.enter_context(mock.patch.object(module, name, stopwatch.wrap(phase, getattr(module, name))))
        group.kernels = SimpleNamespace(**{**vars(kernels), **timed})
        try:
            yield
        finally:
            group.kernels = kernels
