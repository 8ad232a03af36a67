"""What runs a step: our tables, and FBGEMM's static ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.workloads import Batch
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode, DynamicEmbTableOptions

if TYPE_CHECKING:
    from benchmarks.cases import Case

LEARNING_RATE = 0.01
_FILL_IDS = 20_000


@dataclass
class Engine:
    """One competitor.

    Attributes:
        name: for the report.
        step: runs a batch.
        residents: per table, the ids it holds.
        memory: bytes allocated, by what for.
        module: the module itself, for reports that look inside.
    """

    name: str
    step: Callable[[Batch], None]
    residents: list[torch.Tensor]
    memory: dict[str, int]
    module: Any


class Build(Protocol):
    """Builds an engine with all ids 0..rows-1 inserted, as far as they fit."""

    def __call__(self, case: "Case") -> Engine: ...


def dynamic(case: "Case") -> Engine:
    """Build ``BatchedDynamicEmbeddingTablesV2`` with a capacity of ``case.rows`` rows for each table."""
    module = BatchedDynamicEmbeddingTablesV2(
        [DynamicEmbTableOptions(dim=case.dim, max_capacity=case.rows) for _ in range(case.tables)],
        pooling_mode=DynamicEmbPoolingMode[case.pooling],
        optimizer=case.optimizer,
        learning_rate=LEARNING_RATE,
        device=case.device,
    )
    _fill(module, case)
    every = torch.arange(case.rows)
    residents = [every[module.contains(name, every)] for name in module.table_names]
    module.train(case.train)

    def step(batch: Batch) -> None:
        _step(module, batch, batch.ids, case.train)

    return Engine("dynamicemb", step, residents, module.memory_usage(), module)


def dynamic_sgd(case: "Case") -> Engine:
    """Build our tables with SGD, whatever the case trains with."""
    return replace(dynamic(replace(case, optimizer="exact_sgd")), name="dynamicemb SGD")


def static(case: "Case") -> Engine:
    """Build FBGEMM's table-batched embeddings on the CPU with ``case.rows`` rows for each table."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(case.rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * case.tables,
        optimizer=EmbOptimType(case.optimizer),
        pooling_mode=PoolingMode[case.pooling],
        learning_rate=LEARNING_RATE,
        device=torch.device("cpu"),
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)
    module.train(case.train)
    tensors = [*module.parameters(), *module.buffers()]

    def step(batch: Batch) -> None:
        _step(module, batch, batch.known_ids, case.train)

    memory = {"rows": sum(t.numel() * t.element_size() for t in tensors)}
    return Engine("fbgemm TBE", step, [torch.arange(case.rows)] * case.tables, memory, module)


def _step(module: torch.nn.Module, batch: Batch, ids: torch.Tensor, train: bool) -> None:
    if train:
        module(ids, batch.offsets).backward(batch.grad)
    else:
        with torch.no_grad():
            module(ids, batch.offsets)


def _fill(module: BatchedDynamicEmbeddingTablesV2, case: "Case") -> None:
    """Insert ids 0..rows-1 into every table, in batches of a few thousand; the last ones win where a bucket is full."""
    with torch.no_grad():
        for begin in range(0, case.rows, _FILL_IDS):
            ids = torch.arange(begin, min(begin + _FILL_IDS, case.rows))
            module(ids.repeat(case.tables), torch.arange(case.tables + 1) * ids.numel())
