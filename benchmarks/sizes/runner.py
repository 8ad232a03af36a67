"""Run a case of table sizes: the tables in turns, on the same batches."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import Engine, fill, make_tables, run_step
from benchmarks.host.breakdown import host_phases
from benchmarks.machine import load
from benchmarks.runner import common
from benchmarks.sizes.cases import LOAD, SizeCase
from benchmarks.step_case import Case
from benchmarks.timing import Sample, Times, describe_error, settle, time_calls, time_device_calls
from benchmarks.turns import Effort, result, take_turns
from benchmarks.workloads import Batch, batches

_SEED = 7
_NUM_BATCHES = 10
WARM_UP_STEPS = 20
# Of an index, for each slot; a little more than it takes.
_INDEX_BYTES = 27
# What remains for batches, outputs, gradients and scratch.
_SHARE_OF_MEMORY = 0.9


def run_case(case: SizeCase, effort: Effort) -> dict[str, Any]:
    """Measure a case.

    Returns:
        The fields of a line of results. An engine is the table of one size. The ratios are to the smallest, which is
        the baseline; the largest is ``ours``. ``errors`` has the sizes that memory did not allow.
    """
    load_before = load()
    engines, errors = _enter(case, _SHARE_OF_MEMORY)
    sample = _batches(case, list(engines.values()))
    _warm_up(engines, sample)
    before = {name: _misses(engine) for name, engine in engines.items()}

    def turn(number: int, name: str) -> list[Sample]:
        return _turn(case, engines[name], _of_turn(sample, number, effort))

    times = take_turns(list(engines), turn, effort, case.name)
    line = _line(case, engines, times, errors, sample[0])
    line["inserted"] = {name: _misses(engine) - before[name] for name, engine in engines.items()}
    if effort.phases:
        steps: list[Callable[[], object]] = [functools.partial(engines[line["ours"]].step, batch) for batch in sample]
        line["phases_ms"] = host_phases(steps, case.device)
    return {**line, "load": [load_before, load()]}


@contextlib.contextmanager
def alone(case: SizeCase, effort: Effort) -> Iterator[Callable[[int], list[Sample]]]:
    """Yield what runs a turn of the largest table of which two fit, given the number of the turn."""
    engine = list(_enter(case, _SHARE_OF_MEMORY / 2)[0].values())[-1]
    sample = _batches(case, [engine])
    _warm_up({"": engine}, sample)
    yield lambda number: _turn(case, engine, _of_turn(sample, number, effort))


def bytes_of(case: SizeCase, rows: int) -> int:
    """Return about how many bytes a table of so many slots takes."""
    return rows * (4 * case.dim + _INDEX_BYTES)


def free_bytes(device: str) -> int:
    """Return how many bytes of memory nobody uses."""
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def _enter(case: SizeCase, share: float) -> tuple[dict[str, Engine], dict[str, str]]:
    """Build and fill the tables; also return why one does not take part.

    Raises:
        MemoryError: not even the smallest fits.
    """
    engines: dict[str, Engine] = {}
    errors = {}
    left = share * free_bytes(case.device)
    for rows in case.rows:
        name = f"{rows:,} rows"
        if bytes_of(case, rows) > left:
            errors[name] = f"takes {bytes_of(case, rows) / 1e9:.0f} GB, beside the smaller tables more than is free"
            continue
        left -= bytes_of(case, rows)
        try:
            engines[name] = _table(case, rows)
        except Exception as error:
            errors[name] = describe_error(error)
    if not engines:
        raise MemoryError("; ".join(f"{name}: {error}" for name, error in errors.items()))
    return engines, errors


def _step_of(case: SizeCase, rows: int) -> Case:
    """Return the step of a table of so many slots; its ids fill ``LOAD`` of them."""
    return Case(
        case.name,
        tables=1,
        rows=int(LOAD * rows),
        dim=case.dim,
        num_ids=case.num_ids,
        bag_length=1,
        pooling="NONE",
        train=case.train,
        capacity=rows,
        device=case.device,
    )


def _table(case: SizeCase, rows: int) -> Engine:
    step = _step_of(case, rows)
    module = make_tables(step)
    fill(module, step)
    # The ids of the smallest table are in all of them.
    known = torch.arange(int(LOAD * case.rows[0]), device=case.device)
    residents = [known[module.contains(module.table_names[0], known)]]
    module.train(case.train)
    run = functools.partial(run_step, module, "ids", case.train)
    return Engine(f"{rows:,} rows", run, residents, module.memory_usage(), module)


def _batches(case: SizeCase, engines: list[Engine]) -> list[Batch]:
    residents = [common(tables) for tables in zip(*(engine.residents for engine in engines), strict=True)]
    return list(itertools.islice(batches(_step_of(case, case.rows[0]), residents, _SEED), _NUM_BATCHES))


def _warm_up(engines: dict[str, Engine], sample: list[Batch]) -> None:
    for engine in engines.values():
        for number in range(WARM_UP_STEPS):
            engine.step(sample[number % len(sample)])


def _of_turn(sample: list[Batch], number: int, effort: Effort) -> list[Batch]:
    """Return the batches of a turn; the first is not timed."""
    begin = number * effort.steps
    return [sample[(begin + step) % len(sample)] for step in range(1 + effort.steps)]


def _turn(case: SizeCase, engine: Engine, sample: list[Batch]) -> list[Sample]:
    settle(case.device)
    timer = time_device_calls if case.device == "cuda" else time_calls
    return timer([functools.partial(engine.step, batch) for batch in sample])[1:]


def _misses(engine: Engine) -> float:
    """Return how many ids the table has taken in so far."""
    return float(sum(table["inserted"] for table in engine.module.stats().values()))


def _line(
    case: SizeCase, engines: dict[str, Engine], times: dict[str, Times], errors: dict[str, str], batch: Batch
) -> dict[str, Any]:
    smallest, largest = list(engines)[0], list(engines)[-1]
    results = {
        name: {**result(times[name], times[smallest]), "memory": engine.memory} for name, engine in engines.items()
    }
    return {
        "case": case.name,
        "kind": "size",
        "device": case.device,
        "clock": "device events" if case.device == "cuda" else "wall",
        "rows": [rows for rows in case.rows if f"{rows:,} rows" in engines],
        "dim": case.dim,
        "ids": batch.ids.numel(),
        "unique": batch.num_unique,
        "optimizer": "exact_sgd",
        "pooling": "NONE",
        "train": case.train,
        "engines": results,
        "baseline": smallest,
        "ours": largest,
        "ours_eager": largest,
        "errors": errors,
        "targets": {},
        "note": "the largest table beside the smallest",
    }
