"""Insert missing ids: every bucket has one owner, which places all of the batch's missing ids of that bucket."""

import numpy as np
import torch
from numba import njit, prange

from dynamicemb.table.cpu.hashing import bytes_equal, mix
from dynamicemb.table.cpu.memory import read_i32, read_i64, read_u8, read_u64, write_i32, write_i64, write_u8
from dynamicemb.table.cpu.probe import counts as table_counts
from dynamicemb.table.cpu.probe import expired, home, home_bucket, index_view, next_group, probe
from dynamicemb.table.cpu.score_function import rank_slots
from dynamicemb.table.cpu.threads import launcher, num_threads
from dynamicemb.table.index import EVICTED, EXPIRED, FAILED, INSERTED, Index
from dynamicemb.table.stepping.results import (
    EVICTED_OUTCOME,
    EXPIRED_OUTCOME,
    FAILED_OUTCOME,
    FOLLOWED_OUTCOME,
    INSERTED_OUTCOME,
    NUM_OUTCOMES,
    InsertResult,
)


@launcher("rows")
def insert(
    index: Index,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    rows: torch.Tensor,
    frequencies: torch.Tensor | None = None,
) -> InsertResult:
    """Place every id whose row is -1, evicting the lowest score of a full bucket.

    An id that is still there but expired takes its own slot. Then, in batch order, every other one takes the first free
    slot in its probe order (empty, or erased or expired and not protected), else the slot with the lowest score among
    those whose tag is older than the oldest protected step (ties: smaller unsigned fmix64 of the id), else it fails.

    Args:
        index: the group's index.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        rows: i32 ``[N]`` from ``find``; -1 entries are replaced by the row of the placed id, or stay -1 if it failed.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once.

    Returns:
        Which occurrences got a new row, and which ids were evicted for them.

    Example: bucket of 16 slots, full, lowest score 3 held by id 7 in row 40. ``ids = [9, 9]``, ``rows = [-1, -1]``:
    rows become ``[40, 40]``, occurrence 0 is new, and ``(id 7, score 3)`` is evicted.

    Concurrency: buckets are dealt to parts, a part walks its occurrences alone; the result does not depend on their
    number.
    """
    missing = np.flatnonzero(rows.numpy() < 0)
    if not missing.size:
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        return InsertResult(nothing, nothing, nothing, nothing, nothing)
    outcome = np.zeros(missing.size, np.uint8)
    victims = np.zeros((3, missing.size), np.int64)
    parts = num_threads() if missing.size >= 512 else 1
    counts = np.zeros((parts, index.num_tables, NUM_OUTCOMES), np.int64)
    batch = (
        ids.data_ptr(),
        table_ranges.data_ptr(),
        rows.data_ptr(),
        0 if frequencies is None else frequencies.data_ptr(),
    )
    _insert_kernel(index_view(index), batch, missing, outcome, victims, counts)
    counted = counts.sum(0)
    tallies = index.tallies.numpy()
    tallies[:, INSERTED] += counted[:, INSERTED_OUTCOME] + counted[:, EVICTED_OUTCOME] + counted[:, EXPIRED_OUTCOME]
    tallies[:, EVICTED] += counted[:, EVICTED_OUTCOME]
    tallies[:, FAILED] += counted[:, FAILED_OUTCOME]
    tallies[:, EXPIRED] += counted[:, EXPIRED_OUTCOME]
    new = (outcome != FAILED_OUTCOME) & (outcome != FOLLOWED_OUTCOME)
    evicted = outcome == EVICTED_OUTCOME
    return InsertResult(
        new=torch.from_numpy(missing[new]),
        evicted=torch.from_numpy(missing[evicted]),
        evicted_ids=torch.from_numpy(victims[0, evicted]),
        evicted_scores=torch.from_numpy(victims[1, evicted]),
        evicted_stamps=torch.from_numpy(victims[2, evicted if index.has_stamps else slice(0)]),
    )


@njit(parallel=True, cache=True, nogil=True)
def _insert_kernel(view, batch, missing, outcome, victims, counts):
    ids, table_ranges, _, _ = batch
    parts = counts.shape[0]
    num_missing = missing.size
    total = read_i64(view.bucket_offsets, view.num_tables)
    table_of = np.empty(num_missing, np.int32)
    owner = np.empty(num_missing, np.int32)
    t = 0
    for m in range(num_missing):
        while missing[m] >= read_i64(table_ranges, t + 1):
            t += 1
        table_of[m] = t
        owner[m] = home_bucket(view, t, mix(read_i64(ids, missing[m]))) * parts // total
    for part in prange(parts):
        ranks = np.empty(view.bucket_capacity if view.score_function != 0 else 0, np.int64)
        if view.ttls != 0:
            for m in range(num_missing):
                if owner[m] == part and _revive(view, batch, missing[m], table_of[m]):
                    outcome[m] = EXPIRED_OUTCOME
                    counts[part, table_of[m], EXPIRED_OUTCOME] += 1
        for m in range(num_missing):
            if owner[m] == part and outcome[m] != EXPIRED_OUTCOME:
                kind = _place(view, batch, missing[m], table_of[m], victims[:, m], ranks)
                outcome[m] = kind
                counts[part, table_of[m], kind] += 1


@njit
def _first_score(view, frequencies, i, t):
    """Return the score of a new id."""
    if table_counts(view, t):
        return read_i64(frequencies, i) if frequencies != 0 else np.int64(1)
    return read_i64(view.score_values, t)


@njit
def _revive(view, batch, i, t):
    """Give occurrence ``i`` of table ``t`` the slot in which its id expired; returns whether there was one."""
    ids, _, out, frequencies = batch
    key = read_i64(ids, i)
    base, group, digest = home(view, t, key)
    slot = probe(view, base, group, digest, key)
    if slot < 0 or not expired(view, t, slot):
        return False
    _occupy(view, slot, key, digest, _first_score(view, frequencies, i, t))
    write_i32(out, i, read_i32(view.rows, slot))
    return True


@njit
def _place(view, batch, i, t, victim, ranks):
    """Give occurrence ``i`` of table ``t`` a slot, or fail; returns what happened. ``ranks`` is scratch memory."""
    ids, _, out, frequencies = batch
    key = read_i64(ids, i)
    base, group, digest = home(view, t, key)
    score = _first_score(view, frequencies, i, t)
    slot = probe(view, base, group, digest, key)
    if slot >= 0:
        # An earlier occurrence of this batch placed it.
        write_i32(out, i, read_i32(view.rows, slot))
        if table_counts(view, t):
            write_i64(view.scores, slot, read_i64(view.scores, slot) + score)
        return FOLLOWED_OUTCOME
    kind = INSERTED_OUTCOME
    slot = _free_slot(view, base, group, t)
    if slot >= 0 and read_u8(view.digests, slot) > 1:
        kind = EXPIRED_OUTCOME
    if slot < 0:
        kind = EVICTED_OUTCOME
        slot = _lowest(view, base, ranks)
        if slot < 0:
            return FAILED_OUTCOME
        victim[0] = read_i64(view.keys, slot)
        victim[1] = read_i64(view.scores, slot)
        if view.stamps != 0:
            victim[2] = read_i64(view.stamps, slot)
    _occupy(view, slot, key, digest, score)
    write_i32(out, i, read_i32(view.rows, slot))
    return kind


@njit
def _occupy(view, slot, key, digest, score):
    write_i64(view.keys, slot, key)
    write_u8(view.digests, slot, digest)
    write_i64(view.scores, slot, score)
    write_i32(view.tags, slot, view.step)
    if view.stamps != 0:
        write_i64(view.stamps, slot, view.now)


@njit
def _free_slot(view, base, group, t):
    """Return the first slot in probe order that is empty, or erased or expired and not protected; -1 if none.

    The first empty slot is itself a candidate, so another one is taken only in groups up to the first with an empty
    slot.
    """
    num_groups = view.bucket_capacity // 16
    for _ in range(num_groups):
        first = base + group * 16
        low = read_u64(view.digests + first, 0)
        high = read_u64(view.digests + first, 1)
        gaps = bytes_equal(low, 0) | bytes_equal(low, 1) | bytes_equal(high, 0) | bytes_equal(high, 1)
        if gaps != 0 or view.ttls != 0:
            for slot in range(first, first + 16):
                digest = read_u8(view.digests, slot)
                if digest == 0 or (digest == 1 and read_i32(view.tags, slot) < view.oldest):
                    return slot
                if digest > 1 and expired(view, t, slot):
                    return slot
        group = next_group(group, num_groups)
    return -1


@njit
def _lowest(view, base, ranks):
    """Return the unprotected slot with the lowest (score, unsigned fmix64(id)) of a full bucket, or -1.

    With a score function, its result takes the place of the score.
    """
    best = -1
    best_score = np.int64(0)
    best_hash = np.uint64(0)
    if view.score_function != 0:
        rank_slots(view.score_function, view.stamps + 8 * base, view.scores + 8 * base, ranks, view.now)
    for slot in range(base, base + view.bucket_capacity):
        if read_i32(view.tags, slot) >= view.oldest:
            continue
        score = ranks[slot - base] if view.score_function != 0 else read_i64(view.scores, slot)
        if best >= 0 and score > best_score:
            continue
        h = mix(read_i64(view.keys, slot))
        if best < 0 or score < best_score or h < best_hash:
            best = slot
            best_score = score
            best_hash = h
    return best
