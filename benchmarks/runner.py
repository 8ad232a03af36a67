"""Run a case: both engines in turns, in one process, on the same batches."""

import functools
import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.engines import Engine
from benchmarks.machine import load
from benchmarks.phases import measure_phases
from benchmarks.timing import TIMERS, Sample, Times, Watch, copy_bandwidth, settle
from benchmarks.workloads import Batch, batches, bytes_moved, state_bytes

_SEED = 7


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        rounds: turns of each engine.
        steps: timed steps of a turn.
        quiet: undisturbed repetitions wanted of each engine; there are more turns until they are reached.
        seconds: after this time turns end, on a busy machine with fewer repetitions than wanted.
        phases: add the breakdown of our step.
    """

    rounds: int = 15
    steps: int = 4
    quiet: int = 24
    seconds: float = 30.0
    phases: bool = False


def run_case(case: Case, effort: Effort) -> dict[str, Any]:
    """Measure a case.

    The engines take turns. A turn is a pause, one step that is not timed (it wakes the engine's threads, as the step
    before would in training), and the timed steps. Every step has its own batch, which both engines see.

    Returns:
        The fields of a line of results: times in ms, rates, ratio, memory, load.
    """
    load_before = load()
    baseline, ours = case.baseline(case), case.ours(case)
    residents = [_common(pair) for pair in zip(baseline.residents, ours.residents, strict=True)]
    stream = batches(case, residents, _SEED)
    _turn(case, baseline, list(itertools.islice(stream, 3)))
    _turn(case, ours, list(itertools.islice(stream, 3)))
    evicted = _count(ours, "evicted")
    times = {"baseline": Times(), "ours": Times()}
    bandwidths = [copy_bandwidth(case.device)]
    turn = 0
    deadline = time.monotonic() + effort.seconds
    while turn < 2 or (time.monotonic() < deadline and (turn < effort.rounds or _too_few(times, effort))):
        sample = list(itertools.islice(stream, effort.steps + 1))
        order = [("baseline", baseline), ("ours", ours)]
        for key, engine in order if turn % 2 else reversed(order):
            times[key].samples += _turn(case, engine, sample)
        turn += 1
    evicted = (_count(ours, "evicted") - evicted) / (turn * (effort.steps + 1))
    bandwidths.append(copy_bandwidth(case.device))
    line = _line(case, (baseline, ours), times, sample[-1], max(bandwidths))
    line |= {"evicted_per_step": evicted, "load": [load_before, load()]}
    if effort.phases:
        settle()
        line["phases_ms"] = measure_phases(ours, list(itertools.islice(stream, 4 * effort.rounds + 1)))
    return line


def _too_few(times: dict[str, Times], effort: Effort) -> bool:
    return min(engine.num_quiet for engine in times.values()) < effort.quiet


def _turn(case: Case, engine: Engine, sample: list[Batch]) -> list[Sample]:
    """Return the repetitions of every batch but the first."""
    settle()
    timer = TIMERS[case.device]
    samples = []
    for batch in sample:
        watch = Watch()
        cpu_begin = time.process_time()
        ms = timer(functools.partial(engine.step, batch))
        cpu_ms = 1e3 * (time.process_time() - cpu_begin)
        samples.append(Sample(ms, cpu_ms, watch.quiet()))
    return samples[1:]


def _common(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the ids that both hold, shuffled: an id's number says nothing about where its row is."""
    both = pair[0][torch.isin(pair[0], pair[1])]
    return both[torch.randperm(both.numel(), generator=torch.Generator().manual_seed(_SEED))]


def _count(engine: Engine, what: str) -> float:
    return sum(table[what] for table in engine.module.stats().values())


def _line(
    case: Case, engines: tuple[Engine, Engine], times: dict[str, Times], batch: Batch, copy_gbps: float
) -> dict[str, Any]:
    baseline, ours = engines
    num_bytes = bytes_moved(case, batch, state_bytes(case))
    line: dict[str, Any] = {
        "case": case.name,
        "tables": case.tables,
        "rows": case.rows,
        "dim": case.dim,
        "ids": batch.ids.numel(),
        "unique": batch.num_unique,
        "batch_size": case.batch_size,
        "optimizer": case.optimizer,
        "pooling": case.pooling,
        "train": case.train,
        "new_share": case.new_share,
        "repetitions": len(times["ours"].samples),
        "quiet": [times[key].num_quiet for key in ("baseline", "ours")],
        "bytes": num_bytes,
        "copy_gbps": copy_gbps,
    }
    for key, engine in (("ours", ours), ("baseline", baseline)):
        median = times[key].median
        line[key] = {
            "name": engine.name,
            "ms": median,
            "min_ms": times[key].minimum,
            "cpu_ms": times[key].cpu_median,
            "ids_per_s": batch.ids.numel() / median * 1e3,
            "gbps": num_bytes / median / 1e6,
            "copy_percent": num_bytes / median / 1e4 / copy_gbps,
            "memory": engine.memory,
        }
    index = ours.module.tables.index
    line |= {
        "ratio": times["ours"].median / times["baseline"].median,
        "cpu_ratio": times["ours"].cpu_median / times["baseline"].cpu_median,
        "min_ratio": times["ours"].minimum / times["baseline"].minimum,
        "target": case.target,
        "note": case.note,
        "load_factor": _count(ours, "size") / index.num_slots,
        "index_bytes_per_slot": ours.memory["index"] / index.num_slots,
    }
    return line
