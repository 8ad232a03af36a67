"""Look ids up; touch what is found."""

import numpy as np
import torch
from numba import njit, prange

from dynamicemb.table.cpu.hashing import bytes_equal, lowest_byte
from dynamicemb.table.cpu.memory import atomic_add_i64, prefetch, read_i32, read_i64, read_u64, write_i32, write_i64
from dynamicemb.table.cpu.probe import counts as table_counts
from dynamicemb.table.cpu.probe import expired, home, index_view, keeps, probe
from dynamicemb.table.cpu.threads import launcher, num_parts
from dynamicemb.table.index import HITS, MISSES, NUM_TALLIES, Index, Residents

# Ids whose cache misses overlap: each phase of the kernel runs over a block and asks for what the next phase reads.
_BLOCK = 32


@launcher("ids")
def find(
    index: Residents,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    touch: bool,
    frequencies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the row of every id, and touch what is found.

    A touch sets the slot's tag to the current step, its stamp to the step's time where there are stamps, and its score
    to the table's score value; tables that count (LFU, compound) add the occurrence's frequency to it instead, and
    those that never evict while they can grow (NO_EVICTION) leave it alone.

    Args:
        index: who is where; the whole index for a touch, and where ids expire.
        ids: i64 ``[N]``, the occurrences of one table after those of another.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        touch: whether scores, tags and the hit and miss tallies change.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once. Only tables that count read it.

    Returns:
        i32 ``[N]`` row ids, -1 where the id is not in its table.

    Concurrency: lanes write scores and tags of the same slot with the same value, or add atomically.
    """
    num_ids = ids.numel()
    rows = torch.empty(num_ids, dtype=torch.int32, device="cpu")
    if num_ids == 0:
        return rows
    parts = num_parts(num_ids, 1024)
    counts = np.zeros((parts, index.num_tables), np.int64)
    scratch = np.empty((parts, 3, _BLOCK), np.int64)
    batch = (
        ids.data_ptr(),
        table_ranges.data_ptr(),
        rows.data_ptr(),
        0 if frequencies is None else frequencies.data_ptr(),
    )
    assert isinstance(index, Index) or not touch
    tallies = index.tallies.numpy() if isinstance(index, Index) else np.empty((0, NUM_TALLIES), np.int64)
    _find_kernel(index_view(index), batch, num_ids, touch, counts, scratch, tallies)
    return rows


@njit(parallel=True, cache=True, nogil=True)
def _find_kernel(view, batch, num_ids, touch, counts, scratch, tallies):
    parts = counts.shape[0]
    _, table_ranges, _, _ = batch
    for part in prange(parts):
        begin = num_ids * part // parts
        end = num_ids * (part + 1) // parts
        places = scratch[part].ctypes.data
        for t in range(view.num_tables):
            lo = max(begin, read_i64(table_ranges, t))
            hi = min(end, read_i64(table_ranges, t + 1))
            hits = 0
            for block in range(lo, hi, _BLOCK):
                hits += _find_block(view, batch, t, block, min(hi - block, _BLOCK), touch, places)
            counts[part, t] = hits
    if touch:
        for t in range(view.num_tables):
            hits = counts[:, t].sum()
            tallies[t, HITS] += hits
            tallies[t, MISSES] += read_i64(table_ranges, t + 1) - read_i64(table_ranges, t) - hits


@njit
def _find_block(view, batch, t, begin, size, touch, places):
    """Look up ``size`` occurrences of table ``t`` from ``begin`` on; returns the number of hits."""
    ids, _, out, frequencies = batch
    bases, groups, digests = places, places + _BLOCK * 8, places + _BLOCK * 16
    # While no entry has moved the row of a slot is computed: one cache miss less.
    first_slot = read_i64(view.bucket_offsets, t) * view.bucket_capacity
    first_row = read_i32(view.rows, first_slot) - first_slot
    counting, keeping = touch and table_counts(view, t), touch and keeps(view, t)
    for j in range(size):
        base, group, digest = home(view, t, read_i64(ids, begin + j))
        write_i64(bases, j, base)
        write_i64(groups, j, group)
        write_i64(digests, j, digest)
        prefetch(view.digests + base + group * 16)
    for j in range(size):
        first = read_i64(bases, j) + read_i64(groups, j) * 16
        low = bytes_equal(read_u64(view.digests + first, 0), read_i64(digests, j))
        high = bytes_equal(read_u64(view.digests + first, 1), read_i64(digests, j))
        if low != 0 or high != 0:
            _prefetch_slot(view, first + (lowest_byte(low) if low != 0 else 8 + lowest_byte(high)), touch)
    hits = 0
    for j in range(size):
        i = begin + j
        slot = probe(view, read_i64(bases, j), read_i64(groups, j), read_i64(digests, j), read_i64(ids, i))
        if slot < 0 or expired(view, t, slot):
            write_i32(out, i, -1)
            continue
        write_i32(out, i, read_i32(view.rows, slot) if view.moved else first_row + slot)
        hits += 1
        if touch:
            write_i32(view.tags, slot, view.step)
            if view.stamps != 0:
                write_i64(view.stamps, slot, view.now)
            if counting:
                atomic_add_i64(view.scores + slot * 8, read_i64(frequencies, i) if frequencies != 0 else 1)
            elif not keeping:
                write_i64(view.scores, slot, read_i64(view.score_values, t))
    return hits


@njit
def _prefetch_slot(view, slot, touch):
    prefetch(view.keys + slot * 8)
    if view.moved:
        prefetch(view.rows + slot * 4)
    if touch:
        prefetch(view.scores + slot * 8)
        prefetch(view.tags + slot * 4)
