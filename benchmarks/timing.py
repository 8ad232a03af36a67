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
# Several times the last cache.
_COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}

ENOUGH_QUIET = 8

Call = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """One repetition.

    Attributes:
        ms: wall-clock (or device) time.
        cpu_ms: CPU time of all threads of the process. Threads that wait at a barrier spin and count, so it compares
            engines only at one thread; there it does not depend on what else the machine does. On a GPU it is what
            launching the step took.
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


def time_calls(calls: list[Call], prepare: list[Call] | None = None) -> list[Sample]:
    """Time calls that return when their work is done, each by the wall clock.

    Args:
        calls: what to time.
        prepare: runs before each of them and is not timed.
    """
    samples = []
    for number, call in enumerate(calls):
        if prepare:
            prepare[number]()
        watch = Watch()
        cpu_begin = time.process_time()
        begin = time.perf_counter_ns()
        call()
        ms = (time.perf_counter_ns() - begin) / 1e6
        samples.append(Sample(ms, 1e3 * (time.process_time() - cpu_begin), watch.quiet()))
    return samples


def time_device_calls(calls: list[Call], prepare: list[Call] | None = None) -> list[Sample]:
    """Time calls that only queue their work on the current CUDA device, each by two events of its stream.

    There is no wait between the calls: where the host is faster than the device this is the device's time, else the
    host's. After a ``prepare`` that waits for the device, it includes the host's time to the first launch.
    """
    events, host_ms = [], []
    for number, call in enumerate(calls):
        if prepare:
            prepare[number]()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        cpu_begin = time.process_time()
        call()
        host_ms.append(1e3 * (time.process_time() - cpu_begin))
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [Sample(begin.elapsed_time(end), ms, True) for (begin, end), ms in zip(events, host_ms, strict=True)]


def time_device_loop(calls: list[Call]) -> list[Sample]:
    """Time a loop of calls with one wait for the device at its end; returns one repetition, the mean of a call."""
    torch.cuda.synchronize()
    cpu_begin = time.process_time()
    begin = time.perf_counter_ns()
    for call in calls:
        call()
    cpu_ms = 1e3 * (time.process_time() - cpu_begin)
    torch.cuda.synchronize()
    return [Sample((time.perf_counter_ns() - begin) / 1e6 / len(calls), cpu_ms / len(calls), True)]


def settle(device: str) -> None:
    """Wait until the thread pools of earlier work sleep; on a GPU, until it is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    else:
        time.sleep(_SETTLE_SECONDS)


def copy_bandwidth(device: str, repetitions: int = 7) -> float:
    """Return the GB/s, read plus written, of copying a large tensor by torch; the best repetition."""
    source = torch.ones(_COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    timer = time_device_calls if device == "cuda" else time_calls
    samples = timer([lambda: target.copy_(source)] * (repetitions + 1))
    return 2 * source.numel() * 4 / min(sample.ms for sample in samples[1:]) / 1e6


def describe_error(error: BaseException) -> str:
    """Return type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
