"""Sum the rows of each bag (SUM, MEAN, weighted), and the gradient of the pooling weights."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.layout import POOLING_MEAN, FeatureLayout
from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.launch import Launcher, cdiv, launch
from dynamicemb.table.triton.rows import (
    TRITON_DTYPES,
    RowShape,
    load_float,
    pick,
    pointers,
    row_addresses,
    row_shape,
    store_float,
)

# Bags of a program, one after another. On an H200, with bags of 10 rows of 128 floats, 4 take 10 % less time than 1 or
# 8; so do 4 rows in flight than 8.
_MOST_BAGS = tl.constexpr(4)
_POOL_TILE = 512
_GRAD_TILE = 1024


def rows_at_once(shape: RowShape, tile: int = _POOL_TILE) -> int:
    """Return how many rows of a bag are in flight together, so that they have ``tile`` values; 2 to 16."""
    return max(2, min(16, tile // shape.block_dim))


def pool_warps(shape: RowShape, tile: int = _POOL_TILE) -> int:
    """Return the warps of a program that pools: 32 values a lane."""
    return max(1, min(8, rows_at_once(shape, tile) * shape.block_dim // 1024))


def pool(
    store: RowStore,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    layout: FeatureLayout,
    per_sample_weights: torch.Tensor | None,
    missing_values: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Sum rows per bag in fp32; the arguments and the meaning of MEAN and weights are those of the CPU twin.

    The order of the sum depends on the place of an occurrence in its bag alone, so it repeats bit for bit.

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

    Host sync: none. Bytes moved: N * D * weight size + B * total_D * output size + 4 N (8 N weighted).
    """
    out = torch.empty(layout.batch_size, layout.width, dtype=output_dtype, device=rows.device)
    if out.numel() == 0:
        return out
    key = ("pool", output_dtype, layout.pooling, per_sample_weights is not None)
    launcher, each = store.prepared.get(key) or store.prepared.setdefault(key, _prepare(store, *key[1:]))
    num_bags = offsets.numel() - 1
    # Fewer bags for each program where programs would run short.
    each = max(1, min(each, num_bags // (2 * launcher.fill)))
    launcher(
        cdiv(num_bags, each),
        (rows.contiguous(), offsets.contiguous(), layout.feature_tables, layout.column_offsets,
         rows if per_sample_weights is None else per_sample_weights.contiguous(), missing_values, out,
         store.chunk_bases),
        (num_bags, each, layout.batch_size, layout.width),
    )  # fmt: skip
    return out


def _prepare(store: RowStore, output_dtype: torch.dtype, pooling: int, is_weighted: bool) -> tuple[Launcher, int]:
    """Prepare launches for a store; also return how many bags a program takes at most."""
    shape = row_shape(store)
    constants = {
        "DIM": shape.dim,
        "BLOCK_DIM": shape.block_dim,
        "ROW_BYTES": shape.row_bytes,
        "WEIGHT": shape.weight,
        "ALIGNMENT": shape.alignment,
        "MEAN": pooling == POOLING_MEAN,
        "WEIGHTED": is_weighted,
        "AT_ONCE": rows_at_once(shape),
        "OUTPUT": TRITON_DTYPES[output_dtype],
    }
    stays = (store.row_bytes, store.dims, store.chunk_shift)
    return Launcher(store.device, _pool_kernel, constants, stays, num_warps=pool_warps(shape)), _MOST_BAGS.value


@triton.jit
def bag_table_and_place(k, feature_tables_ptr, column_offsets_ptr, batch_size, width, ALIGNMENT: tl.constexpr):
    """Return the table of bag ``k`` and where its columns start in ``[B, total_D]``, in elements."""
    feature = k // batch_size
    place = (k - feature * batch_size).to(tl.int64) * width + tl.load(column_offsets_ptr + feature)
    return tl.load(feature_tables_ptr + feature), tl.multiple_of(place, ALIGNMENT)


@triton.jit
def pool_bags(
    k, last, rows_ptr, offsets_ptr, feature_tables_ptr, column_offsets_ptr, weights_ptr, missing_values_ptr, out_ptr,
    chunk_bases_ptr, row_bytes_ptr, dims_ptr, batch_size, width, chunk_shift, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ROW_BYTES: tl.constexpr, WEIGHT: tl.constexpr, ALIGNMENT: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum the rows of bags ``k`` to ``last`` (exclusive), AT_ONCE rows in flight.

    The row numbers of a bag are read one bag ahead, its end two bags ahead. Addresses are computed for LANES
    occurrences side by side and then handed out; a lane for each spares most of the instructions.
    """
    LANES: tl.constexpr = 32
    lane = tl.arange(0, LANES)
    column = tl.arange(0, BLOCK_DIM)
    begin = tl.load(offsets_ptr + k)
    end = tl.load(offsets_ptr + k + 1)
    next_end = tl.load(offsets_ptr + k + 2, mask=k + 2 <= last, other=0)
    rows = tl.load(rows_ptr + begin + lane, mask=begin + lane < end, other=-1)
    while k < last:
        next_rows = tl.load(rows_ptr + end + lane, mask=end + lane < next_end, other=-1)
        end_after = tl.load(offsets_ptr + k + 3, mask=k + 3 <= last, other=0)
        table, place = bag_table_and_place(k, feature_tables_ptr, column_offsets_ptr, batch_size, width, ALIGNMENT)
        missing_value = tl.load(missing_values_ptr + table)
        dim = DIM
        if DIM == 0:
            dim = tl.load(dims_ptr + table)
        sums = tl.zeros([BLOCK_DIM], tl.float32)
        first = begin
        while first < end:
            sums = _add_rows(
                sums, rows, first, end, table, missing_value, dim, weights_ptr, chunk_bases_ptr, row_bytes_ptr,
                chunk_shift, DIM, BLOCK_DIM, ROW_BYTES, WEIGHT, WEIGHTED, AT_ONCE,
            )  # fmt: skip
            first += LANES
            rows = tl.load(rows_ptr + first + lane, mask=first + lane < end, other=-1)
        if MEAN:
            sums *= tl.div_rn(1.0, tl.maximum(end - begin, 1).to(tl.float32))
        store_float(out_ptr + place + column, sums, column < dim, ".cs")
        k += 1
        begin, end, next_end, rows = end, next_end, end_after, next_rows


@triton.jit
def _add_rows(
    sums, rows, first, end, table, missing_value, dim, weights_ptr, chunk_bases_ptr, row_bytes_ptr, chunk_shift,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROW_BYTES: tl.constexpr, WEIGHT: tl.constexpr, WEIGHTED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add the rows of occurrences ``first`` to ``end`` of a bag, as many as ``rows`` has lanes."""
    lane = tl.arange(0, rows.shape[0])
    column = tl.arange(0, BLOCK_DIM)[None, :]
    present = first + lane < end
    found = rows >= 0
    address = row_addresses(rows, table, found, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW_BYTES)
    # No row is at address 0.
    address = tl.where(found, address, 0)
    filler = tl.where(present & (rows < 0), missing_value, 0.0)
    any_missing = tl.max((present & (rows < 0)).to(tl.int32), 0) > 0
    weights = filler
    if WEIGHTED:
        weights = tl.load(weights_ptr + first + lane, mask=present, other=0.0)
    number = tl.minimum(end - first, rows.shape[0]).to(tl.int32)
    for part in range(0, tl.cdiv(number, AT_ONCE)):
        addresses = pick(address, part, AT_ONCE)
        readable = (addresses != 0)[:, None]
        mask = readable
        if BLOCK_DIM != DIM:
            mask = mask & (column < dim)
        values = load_float(pointers(addresses, WEIGHT)[:, None] + column, mask)
        if any_missing:
            values = tl.where(readable, values, pick(filler, part, AT_ONCE)[:, None])
        if WEIGHTED:
            values *= pick(weights, part, AT_ONCE)[:, None]
        sums += tl.sum(values, 0)
    return sums


@triton.jit
def _copy_bags(
    bag, i, full, rows_ptr, feature_tables_ptr, column_offsets_ptr, weights_ptr, missing_values_ptr, out_ptr,
    chunk_bases_ptr, row_bytes_ptr, dims_ptr, batch_size, width, chunk_shift, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ROW_BYTES: tl.constexpr, WEIGHT: tl.constexpr, ALIGNMENT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Write bags ``[R]``, each of which is ``full`` with one occurrence ``i`` or empty; a bag may come twice."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    row = tl.load(rows_ptr + i, mask=full, other=-1)
    found = full & (row >= 0)
    table, place = bag_table_and_place(bag, feature_tables_ptr, column_offsets_ptr, batch_size, width, ALIGNMENT)
    columns = column < DIM
    if DIM == 0:
        columns = column < tl.load(dims_ptr + table)[:, None]
    address = row_addresses(row, table, found, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW_BYTES)
    mask = found[:, None]
    if BLOCK_DIM != DIM:
        mask = mask & columns
    values = load_float(pointers(address, WEIGHT)[:, None] + column, mask)
    missing = full & (row < 0)
    if tl.max(missing.to(tl.int32), 0) > 0:
        filler = tl.load(missing_values_ptr + table, mask=missing, other=0.0)
        values = tl.where(missing[:, None], filler[:, None], values)
    if WEIGHTED:
        values *= tl.load(weights_ptr + i, mask=full, other=0.0)[:, None]
    # As a sum, of which zero has no sign.
    store_float(out_ptr + place[:, None] + column, values + 0.0, columns & (bag >= 0)[:, None], ".cs")


@triton.jit(do_not_specialize=["num_bags", "each", "batch_size", "width", "chunk_shift"])
def _pool_kernel(
    rows_ptr,
    offsets_ptr,
    feature_tables_ptr,
    column_offsets_ptr,
    weights_ptr,
    missing_values_ptr,
    out_ptr,
    chunk_bases_ptr,
    num_bags,
    each,
    batch_size,
    width,
    row_bytes_ptr,
    dims_ptr,
    chunk_shift,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    k = tl.program_id(0) * each
    last = tl.minimum(k + each, num_bags)
    # Many features have one id for each sample: then no bag of the program holds up another.
    bag = tl.minimum(k + tl.arange(0, _MOST_BAGS), last - 1)
    begin = tl.load(offsets_ptr + bag)
    length = tl.load(offsets_ptr + bag + 1) - begin
    if tl.max(length, 0) <= 1:
        _copy_bags(
            bag, begin, length > 0, rows_ptr, feature_tables_ptr, column_offsets_ptr, weights_ptr, missing_values_ptr,
            out_ptr, chunk_bases_ptr, row_bytes_ptr, dims_ptr, batch_size, width, chunk_shift, DIM, BLOCK_DIM,
            ROW_BYTES, WEIGHT, ALIGNMENT, WEIGHTED,
        )  # fmt: skip
    else:
        pool_bags(
            k, last, rows_ptr, offsets_ptr, feature_tables_ptr, column_offsets_ptr, weights_ptr, missing_values_ptr,
            out_ptr, chunk_bases_ptr, row_bytes_ptr, dims_ptr, batch_size, width, chunk_shift, DIM, BLOCK_DIM,
            ROW_BYTES, WEIGHT, ALIGNMENT, MEAN, WEIGHTED, AT_ONCE,
        )  # fmt: skip


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

    Host sync: none. Bytes moved: N * D * weight size + B * total_D * gradient size + 8 N.
    """
    shape = row_shape(store)
    out = torch.empty(rows.numel(), dtype=torch.float32, device=rows.device)
    if out.numel() == 0:
        return out
    launch(
        _pool_weights_grad_kernel,
        (offsets.numel() - 1,),
        (
            rows.contiguous(),
            offsets.contiguous(),
            layout.feature_tables,
            layout.column_offsets,
            grad.contiguous(),
            out,
            store.chunk_bases,
            store.row_bytes,
            store.dims,
            layout.batch_size,
            layout.width,
            store.chunk_shift,
        ),
        {
            "DIM": shape.dim,
            "BLOCK_DIM": shape.block_dim,
            "ROW_BYTES": shape.row_bytes,
            "WEIGHT": shape.weight,
            "ALIGNMENT": shape.alignment,
            "MEAN": layout.pooling == POOLING_MEAN,
            "AT_ONCE": rows_at_once(shape, _GRAD_TILE),
            "GRADIENT": TRITON_DTYPES[grad.dtype],
        },
        num_warps=pool_warps(shape, _GRAD_TILE),
    )
    return out


@triton.jit(do_not_specialize=["batch_size", "width", "chunk_shift"])
def _pool_weights_grad_kernel(
    rows_ptr,
    offsets_ptr,
    feature_tables_ptr,
    column_offsets_ptr,
    grad_ptr,
    out_ptr,
    chunk_bases_ptr,
    row_bytes_ptr,
    dims_ptr,
    batch_size,
    width,
    chunk_shift,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MEAN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    k = tl.program_id(0)
    column = tl.arange(0, BLOCK_DIM)
    begin = tl.load(offsets_ptr + k)
    end = tl.load(offsets_ptr + k + 1)
    table, place = bag_table_and_place(k, feature_tables_ptr, column_offsets_ptr, batch_size, width, ALIGNMENT)
    dim = DIM
    if DIM == 0:
        dim = tl.load(dims_ptr + table)
    inside = column < dim
    # Empty bags read nothing.
    grad = load_float(grad_ptr + place + column, column < tl.where(begin < end, dim, 0))
    scale = 1.0
    if MEAN:
        scale = tl.div_rn(1.0, tl.maximum(end - begin, 1).to(tl.float32))
    first = begin
    while first < end:
        i = first + tl.arange(0, AT_ONCE)
        rows = tl.load(rows_ptr + i, mask=i < end, other=-1)
        found = rows >= 0
        addresses = row_addresses(rows, table, found, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW_BYTES)
        mask = found[:, None]
        if BLOCK_DIM != DIM:
            mask = mask & inside[None, :]
        values = load_float(pointers(addresses, WEIGHT)[:, None] + column[None, :], mask)
        dots = tl.where(found, scale * tl.sum(values * grad[None, :], 1), 0.0)
        tl.store(out_ptr + i, dots, mask=i < end)
        first += AT_ONCE
