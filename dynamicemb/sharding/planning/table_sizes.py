"""From an embedding config to the size of a table on one rank, in rows and in bytes."""

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from dynamicemb.admission import KVCounter
from dynamicemb.capacity import DEFAULT_BUCKET_CAPACITY, MAX_GROUP_SLOTS, growing_bucket_layout
from dynamicemb.dynamicemb_config import (
    DEFAULT_INDEX_TYPE,
    MAX_DIM,
    WEIGHT_DTYPES,
    DynamicEmbTableOptions,
    complete_initializer_args,
    data_type_to_dtype,
    row_bytes,
)
from dynamicemb.optimizer import get_optimizer_state_dim
from dynamicemb.sharding.checks.fields import CONFIG_FIELDS
from dynamicemb.sharding.planning.constraints import row_wise
from dynamicemb.sharding.planning.written_options import given_options
from dynamicemb.table.growing.relocation import GROWTH_BYTES_PER_SLOT
from dynamicemb.table.index import INDEX_BYTES_PER_SLOT

# A compound strategy has a second score column.
SCORE_BYTES = 8
# What a step takes per occurrence beside inputs, outputs and gradients: on the CPU id, row, list link, grouping order
# and key; on a GPU 64 at the peak of a sequence step (measured), and a reserve for pooling and sums of hot rows.
SCRATCH_BYTES_PER_OCCURRENCE = {"cpu": 8 + 4 + 4 + 8 + 4, "cuda": 80}
# What admission takes beside that, and beside the row that it stages where an id is rejected: on the CPU the numbers of
# leaders, their tables and sums, and claims on them; on a GPU also the lists of the counter.
ADMISSION_BYTES_PER_OCCURRENCE = {"cpu": 4 * 8 + 4 * 8, "cuda": 4 * 8 + 60}


@dataclass(frozen=True)
class TableMemory:
    """Bytes of one dynamic table on one rank.

    Attributes:
        name: name of the table.
        num_slots: slots of the index, one row each.
        index_bytes: keys, digests, row numbers and tags; all of the counter that admission asks, if it is a
            ``KVCounter``.
        score_bytes: score columns.
        row_bytes: weights, with the padding of a row.
        state_bytes: optimizer state.
        scratch_bytes: per-step memory for one batch of the expected size.
        growth_bytes: what the table takes, beside the new slots, while it or another one of its module grows.
        hbm_bytes: the part of all this in GPU memory.
        host_bytes: the rest.
    """

    name: str
    num_slots: int
    index_bytes: int
    score_bytes: int
    row_bytes: int
    state_bytes: int
    scratch_bytes: int
    growth_bytes: int
    hbm_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the table in all memories."""
        return self.hbm_bytes + self.host_bytes


def table_options_on_rank(config: Any, options: DynamicEmbTableOptions, world_size: int) -> DynamicEmbTableOptions:
    """Return a copy of a user's options with everything that follows from the embedding config and the world size.

    Args:
        config: TorchRec's EmbeddingConfig or EmbeddingBagConfig.
        options: what the user gave; not changed. What a planner wrote into them does not count.
        world_size: ranks that share the table.

    Raises:
        ValueError: config and options contradict each other or are out of range.
    """
    name, options = config.name, given_options(options)
    check_config(config)
    # Refuses a rule that cannot divide the table.
    row_wise(options.dist_type, config, world_size)
    if options.score_strategy is None:
        raise ValueError(f"score_strategy of dynamic table {name!r} is None; choose one, for example TIMESTAMP")
    if options.dim not in (None, config.embedding_dim):
        raise ValueError(
            f"dim={options.dim} of table {name!r} differs from embedding_dim={config.embedding_dim}; leave dim None"
        )
    dtype = data_type_to_dtype(config.data_type)
    if options.embedding_dtype not in (None, dtype):
        raise ValueError(
            f"embedding_dtype={options.embedding_dtype} of table {name!r} differs from data_type={config.data_type}; "
            "leave embedding_dtype None"
        )
    init, most, bucket = slots_on_rank(config, options, world_size)
    if most > MAX_GROUP_SLOTS:
        raise ValueError(
            f"num_embeddings={config.num_embeddings} of table {name!r} needs {most} slots on each of "
            f"{world_size} ranks, at most {MAX_GROUP_SLOTS} are possible; use more ranks or a smaller num_embeddings"
        )
    return dataclasses.replace(
        copy.copy(options),
        bucket_capacity=bucket,
        max_capacity=None if options.grows_without_limit else most,
        init_capacity=init,
        admission_counter=None if options.admit_strategy is None else options.admission_counter,
        local_hbm_for_values=options.local_hbm_for_values or -(-options.global_hbm_for_values // world_size),
        dim=config.embedding_dim,
        embedding_dtype=dtype,
        index_type=options.index_type or DEFAULT_INDEX_TYPE,
        initializer_args=complete_initializer_args(options.initializer_args, embedding_config=config),
    )


def slots_on_rank(config: Any, options: DynamicEmbTableOptions, world_size: int) -> tuple[int, int, int]:
    """Return the slots of one rank's share of a table at first, those that are planned for, and those of a bucket.

    A table without a limit (NO_EVICTION) is planned for the slots that ``num_embeddings`` ids want at its load factor.
    It may begin with more, and go on.
    """
    options = given_options(options)
    rows, bucket_capacity = -(-config.num_embeddings // world_size), options.bucket_capacity
    if options.grows_without_limit:
        bucket_capacity = bucket_capacity or DEFAULT_BUCKET_CAPACITY
        rows = max(math.ceil(rows / options.max_load_factor), options.init_capacity or 0)
    init = min(options.init_capacity or rows, rows)
    init, most, bucket = growing_bucket_layout(init, rows, bucket_capacity, world_size)
    assert most is not None
    return init * bucket, most * bucket, bucket


def grows(config: Any, options: DynamicEmbTableOptions, world_size: int) -> bool:
    """Return whether a table may become larger than it is at first, as far as it is planned for."""
    init, most, _ = slots_on_rank(config, options, world_size)
    return init < most or options.grows_without_limit


def check_config(config: Any) -> None:
    """Check that a table of an embedding config can be dynamic.

    Raises:
        ValueError: it cannot, for its size, its dtype or another field.
    """
    CONFIG_FIELDS.refuse(config, f"dynamic table {config.name!r}")
    if not 1 <= config.embedding_dim <= MAX_DIM:
        raise ValueError(
            f"embedding_dim of dynamic table {config.name!r} must be 1..{MAX_DIM}, got {config.embedding_dim}"
        )
    if config.num_embeddings < 1:
        raise ValueError(
            f"num_embeddings of dynamic table {config.name!r} must be at least 1, got {config.num_embeddings}; "
            "it is the number of rows over all ranks"
        )
    if data_type_to_dtype(config.data_type) not in WEIGHT_DTYPES:
        raise ValueError(
            f"data_type of dynamic table {config.name!r} must be FP32, FP16 or BF16, got {config.data_type}"
        )


def table_memory(
    name: str,
    options: DynamicEmbTableOptions,
    optimizer: Any,
    occurrences: float,
    device_type: str,
    slots: int,
    grows: bool = False,
) -> TableMemory:
    """Return the bytes of a table on one rank.

    Args:
        name: name of the table.
        options: as `table_options_on_rank` returns them.
        optimizer: EmbOptimType.
        occurrences: expected occurrences of the table's ids per step that reach a rank.
        device_type: "cpu" or "cuda"; all memory of a table is that of its device, until rows can be in host memory.
        slots: those that are planned for, as `slots_on_rank` returns them.
        grows: whether this table grows, or another one of its module.
    """
    dim, dtype = options.dim, options.embedding_dtype
    assert dim is not None and dtype is not None
    num_state = get_optimizer_state_dim(optimizer, dim, dtype)
    num_scores = len(options.score_strategy) if isinstance(options.score_strategy, tuple) else 1
    state = slots * num_state * torch.float32.itemsize
    rows = slots * row_bytes(dtype, dim, num_state) - state
    index = slots * (INDEX_BYTES_PER_SLOT - SCORE_BYTES) + _counter_bytes(options)
    scores = slots * SCORE_BYTES * num_scores
    scratch = int(occurrences * SCRATCH_BYTES_PER_OCCURRENCE[device_type])
    if options.admit_strategy is not None:
        scratch += int(occurrences * (ADMISSION_BYTES_PER_OCCURRENCE[device_type] + row_bytes(dtype, dim, num_state)))
    # Growth copies the index of the whole module.
    growth = index + scores + slots * GROWTH_BYTES_PER_SLOT if grows else 0
    total = index + scores + rows + state + scratch + growth
    hbm = 0 if device_type == "cpu" else total
    return TableMemory(name, slots, index, scores, rows, state, scratch, growth, hbm, total - hbm)


def _counter_bytes(options: DynamicEmbTableOptions) -> int:
    """Return the bytes of a table's counter; nobody but the user knows those of his own."""
    if not isinstance(options.admission_counter, KVCounter):
        return 0
    num_buckets, bucket = options.admission_counter.layout()
    return num_buckets * bucket * INDEX_BYTES_PER_SLOT
