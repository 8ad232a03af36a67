"""The clock, and the memory bandwidth that results are compared with."""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

# libgomp's workers spin for some milliseconds after a parallel region. torch and numba bring a pool each; a pool that
# still spins would take a core from whoever is measured next.
_SETTLE_SECONDS = 0.015
_COPY_BYTES = 256 << 20

ENOUGH_QUIET = 8


@dataclass(frozen=True)
class Sample:
    """One repetition.

    Attributes:
        ms: wall-clock (or device) time.
        cpu_ms: CPU time of all threads of the process. Threads that wait at a barrier spin and count, so it compares
            engines only at one thread; there it does not depend on what else the machine does.
        quiet: the machine had nothing else to do, as far as we can see.
    """

    ms: float
    cpu_ms: float
    quiet: bool


@dataclass
class Times:
    """The repetitions of one engine. Statistics are of the quiet ones if there are enough, else of all."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def num_quiet(self) -> int:
        """How many repetitions were quiet."""
        return sum(sample.quiet for sample in self.samples)

    @property
    def cpu_median(self) -> float:
        """The median CPU time of all repetitions."""
        return statistics.median(sample.cpu_ms for sample in self.samples)

    def _ms(self) -> list[float]:
        few = self.num_quiet < ENOUGH_QUIET
        return [sample.ms for sample in self.samples if sample.quiet or few]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self._ms())

    @property
    def minimum(self) -> float:
        """The fastest repetition."""
        return min(self._ms())


class Watch:
    """Tells whether a stretch of work was disturbed by other processes (Linux; elsewhere it sees nothing).

    One preempted thread stalls every barrier of a parallel kernel: a median on a busy machine measures its scheduler.
    Disturbed means: a thread of ours was preempted, or more threads wanted to run before or after than we have.
    """

    def __init__(self) -> None:
        self._running = _num_running()
        self._preempted = _num_preempted()

    def quiet(self) -> bool:
        """Say whether nothing was seen since construction."""
        return self._preempted == _num_preempted() and max(self._running, _num_running()) <= torch.get_num_threads()


def _num_running() -> int:
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except OSError:
        return 0


def _num_preempted() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


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
