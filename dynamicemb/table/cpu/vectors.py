"""Rows as fp32 vectors: where a row is, and load, add, dot and store for weights of any dtype.

Everything is an address: numba counts references to arrays atomically at each call that is not inlined, which costs
more than the row when threads share the arrays. One compiled signature also serves every dtype. Callers keep the
tensors alive. Sums run in a fixed order and multiply-adds are not contracted: threads change no result.
"""

from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from dynamicemb.table.cpu.memory import (
    BF16,
    F16,
    F32,
    bf16_to_f32,
    f16_to_f32,
    f32_at,
    f32_to_bf16,
    f32_to_f16,
    prefetch,
    read_i32,
    read_i64,
    u16_at,
)
from dynamicemb.table.rows import RowStore

DTYPE_CODES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}

_CACHE_LINE = 64
# Beyond this many bytes of one row the hardware's own stream prefetcher has taken over.
_MAX_PREFETCH = 2048


@intrinsic
def _as_i64(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


@njit(inline="always")
def i64_at(address, n):
    """View ``n`` int64 at an address."""
    return carray(_as_i64(address), (n,))


class StoreView(NamedTuple):
    """What kernels read of a ``RowStore``: addresses of its arrays, and ``dtype`` as a code of ``memory.py``."""

    chunk_bases: int
    dims: int
    row_bytes: int
    state_offsets: int
    chunk_shift: int
    dtype: int


def store_view(store: RowStore) -> StoreView:
    """Return the addresses of a store on the CPU; valid while the store does not grow."""
    return StoreView(
        store.chunk_bases.data_ptr(),
        store.dims.data_ptr(),
        store.row_bytes.data_ptr(),
        store.state_offsets.data_ptr(),
        store.chunk_shift,
        DTYPE_CODES[store.dtype],
    )


@njit(error_model="numpy", inline="always")
def row_address(store, row, table):
    """Return the address of a row, ``row >= 0``."""
    r = np.int64(row)
    within = r & ((np.int64(1) << store.chunk_shift) - np.int64(1))
    return read_i64(store.chunk_bases, r >> store.chunk_shift) + within * read_i64(store.row_bytes, table)


@njit(error_model="numpy", inline="always")
def prefetch_row(store, row, table, num_bytes):
    """Ask for the first ``num_bytes`` bytes of a row; nothing for row -1."""
    if row >= 0:
        prefetch_span(row_address(store, row, table), num_bytes)


@njit(error_model="numpy", inline="always")
def prefetch_span(address, num_bytes):
    """Ask for the cache lines of ``num_bytes`` bytes."""
    for i in range(0, min(num_bytes, _MAX_PREFETCH), _CACHE_LINE):
        prefetch(address + i)


@njit(error_model="numpy", inline="always")
def item_size(dtype):
    """Return the bytes of one value."""
    return np.int64(4) if dtype == F32 else np.int64(2)


@njit(error_model="numpy")
def fill(out_address, n, value):
    """Set ``n`` floats to a value."""
    out = f32_at(out_address, n)
    for d in range(n):
        out[d] = value


@njit(error_model="numpy")
def add_scaled(out_address, address, n, dtype, scale):
    """Add ``scale`` times the ``n`` values at an address to ``n`` floats."""
    out = f32_at(out_address, n)
    if dtype == F32:
        values = f32_at(address, n)
        for d in range(n):
            out[d] += scale * values[d]
    elif dtype == BF16:
        words = u16_at(address, n)
        for d in range(n):
            out[d] += scale * bf16_to_f32(words[d])
    else:
        words = u16_at(address, n)
        for d in range(n):
            out[d] += scale * f16_to_f32(words[d])


@njit(error_model="numpy")
def add_four(out_address, addresses, n, scales):
    """Add four scaled fp32 rows to ``n`` floats, in order: the same sum as ``add_scaled`` four times, one pass."""
    out = f32_at(out_address, n)
    a = f32_at(addresses[0], n)
    b = f32_at(addresses[1], n)
    c = f32_at(addresses[2], n)
    e = f32_at(addresses[3], n)
    s0, s1, s2, s3 = scales
    for d in range(n):
        out[d] = (((out[d] + s0 * a[d]) + s1 * b[d]) + s2 * c[d]) + s3 * e[d]


@njit(error_model="numpy")
def load(out_address, address, n, dtype):
    """Widen the ``n`` values at an address to floats."""
    out = f32_at(out_address, n)
    if dtype == F32:
        values = f32_at(address, n)
        for d in range(n):
            out[d] = values[d]
    elif dtype == BF16:
        words = u16_at(address, n)
        for d in range(n):
            out[d] = bf16_to_f32(words[d])
    else:
        words = u16_at(address, n)
        for d in range(n):
            out[d] = f16_to_f32(words[d])


@njit(error_model="numpy")
def store_scaled(address, values_address, n, dtype, scale):
    """Write ``scale`` times ``n`` floats at an address, rounded to nearest even."""
    values = f32_at(values_address, n)
    if dtype == F32:
        out = f32_at(address, n)
        for d in range(n):
            out[d] = scale * values[d]
    elif dtype == BF16:
        words = u16_at(address, n)
        for d in range(n):
            words[d] = f32_to_bf16(scale * values[d])
    else:
        words = u16_at(address, n)
        for d in range(n):
            words[d] = f32_to_f16(scale * values[d])


@njit(error_model="numpy")
def dot(a_address, b_address, n):
    """Return the dot product of two vectors of ``n`` floats.

    Lane ``j`` of 8 sums the products ``j, j + 8, ...``; halves of the lanes are added until one is left, then the
    products beyond the last whole 8.
    """
    a = f32_at(a_address, n)
    b = f32_at(b_address, n)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0.0)
    for i in range(0, n - 7, 8):
        s0 += a[i] * b[i]
        s1 += a[i + 1] * b[i + 1]
        s2 += a[i + 2] * b[i + 2]
        s3 += a[i + 3] * b[i + 3]
        s4 += a[i + 4] * b[i + 4]
        s5 += a[i + 5] * b[i + 5]
        s6 += a[i + 6] * b[i + 6]
        s7 += a[i + 7] * b[i + 7]
    tail = np.float32(0.0)
    for i in range(n // 8 * 8, n):
        tail += a[i] * b[i]
    return (((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))) + tail


@njit(error_model="numpy")
def split_point(starts, wide, num_ranges, part, num_parts):
    """Return where part ``part`` of ``num_parts`` begins among ranges ``starts[k]..starts[k+1]``.

    ``starts`` is the address of int64 if ``wide``, else of int32.

    Parts hold whole ranges and about the same number of ranges plus elements.

    Example: ``starts = [0, 1, 2, 9]`` in two parts: the weights are 2, 2, 8, half of their sum is 6, the first range
    that starts there or later is none: ``split_point(.., .., 3, 1, 2) = 3``, part 0 holds all.
    """
    if part >= num_parts:
        return num_ranges
    total = (read_i64(starts, num_ranges) if wide else np.int64(read_i32(starts, num_ranges))) + num_ranges
    target = total * part // num_parts
    low = np.int64(0)
    high = np.int64(num_ranges)
    while low < high:
        middle = (low + high) // 2
        start = read_i64(starts, middle) if wide else np.int64(read_i32(starts, middle))
        if start + middle < target:
            low = middle + 1
        else:
            high = middle
    return low
