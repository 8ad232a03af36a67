"""Modules whose tables do not admit every id, for tests."""

from typing import Any

import pytest
import torch

from dynamicemb import (
    DynamicEmbInitializerArgs,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
)
from dynamicemb.table.cpu.initialize import initial_values
from dynamicemb.table.initializers import InitializerTable
from tests.support.lookups import SEED, make_module, options
from tests.support.tables import UNIFORM, device_of, use_backend


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Tests that know no backend run on the CPU."""
    return device_of(request.getfixturevalue("backend") if "backend" in request.fixturenames else "cpu")


def admitting(threshold: int, counter: int = 64, dim: int = 4, **more: Any) -> DynamicEmbTableOptions:
    """Return a table that admits ids with their ``threshold``-th occurrence."""
    strategy = more.pop("strategy", None) or FrequencyAdmissionStrategy(threshold, more.pop("values", None))
    return options(dim, admit_strategy=strategy, admission_counter=KVCounter(counter, 16), **more)


def module_on(backend: str, *tables: DynamicEmbTableOptions, **arguments: Any) -> Any:
    module = make_module(tables, device=device_of(backend), **arguments)
    use_backend(module.tables, backend)
    return module


def first_values(ids: list[int], dim: int, table: str = "a", args: DynamicEmbInitializerArgs = UNIFORM) -> torch.Tensor:
    """Return what the rows of new ids hold."""
    table_of_one = InitializerTable.create([args], [table], SEED, "cpu")
    return initial_values(table_of_one, 0, torch.tensor(ids, device="cpu"), dim).to(torch.tensor(0).device)


def lengths_of(module: Any, table: int = 0) -> dict[int, int]:
    """Return what the counter of a table knows."""
    counter = module.tables.admission.counter
    begin, end = (int(b) * counter.bucket_capacity for b in counter.bucket_offsets[table : table + 2])
    live = counter.digests[begin:end] >= 2
    return dict(zip(counter.keys[begin:end][live].tolist(), counter.scores[begin:end][live].tolist(), strict=True))


def holds(module: Any, ids: list[int], table: str = "a") -> list[bool]:
    return module.contains(table, torch.tensor(ids, device=module.tables.device)).tolist()


def by_chance(probability: float, **more: Any) -> DynamicEmbTableOptions:
    return options(admit_strategy=ProbabilityAdmissionStrategy(probability), capacity=512, bucket_capacity=128, **more)
