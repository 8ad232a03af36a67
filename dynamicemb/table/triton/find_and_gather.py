"""Find ids and copy their rows, in one kernel: the sequence lookup of an evaluation.

A million ids are bound by the memory, for which few accesses count more than few kernels: the row of an id is computed
while the index allows it, and which occurrences are whose is read from the offsets themselves.
"""

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import Index, Residents
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.find import rows_of, slots_of
from dynamicemb.table.triton.gather import load_rows, store_rows
from dynamicemb.table.triton.launch import Launcher, cdiv, padded_tables
from dynamicemb.table.triton.open_batch import count_wrong
from dynamicemb.table.triton.rows import TRITON_DTYPES, pick, row_addresses, row_shape

# Ids of a program: one for each lane of its warp. Rows in flight, in bytes: 4 rows of 128 floats. On an H200, 16 and 64
# ids and 16 rows take longer, 8 rows too where they are short, and shuffling addresses to the lanes takes as long as
# shared memory does.
_BLOCK = tl.constexpr(32)
_TILE_BYTES = 2048
# Boundaries of a program that looks for illegal ones.
_CHECKED = tl.constexpr(128)


def find_and_gather(
    index: Residents,
    store: RowStore,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    layout: FeatureLayout,
    missing_values: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Return what ``gather`` returns for the rows that ``find`` returns without touching, after ``open_batch``.

    Args:
        index: who is where. Of a whole index the tallies of illegal offsets change, else nothing does.
        store: the rows; all tables have the same dim D.
        ids: i64 ``[N]``, the occurrences of one table after those of another.
        offsets: i64 ``[F*B+1]`` as the caller gave them; see ``open_batch`` for what illegal ones do.
        layout: tables of the features.
        missing_values: f32 ``[T]``, what every column of a missing id reads.
        output_dtype: float32, float16 or bfloat16.

    Returns:
        ``[N, D]`` in ``output_dtype``, rounded to nearest.

    Host sync: none. Bytes moved: N * D * (weight size + output size) + N * (8 id, 16 digests, 8 key) + 8 F * B, and
    4 N for rows once entries of the index have moved.
    """
    key = ("find_and_gather", output_dtype)
    prepared = index.prepared.get(key)
    if prepared is None or prepared[0] is not store:
        prepared = index.prepared[key] = (store, *_prepare(index, store, output_dtype))
    _, launcher, dim, checked = prepared
    num_ids, num_offsets = ids.numel(), offsets.numel()
    out = torch.empty(num_ids, dim, dtype=output_dtype, device=ids.device)
    num_checks = cdiv(num_offsets, checked) if checked else 0
    launcher(
        num_checks + cdiv(num_ids, _BLOCK.value),
        (ids, offsets, layout.table_features, missing_values, out, store.chunk_bases),
        (num_ids, num_offsets, num_checks, layout.batch_size),
    )
    return out


def _prepare(index: Residents, store: RowStore, output_dtype: torch.dtype) -> tuple[Launcher, int, int]:
    """Prepare launches; also return D, and how many offsets a program checks, 0: nobody does."""
    shape = row_shape(store)
    row_bytes = shape.block_dim * min(store.dtype.itemsize, output_dtype.itemsize)
    tile = max(1, min(_BLOCK.value, _TILE_BYTES // row_bytes))
    # Without tallies nobody looks for illegal offsets: any tensor stands for them.
    has_tallies = isinstance(index, Index)
    tallies = index.tallies if isinstance(index, Index) else index.keys
    constants = {
        "BUCKET": index.bucket_capacity,
        "ROW": shape,
        "OUTPUT": TRITON_DTYPES[output_dtype],
        # With 16, fewer than a warp has lanes, the kernel takes a quarter more registers.
        "TABLES": max(32, padded_tables(store.num_tables + 1)),
        "TILE": tile,
    }
    stays = (
        index.keys, index.digests, index.rows, index.moved, index.bucket_offsets, tallies, store.row_bytes,
        store.num_tables, store.chunk_shift,
    )  # fmt: skip
    num_warps = max(1, min(8, tile * row_bytes // _TILE_BYTES))
    launcher = Launcher(index.keys.device, _find_and_gather_kernel, constants, stays, num_warps=num_warps)
    return launcher, store.formats[0].dim, _CHECKED.value if has_tallies else 0


@triton.jit
def tables_of_bags(
    i, begin, end, offsets_ptr, table_features_ptr, batch_size, num_tables, TABLES: tl.constexpr
):  # fmt: skip
    """Return the table (int32) of each position in ``begin..end``.

    A table begins at its first boundary, or where the one before begins if that is later: with ``[0, 9, 3]``, position
    8 is in table 0 and position 9 in table 2.
    """
    t = tl.arange(0, TABLES)
    first_bag = tl.load(table_features_ptr + t, mask=t <= num_tables, other=0) * batch_size
    starts = tl.load(offsets_ptr + first_bag, mask=(t > 0) & (t < num_tables), other=0x7FFFFFFFFFFFFFFF)
    # The tables before the first that begins later have begun.
    first = tl.min(tl.where((t > 0) & (starts > begin), t, TABLES), 0) - 1
    last = tl.min(tl.where((t > 0) & (starts >= end), t, TABLES), 0) - 1
    table = tl.zeros(i.shape, tl.int32) + tl.minimum(first, num_tables - 1)
    latest = tl.full([], 0, tl.int64)
    for later in range(first + 1, tl.minimum(last, num_tables - 1) + 1):
        latest = tl.maximum(latest, tl.sum(tl.where(t == later, starts, 0), 0))
        table += (i >= latest).to(tl.int32)
    return table


@triton.jit(do_not_specialize=["num_ids", "num_offsets", "num_checks", "batch_size", "num_tables", "chunk_shift"])
def _find_and_gather_kernel(
    ids_ptr,
    offsets_ptr,
    table_features_ptr,
    missing_values_ptr,
    out_ptr,
    chunk_bases_ptr,
    num_ids,
    num_offsets,
    num_checks,
    batch_size,
    keys_ptr,
    digests_ptr,
    slot_rows_ptr,
    moved_ptr,
    bucket_offsets_ptr,
    tallies_ptr,
    row_bytes_ptr,
    num_tables,
    chunk_shift,
    BUCKET: tl.constexpr,
    ROW: tl.constexpr,
    OUTPUT: tl.constexpr,
    TABLES: tl.constexpr,
    TILE: tl.constexpr,
):
    if tl.program_id(0) < num_checks:
        k = tl.program_id(0) * _CHECKED + tl.arange(0, _CHECKED)
        inside = k < num_offsets
        value = tl.load(offsets_ptr + k, mask=inside, other=0)
        count_wrong(
            offsets_ptr, k, value, inside, num_offsets, num_ids, table_features_ptr, batch_size, num_tables,
            tallies_ptr,
        )  # fmt: skip
    else:
        _find_and_copy(
            keys_ptr, digests_ptr, slot_rows_ptr, moved_ptr, bucket_offsets_ptr, ids_ptr, offsets_ptr,
            table_features_ptr, missing_values_ptr, out_ptr, chunk_bases_ptr, row_bytes_ptr,
            (tl.program_id(0) - num_checks) * _BLOCK, num_ids, batch_size, num_tables, chunk_shift, BUCKET, ROW,
            OUTPUT, TABLES, TILE,
        )  # fmt: skip


@triton.jit
def _find_and_copy(
    keys_ptr, digests_ptr, slot_rows_ptr, moved_ptr, bucket_offsets_ptr, ids_ptr, offsets_ptr, table_features_ptr,
    missing_values_ptr, out_ptr, chunk_bases_ptr, row_bytes_ptr, begin, num_ids, batch_size, num_tables, chunk_shift,
    BUCKET: tl.constexpr, ROW: tl.constexpr, OUTPUT: tl.constexpr, TABLES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = begin + tl.arange(0, _BLOCK)
    inside = i < num_ids
    ids = tl.load(ids_ptr + i, mask=inside, other=0)
    table = tables_of_bags(
        i, begin, tl.minimum(begin + _BLOCK, num_ids), offsets_ptr, table_features_ptr, batch_size, num_tables, TABLES
    )
    slot = slots_of(keys_ptr, digests_ptr, bucket_offsets_ptr, ids, table, inside, BUCKET)
    hit = inside & (slot >= 0)
    row = rows_of(slot_rows_ptr, bucket_offsets_ptr, moved_ptr, slot, table, hit, BUCKET)
    address = row_addresses(row, table, hit, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW.row_bytes)
    # No row is at address 0.
    address = tl.where(hit, address, 0)
    missing = inside & (slot < 0)
    any_missing = tl.max(missing.to(tl.int32), 0) > 0
    fillers = tl.zeros([_BLOCK], tl.float32)
    if any_missing:
        fillers = tl.load(missing_values_ptr + table, mask=missing, other=0.0)
    for part in range(0, _BLOCK // TILE):
        addresses = pick(address, part, TILE)
        found = addresses != 0
        # Rows come again, what the probes read does not.
        values = load_rows(addresses, found, ROW.dim, ROW.block_dim, ROW.weight, OUTPUT, "evict_last")
        filler = tl.zeros([TILE], tl.float32)
        if any_missing:
            filler = pick(fillers, part, TILE)
        place = begin + part * TILE + tl.arange(0, TILE)
        store_rows(
            out_ptr,
            place.to(tl.int64),
            place < num_ids,
            values,
            found,
            filler,
            ROW.dim,
            ROW.block_dim,
            ROW.weight,
            OUTPUT,
        )
