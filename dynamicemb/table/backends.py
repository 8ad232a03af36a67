"""The kernels of a device: numba on the CPU, Triton on a GPU. Same names, same signatures, same results."""

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast

import torch

from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.admission import Newcomers
from dynamicemb.table.index import Index, Residents, Touches
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.stepping.results import InsertEvents, OpenBatch

Tensor = torch.Tensor


class Kernels(Protocol):
    """What a backend exports. Each function is documented where a backend has it, in the file of its name."""

    # Time

    @staticmethod
    def advance(touches: Touches, lag: int, training: bool = True) -> None: ...
    @staticmethod
    def observe_time(touches: Touches, lag: int) -> None: ...
    @staticmethod
    def rebase(touches: Touches, shift: int) -> None: ...

    # A lookup

    @staticmethod
    def open_batch(
        index: Residents, offsets: Tensor, layout: FeatureLayout, num_ids: int, lag: int | None = None,
        deterministic: bool | None = None,
    ) -> OpenBatch: ...  # fmt: skip
    @staticmethod
    def find(
        index: Residents, ids: Tensor, table_ranges: Tensor, touch: bool, frequencies: Tensor | None = None
    ) -> Tensor: ...
    @staticmethod
    def find_or_insert(
        index: Index, store: RowStore, newcomers: Newcomers, ids: Tensor, table_ranges: Tensor,
        frequencies: Tensor | None, scratch: Any = None,
    ) -> tuple[Tensor, InsertEvents]: ...  # fmt: skip
    @staticmethod
    def find_and_gather(
        index: Residents, store: RowStore, ids: Tensor, offsets: Tensor, layout: FeatureLayout, missing_values: Tensor,
        output_dtype: torch.dtype,
    ) -> Tensor: ...  # fmt: skip
    @staticmethod
    def gather(
        store: RowStore, rows: Tensor, table_ranges: Tensor, missing_values: Tensor, output_dtype: torch.dtype
    ) -> Tensor: ...
    @staticmethod
    def pool(
        store: RowStore, rows: Tensor, offsets: Tensor, layout: FeatureLayout, per_sample_weights: Tensor | None,
        missing_values: Tensor, output_dtype: torch.dtype,
    ) -> Tensor: ...  # fmt: skip

    # Its backward

    @staticmethod
    def pool_weights_grad(
        store: RowStore, rows: Tensor, offsets: Tensor, layout: FeatureLayout, grad: Tensor
    ) -> Tensor: ...
    @staticmethod
    def update(
        store: RowStore, spec: OptimizerSpec, gradients: Gradients, clock: Tensor, learning_rate: Tensor,
        table_keys: Tensor | None = None,
    ) -> None: ...  # fmt: skip

    # Contents

    @staticmethod
    def place(index: Index, ids: Tensor, table_ranges: Tensor) -> Tensor: ...
    @staticmethod
    def erase(index: Index, ids: Tensor, table_ranges: Tensor) -> Tensor: ...
    @staticmethod
    def scan(index: Index, table: int, min_score: int = 0) -> Tensor: ...
    @staticmethod
    def relocate(keys: Tensor, digests: Tensor, kept: Tensor, new_digests: Tensor, bucket_capacity: int) -> Tensor: ...
    @staticmethod
    def initialize(
        store: RowStore, initializers: InitializerTable, rows: Tensor, ids: Tensor, tables: Tensor, state_values: Tensor
    ) -> None: ...
    @staticmethod
    def read_rows(store: RowStore, table: int, rows: Tensor) -> tuple[Tensor, Tensor]: ...
    @staticmethod
    def write_rows(store: RowStore, table: int, rows: Tensor, weights: Tensor, state: Tensor | None) -> None: ...

    # Admission

    @staticmethod
    def add_counts(counter: Index, ids: Tensor, table_ranges: Tensor, amounts: Tensor) -> Tensor: ...


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for tables on a device.

    Raises:
        NotImplementedError: there are no kernels for this kind of device.
    """
    if device.type == "cpu":
        from dynamicemb.table import cpu

        return _exported(cpu)
    if device.type == "cuda":
        from dynamicemb.table import triton

        return _exported(triton)
    raise NotImplementedError(
        f"device: there are no table kernels for {device}; use torch.device('cpu') or a CUDA device"
    )


@cache
def _exported(package: ModuleType) -> Kernels:
    """Return what a package exports and nothing else: its modules are named like kernels, also like those it lacks."""
    return cast(Kernels, SimpleNamespace(**{name: getattr(package, name) for name in package.__all__}))
