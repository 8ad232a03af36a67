"""Erase ids, and rebuild buckets that hold too many erased slots."""

import numpy as np
import torch
from numba import njit, prange

from dynamicemb.table.cpu.hashing import bucket_of, digest_of, group_of, mix
from dynamicemb.table.cpu.memory import read_i64, write_u8
from dynamicemb.table.cpu.probe import expired, index_view, probe
from dynamicemb.table.cpu.threads import launcher
from dynamicemb.table.index import ERASED, OLDEST, Index


@launcher("ids")
def erase(index: Index, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
    """Remove ids; their slots keep their rows, and their tags protect them until the steps that touched them are over.

    Args:
        index: the group's index.
        ids: i64 ``[N]``, the ids of one table after those of another.
        table_ranges: i64 ``[T+1]``, the ids of each table.

    Returns:
        bool ``[N]``: whether this occurrence removed its id (of repeated ids, the first).
    """
    erased = np.zeros(ids.numel(), np.bool_)
    for t in range(index.num_tables):
        begin, end = int(table_ranges[t]), int(table_ranges[t + 1])
        if begin < end:
            _erase_kernel(index_view(index), t, ids.numpy()[begin:end], erased[begin:end])
            index.counters[t, ERASED] += int(erased[begin:end].sum())
    return torch.from_numpy(erased)


@launcher("index")
def rebuild(index: Index, table: int) -> None:
    """Place every id of a table anew so that erased slots become empty, except those still protected.

    Rows stay with their ids; left-over rows go to the empty slots.
    """
    index.entries_moved()
    _rebuild_kernel(
        index.keys.numpy(), index.digests.numpy(), index.scores.numpy(), index.rows.numpy(), index.tags.numpy(),
        index.stamps.numpy(),
        (int(index.bucket_offsets[table]), int(index.bucket_offsets[table + 1]), index.bucket_capacity),
        int(index.clock[OLDEST]),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _erase_kernel(view, table, ids, erased):
    first_bucket = read_i64(view.bucket_offsets, table)
    num_buckets = read_i64(view.bucket_offsets, table + 1) - first_bucket
    num_groups = view.bucket_capacity // 16
    for i in range(ids.size):
        h = mix(ids[i])
        base = (first_bucket + bucket_of(h, num_buckets)) * view.bucket_capacity
        slot = probe(view, base, group_of(h, num_groups), digest_of(h), ids[i])
        if slot >= 0 and not expired(view, table, slot):
            write_u8(view.digests, slot, 1)
            erased[i] = True


@njit(parallel=True, cache=True, nogil=True)
def _rebuild_kernel(keys, digests, scores, rows, tags, stamps, buckets, oldest):
    bucket_begin, bucket_end, bucket_capacity = buckets
    for bucket in prange(bucket_begin, bucket_end):
        begin = bucket * bucket_capacity
        end = begin + bucket_capacity
        _rebuild_bucket(
            keys[begin:end], digests[begin:end], scores[begin:end], rows[begin:end], tags[begin:end],
            # Past the end of no stamps at all lies an empty part.
            stamps[begin:end], oldest,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _rebuild_bucket(keys, digests, scores, rows, tags, stamps, oldest):
    capacity = keys.size
    old_keys = keys.copy()
    old_digests = digests.copy()
    old_scores = scores.copy()
    old_rows = rows.copy()
    old_tags = tags.copy()
    old_stamps = stamps.copy()
    moved = np.zeros(capacity, np.bool_)
    digests[:] = 0
    for i in range(capacity):
        if old_digests[i] == 0 or (old_digests[i] == 1 and old_tags[i] < oldest):
            continue
        slot = group_of(mix(old_keys[i]), capacity // 16) * 16
        while digests[slot] != 0:
            slot = slot + 1 if slot + 1 < capacity else 0
        keys[slot] = old_keys[i]
        digests[slot] = old_digests[i]
        scores[slot] = old_scores[i]
        rows[slot] = old_rows[i]
        tags[slot] = old_tags[i]
        if stamps.size:
            stamps[slot] = old_stamps[i]
        moved[i] = True
    free = 0
    for i in range(capacity):
        if moved[i]:
            continue
        while digests[free] != 0:
            free += 1
        rows[free] = old_rows[i]
        tags[free] = 0
        free += 1
