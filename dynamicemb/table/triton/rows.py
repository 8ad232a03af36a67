"""Where rows are, and how their values are read and written, for Triton kernels.

``dtype`` rules: weights are widened to fp32 on read; a store rounds to nearest even. bfloat16 goes through its bits on
both ways, because Triton's interpreter truncates where the GPU rounds.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.launch import power_of_two

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class RowShape(NamedTuple):
    """What the kernels of a group are compiled for; their parameter ROW.

    Attributes:
        dim: dim of all tables, 0 if they differ.
        block_dim: columns of a tile, the largest dim rounded up to a power of two, at least 4.
        row_bytes: bytes of a row of any table, 0 if they differ.
        state_offset: bytes from a row's start to its state, for any table, -1 if they differ.
        alignment: what every dim, hence every column offset, is a multiple of; a power of two, at most 16.
        state_alignment: what every state offset is a multiple of, in bytes; a power of two, at most 16.
        max_dim: the largest dim.
        max_tail: floats from the state to the end of the row, at most.
        weight: Triton's name of the weights' dtype.
        weight_bytes: of one weight.
    """

    dim: int
    block_dim: int
    row_bytes: int
    state_offset: int
    alignment: int
    state_alignment: int
    max_dim: int
    max_tail: int
    weight: tl.dtype
    weight_bytes: int


def _shape_of(formats: list[tuple[int, int, int]], dtype: torch.dtype) -> RowShape:
    dims, sizes, offsets = (set(column) for column in zip(*formats))
    return RowShape(
        dim=max(dims) if len(dims) == 1 else 0,
        block_dim=max(4, power_of_two(max(dims))),
        row_bytes=max(sizes) if len(sizes) == 1 else 0,
        state_offset=max(offsets) if len(offsets) == 1 else -1,
        alignment=math.gcd(16, *dims),
        state_alignment=math.gcd(16, *offsets),
        max_dim=max(dims),
        max_tail=max(size - offset for _, size, offset in formats) // 4,
        weight=TRITON_DTYPES[dtype],
        weight_bytes=dtype.itemsize,
    )


def row_shape(store: RowStore) -> RowShape:
    """Return what the kernels of a store are compiled for."""
    # A store's formats never change; walking a hundred of them costs more than a launch.
    shape: RowShape | None = store.prepared.get("shape")
    if shape is None:
        dtype = store.dtype
        shape = _shape_of([(f.dim, f.num_bytes(dtype), f.state_offset(dtype)) for f in store.formats], dtype)
        store.prepared["shape"] = shape
    return shape


def num_warps(elements: int) -> int:
    """Return how many warps share a tile: 16 values a lane and more."""
    return max(1, min(8, elements // 512))


@triton.jit
def find_range(i, starts_ptr, low, width):
    """Return the last ``r`` in ``low..low + width`` (exclusive) with ``starts[r] <= i``, per lane.

    Example: ``starts = [0, 3, 3, 4]``, low 0, width 3: ``i = 2`` gives 0, ``i = 3`` gives 2.
    """
    while width > 1:
        half = width // 2
        middle = low + half
        low = tl.where(tl.load(starts_ptr + middle) <= i, middle, low)
        width -= half
    return low


@triton.jit
def row_addresses(rows, tables, valid, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW_BYTES: tl.constexpr):
    """Return the addresses (int64) of rows; lanes that are not valid get any number.

    Example: ``chunk_shift`` 6, row 70 of 32 bytes: the second entry of ``chunk_bases`` + 6 * 32.
    """
    base = tl.load(chunk_bases_ptr + (rows >> chunk_shift), mask=valid, other=0)
    within = (rows & ((1 << chunk_shift) - 1)).to(tl.int64)
    if ROW_BYTES > 0:
        return base + within * ROW_BYTES
    return base + within * tl.load(row_bytes_ptr + tables)


@triton.jit
def pointers(addresses, DTYPE: tl.constexpr):
    """Return row addresses as pointers to values; every row starts at a multiple of 16 bytes."""
    return tl.multiple_of(addresses.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def pick(values, part, SIZE: tl.constexpr):
    """Return entries ``part * SIZE`` to ``(part + 1) * SIZE`` of a vector.

    Example: part 1 of ``[5, 6, 7, 8]`` in parts of two is ``[7, 8]``.
    """
    if values.shape[0] == SIZE:
        return values
    else:
        return tl.gather(values, part * SIZE + tl.arange(0, SIZE), 0)


@triton.jit
def load_float(pointer, mask):
    """Read values as fp32, 0 where masked."""
    return load_evicting(pointer, mask, "")


@triton.jit
def load_evicting(pointer, mask, EVICTION: tl.constexpr):
    """Read values as fp32, 0 where masked; EVICTION is an ``eviction_policy``."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
        words = tl.load(bits, mask=mask, other=0, eviction_policy=EVICTION)
        return (words.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(pointer, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def bf16_bits(values):
    """Round fp32 to the nearest bfloat16, ties to even; NaN stays NaN. Returns uint16."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.uint16)


@triton.jit
def float_bits(values, DTYPE: tl.constexpr):
    """Return the bits of fp32 values rounded to a 16-bit dtype, uint16."""
    if DTYPE == tl.bfloat16:
        return bf16_bits(values)
    else:
        return values.to(tl.float16).to(tl.uint16, bitcast=True)


@triton.jit
def store_float(pointer, values, mask, CACHE: tl.constexpr):
    """Write fp32 values, rounded to nearest even into the pointer's dtype; CACHE is a ``cache_modifier``."""
    if pointer.dtype.element_ty == tl.bfloat16:
        words = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(words, bf16_bits(values), mask=mask, cache_modifier=CACHE)
    else:
        tl.store(pointer, values.to(pointer.dtype.element_ty), mask=mask, cache_modifier=CACHE)
