"""Run a case of host time: loops of eager steps without a wait, engines in turns."""

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engines import Engine
from benchmarks.host.breakdown import count_calls, host_phases
from benchmarks.host.cases import HostCase
from benchmarks.machine import load
from benchmarks.phases import SLEEP_CYCLES
from benchmarks.runner import common
from benchmarks.step_case import Case
from benchmarks.timing import Sample, Times, describe_error, settle
from benchmarks.turns import Effort, result, take_turns
from benchmarks.workloads import Batch, batches

_SEED = 7
_NUM_BATCHES = 20
WARM_UP_STEPS = 20
_MOST_TURNS = 5
# Few enough steps that the device's queue takes all of their launches.
_BURST_STEPS = 8
_BURSTS = 5
_DEVICE_SAMPLES = 20


def run_case(case: HostCase, effort: Effort) -> dict[str, Any]:
    """Measure a case.

    Returns:
        The fields of a line of results. Of each engine: ``ms``, the host's time of a step in the best of the loops;
        ``burst_ms``, the same in the best of a few short loops on an idle device, which no full queue holds up;
        ``device_ms``, the device's time of a step that was queued before it began, None on the CPU; ``counts``.
    """
    load_before = load()
    engines, sample, errors = _enter(case.step)

    def turn(number: int, name: str) -> list[Sample]:
        return [loop(engines[name], sample, effort.loop)]

    plan = replace(effort, rounds=min(effort.rounds, _MOST_TURNS), quiet=0, seconds=math.inf)
    times = take_turns(list(engines), turn, plan, case.name)
    line = _line(case.step, engines, times, sample, errors)
    for name, engine in engines.items():
        settle(case.device)
        bursts = [loop(engine, sample, _BURST_STEPS).ms for _ in range(_BURSTS)]
        line["engines"][name] |= {
            "burst_ms": min(bursts),
            "device_ms": _device_ms(engine, sample) if case.device == "cuda" else None,
            "counts": count_calls(_calls(engine, sample), case.device),
        }
    line["phases_ms"] = host_phases(_calls(engines[line["ours"]], sample), case.device)
    return {**line, "load": [load_before, load()]}


@contextlib.contextmanager
def alone(case: HostCase, effort: Effort) -> Iterator[Callable[[int], list[Sample]]]:
    """Yield what runs a turn of our engine, given the number of the turn."""
    engine = case.step.ours(case.step)
    sample = _sample(case.step, [engine])
    _warm_up(engine, sample)
    yield lambda number: [loop(engine, sample, effort.loop)]


def loop(engine: Engine, sample: list[Batch], steps: int) -> Sample:
    """Run steps without a wait; return the host's time of one, until the last step is queued."""
    settle("cuda" if sample[0].ids.is_cuda else "cpu")
    queue = list(itertools.islice(itertools.cycle(sample), steps))
    cpu_begin, begin = time.process_time(), time.perf_counter()
    for batch in queue:
        engine.step(batch)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    return Sample(1e3 * seconds / steps, 1e3 * cpu_seconds / steps, True)


def _enter(case: Case) -> tuple[dict[str, Engine], list[Batch], dict[str, str]]:
    """Build and warm up the engines; also return their batches, and why the baseline does not take part."""
    engines, errors = [], {}
    try:
        engines.append(case.baseline(case))
    except Exception as error:
        errors["baseline"] = describe_error(error)
    engines.append(case.ours(case))
    sample = _sample(case, engines)
    for engine in list(engines):
        try:
            _warm_up(engine, sample)
        except Exception as error:
            if engine is engines[-1]:
                raise
            errors[engine.name] = describe_error(error)
            engines.remove(engine)
    return {engine.name: engine for engine in engines}, sample, errors


def _sample(case: Case, engines: list[Engine]) -> list[Batch]:
    residents = [common(tables) for tables in zip(*(engine.residents for engine in engines), strict=True)]
    return list(itertools.islice(batches(case, residents, _SEED), _NUM_BATCHES))


def _warm_up(engine: Engine, sample: list[Batch]) -> None:
    for number in range(WARM_UP_STEPS):
        engine.step(sample[number % len(sample)])


def _calls(engine: Engine, sample: list[Batch]) -> list[Callable[[], object]]:
    return [functools.partial(engine.step, batch) for batch in sample]


def _device_ms(engine: Engine, sample: list[Batch]) -> float:
    """Return the device's median ms of a step; the device sleeps while the host queues it."""
    times = []
    for batch in itertools.islice(itertools.cycle(sample), _DEVICE_SAMPLES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        engine.step(batch)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _line(
    case: Case, engines: dict[str, Engine], times: dict[str, Times], sample: list[Batch], errors: dict[str, str]
) -> dict[str, Any]:
    names = list(engines)
    baseline, ours = names[0] if len(names) > 1 else "", names[-1]
    base = times.get(baseline)
    results = {}
    for name in names:
        best = times[name].minimum
        of_loops = result(times[name], base)
        # The best loop is the time: what the host does is the same each time, all else is disturbance.
        ratios = {"ratio": of_loops["min_ratio"], "median_ratio": of_loops["ratio"]}
        results[name] = {**of_loops, "ms": best, "median_ms": times[name].median, **ratios}
    return {
        "case": case.name,
        "kind": "host",
        "device": case.device,
        "clock": "wall of the host, best loop",
        "tables": case.tables,
        "rows": case.rows,
        "dim": case.dim,
        "ids": sample[0].ids.numel(),
        "unique": sample[0].num_unique,
        "batch_size": case.batch_size,
        "bag_length": case.bag_length,
        "optimizer": case.optimizer,
        "pooling": case.pooling,
        "train": case.train,
        "engines": results,
        "baseline": baseline,
        "ours": ours,
        "ours_eager": ours,
        "errors": errors,
        "targets": {},
        "note": "host time of a step",
    }
