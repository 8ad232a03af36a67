"""What runs a step: our tables, and FBGEMM's static ones."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.policies import THRESHOLD, in_force, table_options
from benchmarks.workloads import DTYPES, Batch, batches
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.capacity import DEFAULT_BUCKET_CAPACITY
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode, DynamicEmbTableOptions

if TYPE_CHECKING:
    from benchmarks.step_case import Case

LEARNING_RATE = 0.01
# Ids of one batch while tables are filled, over all tables.
_FILL_IDS = {"cpu": 200_000, "cuda": 1_000_000}
# Steps after which a table that evicts holds what it holds from then on: with 40 M ids for 1.7 M rows, an id is evicted
# about 75 steps after its last touch.
_SETTLING_STEPS = 80
_SETTLING_SEED = 11


@dataclass
class Engine:
    """One competitor.

    Attributes:
        name: for the report.
        step: runs a batch.
        residents: per table, the ids that batches may draw.
        memory: bytes allocated, by what for.
        module: the module itself, for reports that look inside.
        source: the field of a batch with the ids that ``step`` reads.
        prepare: runs before every step, with this engine, and is not timed; it sets ``step`` and ``module``.
        captures: whether a CUDA graph of the step is tried.
    """

    name: str
    step: Callable[[Batch], None]
    residents: list[torch.Tensor]
    memory: dict[str, int]
    module: Any
    source: str = "ids"
    prepare: Callable[["Engine", Batch], None] | None = None
    captures: bool = True


class Build(Protocol):
    """Builds an engine with all ids 0..rows-1 inserted, as far as they fit."""

    def __call__(self, case: "Case") -> Engine: ...


def dynamic(case: "Case") -> Engine:
    """Build ``BatchedDynamicEmbeddingTablesV2``; its tables are empty before every step if the case is cold."""
    every = torch.arange(case.rows, device=case.device)
    module = make_tables(case)
    if case.cold:
        memory = module.memory_usage()
        prepare = functools.partial(_empty_tables, case)
        return Engine("dynamicemb", not_prepared, [every] * case.tables, memory, module, prepare=prepare)
    fill(module, case)
    residents = [every] * case.tables
    if case.population:
        _settle(module, case, residents)
    else:
        residents = [every[module.contains(name, every)] for name in module.table_names]
    module.train(case.train)
    step = functools.partial(_step_by, case.policy, module, case.train)
    return Engine("dynamicemb", step, residents, module.memory_usage(), module)


def dynamic_sgd(case: "Case") -> Engine:
    """Build our tables with SGD, whatever the case trains with."""
    return replace(dynamic(replace(case, optimizer="exact_sgd")), name="dynamicemb SGD")


def plain(case: "Case") -> Engine:
    """Build our tables with default options, whatever the case's policy."""
    return replace(dynamic(replace(case, policy="lru")), name="dynamicemb LRU")


def counting(case: "Case") -> Engine:
    """Build our tables with LFU scores, whatever the case's policy."""
    return replace(dynamic(replace(case, policy="lfu")), name="dynamicemb LFU")


def growing(case: "Case") -> Engine:
    """Build tables that hold ``rows`` ids, and with one more double: before every step they are made anew."""
    return _before_growth(case, "dynamicemb, growing", 2 * case.rows)


def grown(case: "Case") -> Engine:
    """Build tables that hold ``rows`` ids and are as large as others after growth: the ordinary step."""
    return _before_growth(case, "dynamicemb, grown", 4 * case.rows)


def _before_growth(case: "Case", name: str, slots: int) -> Engine:
    every = torch.arange(case.rows, device=case.device)
    memory = make_tables(replace(case, capacity=4 * case.rows)).memory_usage()

    def prepare(engine: Engine, batch: Batch) -> None:
        # The old tables go first: both together may not fit.
        engine.module, engine.step = None, not_prepared
        module = make_tables(replace(case, capacity=4 * case.rows), slots)
        fill(module, case)
        assert module.tables.capacities == [slots] * case.tables
        engine.module, engine.step = module, functools.partial(run_step, module, "ids", case.train)
        if case.device == "cuda":
            torch.cuda.synchronize()

    return Engine(name, not_prepared, [every] * case.tables, memory, None, prepare=prepare, captures=False)


def static(case: "Case") -> Engine:
    """Build FBGEMM's table-batched embeddings with ``case.rows`` rows for each table, where the case says."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    on_cpu = case.device == "cpu"
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU) if on_cpu else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    # Its kernels have no bf16 rows, and its Adam no fp16 rows.
    rows, output = {"fp32": ("FP32", "FP32"), "bf16": ("FP16", "BF16")}[case.dtype]
    rows = "FP32" if case.optimizer == "adam" else rows
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(case.rows, case.dim, *place)] * case.tables,
        optimizer=EmbOptimType(case.optimizer),
        pooling_mode=PoolingMode[case.pooling],
        weights_precision=SparseType[rows],
        output_dtype=SparseType[output],
        learning_rate=LEARNING_RATE,
        device=torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device()),
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)
    module.train(case.train)
    tensors = [*module.parameters(), *module.buffers()]
    memory = {"rows": sum(t.numel() * t.element_size() for t in tensors)}
    residents = [torch.arange(case.rows, device=case.device)] * case.tables
    step = functools.partial(run_step, module, "known_ids", case.train)
    return Engine("fbgemm TBE", step, residents, memory, module, "known_ids")


def make_tables(case: "Case", slots: int | None = None) -> BatchedDynamicEmbeddingTablesV2:
    """Make the tables of a case, which begin with ``slots`` slots each or are as large as they get."""
    dtype = DTYPES[case.dtype]
    capacity = case.capacity or case.rows
    return BatchedDynamicEmbeddingTablesV2(
        [
            DynamicEmbTableOptions(
                dim=case.dim,
                init_capacity=slots,
                max_capacity=capacity,
                embedding_dtype=dtype,
                # A case says how full its tables are: no slots to spare.
                bucket_capacity=DEFAULT_BUCKET_CAPACITY,
                **table_options(case.policy, case.rows),
            )
            for _ in range(case.tables)
        ],
        pooling_mode=DynamicEmbPoolingMode[case.pooling],
        output_dtype=dtype,
        optimizer=case.optimizer,
        learning_rate=LEARNING_RATE,
        device=case.device,
    )


def _step_by(policy: str, module: torch.nn.Module, train: bool, batch: Batch) -> None:
    with in_force(policy):
        run_step(module, "ids", train, batch)


def run_step(module: torch.nn.Module, source: str, train: bool, batch: Batch) -> None:
    ids = getattr(batch, source)
    if train:
        module(ids, batch.offsets).backward(batch.grad)
    else:
        with torch.no_grad():
            module(ids, batch.offsets)


def _empty_tables(case: "Case", engine: Engine, batch: Batch) -> None:
    """Give the engine new tables, which one id has entered and left: the first step of a module also sets it up.

    What it sets up then waits for the device, which a CUDA graph cannot capture.
    """
    # The old tables go first: both together may not fit.
    engine.module, engine.step = None, not_prepared
    module = make_tables(case)
    ids = torch.full((case.tables,), -1, device=case.device)
    output = module(ids, torch.arange(case.tables + 1, device=case.device))
    output.backward(torch.zeros_like(output))
    for name in module.table_names:
        module.erase(name, ids[:1])
    engine.module = module.train(case.train)
    engine.step = functools.partial(run_step, module, "ids", case.train)
    if case.device == "cuda":
        torch.cuda.synchronize()


def not_prepared(batch: Batch) -> None:
    """Stand in for a step without tables."""
    raise RuntimeError("prepare was not called")


def fill(module: BatchedDynamicEmbeddingTablesV2, case: "Case") -> None:
    """Insert ids 0..rows-1 into every table; the last ones, which are the lowest, win where a bucket is full."""
    count = max(1, _FILL_IDS[case.device] // case.tables)
    # So often that admission by count lets every id in.
    ends = [end for end in range(case.rows, 0, -count) for _ in range(THRESHOLD if case.policy == "admission" else 1)]
    with torch.no_grad():
        for end in ends:
            ids = torch.arange(max(0, end - count), end, device=case.device)
            offsets = torch.arange(case.tables + 1, device=case.device) * ids.numel()
            module(ids.repeat(case.tables), offsets)


def _settle(module: BatchedDynamicEmbeddingTablesV2, case: "Case", residents: list[torch.Tensor]) -> None:
    """Run batches of the case until the tables hold what such batches leave behind."""
    with torch.no_grad():
        for batch in itertools.islice(batches(case, residents, _SETTLING_SEED), _SETTLING_STEPS):
            module(batch.ids, batch.offsets)
