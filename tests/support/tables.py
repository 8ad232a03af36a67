"""Groups of tables for tests, on any backend."""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import torch

from dynamicemb.table.backends import Kernels, kernels_for
from dynamicemb.table.group import GroupOptions, TableGroup
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.rows import RowFormat
from dynamicemb.table.scores import SCORE_TIMESTAMP
from dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode

UNIFORM = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM, lower=-1.0, upper=1.0)
SEED = 20


def device_of(backend: str) -> torch.device:
    """Return where a backend's tables live."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "cuda" else torch.device("cpu")


def use_backend(group: TableGroup, backend: str) -> None:
    """Make a group run the kernels of a backend; those of Triton in batch order, as the CPU's."""
    if backend == "cpu":
        return
    kernels = vars(kernels_of(backend)).copy()
    kernels["open_batch"] = functools.partial(kernels["open_batch"], deterministic=True)
    kernels["find_or_insert"] = find_or_insert_in_order
    group.kernels = cast(Kernels, SimpleNamespace(**kernels))


def kernels_of(backend: str) -> Kernels:
    """Return a backend's kernels as a group of tables gets them; `interpret` has those of a GPU."""
    return kernels_for(torch.device("cpu" if backend == "cpu" else "cuda"))


def find_or_insert_in_order(index, store, newcomers, ids, table_ranges, frequencies, scratch=None):
    """Do what Triton's ``find_or_insert`` does, in batch order."""
    from dynamicemb.table import triton
    from dynamicemb.table.triton.missing import Missing

    if scratch is None:
        scratch = Missing.allocate(index, ids.numel(), ordered=True).filled()
    return triton.find_or_insert(index, store, newcomers, ids, table_ranges, frequencies, scratch)


def make_group(
    backend: str,
    capacities: list[int],
    dims: list[int] | None = None,
    bucket_capacity: int = 16,
    strategy: int | Sequence[int] = SCORE_TIMESTAMP,
    **options: object,
) -> TableGroup:
    """Make a group of small tables with uniform initial values in +-1 and no optimizer state.

    Strategies are one for all tables, or one for each.
    """
    strategies = (strategy,) * len(capacities) if isinstance(strategy, int) else tuple(strategy)
    names = [f"t{t}" for t in range(len(capacities))]
    group = TableGroup(
        names,
        capacities,
        [RowFormat(dim, 0) for dim in dims or [4] * len(capacities)],
        InitializerTable.create([UNIFORM] * len(capacities), names, SEED, device_of(backend)),
        GroupOptions(bucket_capacity, torch.float32, strategies, SEED, **options),
        device_of(backend),
    )
    use_backend(group, backend)
    return group


def ranges(*sizes: int) -> torch.Tensor:
    """Return ``table_ranges`` for tables with so many occurrences each, on the default device."""
    return torch.tensor([0, *sizes]).cumsum(0)
