"""Names that users of the reference implementation know, and that nothing here needs.

They are handed on by ``dynamicemb.dynamicemb_config``, where the reference implementation has them. Others that only
users need stand beside what they belong to: ``CopyMode`` among the types, ``string_to_opt_type`` with the optimizers.
"""

import enum
from typing import Any

import torch

from dynamicemb.aliases import also_named
from dynamicemb.capacity import DEFAULT_BUCKET_CAPACITY, check_bucket_capacity, data_type_to_dtype, row_bytes
from dynamicemb.optimizer import get_optimizer_state_dim
from dynamicemb.types import BUCKET_ALIGNMENT, MAX_BUCKET_CAPACITY
from dynamicemb.warn import warn


class DynamicEmbDataType(enum.Enum):
    """Element types by the names of the reference implementation."""

    Float32 = torch.float32
    Float16 = torch.float16
    BFloat16 = torch.bfloat16
    Int64 = torch.int64
    UInt64 = torch.uint64
    Int32 = torch.int32
    UInt32 = torch.uint32
    Int8 = torch.int8
    UInt8 = torch.uint8


def data_type_to_dyn_emb(data_type: Any) -> DynamicEmbDataType:
    """Return our element type of a TorchRec ``DataType``."""
    return torch_to_dyn_emb(data_type_to_dtype(data_type))


def dyn_emb_to_torch(data_type: DynamicEmbDataType) -> torch.dtype:
    """Return the torch dtype of an element type."""
    if not isinstance(data_type, DynamicEmbDataType):
        raise TypeError(f"data_type must be a DynamicEmbDataType, got {data_type!r}")
    return data_type.value


@also_named(dtype="torch_dtype")
def torch_to_dyn_emb(torch_dtype: torch.dtype) -> DynamicEmbDataType:
    """Return the element type of a torch dtype.

    Raises:
        ValueError: there is none.
    """
    try:
        return DynamicEmbDataType(torch_dtype)
    except ValueError:
        known = ", ".join(str(member.value) for member in DynamicEmbDataType)
        raise ValueError(f"torch_dtype {torch_dtype!r} is not supported; use one of {known}") from None


def dtype_to_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one element."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    return dtype.itemsize


def get_constraint_capacity(
    memory_bytes: int, dtype: torch.dtype, dim: int, optimizer_type: Any, bucket_capacity: int | None
) -> int:
    """Return how many rows fit into ``memory_bytes``, in whole buckets and at least one (then with a warning)."""
    check_bucket_capacity(bucket_capacity)
    bucket = bucket_capacity or DEFAULT_BUCKET_CAPACITY
    if bucket == MAX_BUCKET_CAPACITY:
        bucket = BUCKET_ALIGNMENT
    bucket_bytes = bucket * row_bytes(dtype, dim, get_optimizer_state_dim(optimizer_type, dim, dtype))
    if memory_bytes < bucket_bytes:
        warn(
            f"{memory_bytes} bytes hold no bucket of {bucket} rows ({bucket_bytes} bytes); using one bucket",
        )
    return max(memory_bytes // bucket_bytes, 1) * bucket
