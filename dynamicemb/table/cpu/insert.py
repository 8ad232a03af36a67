"""Insert missing ids: every bucket has one owner, which places all of the batch's missing ids of that bucket."""

import numpy as np
import torch
from numba import njit, prange

from dynamicemb.table.cpu.find import probe
from dynamicemb.table.cpu.hashing import bucket_of, bytes_equal, digest_of, group_of, mix
from dynamicemb.table.cpu.threads import num_threads
from dynamicemb.table.index import EVICTED, FAILED, INSERTED, OLDEST, STEP, Index
from dynamicemb.table.results import InsertResult

# What happened to a missing occurrence.
_PLACED_BEFORE = 0
_INSERTED = 1
_EVICTED = 2
_FAILED = 3


def insert(
    index: Index,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    rows: torch.Tensor,
    frequencies: torch.Tensor | None = None,
) -> InsertResult:
    """Place every id whose row is -1, evicting the lowest score of a full bucket.

    An id takes the first free slot in its probe order (empty, or erased and not protected), else the slot with the
    lowest score among those whose tag is older than the oldest protected step (ties: smaller unsigned fmix64 of the id),
    else it fails. Within a bucket, occurrences are placed in batch order.

    Args:
        index: the group's index.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        rows: i32 ``[N]`` from ``find``; -1 entries are replaced by the row of the placed id, or stay -1 if it failed.
        frequencies: i64 ``[N]``, how often each occurrence counts (LFU); None is once.

    Returns:
        Which occurrences got a new row, and which ids were evicted for them.

    Example: bucket of 16 slots, full, lowest score 3 held by id 7 in row 40. ``ids = [9, 9]``, ``rows = [-1, -1]``: rows
    become ``[40, 40]``, occurrence 0 is new, and ``(id 7, score 3)`` is evicted.

    Concurrency: buckets are dealt to parts, a part walks its occurrences alone; the result does not depend on their number.
    """
    missing = np.flatnonzero(rows.numpy() < 0)
    outcome = np.zeros(missing.size, np.uint8)
    victims = np.zeros((2, missing.size), np.int64)
    if missing.size:
        parts = num_threads() if missing.size >= 512 else 1
        counts = np.zeros((parts, index.num_tables, 4), np.int64)
        _insert_kernel(
            index.keys.numpy(),
            (index.digests.numpy(), index.digests.view(torch.int64).numpy()),
            index.scores.numpy(),
            index.rows.numpy(),
            index.tags.numpy(),
            (index.bucket_offsets.numpy(), index.bucket_capacity),
            (index.score_values.numpy(), index.clock.numpy()[STEP], index.clock.numpy()[OLDEST], index.accumulate),
            (ids.numpy(), table_ranges.numpy(), index.scores.numpy()[:0] if frequencies is None else frequencies.numpy()),
            missing,
            rows.numpy(),
            (outcome, victims),
            counts,
        )
        counted = counts.sum(0)
        counters = index.counters.numpy()
        counters[:, INSERTED] += counted[:, _INSERTED] + counted[:, _EVICTED]
        counters[:, EVICTED] += counted[:, _EVICTED]
        counters[:, FAILED] += counted[:, _FAILED]
    new = (outcome == _INSERTED) | (outcome == _EVICTED)
    evicted = outcome == _EVICTED
    return InsertResult(
        new=torch.from_numpy(missing[new]),
        evicted=torch.from_numpy(missing[evicted]),
        evicted_ids=torch.from_numpy(victims[0, evicted]),
        evicted_scores=torch.from_numpy(victims[1, evicted]),
    )


@njit(parallel=True, cache=True, nogil=True)
def _insert_kernel(keys, digests, scores, rows, tags, buckets, touch, batch, missing, out, events, counts):
    bucket_offsets, bucket_capacity = buckets
    ids, table_ranges, _ = batch
    parts = counts.shape[0]
    num_tables = counts.shape[1]
    num_missing = missing.size
    total = bucket_offsets[num_tables]
    table_of = np.empty(num_missing, np.int32)
    owner = np.empty(num_missing, np.int32)
    t = 0
    for m in range(num_missing):
        while missing[m] >= table_ranges[t + 1]:
            t += 1
        table_of[m] = t
    for m in prange(num_missing):
        t = table_of[m]
        begin = bucket_offsets[t]
        bucket = begin + bucket_of(mix(ids[missing[m]]), bucket_offsets[t + 1] - begin)
        owner[m] = bucket * parts // total
    for part in prange(parts):
        for m in range(num_missing):
            if owner[m] == part:
                _place(
                    keys, digests, scores, rows, tags, buckets, touch, batch, missing[m], table_of[m], out, m, events,
                    counts[part],
                )  # fmt: skip


@njit(nogil=True, cache=True)
def _place(keys, digests, scores, rows, tags, buckets, touch, batch, i, t, out, m, events, counts):
    """Give occurrence ``i`` of table ``t`` a slot, or fail."""
    bucket_offsets, bucket_capacity = buckets
    score_values, step, oldest, accumulate = touch
    ids, _, frequencies = batch
    outcome, victims = events
    key = ids[i]
    h = mix(key)
    num_groups = bucket_capacity // 16
    first_bucket = bucket_offsets[t]
    base = (first_bucket + bucket_of(h, bucket_offsets[t + 1] - first_bucket)) * bucket_capacity
    group = group_of(h, num_groups)
    digest = digest_of(h)
    amount = score_values[t]
    if accumulate:
        amount = frequencies[i] if frequencies.size > 0 else 1
    slot = probe(keys, digests[1], base, num_groups, group, digest, key)
    if slot >= 0:
        # An earlier occurrence of this batch placed it.
        out[i] = rows[slot]
        if accumulate:
            scores[slot] += amount
        outcome[m] = _PLACED_BEFORE
        return
    slot = _free_slot(digests, tags, base, num_groups, group, oldest)
    kind = _INSERTED
    if slot < 0:
        slot = _victim(keys, scores, tags, base, bucket_capacity, oldest)
        kind = _EVICTED if slot >= 0 else _FAILED
    outcome[m] = kind
    counts[t, kind] += 1
    if slot < 0:
        return
    if kind == _EVICTED:
        victims[0, m] = keys[slot]
        victims[1, m] = scores[slot]
    keys[slot] = key
    digests[0][slot] = digest
    scores[slot] = amount
    tags[slot] = step
    out[i] = rows[slot]


@njit(nogil=True, cache=True)
def _free_slot(digests, tags, base, num_groups, group, oldest):
    """Return the first slot in probe order that is empty, or erased by then unprotected; -1 if none.

    The first empty slot is itself a candidate, so an erased one is taken only in groups up to the first with an empty slot.
    """
    for step in range(num_groups):
        g = group + step
        if g >= num_groups:
            g -= num_groups
        first = base + g * 16
        low = np.uint64(digests[1][first >> 3])
        high = np.uint64(digests[1][(first >> 3) + 1])
        if (bytes_equal(low, 0) | bytes_equal(low, 1) | bytes_equal(high, 0) | bytes_equal(high, 1)) == 0:
            continue
        for slot in range(first, first + 16):
            digest = digests[0][slot]
            if digest == 0 or (digest == 1 and tags[slot] < oldest):
                return slot
    return -1


@njit(nogil=True, cache=True)
def _victim(keys, scores, tags, base, bucket_capacity, oldest):
    """Return the unprotected slot with the lowest (score, unsigned fmix64(id)) of a bucket without free slots, or -1."""
    best = -1
    best_score = np.int64(0)
    best_hash = np.uint64(0)
    for slot in range(base, base + bucket_capacity):
        if tags[slot] >= oldest:
            continue
        score = scores[slot]
        if best >= 0 and score > best_score:
            continue
        h = mix(keys[slot])
        if best < 0 or score < best_score or h < best_hash:
            best = slot
            best_score = score
            best_hash = h
    return best
