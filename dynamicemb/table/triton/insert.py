"""Place missing ids: every list of leaders has one owner, which gives them slots one after another."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import OLDEST, STEP, Index
from dynamicemb.table.triton.hashing import digest_of, group_of, mix
from dynamicemb.table.triton.launch import cdiv, launch, persistent_grid, power_of_two
from dynamicemb.table.triton.missing import Missing

# Small buckets are taken so many slots at a time: on an H200, 256 and 512 take 20 % and 30 % longer to evict.
_SLOTS = 128
# Larger buckets are looked at by four warps, a tile after the other.
_MOST_SLOTS_PER_WARP = 512
_TILE = 1024


def insert(index: Index, rows: torch.Tensor, missing: Missing) -> None:
    """Give every listed leader a slot by the rule of the CPU twin, or let it fail.

    An id takes the first free slot in its probe order (empty, or erased and not protected), else the slot with the
    lowest score among those whose tag is older than the oldest protected step (ties: smaller unsigned fmix64 of the
    id), else it fails. A list is walked in its order: the latest pushed first, or in batch order if
    ``missing.ordered``; without failures every order leaves the same ids.

    Args:
        index: the group's index.
        rows: i32 ``[N]``; the leaders' entries become their rows, or -1 where they failed.
        missing: the lists. Written: ``leader_rows``, ``outcomes``, ``victim_ids``, ``victim_scores``.

    Concurrency: a program owns the lists it takes, so all buckets on them; it reads back what it wrote itself after a
    barrier. Host sync: none; the grid is persistent and reads the number of lists from the device.
    """
    capacity = index.bucket_capacity
    num_warps = 1 if capacity <= _MOST_SLOTS_PER_WARP else 4
    tile = min(power_of_two(capacity), _TILE)
    lists = max(1, _SLOTS // tile)
    grid = persistent_grid(rows.device, cdiv(rows.numel(), lists), num_warps)
    m = missing
    args = (
        index.keys, index.digests, index.scores, index.rows, index.tags, index.score_values, index.clock, rows, m.heads,
        m.counts, m.leader_ids, m.leader_tables, m.leader_buckets, m.positions, m.next, m.work, m.leader_rows,
        m.outcomes, m.victim_ids, m.victim_scores, m.amounts,
    )  # fmt: skip
    constants = {
        "BUCKET": capacity,
        "TILE": tile,
        "LISTS": lists,
        "ACCUMULATE": index.accumulate,
        "STEP_INDEX": STEP,
        "OLDEST_INDEX": OLDEST,
    }
    launch(_insert_kernel, grid, args, constants, num_warps=num_warps)


@triton.jit
def _free_slot(digests_ptr, tags_ptr, base, group, wanted, oldest, BUCKET: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    """Return the first slot in probe order that is empty, or erased and not protected; -1 if none or not wanted.

    The first empty slot is itself a candidate, so an erased one is taken only in groups up to the first with an empty
    slot.
    """
    slot = tl.full(base.shape, -1, tl.int64)
    begin = 0
    while (begin < BUCKET) & (tl.max((wanted & (slot < 0)).to(tl.int32), 0) > 0):
        order = begin + tl.arange(0, TILE)
        place = group[:, None] * 16 + order[None, :]
        place = base[:, None] + tl.where(place >= BUCKET, place - BUCKET, place)
        looked = (wanted & (slot < 0))[:, None] & (order < BUCKET)[None, :]
        digest = tl.load(digests_ptr + place, mask=looked, other=2)
        tag = tl.load(tags_ptr + place, mask=digest == 1, other=0)
        free = (digest == 0) | ((digest == 1) & (tag < oldest))
        first = tl.min(tl.where(free, order[None, :], BUCKET), 1)
        found = group * 16 + first
        found = base + tl.where(found >= BUCKET, found - BUCKET, found)
        slot = tl.where(first < BUCKET, found, slot)
        begin += TILE
    return slot


@triton.jit
def _lowest_slot(
    keys_ptr, scores_ptr, tags_ptr, base, wanted, oldest, BUCKET: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Return slot, score and id of the unprotected slot with the lowest (score, fmix64(id)) of full buckets.

    The slot is -1 where there is none, or where none was wanted.

    Example: scores ``[5, 3, 3, 1]``, the last one protected: of the two 3s, the one whose id mixes to less.
    """
    LARGEST: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    slot = tl.full(base.shape, -1, tl.int64)
    slot_score = tl.full(base.shape, LARGEST, tl.int64)
    slot_hash = tl.full(base.shape, LARGEST, tl.int64)
    slot_key = tl.full(base.shape, 0, tl.int64)
    for begin in range(0, BUCKET, TILE):
        order = begin + tl.arange(0, TILE)
        place = base[:, None] + order[None, :]
        looked = wanted[:, None] & (order < BUCKET)[None, :]
        tag = tl.load(tags_ptr + place, mask=looked, other=0x7FFFFFFF)
        # Not masked by the tags: the two loads shall be under way together.
        score = tl.load(scores_ptr + place, mask=looked, other=LARGEST)
        open_ = looked & (tag < oldest)
        low = tl.min(tl.where(open_, score, LARGEST), 1)
        tie = open_ & (score == low[:, None])
        key = tl.load(keys_ptr + place, mask=tie, other=0)
        # Flipping the sign bit makes signed order that of the unsigned hashes.
        mixed = (mix(key) ^ 0x8000000000000000).to(tl.int64, bitcast=True)
        low_hash = tl.min(tl.where(tie, mixed, LARGEST), 1)
        lowest = tie & (mixed == low_hash[:, None])
        first = tl.min(tl.where(lowest, order[None, :], BUCKET), 1)
        smaller = (low < slot_score) | ((low == slot_score) & (low_hash < slot_hash))
        better = (first < BUCKET) & ((slot < 0) | smaller)
        slot = tl.where(better, base + first, slot)
        slot_score = tl.where(better, low, slot_score)
        slot_hash = tl.where(better, low_hash, slot_hash)
        # fmix64 is a bijection: only one slot is the lowest.
        slot_key = tl.where(better, tl.sum(tl.where(lowest, key, 0), 1), slot_key)
    return slot, slot_score, slot_key


@triton.jit
def _insert_kernel(
    keys_ptr,
    digests_ptr,
    scores_ptr,
    rows_ptr,
    tags_ptr,
    score_values_ptr,
    clock_ptr,
    out_ptr,
    heads_ptr,
    counts_ptr,
    leader_ids_ptr,
    leader_tables_ptr,
    leader_buckets_ptr,
    positions_ptr,
    next_ptr,
    work_ptr,
    leader_rows_ptr,
    outcomes_ptr,
    victim_ids_ptr,
    victim_scores_ptr,
    amounts_ptr,
    BUCKET: tl.constexpr,
    TILE: tl.constexpr,
    LISTS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    STEP_INDEX: tl.constexpr,
    OLDEST_INDEX: tl.constexpr,
):
    step = tl.load(clock_ptr + STEP_INDEX).to(tl.int32)
    oldest = tl.load(clock_ptr + OLDEST_INDEX).to(tl.int32)
    num_lists = tl.load(counts_ptr + 1) + 1
    # Every lane walks its own lists, one after another; what it needs of the next leader is under way early.
    q = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    k = tl.load(heads_ptr + tl.load(work_ptr + q, mask=q < num_lists, other=0), mask=q < num_lists, other=-1)
    key = tl.load(leader_ids_ptr + k, mask=k >= 0, other=0)
    bucket = tl.load(leader_buckets_ptr + k, mask=k >= 0, other=0)
    following = tl.load(next_ptr + k, mask=k >= 0, other=-1)
    while tl.max(k, 0) >= 0:
        on = k >= 0
        ends = on & (following < 0)
        q = tl.where(ends, q + tl.num_programs(0) * LISTS, q)
        begins = ends & (q < num_lists)
        head = tl.load(heads_ptr + tl.load(work_ptr + q, mask=begins, other=0), mask=begins, other=-1)
        following = tl.where(ends, head, following)
        h = mix(key)
        base = bucket.to(tl.int64) * BUCKET
        table = tl.load(leader_tables_ptr + k, mask=on, other=0)
        position = tl.load(positions_ptr + k, mask=on, other=0)
        group = group_of(h, BUCKET // 16)
        slot = _free_slot(digests_ptr, tags_ptr, base, group, on, oldest, BUCKET, TILE)
        next_key = tl.load(leader_ids_ptr + following, mask=following >= 0, other=0)
        next_bucket = tl.load(leader_buckets_ptr + following, mask=following >= 0, other=0)
        next_following = tl.load(next_ptr + following, mask=following >= 0, other=-1)
        outcome = tl.where(slot >= 0, 1, 0)
        full = on & (slot < 0)
        if tl.max(full.to(tl.int32), 0) > 0:
            lowest, lowest_score, victim = _lowest_slot(
                keys_ptr, scores_ptr, tags_ptr, base, full, oldest, BUCKET, TILE
            )
            evicts = full & (lowest >= 0)
            tl.store(victim_ids_ptr + k, victim, mask=evicts)
            tl.store(victim_scores_ptr + k, lowest_score, mask=evicts)
            slot = tl.where(full, lowest, slot)
            outcome = tl.where(evicts, 2, outcome)
        placed = on & (slot >= 0)
        score = tl.load(score_values_ptr + table)
        if ACCUMULATE:
            score = tl.load(amounts_ptr + (-2 - tl.load(out_ptr + position, mask=on, other=-2)), mask=on, other=0)
        row = tl.load(rows_ptr + slot, mask=placed, other=-1)
        # Threads that still read the bucket must be done before it changes.
        tl.debug_barrier()
        tl.store(keys_ptr + slot, key, mask=placed)
        tl.store(digests_ptr + slot, digest_of(h), mask=placed)
        tl.store(scores_ptr + slot, score, mask=placed)
        tl.store(tags_ptr + slot, step, mask=placed)
        tl.store(out_ptr + position, row, mask=on)
        tl.store(leader_rows_ptr + k, row, mask=on)
        tl.store(outcomes_ptr + k, outcome, mask=on)
        # The next leader of the list reads digests and tags that other threads have just written.
        tl.debug_barrier()
        k, key, bucket, following = following, next_key, next_bucket, next_following
