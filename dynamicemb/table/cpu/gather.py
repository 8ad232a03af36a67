"""Copy rows to the output, one per occurrence (sequence lookup)."""

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from dynamicemb.table.cpu.memory import F32, read_f32, read_i32, read_i64
from dynamicemb.table.cpu.threads import launcher
from dynamicemb.table.cpu.vectors import (
    DTYPE_CODES,
    fill,
    item_size,
    load,
    prefetch_row,
    row_address,
    store_scaled,
    store_view,
)
from dynamicemb.table.rows import RowStore

_AHEAD = 16


@launcher("rows")
def gather(
    store: RowStore,
    rows: torch.Tensor,
    table_ranges: torch.Tensor,
    missing_values: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Read the weights of one row per occurrence.

    Args:
        store: the rows; all tables have the same dim D.
        rows: i32 ``[N]``, -1 for a missing id.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        missing_values: f32 ``[T]``, what every column of a missing id reads.
        output_dtype: float32, float16 or bfloat16.

    Returns:
        ``[N, D]`` in ``output_dtype``, rounded to nearest.

    Host sync: none (CPU). Bytes moved: N * D * (weight size + output size) + 4 N.
    """
    num_rows, dim = rows.numel(), store.formats[0].dim
    out = torch.empty(num_rows, dim, dtype=output_dtype, device="cpu")
    if num_rows:
        num_parts = get_num_threads()
        scratch = torch.empty(num_parts * dim, dtype=torch.float32, device="cpu")
        rows, table_ranges, missing_values = rows.contiguous(), table_ranges.contiguous(), missing_values.contiguous()
        inputs = (rows.data_ptr(), num_rows, table_ranges.data_ptr(), missing_values.data_ptr())
        outputs = (out.data_ptr(), DTYPE_CODES[output_dtype], scratch.data_ptr(), dim)
        _gather(store_view(store), inputs, outputs, num_parts)
    return out


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _gather(store, inputs, outputs, num_parts):
    for part in prange(num_parts):
        _gather_part(store, inputs, outputs, part, num_parts)


@njit(nogil=True, error_model="numpy")
def _gather_part(store, inputs, outputs, part, num_parts):
    rows, num_rows, table_ranges, missing_values = inputs
    out_address, out_dtype, scratch, dim = outputs
    values = scratch + part * dim * 4
    end = num_rows * (part + 1) // num_parts
    weight_bytes = dim * item_size(store.dtype)
    one = np.float32(1.0)
    table = 0
    for i in range(num_rows * part // num_parts, end):
        while i >= read_i64(table_ranges, table + 1):
            table += 1
        # Near the end of a table this may name a row of the next one; a wrong prefetch is harmless.
        prefetch_row(store, read_i32(rows, min(i + _AHEAD, end - 1)), table, weight_bytes)
        row = read_i32(rows, i)
        out = out_address + i * dim * item_size(out_dtype)
        if row < 0:
            fill(values, dim, read_f32(missing_values, table))
            store_scaled(out, values, dim, out_dtype, one)
        elif store.dtype == F32:
            store_scaled(out, row_address(store, row, table), dim, out_dtype, one)
        else:
            load(values, row_address(store, row, table), dim, store.dtype)
            store_scaled(out, values, dim, out_dtype, one)
