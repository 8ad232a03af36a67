"""Element types, sizes of rows and capacities of tables.

Nothing here imports torchrec: embedding configs and their ``DataType`` are read by attribute and by name.
"""

import enum
from numbers import Integral
from typing import Any, Protocol

import torch

from dynamicemb.optimizer import OptimizerKind, get_optimizer_state_dim, optimizer_kind
from dynamicemb.types import BUCKET_ALIGNMENT, DEMB_TABLE_ALIGN_SIZE, MAX_BUCKET_CAPACITY, Planned

DEFAULT_BUCKET_CAPACITY = 128
# Slots of the tables of one module together: slots and rows have 32-bit numbers.
MAX_GROUP_SLOTS = 2**31 - 1

# Rows of a table that have slots to spare where the size of buckets is left open.
_SPARED_ROWS = 4096
_STATE_ALIGNMENT = 4
_ROW_ALIGNMENT = 16


# Bytes of one element of a weight, by its dtype.
DTYPE_NUM_BYTES = {dtype: dtype.itemsize for dtype in (torch.float32, torch.float16, torch.bfloat16)}

_DTYPE_OF_DATA_TYPE = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
}


class EmbeddingConfig(Protocol):
    """The attributes of TorchRec's embedding configs that capacity arithmetic reads."""

    num_embeddings: int
    embedding_dim: int
    data_type: Any


def data_type_to_dtype(data_type: Any) -> torch.dtype:
    """Return the torch dtype of a TorchRec ``DataType``, or of its name such as ``"FP32"``.

    Raises:
        ValueError: the type has no torch dtype here.
    """
    name = data_type.value if isinstance(data_type, enum.Enum) else data_type
    if not isinstance(name, str) or name not in _DTYPE_OF_DATA_TYPE:
        raise ValueError(f"data_type {data_type!r} is not supported; use one of {', '.join(_DTYPE_OF_DATA_TYPE)}")
    return _DTYPE_OF_DATA_TYPE[name]


def check_bucket_capacity(bucket_capacity: int | None) -> None:
    """Raise unless ``bucket_capacity`` is a positive multiple of 16, MAX_BUCKET_CAPACITY or None."""
    if bucket_capacity is None:
        return
    if not isinstance(bucket_capacity, Integral) or isinstance(bucket_capacity, bool):
        raise TypeError(f"bucket_capacity must be an int, got {bucket_capacity!r}")
    if bucket_capacity != MAX_BUCKET_CAPACITY and (bucket_capacity < 1 or bucket_capacity % BUCKET_ALIGNMENT):
        raise ValueError(
            f"bucket_capacity must be a positive multiple of {BUCKET_ALIGNMENT}, MAX_BUCKET_CAPACITY or None, "
            f"got {bucket_capacity}; use for example {align_to_table_size(bucket_capacity)}"
        )


def align_to_table_size(n: int, alignment: int = DEMB_TABLE_ALIGN_SIZE) -> int:
    """Round up to a multiple of ``alignment``, at least one."""
    return max(-(-n // alignment), 1) * alignment


def bucket_layout(num_rows: int, bucket_capacity: int | None, world_size: int = 1) -> tuple[int, int]:
    """Return ``(number of buckets, slots of a bucket)`` of a table that is to hold ``num_rows`` ids.

    Buckets fill unevenly, so a small table with as many slots as rows loses ids before it is full. With
    ``bucket_capacity`` None the first 4,096 rows get one and a half slots each, unless a single bucket holds all ids:
    then as many ids as rows find a place, fewer than one in 1,000 such tables excepted
    (``benchmarks/studies/README.md``).

    Args:
        num_rows: rows on one rank.
        bucket_capacity: slots of a bucket; MAX_BUCKET_CAPACITY asks for a single bucket, None for buckets of 128 and
            slots to spare.
        world_size: ranks that share the table; a rank's share is one more part that may be full.

    Raises:
        ValueError: ``bucket_capacity`` is not a positive multiple of 16.

    Example:
        ``bucket_layout(251, 128) == (2, 128)``, ``bucket_layout(251, MAX_BUCKET_CAPACITY) == (1, 256)`` and
        ``bucket_layout(251, None) == (3, 128)``: 377 slots are wanted.
    """
    check_bucket_capacity(bucket_capacity)
    if bucket_capacity is None:
        bucket_capacity = DEFAULT_BUCKET_CAPACITY
        if num_rows > bucket_capacity or world_size > 1:
            num_rows = max(num_rows, -(-3 * min(num_rows, _SPARED_ROWS) // 2))
    if bucket_capacity == MAX_BUCKET_CAPACITY:
        return 1, align_to_table_size(num_rows, BUCKET_ALIGNMENT)
    # A plain number: kernels get it.
    bucket_capacity = int(bucket_capacity)
    return align_to_table_size(num_rows, bucket_capacity) // bucket_capacity, bucket_capacity


def growing_bucket_layout(
    init_rows: int, max_rows: int | None, bucket_capacity: int | None, world_size: int = 1
) -> tuple[int, int | None, int]:
    """Return ``(buckets at first, buckets at most, slots of a bucket)`` of a table that grows by doubling.

    The table begins with the buckets that ``init_rows`` need, or up to twice as many, and ends with at least
    ``max_rows`` slots: its first size times a power of two.

    Args:
        init_rows: rows at first.
        max_rows: rows at most, not fewer; None is no limit, and then there is no last number of buckets.
        bucket_capacity: as of ``bucket_layout``; a single bucket cannot grow.
        world_size: ranks that share the table.

    Example:
        ``growing_bucket_layout(1280, 12800, 128) == (13, 104, 128)``: 10 buckets double at most three times below 100.
    """
    if max_rows is None:
        # It grows before a bucket is full.
        init, bucket = bucket_layout(init_rows, bucket_capacity or DEFAULT_BUCKET_CAPACITY)
        return init, None, bucket
    most, bucket = bucket_layout(max_rows, bucket_capacity, world_size)
    if bucket_capacity == MAX_BUCKET_CAPACITY or init_rows >= max_rows:
        return most, most, bucket
    init, _ = bucket_layout(init_rows, bucket)
    factor = 1 << max(0, (most // init).bit_length() - 1)
    init = -(-most // factor)
    return init, init * factor, bucket


def _sharded_table_bucket_layout(
    embedding_config: EmbeddingConfig, world_size: int, bucket_capacity: int | None
) -> tuple[int, int]:
    """Return the ``bucket_layout`` of one rank's share of a table.

    A ``bucket_capacity`` that a planner wrote stands for what was asked for before: the layout is the planned one.

    Raises:
        ValueError: ``world_size`` < 1, or a bad ``bucket_capacity``.
    """
    if world_size <= 0:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    if isinstance(bucket_capacity, Planned):
        bucket_capacity = bucket_capacity.given
    return bucket_layout(-(-embedding_config.num_embeddings // world_size), bucket_capacity, world_size)


def get_sharded_table_capacity(embedding_config: EmbeddingConfig, world_size: int, bucket_capacity: int | None) -> int:
    """Return the slots that one rank has for its share of a table."""
    num_buckets, bucket = _sharded_table_bucket_layout(embedding_config, world_size, bucket_capacity)
    return num_buckets * bucket


def state_offset_bytes(dtype: torch.dtype, dim: int) -> int:
    """Return the bytes from the start of a row to its optimizer state: the weights, padded to 4."""
    return align_to_table_size(dim * dtype.itemsize, _STATE_ALIGNMENT)


def row_bytes(dtype: torch.dtype, dim: int, num_state: int) -> int:
    """Return the bytes of a row as stored: weights padded to 4, fp32 optimizer state, padded to 16.

    Args:
        dtype: dtype of the weights.
        dim: embedding dim D.
        num_state: fp32 values of optimizer state.

    Example:
        ``row_bytes(torch.bfloat16, 3, 1) == 16``: 6 bytes of weights, 2 of padding, 4 of state, 4 of padding.
    """
    return align_to_table_size(state_offset_bytes(dtype, dim) + 4 * num_state, _ROW_ALIGNMENT)


def get_table_value_bytes(
    embedding_config: EmbeddingConfig,
    optimizer_type: Any,
    world_size: int,
    bucket_capacity: int | None = None,
) -> int:
    """Return the nominal bytes of a table's values on all ranks: element size x (D + state) x capacity.

    This is the reference implementation's measure: state is as wide as weights, rows are not padded, and row-wise
    Adagrad takes 16 bytes. ``get_table_row_bytes`` is what the rows take here; it is larger for fp16 and bf16 tables
    with Adam or Adagrad (fp32 state), and where a row is not a multiple of 16 bytes (padding).
    """
    dtype = data_type_to_dtype(embedding_config.data_type)
    row = nominal_row_bytes(dtype, embedding_config.embedding_dim, optimizer_type)
    return row * get_sharded_table_capacity(embedding_config, world_size, bucket_capacity) * world_size


def nominal_row_bytes(dtype: torch.dtype, dim: int, optimizer_type: Any) -> int:
    """Return the bytes of a row by the measure of ``get_table_value_bytes``."""
    if optimizer_kind(optimizer_type) is OptimizerKind.ROWWISE_ADAGRAD:
        # The reference implementation reserves 16 bytes a row for the single value.
        num_state = 16 // dtype.itemsize
    else:
        num_state = get_optimizer_state_dim(optimizer_type, dim, dtype)
    return dtype.itemsize * (dim + num_state)


def get_table_row_bytes(
    embedding_config: EmbeddingConfig,
    optimizer_type: Any,
    world_size: int,
    bucket_capacity: int | None = None,
) -> int:
    """Return the bytes that a table's rows take on all ranks, without the index."""
    dim = embedding_config.embedding_dim
    dtype = data_type_to_dtype(embedding_config.data_type)
    row = row_bytes(dtype, dim, get_optimizer_state_dim(optimizer_type, dim, dtype))
    return row * get_sharded_table_capacity(embedding_config, world_size, bucket_capacity) * world_size
