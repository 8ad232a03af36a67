"""Look ids up; touch what is found."""

import numpy as np
import torch
from numba import njit, prange

from dynamicemb.table.cpu.hashing import bucket_of, bytes_equal, digest_of, group_of, lowest_byte, mix
from dynamicemb.table.cpu.memory import atomic_add_i64, prefetch
from dynamicemb.table.cpu.threads import num_parts
from dynamicemb.table.index import HITS, MISSES, STEP, Index

# Ids whose cache misses overlap: each phase of the kernel runs over a block and asks for what the next phase reads.
_BLOCK = 32


def find(
    index: Index,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    touch: bool,
    frequencies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the row of every id, and touch what is found.

    A touch sets the slot's tag to the current step and its score to the table's score value, or adds the occurrence's
    frequency to it (LFU).

    Args:
        index: the group's index.
        ids: i64 ``[N]``, the occurrences of one table after those of another.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        touch: whether scores, tags and the hit and miss counters change.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once. Only LFU reads it.

    Returns:
        i32 ``[N]`` row ids, -1 where the id is not in its table.

    Concurrency: lanes write scores and tags of the same slot with the same value, or add atomically.
    """
    rows = torch.empty(ids.numel(), dtype=torch.int32)
    if ids.numel() == 0:
        return rows
    parts = num_parts(ids.numel(), 1024)
    counts = np.zeros((parts, index.num_tables), np.int64)
    _find_kernel(
        index.keys.numpy(),
        index.digests.view(torch.int64).numpy(),
        index.scores.numpy(),
        index.rows.numpy(),
        index.tags.numpy(),
        index.bucket_offsets.numpy(),
        index.bucket_capacity,
        index.score_values.numpy(),
        index.clock.numpy()[STEP],
        ids.numpy(),
        table_ranges.numpy(),
        rows.numpy(),
        index.scores.numpy()[:0] if frequencies is None else frequencies.numpy(),
        (touch, index.accumulate),
        counts,
    )
    if touch:
        hits = counts.sum(0)
        counters = index.counters.numpy()
        counters[:, HITS] += hits
        counters[:, MISSES] += np.diff(table_ranges.numpy()) - hits
    return rows


@njit(inline="always")
def probe(keys, words, base, num_groups, group, digest, key):
    """Return the slot of ``key`` in the bucket at slot ``base``, or -1."""
    for step in range(num_groups):
        g = group + step
        if g >= num_groups:
            g -= num_groups
        first = base + g * 16
        empty = np.uint64(0)
        for half in range(2):
            word = np.uint64(words[(first >> 3) + half])
            marks = bytes_equal(word, digest)
            while marks != 0:
                slot = first + half * 8 + lowest_byte(marks)
                if keys[slot] == key:
                    return slot
                marks &= marks - np.uint64(1)
            empty |= bytes_equal(word, 0)
        if empty != 0:
            return -1
    return -1


@njit(parallel=True, cache=True, nogil=True)
def _find_kernel(
    keys, words, scores, rows, tags, bucket_offsets, bucket_capacity, score_values, step, ids, table_ranges, out,
    frequencies, flags, counts,
):  # fmt: skip
    parts = counts.shape[0]
    num_ids = ids.size
    for part in prange(parts):
        begin = num_ids * part // parts
        end = num_ids * (part + 1) // parts
        for t in range(counts.shape[1]):
            lo = max(begin, table_ranges[t])
            hi = min(end, table_ranges[t + 1])
            if lo < hi:
                counts[part, t] = _find_span(
                    keys, words, scores, rows, tags, bucket_offsets[t], bucket_offsets[t + 1], bucket_capacity,
                    score_values[t], step, ids, lo, hi, out, frequencies, flags,
                )  # fmt: skip


@njit(nogil=True, cache=True)
def _find_span(
    keys, words, scores, rows, tags, bucket_begin, bucket_end, bucket_capacity, score_value, step, ids, lo, hi, out,
    frequencies, flags,
):  # fmt: skip
    """Look up the occurrences lo..hi of one table; returns the number of hits."""
    touch, accumulate = flags
    num_buckets = bucket_end - bucket_begin
    num_groups = bucket_capacity // 16
    bases = np.empty(_BLOCK, np.int64)
    groups = np.empty(_BLOCK, np.int64)
    digests = np.empty(_BLOCK, np.int64)
    words_at = words.ctypes.data
    keys_at = keys.ctypes.data
    rows_at = rows.ctypes.data
    scores_at = scores.ctypes.data
    tags_at = tags.ctypes.data
    hits = 0
    for block in range(lo, hi, _BLOCK):
        size = min(_BLOCK, hi - block)
        for j in range(size):
            h = mix(ids[block + j])
            bases[j] = (bucket_begin + bucket_of(h, num_buckets)) * bucket_capacity
            groups[j] = group_of(h, num_groups)
            digests[j] = digest_of(h)
            prefetch(words_at + bases[j] + groups[j] * 16)
        for j in range(size):
            first = bases[j] + groups[j] * 16
            low = bytes_equal(np.uint64(words[first >> 3]), digests[j])
            high = bytes_equal(np.uint64(words[(first >> 3) + 1]), digests[j])
            if low != 0 or high != 0:
                slot = first + (lowest_byte(low) if low != 0 else 8 + lowest_byte(high))
                prefetch(keys_at + slot * 8)
                prefetch(rows_at + slot * 4)
                if touch:
                    prefetch(scores_at + slot * 8)
                    prefetch(tags_at + slot * 4)
        for j in range(size):
            i = block + j
            slot = probe(keys, words, bases[j], num_groups, groups[j], digests[j], ids[i])
            if slot < 0:
                out[i] = -1
                continue
            out[i] = rows[slot]
            hits += 1
            if touch:
                tags[slot] = step
                if accumulate:
                    amount = frequencies[i] if frequencies.size > 0 else 1
                    atomic_add_i64(scores_at + slot * 8, amount)
                else:
                    scores[slot] = score_value
    return hits
