"""Place missing ids: every list of leaders has one owner, which gives them slots one after another."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import OLDEST, STEP, Index
from dynamicemb.table.triton.hashing import bucket_of, digest_of, group_of, mix
from dynamicemb.table.triton.launch import launch, persistent_grid, power_of_two, strides
from dynamicemb.table.triton.missing import Missing

# Slots that one program looks at in one go; small buckets are taken several at a time.
_SLOTS = 512


def insert(index: Index, rows: torch.Tensor, missing: Missing) -> None:
    """Give every listed leader a slot by the rule of the CPU twin, or let it fail.

    An id takes the first free slot in its probe order (empty, or erased and not protected), else the slot with the
    lowest score among those whose tag is older than the oldest protected step (ties: smaller unsigned fmix64 of the
    id), else it fails. A list is walked in its order: the latest pushed first, or in batch order if
    ``missing.ordered``; without failures every order leaves the same ids.

    Args:
        index: the group's index.
        rows: i32 ``[N]``; the leaders' entries become their rows, or -1 where they failed.
        missing: the lists. Written: ``leader_rows``, ``outcomes``, ``victims``.

    Concurrency: a program owns the lists it takes, so all buckets on them; it reads back what it wrote itself after a
    barrier. Host sync: none; the grid is persistent and reads the number of lists from the device.
    """
    capacity = index.bucket_capacity
    tile = min(power_of_two(capacity), _SLOTS if capacity <= _SLOTS else 1024)
    num_warps = 1 if capacity <= _SLOTS else 4
    lists = max(1, _SLOTS // tile) if capacity <= _SLOTS else 1
    grid = persistent_grid(rows.device, triton.cdiv(rows.numel(), lists), num_warps)
    m = missing
    args = (
        index.keys, index.digests, index.scores, index.rows, index.tags, index.bucket_offsets, index.score_values,
        index.clock, rows, m.heads, m.counts, m.leader_ids, m.leader_tables, m.positions, m.next, m.work, m.leader_rows,
        m.outcomes, m.victims, m.amounts, m.leader_ids.numel(),
    )  # fmt: skip
    constants = {
        "BUCKET": capacity,
        **strides(index),
        "TILE": tile,
        "LISTS": lists,
        "ACCUMULATE": index.accumulate,
        "STEP_INDEX": STEP,
        "OLDEST_INDEX": OLDEST,
    }
    launch(_insert_kernel, grid, args, constants, num_warps=num_warps)


@triton.jit
def _free_slot(digests_ptr, tags_ptr, base, group, wanted, oldest, BUCKET: tl.constexpr, ROW_STRIDE: tl.constexpr,
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
        tag = tl.load(tags_ptr + place * ROW_STRIDE, mask=digest == 1, other=0)
        free = (digest == 0) | ((digest == 1) & (tag < oldest))
        first = tl.min(tl.where(free, order[None, :], BUCKET), 1)
        found = group * 16 + first
        found = base + tl.where(found >= BUCKET, found - BUCKET, found)
        slot = tl.where(first < BUCKET, found, slot)
        begin += TILE
    return slot


@triton.jit
def _lowest_slot(
    keys_ptr, scores_ptr, tags_ptr, base, wanted, oldest, BUCKET: tl.constexpr, KEY_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return slot and score of the unprotected slot with the lowest (score, fmix64(id)) of full buckets; -1 if none.

    Example: scores ``[5, 3, 3, 1]``, the last one protected: of the two 3s, the one whose id mixes to less.
    """
    LARGEST: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    slot = tl.full(base.shape, -1, tl.int64)
    slot_score = tl.full(base.shape, LARGEST, tl.int64)
    slot_hash = tl.full(base.shape, LARGEST, tl.int64)
    for begin in range(0, BUCKET, TILE):
        order = begin + tl.arange(0, TILE)
        place = base[:, None] + order[None, :]
        looked = wanted[:, None] & (order < BUCKET)[None, :]
        tag = tl.load(tags_ptr + place * ROW_STRIDE, mask=looked, other=0x7FFFFFFF)
        open_ = looked & (tag < oldest)
        score = tl.load(scores_ptr + place * KEY_STRIDE, mask=open_, other=LARGEST)
        low = tl.min(score, 1)
        tie = open_ & (score == low[:, None])
        key = tl.load(keys_ptr + place * KEY_STRIDE, mask=tie, other=0)
        # Flipping the sign bit makes signed order that of the unsigned hashes.
        mixed = (mix(key) ^ 0x8000000000000000).to(tl.int64, bitcast=True)
        low_hash = tl.min(tl.where(tie, mixed, LARGEST), 1)
        first = tl.min(tl.where(tie & (mixed == low_hash[:, None]), order[None, :], BUCKET), 1)
        smaller = (low < slot_score) | ((low == slot_score) & (low_hash < slot_hash))
        better = (first < BUCKET) & ((slot < 0) | smaller)
        slot = tl.where(better, base + first, slot)
        slot_score = tl.where(better, low, slot_score)
        slot_hash = tl.where(better, low_hash, slot_hash)
    return slot, slot_score


@triton.jit(do_not_specialize=["num_ids"])
def _insert_kernel(
    keys_ptr,
    digests_ptr,
    scores_ptr,
    rows_ptr,
    tags_ptr,
    bucket_offsets_ptr,
    score_values_ptr,
    clock_ptr,
    out_ptr,
    heads_ptr,
    counts_ptr,
    leader_ids_ptr,
    leader_tables_ptr,
    positions_ptr,
    next_ptr,
    work_ptr,
    leader_rows_ptr,
    outcomes_ptr,
    victims_ptr,
    amounts_ptr,
    num_ids,
    BUCKET: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    LISTS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    STEP_INDEX: tl.constexpr,
    OLDEST_INDEX: tl.constexpr,
):
    step = tl.load(clock_ptr + STEP_INDEX).to(tl.int32)
    oldest = tl.load(clock_ptr + OLDEST_INDEX).to(tl.int32)
    num_lists = tl.load(counts_ptr + 1) + 1
    q = tl.program_id(0) * LISTS
    while q < num_lists:
        lane = q + tl.arange(0, LISTS)
        bucket_list = tl.load(work_ptr + lane, mask=lane < num_lists, other=0)
        k = tl.load(heads_ptr + bucket_list, mask=lane < num_lists, other=-1)
        while tl.max(k, 0) >= 0:
            on = k >= 0
            key = tl.load(leader_ids_ptr + k, mask=on, other=0)
            table = tl.load(leader_tables_ptr + k, mask=on, other=0)
            position = tl.load(positions_ptr + k, mask=on, other=0)
            following = tl.load(next_ptr + k, mask=on, other=-1)
            first_bucket = tl.load(bucket_offsets_ptr + table)
            num_buckets = tl.load(bucket_offsets_ptr + table + 1) - first_bucket
            h = mix(key)
            base = (first_bucket + bucket_of(h, num_buckets)) * BUCKET
            slot = _free_slot(digests_ptr, tags_ptr, base, group_of(h, BUCKET // 16), on, oldest, BUCKET,
                              ROW_STRIDE, TILE)  # fmt: skip
            outcome = tl.where(slot >= 0, 1, 0)
            full = on & (slot < 0)
            if tl.max(full.to(tl.int32), 0) > 0:
                lowest, lowest_score = _lowest_slot(keys_ptr, scores_ptr, tags_ptr, base, full, oldest, BUCKET,
                                                    KEY_STRIDE, ROW_STRIDE, TILE)  # fmt: skip
                evicts = full & (lowest >= 0)
                victim = tl.load(keys_ptr + lowest * KEY_STRIDE, mask=evicts, other=0)
                tl.store(victims_ptr + k, victim, mask=evicts)
                tl.store(victims_ptr + num_ids.to(tl.int64) + k, lowest_score, mask=evicts)
                slot = tl.where(full, lowest, slot)
                outcome = tl.where(evicts, 2, outcome)
            placed = on & (slot >= 0)
            score = tl.load(score_values_ptr + table)
            if ACCUMULATE:
                score = tl.load(amounts_ptr + (-2 - tl.load(out_ptr + position, mask=on, other=-2)), mask=on, other=0)
            row = tl.load(rows_ptr + slot * ROW_STRIDE, mask=placed, other=-1)
            # Whoever still reads the victim's key or digest must be done before they change.
            tl.debug_barrier()
            tl.store(keys_ptr + slot * KEY_STRIDE, key, mask=placed)
            tl.store(digests_ptr + slot, digest_of(h), mask=placed)
            tl.store(scores_ptr + slot * KEY_STRIDE, score, mask=placed)
            tl.store(tags_ptr + slot * ROW_STRIDE, step, mask=placed)
            tl.store(out_ptr + position, row, mask=on)
            tl.store(leader_rows_ptr + k, row, mask=on)
            tl.store(outcomes_ptr + k, outcome, mask=on)
            # The next leader of the list reads digests and tags that other threads have just written.
            tl.debug_barrier()
            k = following
        q += tl.num_programs(0) * LISTS
