"""The clock, and the memory bandwidth that results are compared with."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# libgomp's workers spin for some milliseconds after a parallel region. torch and numba bring a pool each; a pool that
# still spins would take a core from whoever is measured next.
_SETTLE_SECONDS = 0.015
_COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class Times:
    """Milliseconds of the repetitions of one engine."""

    ms: list[float]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.ms)

    @property
    def minimum(self) -> float:
        """The fastest repetition."""
        return min(self.ms)


def host_timer(function: Callable[[], object]) -> float:
    """Return the wall-clock milliseconds of a call that returns when its work is done."""
    begin = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - begin) / 1e6


# A device with asynchronous execution needs a timer that waits for events.
TIMERS: dict[str, Callable[[Callable[[], object]], float]] = {"cpu": host_timer}


def settle() -> None:
    """Wait until the thread pools of earlier work sleep."""
    time.sleep(_SETTLE_SECONDS)


def copy_bandwidth(device: str, num_bytes: int = _COPY_BYTES, repetitions: int = 7) -> float:
    """Return the GB/s, read plus written, of copying a large tensor with torch's threads; the best repetition."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(TIMERS[device](lambda: target.copy_(source)) for _ in range(repetitions))
    return 2 * source.numel() * 4 / best / 1e6
