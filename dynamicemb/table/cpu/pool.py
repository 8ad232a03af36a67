"""Sum the rows of each bag (SUM, MEAN, weighted), and the gradient of the pooling weights."""

from typing import NamedTuple

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from dynamicemb.table.cpu.memory import F32, f32_at, read_f32, read_i32, read_i64
from dynamicemb.table.cpu.threads import launcher
from dynamicemb.table.cpu.vectors import (
    DTYPE_CODES,
    add_four,
    add_scaled,
    dot,
    fill,
    item_size,
    load,
    prefetch_row,
    prefetch_span,
    row_address,
    split_point,
    store_scaled,
    store_view,
)
from dynamicemb.table.layout import POOLING_MEAN, FeatureLayout
from dynamicemb.table.rows import RowStore

_AHEAD = 16


class BagsView(NamedTuple):
    """Addresses of a batch of bags (names of ``FeatureLayout``); ``weights`` is 0 for none, ``mean`` 0 or 1."""

    rows: int
    num_occurrences: int
    offsets: int
    feature_tables: int
    column_offsets: int
    num_bags: int
    batch_size: int
    width: int
    weights: int
    mean: int


def bags_view(
    rows: torch.Tensor, offsets: torch.Tensor, layout: FeatureLayout, per_sample_weights: torch.Tensor | None = None
) -> BagsView:
    """Return the addresses of a batch of bags; the caller keeps the contiguous tensors alive."""
    return BagsView(
        rows.data_ptr(),
        rows.numel(),
        offsets.data_ptr(),
        layout.feature_tables.data_ptr(),
        layout.column_offsets.data_ptr(),
        offsets.numel() - 1,
        layout.batch_size,
        layout.width,
        0 if per_sample_weights is None else per_sample_weights.data_ptr(),
        int(layout.pooling == POOLING_MEAN),
    )


@njit(error_model="numpy")
def bag_scale(bags, begin, end):
    """Return what a bag's sum is multiplied with: 1, or 1 / length for MEAN."""
    if bags.mean and end > begin:
        return np.float32(1.0) / np.float32(end - begin)
    return np.float32(1.0)


@njit(error_model="numpy")
def bag_position(bags, k, feature):
    """Return where bag ``k`` starts in the ``[B, total_D]`` output, in elements."""
    return (k - feature * bags.batch_size) * bags.width + read_i64(bags.column_offsets, feature)


@launcher("rows")
def pool(
    store: RowStore,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    layout: FeatureLayout,
    per_sample_weights: torch.Tensor | None,
    missing_values: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Sum rows per bag in fp32, in the order of the occurrences.

    MEAN multiplies the sum by 1 / bag length; with weights it is the weighted sum over the bag's length, not over the
    sum of the weights, as in FBGEMM.

    Args:
        store: the rows.
        rows: i32 ``[N]``, -1 for a missing id.
        offsets: i64 ``[F*B+1]``.
        layout: tables and columns of the features; pooling SUM or MEAN.
        per_sample_weights: f32 ``[N]``, or None for 1.
        missing_values: f32 ``[T]``, what every column of a missing id reads.
        output_dtype: float32, float16 or bfloat16.

    Returns:
        ``[B, total_D]`` in ``output_dtype``, rounded to nearest; empty bags are zero.

    Example: rows ``[[1, 2], [10, 20]]``, one feature, bags ``[0, 0, 1]``, ``[]`` and ``[1]``:
    ``offsets = [0, 3, 3, 4]``; SUM gives ``[[12, 24], [0, 0], [10, 20]]``, MEAN ``[[4, 8], [0, 0], [10, 20]]``.

    Host sync: none (CPU). Bytes moved: N * D * weight size + B * total_D * output size + 4 N (8 N weighted).
    """
    rows, offsets, missing_values = rows.contiguous(), offsets.contiguous(), missing_values.contiguous()
    if per_sample_weights is not None:
        per_sample_weights = per_sample_weights.contiguous()
    bags = bags_view(rows, offsets, layout, per_sample_weights)
    out = torch.empty(layout.batch_size, bags.width, dtype=output_dtype, device="cpu")
    if out.numel():
        num_parts = get_num_threads()
        scratch_dim = max(row_format.dim for row_format in store.formats)
        scratch = torch.empty(num_parts * scratch_dim, dtype=torch.float32, device="cpu")
        outputs = (out.data_ptr(), DTYPE_CODES[output_dtype], scratch.data_ptr(), scratch_dim)
        _pool(store_view(store), bags, missing_values.data_ptr(), outputs, num_parts)
    return out


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _pool(store, bags, missing_values, outputs, num_parts):
    for part in prange(num_parts):
        _pool_part(store, bags, missing_values, outputs, part, num_parts)


@njit(nogil=True, error_model="numpy")
def _pool_part(store, bags, missing_values, outputs, part, num_parts):
    out_address, out_dtype, scratch, scratch_dim = outputs
    sums = scratch + part * scratch_dim * 4
    first = split_point(bags.offsets, 1, bags.num_bags, part, num_parts)
    for k in range(first, split_point(bags.offsets, 1, bags.num_bags, part + 1, num_parts)):
        feature = k // bags.batch_size
        table = np.int64(read_i32(bags.feature_tables, feature))
        begin = read_i64(bags.offsets, k)
        end = read_i64(bags.offsets, k + 1)
        dim = np.int64(read_i32(store.dims, table))
        out = out_address + bag_position(bags, k, feature) * item_size(out_dtype)
        # Else the stores to a line not in the cache hold up those to ``sums`` behind them.
        prefetch_span(out, dim * item_size(out_dtype))
        _sum_bag(store, bags, sums, (table, begin, end), read_f32(missing_values, table))
        store_scaled(out, sums, dim, out_dtype, bag_scale(bags, begin, end))


@njit(nogil=True, error_model="numpy")
def _sum_bag(store, bags, sums, bag, missing_value):
    table, begin, end = bag
    dim = np.int64(read_i32(store.dims, table))
    fill(sums, dim, np.float32(0.0))
    i = begin
    while i < end:
        r0 = read_i32(bags.rows, i)
        if store.dtype == F32 and i + 4 <= end:
            r1, r2, r3 = read_i32(bags.rows, i + 1), read_i32(bags.rows, i + 2), read_i32(bags.rows, i + 3)
            # Rows are >= 0 or -1, so the sign of "or" tells whether one is missing.
            if (r0 | r1 | r2 | r3) >= 0:
                for j in range(4):
                    _prefetch_ahead(store, bags, i + j, table, 4 * dim)
                addresses = (
                    row_address(store, r0, table),
                    row_address(store, r1, table),
                    row_address(store, r2, table),
                    row_address(store, r3, table),
                )
                scales = (_weight(bags, i), _weight(bags, i + 1), _weight(bags, i + 2), _weight(bags, i + 3))
                add_four(sums, addresses, dim, scales)
                i += 4
                continue
        _prefetch_ahead(store, bags, i, table, dim * item_size(store.dtype))
        if r0 >= 0:
            add_scaled(sums, row_address(store, r0, table), dim, store.dtype, _weight(bags, i))
        else:
            missing = _weight(bags, i) * missing_value
            values = f32_at(sums, dim)
            for d in range(dim):
                values[d] += missing
        i += 1


@njit(error_model="numpy", inline="always")
def _prefetch_ahead(store, bags, i, table, num_bytes):
    """Ask for the row that occurrence ``i`` + _AHEAD reads; near the end of a table a wrong one, which is harmless."""
    prefetch_row(store, read_i32(bags.rows, min(i + _AHEAD, bags.num_occurrences - 1)), table, num_bytes)


@njit(error_model="numpy", inline="always")
def _weight(bags, i):
    """Return the pooling weight of occurrence ``i``."""
    return read_f32(bags.weights, i) if bags.weights else np.float32(1.0)


@launcher("rows")
def pool_weights_grad(
    store: RowStore, rows: torch.Tensor, offsets: torch.Tensor, layout: FeatureLayout, grad: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient of the pooling weights: the bag's gradient times the row, / bag length for MEAN.

    Args:
        store: the rows, before the optimizer changes them.
        rows: i32 ``[N]``; the gradient of a missing id (-1) is 0.
        offsets: i64 ``[F*B+1]``.
        layout: tables and columns of the features.
        grad: ``[B, total_D]``, float32, float16 or bfloat16.

    Returns:
        f32 ``[N]``.

    Host sync: none (CPU). Bytes moved: N * D * weight size + B * total_D * gradient size + 8 N.
    """
    rows, offsets, grad = rows.contiguous(), offsets.contiguous(), grad.contiguous()
    out = torch.empty(rows.numel(), dtype=torch.float32, device="cpu")
    if out.numel():
        num_parts = get_num_threads()
        scratch_dim = max(row_format.dim for row_format in store.formats)
        scratch = torch.empty(num_parts * 2 * scratch_dim, dtype=torch.float32, device="cpu")
        gradient = (grad.data_ptr(), DTYPE_CODES[grad.dtype], scratch.data_ptr(), scratch_dim)
        _pool_weights_grad(store_view(store), bags_view(rows, offsets, layout), gradient, out.numpy(), num_parts)
    return out


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _pool_weights_grad(store, bags, gradient, out, num_parts):
    for part in prange(num_parts):
        _pool_weights_grad_part(store, bags, gradient, out, part, num_parts)


@njit(nogil=True, error_model="numpy")
def _pool_weights_grad_part(store, bags, gradient, out, part, num_parts):
    grad_address, grad_dtype, scratch, scratch_dim = gradient
    bag_grad = scratch + part * 2 * scratch_dim * 4
    weights = bag_grad + scratch_dim * 4
    first = split_point(bags.offsets, 1, bags.num_bags, part, num_parts)
    for k in range(first, split_point(bags.offsets, 1, bags.num_bags, part + 1, num_parts)):
        feature = k // bags.batch_size
        table = np.int64(read_i32(bags.feature_tables, feature))
        dim = np.int64(read_i32(store.dims, table))
        begin = read_i64(bags.offsets, k)
        end = read_i64(bags.offsets, k + 1)
        scale = bag_scale(bags, begin, end)
        position = bag_position(bags, k, feature) * item_size(grad_dtype)
        load(bag_grad, grad_address + position, dim, grad_dtype)
        for i in range(begin, end):
            _prefetch_ahead(store, bags, i, table, dim * item_size(store.dtype))
            row = read_i32(bags.rows, i)
            out[i] = np.float32(0.0)
            if row >= 0:
                load(weights, row_address(store, row, table), dim, store.dtype)
                out[i] = scale * dot(bag_grad, weights, dim)
