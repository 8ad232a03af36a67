"""Groups of tables for tests, on any backend."""

import functools
from types import SimpleNamespace

import pytest
import torch

from dynamicemb.table.group import GroupOptions, TableGroup
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.rows import RowFormat
from dynamicemb.table.scores import SCORE_TIMESTAMP
from dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode

UNIFORM = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM, lower=-1.0, upper=1.0)
SEED = 20


def use_backend(group: TableGroup, backend: str) -> None:
    """Make a group on the CPU run the kernels of a backend, as far as that backend has them."""
    if backend == "cuda":
        pytest.skip("cuda: only find has a GPU kernel yet")
    if backend == "interpret":
        from dynamicemb.table import triton as interpreted

        kernels = dict(vars(group.kernels))
        kernels.update({name: getattr(interpreted, name) for name in interpreted.__all__})
        # The oracle takes ids in batch order.
        kernels["find_or_insert"] = functools.partial(interpreted.find_or_insert, deterministic=True)
        group.kernels = SimpleNamespace(**kernels)


def make_group(
    backend: str,
    capacities: list[int],
    dims: list[int] | None = None,
    bucket_capacity: int = 16,
    strategy: int = SCORE_TIMESTAMP,
    **options: object,
) -> TableGroup:
    """Make a group of small tables with uniform initial values in +-1 and no optimizer state."""
    names = [f"t{t}" for t in range(len(capacities))]
    group = TableGroup(
        names,
        capacities,
        [RowFormat(dim, 0) for dim in dims or [4] * len(capacities)],
        InitializerTable.create([UNIFORM] * len(capacities), names, SEED, torch.device("cpu")),
        GroupOptions(bucket_capacity, torch.float32, strategy, SEED, **options),
        torch.device("cpu"),
    )
    use_backend(group, backend)
    return group


def ranges(*sizes: int) -> torch.Tensor:
    """Return ``table_ranges`` for tables with so many occurrences each."""
    return torch.tensor([0, *sizes]).cumsum(0)
