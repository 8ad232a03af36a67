"""Groups of tables for tests, on any backend."""

import functools
from types import SimpleNamespace

import torch

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
    from dynamicemb.table import triton

    kernels = {name: getattr(triton, name) for name in triton.__all__}
    for name in ("open_batch", "find_or_insert"):
        kernels[name] = functools.partial(kernels[name], deterministic=True)
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
        InitializerTable.create([UNIFORM] * len(capacities), names, SEED, device_of(backend)),
        GroupOptions(bucket_capacity, torch.float32, strategy, SEED, **options),
        device_of(backend),
    )
    use_backend(group, backend)
    return group


def ranges(*sizes: int) -> torch.Tensor:
    """Return ``table_ranges`` for tables with so many occurrences each, on the default device."""
    return torch.tensor([0, *sizes]).cumsum(0)
