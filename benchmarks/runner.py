"""Run a case: all engines in turns, in one process, on the same batches."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.engines import Engine
from benchmarks.graphs import captured
from benchmarks.machine import load
from benchmarks.phases import measure_phases
from benchmarks.step_case import Case
from benchmarks.timing import (
    Sample,
    Times,
    copy_bandwidth,
    describe_error,
    settle,
    time_calls,
    time_device_calls,
    time_device_loop,
)
from benchmarks.turns import Effort, result, take_turns
from benchmarks.workloads import Batch, batches, bytes_moved, state_bytes

_SEED = 7
# A loop of small steps has so many times more of them, since its repetition is one number.
_LOOP_FACTOR = 8


@dataclass
class _Field:
    """Who takes part.

    Attributes:
        engines: by the name they have in the report.
        baseline: name of the engine whose time is 1; empty if it failed.
        ours: name of the engine whose ratio has a target.
        ours_eager: the same without a graph.
        errors: why an engine does not take part, by name.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    baseline: str = ""
    ours: str = ""
    ours_eager: str = ""
    errors: dict[str, str] = field(default_factory=dict)

    def admit(self, name: str, build: Callable[[], Engine], warm_up: Callable[[Engine], object]) -> bool:
        """Add an engine that runs, or the reason why it does not."""
        try:
            engine = build()
            warm_up(engine)
        except Exception as error:
            self.errors[name] = describe_error(error)
            return False
        self.engines[name] = engine
        return True


def run_case(case: Case, effort: Effort) -> dict[str, Any]:
    """Measure a case.

    The engines take turns. A turn is a pause, one step that is not timed (it wakes the engine's threads, as the step
    before would in training), and the timed steps. Every step has its own batch, which all engines see; where a step
    makes ids known, every engine has batches of its own.

    Returns:
        The fields of a line of results: times in ms, rates, ratios, memory, load.
    """
    load_before = load()
    entrants, stream = _enter(case)
    ours = [engine for name, engine in entrants.engines.items() if name in (entrants.ours, entrants.ours_eager)]
    before = _counts(ours[-1])
    bandwidths = [copy_bandwidth(case.device)]
    length = 1 + effort.steps * (_LOOP_FACTOR if case.loop else 1)
    sample: list[Batch] = []
    turns = 0

    def turn(number: int, name: str) -> list[Sample]:
        nonlocal sample, turns
        if case.changes or number == turns:
            sample = list(itertools.islice(stream, length))
        turns = number + 1
        return _turn(case, entrants.engines[name], sample)

    times = take_turns(list(entrants.engines), turn, effort, case.name)
    changes = _changes(ours[-1], before, turns * length * len(ours), sample[-1])
    bandwidths.append(copy_bandwidth(case.device))
    line = _line(case, entrants, times, sample[-1], max(bandwidths))
    line |= {f"{what}_per_step": changes[what] for what in ("inserted", "evicted", "failed")}
    line["load"] = [load_before, load()]
    if effort.phases:
        settle(case.device)
        line["phases_ms"] = measure_phases(case, ours[0], list(itertools.islice(stream, 4 * effort.rounds + 1)))
    return line


def _enter(case: Case) -> tuple[_Field, Iterator[Batch]]:
    """Build and warm up the engines of a case; also return its batches.

    Raises:
        RuntimeError: our own eager step fails.
    """
    entrants = _Field()
    baseline = _build_baseline(case, entrants)
    ours = case.ours(case)
    residents = [engine.residents for engine in (baseline, ours) if engine is not None]
    stream = batches(case, [common(tables) for tables in zip(*residents, strict=True)], _SEED)

    def warm_up(engine: Engine) -> None:
        _turn(case, engine, list(itertools.islice(stream, 3)))

    def enter(engine: Engine) -> tuple[str, str]:
        """Return the names of the engine, and of its graph, that run."""
        eager, graph = engine.name, ""
        if case.device == "cuda":
            eager, graph = f"{engine.name} eager", f"{engine.name} graph"
        if not entrants.admit(eager, lambda: engine, warm_up):
            return "", ""
        if not graph or not engine.captures:
            return eager, eager
        if not entrants.admit(graph, functools.partial(captured, engine, next(stream)), warm_up):
            return eager, eager
        return eager, graph

    if baseline is not None:
        entrants.baseline, _ = enter(baseline)
    entrants.ours_eager, entrants.ours = enter(ours)
    if not entrants.ours:
        raise RuntimeError(list(entrants.errors.values())[-1])
    return entrants, stream


def _build_baseline(case: Case, entrants: _Field) -> Engine | None:
    try:
        return case.baseline(case)
    except Exception as error:
        entrants.errors["baseline"] = describe_error(error)
        return None


@contextlib.contextmanager
def alone(case: Case, effort: Effort) -> Iterator[Callable[[int], list[Sample]]]:
    """Yield what runs a turn of our eager engine, given the number of the turn."""
    ours = case.ours(case)
    stream = batches(case, [common((ids,)) for ids in ours.residents], _SEED)
    length = 1 + effort.steps * (_LOOP_FACTOR if case.loop else 1)
    _turn(case, ours, list(itertools.islice(stream, length)))
    yield lambda number: _turn(case, ours, list(itertools.islice(stream, length)))


def _turn(case: Case, engine: Engine, sample: list[Batch]) -> list[Sample]:
    """Return the repetitions of every batch but the first."""
    settle(case.device)
    calls = [functools.partial(_step, engine, batch) for batch in sample]
    if engine.prepare is not None:
        # Every step is the first of its tables.
        prepare = [functools.partial(engine.prepare, engine, batch) for batch in sample[:2]]
        timer = time_calls if case.device == "cpu" else time_device_calls
        return timer(calls[:2], prepare)[1:]
    if case.device == "cpu":
        return time_calls(calls)[1:]
    if case.loop:
        calls[0]()
        return time_device_loop(calls[1:])
    return time_device_calls(calls)[1:]


def _step(engine: Engine, batch: Batch) -> None:
    # Looked up late: ``prepare`` may have exchanged it.
    engine.step(batch)


def common(tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the ids that all hold, shuffled: an id's number says nothing about where its row is."""
    both = tables[0]
    for other in tables[1:]:
        both = both[torch.isin(both, other)]
    random = torch.Generator(both.device).manual_seed(_SEED)
    return both[torch.randperm(both.numel(), generator=random, device=both.device)]


def _counts(engine: Engine) -> dict[str, float]:
    """Return what our tables counted, summed over the tables."""
    stats = list(engine.module.stats().values())
    return {what: sum(table[what] for table in stats) for what in stats[0]}


def _changes(engine: Engine, before: dict[str, float], steps: int, batch: Batch) -> dict[str, float]:
    """Return what a step changes in our tables on average, since ``before``; where tables are new, in one more step."""
    if engine.prepare is not None:
        engine.prepare(engine, batch)
        before, steps = _counts(engine), 1
        engine.step(batch)
    after = _counts(engine)
    return {what: (after[what] - before[what]) / steps for what in after}


def _line(case: Case, entrants: _Field, times: dict[str, Times], batch: Batch, copy_gbps: float) -> dict[str, Any]:
    num_bytes = bytes_moved(case, batch, state_bytes(case))
    base = times.get(entrants.baseline)
    ours = entrants.engines[entrants.ours]
    counts = _counts(ours)
    targets = {entrants.ours_eager: case.eager_target, entrants.ours: case.target}
    line: dict[str, Any] = {
        **_shape(case, batch),
        "bytes": num_bytes,
        "copy_gbps": copy_gbps,
        "engines": {},
        "baseline": entrants.baseline,
        "ours": entrants.ours,
        "ours_eager": entrants.ours_eager,
        "errors": entrants.errors,
        "targets": {name: target for name, target in targets.items() if target is not None},
        "note": case.note,
        "load_factor": counts["size"] / counts["capacity"],
        "index_bytes_per_slot": ours.memory["index"] / counts["capacity"],
    }
    if case.grows and base is not None:
        extra = times[entrants.ours].median - base.median
        line["growth_ns_per_id"] = extra * 1e6 / (case.tables * case.rows)
    for name, engine in entrants.engines.items():
        median = times[name].median
        line["engines"][name] = {
            **result(times[name], base),
            "ids_per_s": batch.ids.numel() / median * 1e3,
            "gbps": num_bytes / median / 1e6,
            "copy_percent": num_bytes / median / 1e4 / copy_gbps,
            "memory": engine.memory,
        }
    return line


def _shape(case: Case, batch: Batch) -> dict[str, Any]:
    clock = {"cpu": "wall", "cuda": "wall, loop of steps" if case.loop else "device events"}[case.device]
    return {
        "case": case.name,
        "kind": "step",
        "device": case.device,
        "clock": clock,
        "tables": case.tables,
        "rows": case.rows,
        "capacity": case.capacity or case.rows,
        "population": case.population,
        "dim": case.dim,
        "dtype": case.dtype,
        "ids": batch.ids.numel(),
        "unique": batch.num_unique,
        "batch_size": case.batch_size,
        "bag_length": case.bag_length if not case.bag_lengths else list(case.bag_lengths),
        "optimizer": case.optimizer,
        "pooling": case.pooling,
        "train": case.train,
        "alpha": case.alpha,
        "new_share": case.new_share,
        "cold": case.cold,
        "grows": case.grows,
    }
