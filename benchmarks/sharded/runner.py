"""Run a sharded case: its engines in turns, on all of its ranks."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.host.breakdown import count_calls, host_phases
from benchmarks.machine import load
from benchmarks.sharded.batches import draw, fresh
from benchmarks.sharded.cases import ShardedCase
from benchmarks.sharded.models import BUILDERS, CONSTANT, OURS, STATIC, Model
from benchmarks.sharded.ranks import agree, on_ranks, process_group, slowest
from benchmarks.timing import Sample, Times, describe_error, settle, time_calls, time_device_calls
from benchmarks.turns import Effort, result, take_turns

# Batches that all engines go round. They have trained all of them, twice, before they are timed.
_NUM_BATCHES = 10
WARM_UP_STEPS = 20
_COUNTED = ("inserted", "evicted", "failed")


def run_case(case: ShardedCase, effort: Effort) -> dict[str, Any]:
    """Measure a case.

    Times are of whole steps, as rank 0 or the slowest rank sees them. The ratio is to the faster static plan.

    Returns:
        The fields of a line of results.
    """
    load_before = load()
    line: dict[str, Any] = on_ranks(case.ranks, case.device, functools.partial(_measure, case, effort))
    return {**line, "load": [load_before, load()]}


@contextlib.contextmanager
def alone(case: ShardedCase, effort: Effort) -> Iterator[Callable[[int], list[Sample]]]:
    """Yield what runs a turn of our engine on one rank, given the number of the turn."""
    with process_group(case.device) as device:
        batches = draw(case, _NUM_BATCHES, 0, device)
        model = _warm(case, OURS, device, batches)
        yield lambda number: _turn(case, model, _sample(batches, number, effort))


def _measure(case: ShardedCase, effort: Effort, device: torch.device) -> dict[str, Any]:
    batches = draw(case, _NUM_BATCHES, torch.distributed.get_rank(), device)
    models, errors = _models(case, device, batches)
    before = _counts(models[OURS])

    def turn(number: int, name: str) -> list[Sample]:
        samples = _turn(case, models[name], _sample(batches, number, effort))
        return [replace(s, ms=ms) for s, ms in zip(samples, slowest([s.ms for s in samples]), strict=True)]

    times = take_turns(list(models), turn, effort, case.name, agree)
    steps = len(times[OURS].samples) * (1 + effort.steps) / effort.steps
    after = _counts(models[OURS])
    line = _line(case, times, errors)
    line |= {f"{what}_per_step": (after[what] - before[what]) / steps for what in _COUNTED}
    line["differences"] = _differences(models, batches[0])
    line["unique"] = _num_unique(batches[0], case)
    if effort.phases:
        line["phases_ms"] = host_phases(_calls(models[OURS], batches), case.device)
        line["counts"] = {name: count_calls(_calls(model, batches), case.device) for name, model in models.items()}
    return line


def _models(
    case: ShardedCase, device: torch.device, batches: list[KeyedJaggedTensor]
) -> tuple[dict[str, Model], dict[str, str]]:
    """Build and warm up the engines; also return why one does not take part.

    Raises:
        Exception: our own engine fails.
    """
    models, errors = {}, {}
    for name in BUILDERS:
        try:
            models[name] = _warm(case, name, device, batches)
        except Exception as error:
            if name == OURS:
                raise
            errors[name] = describe_error(error)
    return models, errors


def _warm(case: ShardedCase, name: str, device: torch.device, batches: list[KeyedJaggedTensor]) -> Model:
    model = BUILDERS[name](case, device)
    for number in range(WARM_UP_STEPS):
        model.step(batches[number % len(batches)])
    settle(case.device)
    return model


def _sample(batches: list[KeyedJaggedTensor], number: int, effort: Effort) -> list[KeyedJaggedTensor]:
    """Return the batches of a turn; the first is not timed."""
    begin = number * effort.steps
    return [fresh(batches[(begin + step) % len(batches)]) for step in range(1 + effort.steps)]


def _calls(model: Model, batches: list[KeyedJaggedTensor]) -> list[Callable[[], object]]:
    return [functools.partial(model.step, fresh(batch)) for batch in batches]


def _turn(case: ShardedCase, model: Model, sample: list[KeyedJaggedTensor]) -> list[Sample]:
    settle(case.device)
    timer = time_device_calls if case.device == "cuda" else time_calls
    return timer([functools.partial(model.step, batch) for batch in sample])[1:]


def _counts(model: Model) -> dict[str, float]:
    """Return what our tables of this rank counted."""
    stats = [table for module in model.tables for table in module.stats().values()]
    return {what: sum(table[what] for table in stats) for what in _COUNTED}


def _differences(models: dict[str, Model], batch: KeyedJaggedTensor) -> dict[str, float]:
    """Return by how much the outputs of engines that did the same work differ from ours, at most."""
    outputs = {}
    for name, model in models.items():
        with torch.no_grad():
            model.model.eval()
            outputs[name] = torch.cat([output.reshape(-1) for output in model.forward(batch)])
            model.model.train(model.case.train)
    ours = outputs[OURS]
    return {name: float((outputs[name] - ours).abs().max()) for name in STATIC if name in outputs}


def _num_unique(batch: KeyedJaggedTensor, case: ShardedCase) -> int:
    parts = batch.values().split([case.batch_size * length for length in case.lengths])
    return sum(part.unique().numel() for part in parts)


def _line(case: ShardedCase, times: dict[str, Times], errors: dict[str, str]) -> dict[str, Any]:
    plans = [name for name in STATIC if name in times]
    baseline = min(plans, key=lambda name: times[name].median) if plans else ""
    base = times.get(baseline)
    engines = {name: result(engine, base) for name, engine in times.items()}
    for engine in engines.values():
        engine["ids_per_s"] = case.ranks * case.num_ids / engine["ms"] * 1e3
    of_ours = engines[OURS]["ms"]
    line: dict[str, Any] = {
        "case": case.name,
        "kind": "torchrec",
        "device": case.device,
        "clock": "device events" if case.device == "cuda" else "wall",
        "ranks": case.ranks,
        "pooling": "SUM" if case.pooled else "NONE",
        "tables": len(case.rows),
        "rows": list(case.rows),
        "lengths": list(case.lengths),
        "dim": case.dim,
        "ids": case.num_ids,
        "batch_size": case.batch_size,
        "optimizer": case.optimizer,
        "train": case.train,
        "alpha": case.alpha,
        "engines": engines,
        "baseline": baseline,
        "ours": OURS,
        "ours_eager": OURS,
        "errors": errors,
        "targets": {},
        "note": "beside the faster static plan",
    }
    if CONSTANT in engines:
        line["torchrec_share"] = engines[CONSTANT]["ms"] / of_ours
    return line
