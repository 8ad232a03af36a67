"""What the host does in a step: time by phase, and how many launches and torch ops."""

import contextlib
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.timing import settle

Call = Callable[[], object]

OUTSIDE = "outside of phases"
_PROFILED_STEPS = 3


class PhaseClock:
    """Adds up the host's seconds in the package's phases; time in an inner phase is not counted in the outer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; takes the place of ``dynamicemb.embedding.phases.phase``."""
        self._inner.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            total = time.perf_counter() - begin
            self.seconds[name] += total - self._inner.pop()
            self._inner[-1] += total

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time all phases of the package, wherever a module of it has imported them to."""
        from dynamicemb.embedding.phases import phase

        with contextlib.ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith("dynamicemb.") and getattr(module, "phase", None) is phase:
                    stack.enter_context(mock.patch.object(module, "phase", self.phase))
            yield


def host_phases(steps: list[Call], device: str) -> dict[str, float]:
    """Return the median ms that the host spends in each phase of a step; what no phase has, and ``total``, come last.

    Args:
        steps: each call is a step, which queues work and does not wait for it.
        device: ``cpu``, where the phases have the work itself too, or ``cuda``.
    """
    rows = []
    for step in steps:
        clock = PhaseClock()
        with clock.running():
            # The device is idle, so that no launch waits for room in its queue.
            settle(device)
            begin = time.perf_counter()
            step()
            total = time.perf_counter() - begin
        rows.append({**clock.seconds, OUTSIDE: total - sum(clock.seconds.values()), "total": total})
    names = list(dict.fromkeys(name for row in rows for name in row if name not in (OUTSIDE, "total")))
    return {name: 1e3 * statistics.median(row.get(name, 0.0) for row in rows) for name in [*names, OUTSIDE, "total"]}


def count_calls(steps: list[Call], device: str) -> dict[str, float]:
    """Return how many calls of the host and kernels of the device a step has on average, by ``torch.profiler``.

    Returns:
        ``ops``: torch ops that no other op calls. ``launches``: launches of kernels, by torch, Triton or C++.
        ``copies``: copies and fills by the driver. ``kernels``: kernels that the device ran. The last three are 0 on
        the CPU.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    counted = [steps[number % len(steps)] for number in range(_PROFILED_STEPS)]
    steps[0]()
    settle(device)
    with torch.profiler.profile(activities=activities) as profile:
        for step in counted:
            step()
        settle(device)
    tally = Counter(kind for event in profile.events() if (kind := _kind(event)))
    return {kind: tally[kind] / len(counted) for kind in ("ops", "launches", "copies", "kernels")}


def _kind(event: Any) -> str:
    """Return what an event of the profiler counts as; nothing for most."""
    name = event.name
    if event.device_type != torch.autograd.DeviceType.CPU:
        is_work = not (
            name.startswith(("Mem", "aten::", "dynamicemb::")) or getattr(event, "is_user_annotation", False)
        )
        return "kernels" if is_work else ""
    if name.startswith("aten::"):
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith("aten::"):
            parent = parent.cpu_parent
        return "ops" if parent is None else ""
    if name.startswith("cu") and "LaunchKernel" in name:
        return "launches"
    return "copies" if name.startswith(("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset")) else ""
