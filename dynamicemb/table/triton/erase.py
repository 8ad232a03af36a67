"""Erase ids, and rebuild buckets that hold too many erased slots."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import ERASED, OLDEST, Index
from dynamicemb.table.layout import DIGEST_EMPTY, DIGEST_ERASED
from dynamicemb.table.triton.find import find_slots
from dynamicemb.table.triton.hashing import group_of, mix
from dynamicemb.table.triton.launch import power_of_two

_TILE = 512


def erase(index: Index, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
    """Remove ids; their slots keep their rows, and their tags protect them until the steps that touched them are over.

    Args:
        index: the group's index.
        ids: i64 ``[N]``, the ids of one table after those of another.
        table_ranges: i64 ``[T+1]``, the ids of each table.

    Returns:
        bool ``[N]``: whether this occurrence removed its id (of repeated ids, the first).

    Host sync: yes, to select. Not on the path of a training step.
    """
    slots, order = find_slots(index, ids, table_ranges).sort(stable=True)
    # Equal slots are neighbours now, in batch order.
    first = slots >= 0
    first[1:] &= slots[1:] != slots[:-1]
    erased = torch.zeros_like(first)
    erased[order] = first
    index.digests[slots[first].long()] = DIGEST_ERASED
    tables = torch.searchsorted(table_ranges, order[first], right=True) - 1
    index.counters[:, ERASED] += torch.bincount(tables, minlength=index.num_tables)
    return erased


def rebuild(index: Index, table: int) -> None:
    """Place every id of a table anew so that erased slots become empty, except those still protected.

    Rows stay with their ids; left-over rows go to the empty slots. Takes a copy of the table's part of the index.

    Concurrency: one program per bucket. Host sync: yes. Not on the path of a training step.
    """
    index.entries_moved()
    begin, end = (index.bucket_offsets[table : table + 2] * index.bucket_capacity).tolist()
    arrays = [a[begin:end] for a in (index.keys, index.digests, index.scores, index.rows, index.tags)]
    arrays.append((index.stamps if index.has_stamps else index.scores)[begin:end])
    old = [a.clone() for a in arrays]
    _, digests, _, rows, tags, _ = old
    kept = (digests != DIGEST_EMPTY) & ((digests != DIGEST_ERASED) | (tags >= index.clock[OLDEST]))
    arrays[1].zero_()
    # Plain launch: a table's part of an array may begin anywhere.
    _rebuild_kernel[(max(1, (end - begin) // index.bucket_capacity),)](
        *arrays,
        *old,
        kept.to(torch.uint8),
        STAMPS=index.has_stamps,
        BUCKET=index.bucket_capacity,
        TILE=min(_TILE, power_of_two(index.bucket_capacity)),
        num_warps=1,
    )
    # In every bucket as many slots are left empty as rows are left over, so the two lists run in parallel.
    empty = (arrays[1] == DIGEST_EMPTY).nonzero().flatten()
    arrays[3][empty] = rows[(~kept).nonzero().flatten()]
    arrays[4][empty] = 0


@triton.jit
def _rebuild_kernel(
    keys_ptr,
    digests_ptr,
    scores_ptr,
    rows_ptr,
    tags_ptr,
    stamps_ptr,
    old_keys_ptr,
    old_digests_ptr,
    old_scores_ptr,
    old_rows_ptr,
    old_tags_ptr,
    old_stamps_ptr,
    kept_ptr,
    STAMPS: tl.constexpr,
    BUCKET: tl.constexpr,
    TILE: tl.constexpr,
):
    base = tl.program_id(0).to(tl.int64) * BUCKET
    for i in range(0, BUCKET):
        old = base + i
        if tl.load(kept_ptr + old) != 0:
            key = tl.load(old_keys_ptr + old)
            start = group_of(mix(key), BUCKET // 16) * 16
            first = tl.full([], BUCKET, tl.int64)
            begin = 0
            while (begin < BUCKET) & (first == BUCKET):
                order = begin + tl.arange(0, TILE)
                place = start + order
                place = tl.where(place >= BUCKET, place - BUCKET, place)
                digest = tl.load(digests_ptr + base + place, mask=order < BUCKET, other=2)
                first = tl.min(tl.where(digest == 0, order, BUCKET), 0).to(tl.int64)
                begin += TILE
            slot = start + first
            slot = base + tl.where(slot >= BUCKET, slot - BUCKET, slot)
            # All threads have looked for an empty slot before one of them takes it, and see it taken after.
            tl.debug_barrier()
            tl.store(keys_ptr + slot, key)
            tl.store(digests_ptr + slot, tl.load(old_digests_ptr + old))
            tl.store(scores_ptr + slot, tl.load(old_scores_ptr + old))
            tl.store(rows_ptr + slot, tl.load(old_rows_ptr + old))
            tl.store(tags_ptr + slot, tl.load(old_tags_ptr + old))
            if STAMPS:
                tl.store(stamps_ptr + slot, tl.load(old_stamps_ptr + old))
            tl.debug_barrier()
