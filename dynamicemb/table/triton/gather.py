"""Copy rows to the output, one per occurrence (sequence lookup)."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.launch import Launcher, cdiv
from dynamicemb.table.triton.rows import (
    TRITON_DTYPES,
    find_range,
    float_bits,
    load_evicting,
    pointers,
    row_addresses,
    row_shape,
    store_float,
)

# Bytes of a program's tile: 8 rows of 128 floats; two reads of 16 bytes a lane.
_TILE_BYTES = 4096


def gather(
    store: RowStore,
    rows: torch.Tensor,
    table_ranges: torch.Tensor,
    missing_values: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Read the weights of one row per occurrence; the arguments are those of the CPU twin.

    Args:
        store: the rows; all tables have the same dim D.
        rows: i32 ``[N]``, -1 for a missing id.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        missing_values: f32 ``[T]``, what every column of a missing id reads.
        output_dtype: float32, float16 or bfloat16.

    Returns:
        ``[N, D]`` in ``output_dtype``, rounded to nearest.

    Host sync: none. Bytes moved: N * D * (weight size + output size) + 4 N.
    """
    num_rows = rows.numel()
    key = ("gather", output_dtype)
    launcher, dim, block = store.prepared.get(key) or store.prepared.setdefault(key, _prepare(store, output_dtype))
    out = torch.empty(num_rows, dim, dtype=output_dtype, device=rows.device)
    if num_rows:
        pointers = (rows.contiguous(), table_ranges, missing_values, out, store.chunk_bases)
        launcher(cdiv(num_rows, block), pointers, (num_rows,))
    return out


def _prepare(store: RowStore, output_dtype: torch.dtype) -> tuple[Launcher, int, int]:
    """Prepare launches for a store; also return D, and how many rows a program copies."""
    shape, dim = row_shape(store), store.formats[0].dim
    size = min(store.dtype.itemsize, output_dtype.itemsize)
    block = max(1, _TILE_BYTES // size // shape.block_dim)
    constants = {
        "DIM": dim,
        "BLOCK_DIM": shape.block_dim,
        "ROW_BYTES": shape.row_bytes,
        "WEIGHT": shape.weight,
        "OUTPUT": TRITON_DTYPES[output_dtype],
        "BLOCK": block,
    }
    stays = (store.row_bytes, store.num_tables, store.chunk_shift)
    num_warps = max(1, min(8, block * shape.block_dim * size // 1024))
    return Launcher(store.device, _gather_kernel, constants, stays, num_warps=num_warps), dim, block


@triton.jit(do_not_specialize=["num_rows", "num_tables", "chunk_shift"])
def _gather_kernel(
    rows_ptr,
    table_ranges_ptr,
    missing_values_ptr,
    out_ptr,
    chunk_bases_ptr,
    num_rows,
    row_bytes_ptr,
    num_tables,
    chunk_shift,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WEIGHT: tl.constexpr,
    OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(rows_ptr + i, mask=i < num_rows, other=-1)
    found = rows >= 0
    tables = tl.zeros([BLOCK], tl.int32)
    # Tables are looked up only where they matter: rows of several sizes, or a missing id.
    if ROW_BYTES == 0:
        tables = find_range(i, table_ranges_ptr, tables, num_tables)
    addresses = row_addresses(rows, tables, found, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW_BYTES)
    values = load_rows(addresses, found, DIM, BLOCK_DIM, WEIGHT, OUTPUT, "")
    # Only now, so that the question does not hold up the rows.
    missing = (i < num_rows) & (rows < 0)
    filler = tl.zeros([BLOCK], tl.float32)
    if tl.max(missing.to(tl.int32), 0) > 0:
        if ROW_BYTES > 0:
            tables = find_range(i, table_ranges_ptr, tables, num_tables)
        filler = tl.load(missing_values_ptr + tables, mask=missing, other=0.0)
    store_rows(out_ptr, i, i < num_rows, values, found, filler, DIM, BLOCK_DIM, WEIGHT, OUTPUT)


@triton.jit
def load_rows(
    addresses, found, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, OUTPUT: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """Read the weights of rows that were found: fp32, or 16-bit words where the output has the same 16-bit dtype.

    Bits are then moved as they are: widening and rounding would only cost lanes. EVICTION is an ``eviction_policy``.
    """
    column = tl.arange(0, BLOCK_DIM)[None, :]
    readable = found[:, None]
    if BLOCK_DIM != DIM:
        readable = readable & (column < DIM)
    if (WEIGHT == OUTPUT) & (WEIGHT != tl.float32):
        words = pointers(addresses, tl.uint16)[:, None] + column
        return tl.load(words, mask=readable, other=0, eviction_policy=EVICTION)
    else:
        return load_evicting(pointers(addresses, WEIGHT)[:, None] + column, readable, EVICTION)


@triton.jit
def store_rows(
    out_ptr, i, written, values, found, filler, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
    OUTPUT: tl.constexpr,
):  # fmt: skip
    """Write what ``load_rows`` read to rows ``i`` (int64) of the output, and the fp32 ``filler`` of the others."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    mask = written[:, None]
    if BLOCK_DIM != DIM:
        mask = mask & (column < DIM)
    place = i[:, None] * DIM + column
    # Nobody reads the output soon; it must not drive rows out of the cache.
    if (WEIGHT == OUTPUT) & (WEIGHT != tl.float32):
        words = tl.where(found[:, None], values, float_bits(filler, OUTPUT)[:, None])
        tl.store(out_ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + place, words, mask=mask, cache_modifier=".cs")
    else:
        store_float(out_ptr + place, tl.where(found[:, None], values, filler[:, None]), mask, ".cs")
