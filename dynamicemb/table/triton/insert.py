"""Place missing ids: every list of leaders has one owner, which gives them slots one after another."""

from typing import Any

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import Index
from dynamicemb.table.triton.constants import (
    COUNT_ALL,
    COUNT_SOME,
    EVICTED_OUTCOME,
    EXPIRED_OUTCOME,
    FAILED_OUTCOME,
    INSERTED_OUTCOME,
    NOW,
    OLDEST,
    SCORE_LFU,
    SEEN,
    STEP,
    WORK_LENGTH,
)
from dynamicemb.table.triton.hashing import digest_of, group_of, mix
from dynamicemb.table.triton.launch import Launcher, power_of_two
from dynamicemb.table.triton.missing import (
    LEADER_BUCKETS,
    LEADER_IDS,
    LEADER_ROWS,
    LEADER_TABLES,
    NEXT,
    OUTCOMES,
    POSITIONS,
    VICTIM_IDS,
    VICTIM_SCORES,
    VICTIM_STAMPS,
    WORK,
    Missing,
    lengths_of,
    list_part,
)
from dynamicemb.table.triton.philox import words_of
from dynamicemb.table.triton.score_function import compile_score, ranks

# A bucket of up to so many slots is held in registers while its leaders are placed: on an H200 that makes evictions
# 17 % faster than reading it again for each. A larger one is looked at so many slots at a time.
_TILE = 1024
_SLOTS_PER_WARP = 256


def insert(index: Index, rows: torch.Tensor, missing: Missing) -> None:
    """Give every listed leader a slot by the rule of the CPU twin, or let it fail.

    An id takes the first free slot in its probe order (empty, or erased or expired and not protected), else the slot
    with the lowest score among those whose tag is older than the oldest protected step (ties: smaller unsigned fmix64
    of the id), else it fails. What ``revive`` has placed stays. A list is walked in its order: the latest pushed first,
    or in batch order if ``missing.ordered``; without failures every order leaves the same ids.

    Args:
        index: the group's index.
        rows: i32 ``[N]``; the leaders' entries become their rows, or -1 where they failed.
        missing: the lists. Written: ``leader_rows``, ``outcomes``, ``victim_ids``, ``victim_scores``,
            ``victim_stamps``.

    Concurrency: a program owns the lists it takes, so all buckets on them; it reads back what it wrote itself after a
    barrier. Host sync: none; the grid is persistent and reads the number of lists from the device. Bytes moved: per
    bucket one for each slot, and 12 for each slot where the bucket is full or has erased slots; per leader 28 read and
    33 written, 24 more for a victim.
    """
    launcher = index.prepared.get("insert") or index.prepared.setdefault("insert", _prepare(index))
    launcher(
        max(1, min(rows.numel(), launcher.fill)),
        (rows, missing.amounts, missing.lists),
        (missing.num_lists, missing.stride),
    )


def _prepare(index: Index) -> Launcher:
    """Prepare launches for an index."""
    tile = tile_of(index)
    stays = (
        index.keys, index.digests, index.scores, index.rows, index.tags, index.score_values, index.strategies,
        index.times(), index.ttls if index.expires else index.clock, index.clock,
    )  # fmt: skip
    constants = {
        "BUCKET": index.bucket_capacity,
        "TILE": tile,
        "COUNTING": index.counting,
        "STAMPS": index.has_stamps,
        "EXPIRES": index.expires,
        "FUNCTION": None,
    }
    options: dict[str, Any] = {"num_warps": warps_of(index)}
    if index.score_function is not None:
        constants["FUNCTION"] = compile_score(index.score_function)
        # Products are rounded before they are added, as on the CPU.
        options["enable_fp_fusion"] = False
    return Launcher(index.keys.device, _insert_kernel, constants, stays, **options)


def tile_of(index: Index) -> int:
    """Return how many slots of a bucket a program looks at together."""
    return min(power_of_two(index.bucket_capacity), _TILE)


def warps_of(index: Index) -> int:
    """Return the warps of a program."""
    return max(1, min(4, tile_of(index) // _SLOTS_PER_WARP))


@triton.jit
def _first_free(digest, tag, order, oldest, BUCKET: tl.constexpr):
    """Return the lowest ``order`` of a slot that is empty, or erased and not protected; BUCKET if there is none.

    The first empty slot is itself a candidate, so an erased one is taken only in groups up to the first with an empty
    slot. Slots of expired ids have been read as erased.
    """
    free = (digest == 0) | ((digest == 1) & (tag < oldest))
    return tl.min(tl.where(free, order, BUCKET), 0)


@triton.jit
def _digests(digests_ptr, tags_ptr, stamps_ptr, place, mask, oldest, since, EXPIRES: tl.constexpr):
    """Read digests; slots that nobody has touched ``since``, and nothing protects, read as erased."""
    digest = tl.load(digests_ptr + place, mask=mask, other=2)
    if EXPIRES:
        old = tl.load(stamps_ptr + place, mask=mask, other=0) < since
        old = old & (tl.load(tags_ptr + place, mask=mask, other=0x7FFFFFFF) < oldest)
        digest = tl.where(old & (digest > 1), 1, digest).to(tl.uint8)
    return digest


@triton.jit
def _lowest(keys_ptr, score, tag, place, oldest, ALWAYS: tl.constexpr):
    """Return lane, score and mixed id of the unprotected slot of a tile with the lowest (score, fmix64(id)).

    The lane is the tile's size where all are protected. The mixed id is known where scores tie, or ALWAYS.

    Example: scores ``[5, 3, 3, 1]``, the last one protected: of the two 3s, the one whose id mixes to less.

    Minima of 64 bits are taken 32 bits at a time, for which a warp has an instruction.
    """
    SIZE: tl.constexpr = score.shape[0]
    lane = tl.arange(0, SIZE)
    low, high = words_of(score)
    tie = tag < oldest
    high_score = tl.min(tl.where(tie, high, 0xFFFFFFFF), 0)
    tie = tie & (high == high_score)
    low_score = tl.min(tl.where(tie, low, 0xFFFFFFFF), 0)
    tie = tie & (low == low_score)
    first = tl.min(tl.where(tie, lane, SIZE), 0)
    mixed = tl.full([], 0, tl.uint64)
    if ALWAYS | (tl.max(tl.where(tie, lane, -1), 0) > first):
        mixed_low, mixed_high = words_of(mix(tl.load(keys_ptr + place, mask=tie, other=0)))
        least_high = tl.min(tl.where(tie, mixed_high, 0xFFFFFFFF), 0)
        tie = tie & (mixed_high == least_high)
        least_low = tl.min(tl.where(tie, mixed_low, 0xFFFFFFFF), 0)
        # fmix64 is a bijection: only one slot is the lowest.
        first = tl.min(tl.where(tie & (mixed_low == least_low), lane, SIZE), 0)
        mixed = (least_high.to(tl.uint64) << 32) | least_low.to(tl.uint64)
    return first, (high_score.to(tl.int64) << 32) | low_score.to(tl.int64), mixed


@triton.jit
def _choose(
    keys_ptr, tags_ptr, scores_ptr, stamps_ptr, digest, tag, score, known, base, start, oldest, now,
    BUCKET: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """Choose a slot in a bucket that is held in registers.

    Returns:
        slot in the bucket, at least BUCKET if there is none; whether no slot is free; the id that must go then and its
        score; what is held now: tags, scores, whether they are known; whether they were needed.
    """
    lane = tl.arange(0, digest.shape[0])
    place = base + lane
    order = lane - start
    order = tl.where(lane < BUCKET, tl.where(order < 0, order + BUCKET, order), BUCKET)
    first = _first_free(digest, tag, order, oldest, BUCKET)
    crowded = tl.maximum(tl.max((digest == 1).to(tl.int32), 0), (first == BUCKET).to(tl.int32))
    if crowded > known:
        tl.debug_barrier()
        tag, score = _tags_and_scores(tags_ptr, scores_ptr, stamps_ptr, place, lane < BUCKET, now, FUNCTION)
        known = crowded
        first = _first_free(digest, tag, order, oldest, BUCKET)
    slot = _wrapped(start + first, BUCKET)
    victim = tl.full([], 0, tl.int64)
    victim_score = tl.full([], 0, tl.int64)
    if first == BUCKET:
        slot, victim_score, _ = _lowest(keys_ptr, score, tag, place, oldest, False)
        victim = tl.load(keys_ptr + base + slot, mask=slot < BUCKET, other=0)
    return slot, first == BUCKET, victim, victim_score, tag, score, known, crowded


@triton.jit
def _choose_in_large(
    keys_ptr, digests_ptr, tags_ptr, scores_ptr, stamps_ptr, base, start, oldest, since, now, BUCKET: tl.constexpr,
    TILE: tl.constexpr, EXPIRES: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """Choose a slot in a bucket that is larger than a tile; returns the first four results of ``_choose``."""
    first = tl.full([], BUCKET, tl.int32)
    begin = 0
    while (begin < BUCKET) & (first == BUCKET):
        order = begin + tl.arange(0, TILE)
        place = base + _wrapped(start + order, BUCKET)
        digest = _digests(digests_ptr, tags_ptr, stamps_ptr, place, order < BUCKET, oldest, since, EXPIRES)
        tag = tl.load(tags_ptr + place, mask=digest == 1, other=0)
        first = _first_free(digest, tag, order, oldest, BUCKET)
        begin += TILE
    slot = _wrapped(start + first, BUCKET)
    victim = tl.full([], 0, tl.int64)
    score = tl.full([], 0, tl.int64)
    if first == BUCKET:
        slot, score = _lowest_in_large(
            keys_ptr, scores_ptr, tags_ptr, stamps_ptr, base, oldest, now, BUCKET, TILE, FUNCTION
        )
        victim = tl.load(keys_ptr + base + slot, mask=slot < BUCKET, other=0)
    return slot, first == BUCKET, victim, score


@triton.jit
def _choose_slot(
    keys_ptr, digests_ptr, tags_ptr, scores_ptr, stamps_ptr, digest, tag, score, known, crowded, base, start, oldest,
    since, now, BUCKET: tl.constexpr, TILE: tl.constexpr, EXPIRES: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """Choose a slot; returns what ``_choose`` does, of which the last four are as they were for a large bucket."""
    if TILE >= BUCKET:
        slot, full, victim, victim_score, tag, score, known, crowded = _choose(
            keys_ptr, tags_ptr, scores_ptr, stamps_ptr, digest, tag, score, known, base, start, oldest, now, BUCKET,
            FUNCTION
        )  # fmt: skip
    else:
        slot, full, victim, victim_score = _choose_in_large(
            keys_ptr, digests_ptr, tags_ptr, scores_ptr, stamps_ptr, base, start, oldest, since, now, BUCKET, TILE,
            EXPIRES, FUNCTION,
        )  # fmt: skip
    if FUNCTION is not None:
        # What is known of the victim is its rank.
        victim_score = tl.load(scores_ptr + base + slot, mask=slot < BUCKET, other=0)
    return slot, full, victim, victim_score, tag, score, known, crowded


@triton.jit
def _wrapped(place, BUCKET: tl.constexpr):
    """Return places in a bucket, counted round its end."""
    return tl.where(place >= BUCKET, place - BUCKET, place)


@triton.jit
def _lowest_in_large(
    keys_ptr, scores_ptr, tags_ptr, stamps_ptr, base, oldest, now, BUCKET: tl.constexpr, TILE: tl.constexpr,
    FUNCTION: tl.constexpr,
):  # fmt: skip
    """Return the slot in its bucket and the score ``_lowest`` asks for; slot BUCKET if all are protected."""
    slot = tl.full([], BUCKET, tl.int32)
    slot_score = tl.full([], 0, tl.uint64)
    slot_mixed = tl.full([], 0, tl.uint64)
    for begin in range(0, BUCKET, TILE):
        lane = begin + tl.arange(0, TILE)
        tag, score = _tags_and_scores(tags_ptr, scores_ptr, stamps_ptr, base + lane, lane < BUCKET, now, FUNCTION)
        first, low, mixed = _lowest(keys_ptr, score, tag, base + lane, oldest, True)
        # Ranks order as unsigned integers; scores are not negative.
        low = low.to(tl.uint64, bitcast=True)
        better = (low < slot_score) | ((low == slot_score) & (mixed < slot_mixed))
        better = (first < TILE) & ((slot == BUCKET) | better)
        slot = tl.where(better, begin + first, slot)
        slot_score = tl.where(better, low, slot_score)
        slot_mixed = tl.where(better, mixed, slot_mixed)
    return slot, slot_score.to(tl.int64, bitcast=True)


@triton.jit
def _tags_and_scores(tags_ptr, scores_ptr, stamps_ptr, place, mask, now, FUNCTION: tl.constexpr):
    """Read tags and scores, or with a score function their ranks; what is masked reads as protected."""
    tag = tl.load(tags_ptr + place, mask=mask, other=0x7FFFFFFF)
    score = tl.load(scores_ptr + place, mask=mask, other=0)
    if FUNCTION is not None:
        score = ranks(tl.load(stamps_ptr + place, mask=mask, other=0), score, now, FUNCTION)
    return tag, score


@triton.jit
def _head(lists_ptr, lists_in_all, stride, q, num_lists):
    """Return the first leader of list ``q`` of the work, or -1 after the last list."""
    work_ptr = list_part(lists_ptr, lists_in_all, stride, WORK)
    return tl.load(lists_ptr + tl.load(work_ptr + q, mask=q < num_lists, other=0), mask=q < num_lists, other=-1)


@triton.jit
def _leader(lists_ptr, lists_in_all, stride, k):
    """Return id, bucket and successor of a leader; -1 for no leader and no successor."""
    return (
        tl.load(list_part(lists_ptr, lists_in_all, stride, LEADER_IDS) + k, mask=k >= 0, other=0),
        tl.load(list_part(lists_ptr, lists_in_all, stride, LEADER_BUCKETS) + k, mask=k >= 0, other=-1),
        tl.load(list_part(lists_ptr, lists_in_all, stride, NEXT) + k, mask=k >= 0, other=-1),
    )


@triton.jit
def _events(lists_ptr, lists_in_all, stride, k):
    """Return where the victim's id, score and stamp of a leader go, and the leader's outcome."""
    return (
        list_part(lists_ptr, lists_in_all, stride, VICTIM_IDS) + k,
        list_part(lists_ptr, lists_in_all, stride, VICTIM_SCORES) + k,
        list_part(lists_ptr, lists_in_all, stride, VICTIM_STAMPS).to(tl.pointer_type(tl.int64)) + k,
        list_part(lists_ptr, lists_in_all, stride, OUTCOMES) + k,
    )


@triton.jit
def _occupy(keys_ptr, digests_ptr, scores_ptr, tags_ptr, slot, key, digest, score, tag, placed):
    """Write a slot."""
    # Threads that still read the bucket must be done before it changes.
    tl.debug_barrier()
    tl.store(keys_ptr + slot, key, mask=placed)
    tl.store(digests_ptr + slot, digest, mask=placed)
    tl.store(scores_ptr + slot, score, mask=placed)
    tl.store(tags_ptr + slot, tag, mask=placed)


@triton.jit
def _first_score(score_values_ptr, strategies_ptr, amounts_ptr, table, entry_ptr, COUNTING: tl.constexpr):
    """Return the score of a new id: the table's, or the sum of its occurrences, at the place that its entry names."""
    score = tl.load(score_values_ptr + table)
    if COUNTING == COUNT_ALL:
        score = tl.load(amounts_ptr + (-2 - tl.load(entry_ptr)))
    if COUNTING == COUNT_SOME:
        counts = tl.load(strategies_ptr + table) >= SCORE_LFU
        amount = tl.load(amounts_ptr + (-2 - tl.load(entry_ptr)), mask=counts, other=0)
        score = tl.where(counts, amount, score)
    return score


@triton.jit
def _stamp(stamp_ptr, victim_stamp_ptr, now, placed, full):
    """Stamp a slot, and keep the stamp of the id that must go."""
    tl.store(victim_stamp_ptr, tl.load(stamp_ptr, mask=placed & full, other=0), mask=placed & full)
    # All threads have read before one of them writes.
    tl.debug_barrier()
    tl.store(stamp_ptr, now, mask=placed)


@triton.jit
def _take(
    arrays, events, slot, entry, victim, victim_score, placed, full, STAMPS: tl.constexpr, EXPIRES: tl.constexpr
):  # fmt: skip
    """Give a leader that is placed its slot; note the outcome, and the victim where no slot was free.

    ``arrays`` are those of the index, ``events`` where the victim's id, score and stamp and the outcome go, ``entry``
    the leader's id, digest, score, tag and stamp.
    """
    keys_ptr, digests_ptr, scores_ptr, tags_ptr, stamps_ptr = arrays
    key, digest, score, tag, now = entry
    tl.store(events[0], victim, mask=placed & full)
    tl.store(events[1], victim_score, mask=placed & full)
    outcome = tl.where(placed, tl.where(full, EVICTED_OUTCOME, INSERTED_OUTCOME), FAILED_OUTCOME)
    if EXPIRES:
        before = tl.load(digests_ptr + slot, mask=placed, other=0)
        outcome = tl.where((outcome == INSERTED_OUTCOME) & (before > 1), EXPIRED_OUTCOME, outcome)
    tl.store(events[3], outcome)
    if STAMPS:
        _stamp(stamps_ptr + slot, events[2], now, placed, full)
    _occupy(keys_ptr, digests_ptr, scores_ptr, tags_ptr, slot, key, digest, score, tag, placed)


@triton.jit
def insert_leaders(
    program, num_programs, out_ptr, amounts_ptr, lists_ptr, lists_in_all, stride, keys_ptr, digests_ptr, scores_ptr,
    rows_ptr, tags_ptr, score_values_ptr, strategies_ptr, stamps_ptr, ttls_ptr, clock_ptr, BUCKET: tl.constexpr,
    TILE: tl.constexpr, COUNTING: tl.constexpr, STAMPS: tl.constexpr, EXPIRES: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """Place the leaders of the lists that this program, one of ``num_programs``, owns."""
    leader_rows_ptr = list_part(lists_ptr, lists_in_all, stride, LEADER_ROWS)
    step, oldest = tl.load(clock_ptr + STEP).to(tl.int32), tl.load(clock_ptr + OLDEST).to(tl.int32)
    now, since = tl.load(clock_ptr + NOW), tl.full([], 0, tl.int64)
    num_lists = tl.load(lengths_of(lists_ptr, lists_in_all) + WORK_LENGTH) + 1
    lane = tl.arange(0, TILE)
    # The first leader of the next list, and what is needed of the next leader, are under way early.
    q = program
    k = _head(lists_ptr, lists_in_all, stride, q, num_lists)
    upcoming = _head(lists_ptr, lists_in_all, stride, q + num_programs, num_lists)
    key, bucket, following = _leader(lists_ptr, lists_in_all, stride, k)
    # The bucket in registers: its digests, and its tags and scores where they are known.
    held = tl.full([], -1, tl.int32)
    digest = tl.full([TILE], 2, tl.uint8)
    tag = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    score = tl.full([TILE], 0, tl.int64)
    known, crowded = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    while k >= 0:
        h = mix(key)
        start = group_of(h, BUCKET // 16).to(tl.int32) * 16
        base = bucket.to(tl.int64) * BUCKET
        table = tl.load(list_part(lists_ptr, lists_in_all, stride, LEADER_TABLES) + k)
        wanted = True
        if EXPIRES:
            since = tl.load(clock_ptr + SEEN) - tl.load(ttls_ptr + table)
            wanted = tl.load(leader_rows_ptr + k) < 0
        # What this program wrote to the bucket before is there to be read.
        tl.debug_barrier()
        if (TILE >= BUCKET) & (bucket != held):
            place = base + lane
            digest = _digests(digests_ptr, tags_ptr, stamps_ptr, place, lane < BUCKET, oldest, since, EXPIRES)
            # Full buckets come together: where the last one needed tags and scores, this one is taken to do so too.
            tag, score = _tags_and_scores(
                tags_ptr, scores_ptr, stamps_ptr, place, lane < crowded * BUCKET, now, FUNCTION
            )
            known, held = crowded, bucket
        ends = following < 0
        successor = tl.where(ends, upcoming, following)
        next_key, next_bucket, next_following = _leader(lists_ptr, lists_in_all, stride, successor)
        if ends:
            q += num_programs
            upcoming = _head(lists_ptr, lists_in_all, stride, q + num_programs, num_lists)
        entry_ptr = out_ptr + tl.load(list_part(lists_ptr, lists_in_all, stride, POSITIONS) + k)
        if wanted:
            slot, full, victim, victim_score, tag, score, known, crowded = _choose_slot(
                keys_ptr, digests_ptr, tags_ptr, scores_ptr, stamps_ptr, digest, tag, score, known, crowded, base,
                start, oldest, since, now, BUCKET, TILE, EXPIRES, FUNCTION,
            )  # fmt: skip
            placed = slot < BUCKET
            new_score = _first_score(score_values_ptr, strategies_ptr, amounts_ptr, table, entry_ptr, COUNTING)
            events = _events(lists_ptr, lists_in_all, stride, k)
            arrays = (keys_ptr, digests_ptr, scores_ptr, tags_ptr, stamps_ptr)
            entry = (key, digest_of(h), new_score, step, now)
            _take(arrays, events, base + slot, entry, victim, victim_score, placed, full, STAMPS, EXPIRES)
            row = tl.load(rows_ptr + base + slot, mask=placed, other=-1)
            mine = placed & (lane == slot)
            digest = tl.where(mine, digest_of(h), digest)
            tag = tl.where(mine, step, tag)
            tl.store(entry_ptr, row)
            tl.store(leader_rows_ptr + k, row)
        k, key, bucket, following = successor, next_key, next_bucket, next_following


@triton.jit(do_not_specialize=["lists_in_all", "stride"])
def _insert_kernel(
    out_ptr,
    amounts_ptr,
    lists_ptr,
    lists_in_all,
    stride,
    keys_ptr,
    digests_ptr,
    scores_ptr,
    rows_ptr,
    tags_ptr,
    score_values_ptr,
    strategies_ptr,
    stamps_ptr,
    ttls_ptr,
    clock_ptr,
    BUCKET: tl.constexpr,
    TILE: tl.constexpr,
    COUNTING: tl.constexpr,
    STAMPS: tl.constexpr,
    EXPIRES: tl.constexpr,
    FUNCTION: tl.constexpr,
):
    insert_leaders(
        tl.program_id(0), tl.num_programs(0), out_ptr, amounts_ptr, lists_ptr, lists_in_all, stride, keys_ptr,
        digests_ptr, scores_ptr, rows_ptr, tags_ptr, score_values_ptr, strategies_ptr, stamps_ptr, ttls_ptr, clock_ptr,
        BUCKET, TILE, COUNTING, STAMPS, EXPIRES, FUNCTION,
    )  # fmt: skip
