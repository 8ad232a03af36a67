"""Look ids up; touch what is found; list what is missing."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import Index, Residents
from dynamicemb.table.scores import COUNT_NONE as NOTHING_COUNTS
from dynamicemb.table.scores import keeping
from dynamicemb.table.triton.constants import (
    CLAMPED,
    COUNT_ALL,
    COUNT_NONE,
    COUNT_SOME,
    HITS,
    MISSES,
    MISSING_LENGTH,
    NOW,
    NUM_TALLIES,
    OLDEST,
    SCORE_LFU,
    SCORE_NO_EVICTION,
    SEEN,
    STEP,
)
from dynamicemb.table.triton.counting import clamp_frequencies, count_by_table
from dynamicemb.table.triton.hashing import (
    bytes_equal,
    digest_of,
    group_of,
    home_bucket,
    lowest_byte,
    mix,
    table_of,
)
from dynamicemb.table.triton.launch import FULL_PROCESSOR, Argument, Launcher, cdiv, padded_tables
from dynamicemb.table.triton.missing import Missing, note

# On an H200, of 32 to 256 ids and 1 to 8 warps per program none is faster all round: 32 ids take 3 % less time where
# all are found, and 10 % more where some are missing.
_BLOCK = tl.constexpr(64)
_NUM_WARPS = 1


class _IndexShape(NamedTuple):
    """What of an index the kernel is compiled for.

    Attributes:
        bucket: slots of a bucket.
        counting: COUNT_*.
        keeping: some tables keep the score that an id was inserted with.
        stamps: touches are stamped with their time.
        expires: ids are forgotten.
    """

    bucket: int
    counting: int
    keeping: bool
    stamps: bool
    expires: bool


class _Wanted(NamedTuple):
    """What a caller wants of a find.

    Attributes:
        touch: scores, tags and tallies change.
        frequencies: occurrences count as often as they say.
        slots: the result is slots, not rows.
        list: missing occurrences are listed.
    """

    touch: bool
    frequencies: bool
    slots: bool
    list: bool


def find(
    index: Residents,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    touch: bool,
    frequencies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the row of every id, and touch what is found; see the CPU twin for what a touch is.

    Args:
        index: who is where; the whole index for a touch, and where ids expire.
        ids: i64 ``[N]``, the occurrences of one table after those of another.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        touch: whether scores, tags and the hit and miss tallies change.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once. Only tables that count read it.

    Returns:
        i32 ``[N]`` row ids, -1 where the id is not in its table.

    Host sync: none. Bytes moved per id: 8 id, 16 digests, 8 key, 4 row, 4 result; a touch adds 8 score and 4 tag.
    """
    return _find(index, ids, table_ranges, touch, frequencies)


def find_slots(index: Residents, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
    """Return i32 ``[N]``, the slot of every id, -1 where the id is not in its table."""
    return _find(index, ids, table_ranges, False, None, slots=True)


def find_and_list(
    index: Index, ids: torch.Tensor, table_ranges: torch.Tensor, frequencies: torch.Tensor | None, missing: Missing
) -> torch.Tensor:
    """Find and touch, and list the missing occurrences, whose rows are -1."""
    return _find(index, ids, table_ranges, True, frequencies, missing)


def _find(
    index: Residents,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    touch: bool,
    frequencies: torch.Tensor | None,
    missing: Missing | None = None,
    slots: bool = False,
) -> torch.Tensor:
    out = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    if ids.numel() == 0:
        return out
    wanted = (touch, frequencies is not None, slots, missing is not None)
    key = ("find", *wanted)
    launcher = index.prepared.get(key) or index.prepared.setdefault(key, _prepare(index, _Wanted(*wanted)))
    launcher(
        cdiv(ids.numel(), _BLOCK.value),
        (ids, table_ranges, out, ids if frequencies is None else frequencies,
         ids if missing is None else missing.entries(), out if missing is None else missing.lengths()),
        (ids.numel(),),
    )  # fmt: skip
    return out


def _prepare(index: Residents, wanted: _Wanted) -> Launcher:
    """Prepare launches for an index."""
    shape, touches = _touches_of(index)
    assert isinstance(index, Index) or not wanted.touch
    stays: tuple[Argument, ...] = (
        index.keys,
        index.digests,
        index.rows,
        index.moved,
        index.bucket_offsets,
        *touches,
        index.num_tables,
    )
    constants = {"INDEX": shape, "WANTED": wanted, "TABLES": padded_tables(index.num_tables)}
    device = index.keys.device
    return Launcher(device, _find_kernel, constants, stays, num_warps=_NUM_WARPS, maxnreg=FULL_PROCESSOR)


def _touches_of(index: Residents) -> tuple[_IndexShape, tuple[torch.Tensor, ...]]:
    """Return what the kernel is compiled for, and its tensors of touches: any where nobody touches."""
    if not isinstance(index, Index):
        return _IndexShape(index.bucket_capacity, NOTHING_COUNTS, False, False, False), (index.keys,) * 8
    tensors = (
        index.scores, index.tags, index.times(), index.score_values, index.strategies,
        index.ttls if index.expires else index.clock, index.clock, index.tallies,
    )  # fmt: skip
    counting, keeps = index.counting, keeping(index.strategy)
    return _IndexShape(index.bucket_capacity, counting, keeps, index.has_stamps, index.expires), tensors


@triton.jit
def probe(keys_ptr, digests_ptr, base, group, digest, ids, pending, NUM_GROUPS: tl.constexpr):
    """Return the slot of each id in its bucket, or -1; lanes that are not pending get -1.

    Example: bucket of 32 slots at base 64, start group 1, the id in slot 70: group 1 (slots 80..95) is full, so the
    walk wraps to group 0 (slots 64..79) and returns 70. Had group 1 an empty slot, it would have returned -1.

    The 16 digests of a group are two 64-bit words; keys are read only where a digest agrees.
    """
    slot = tl.full(ids.shape, -1, tl.int64)
    pattern = digest.to(tl.uint64) * 0x0101010101010101
    words_ptr = digests_ptr.to(tl.pointer_type(tl.uint64))
    walked = 0
    while (walked < NUM_GROUPS) & (tl.max(pending.to(tl.int32), 0) > 0):
        first = base + group * 16
        low = tl.load(words_ptr + first // 8, mask=pending, other=0)
        high = tl.load(words_ptr + first // 8 + 1, mask=pending, other=0)
        # Words that were not loaded are 0, which is no digest of an id.
        low_marks = bytes_equal(low, pattern)
        high_marks = bytes_equal(high, pattern)
        while tl.max(((low_marks | high_marks) != 0).to(tl.int32), 0) > 0:
            in_low = low_marks != 0
            marks = tl.where(in_low, low_marks, high_marks)
            place = first + lowest_byte(marks) + tl.where(in_low, 0, 8)
            key = tl.load(keys_ptr + place, mask=marks != 0, other=0)
            hit = (marks != 0) & (key == ids)
            slot = tl.where(hit, place, slot)
            rest = marks & (marks - 1)
            low_marks = tl.where(in_low & (hit == 0), rest, 0)
            high_marks = tl.where(hit, 0, tl.where(in_low, high_marks, rest))
        has_empty = (bytes_equal(low, 0) | bytes_equal(high, 0)) != 0
        pending = pending & (slot < 0) & (has_empty == 0)
        group = tl.where(group + 1 < NUM_GROUPS, group + 1, 0)
        walked += 1
    return slot


@triton.jit
def slots_of(keys_ptr, digests_ptr, bucket_offsets_ptr, ids, table, pending, BUCKET: tl.constexpr):
    """Return the slot of each id of each table, or -1; lanes that are not pending get -1."""
    h = mix(ids)
    base = home_bucket(bucket_offsets_ptr, table, h) * BUCKET
    return probe(keys_ptr, digests_ptr, base, group_of(h, BUCKET // 16), digest_of(h), ids, pending, BUCKET // 16)


@triton.jit
def expired(tags_ptr, stamps_ptr, ttls_ptr, clock_ptr, slot, table, occupied):
    """Return which occupied slots hold ids that are forgotten: untouched for longer than their table's time to live,
    also by the steps that are not over.

    Whatever touches the same slot meanwhile leaves both what it tags and what it stamps alive.
    """
    since = tl.load(clock_ptr + SEEN) - tl.load(ttls_ptr + table)
    old = tl.load(stamps_ptr + slot, mask=occupied, other=0) < since
    return old & (tl.load(tags_ptr + slot, mask=occupied, other=0) < tl.load(clock_ptr + OLDEST).to(tl.int32))


@triton.jit
def rows_of(rows_ptr, bucket_offsets_ptr, moved_ptr, slot, table, hit, BUCKET: tl.constexpr):
    """Return the rows (int32) of slots that were hit, -1 for other lanes.

    While no entry has moved, slot i of a table owns its row i, and nothing is read at random.
    """
    row = tl.full(slot.shape, -1, tl.int32)
    if tl.load(moved_ptr) == 0:
        first_slot = tl.load(bucket_offsets_ptr + table) * BUCKET
        first_row = tl.load(rows_ptr + first_slot, mask=hit, other=0)
        row = tl.where(hit, first_row + (slot - first_slot).to(tl.int32), -1)
    else:
        row = tl.load(rows_ptr + slot, mask=hit, other=-1)
    return row


@triton.jit
def touch(tags_ptr, scores_ptr, slot, hit, step, amount, score, counts, replaces, COUNTING: tl.constexpr):
    """Tag the slots that were hit with the step, and give them the score or, where it counts, add the amount to theirs.

    Scores that neither count nor are replaced stay.

    Returns which lanes tagged a slot.

    Most occurrences come too late to change anything, and reading the tag is cheaper than writing it again.
    """
    fresh = hit & (tl.load(tags_ptr + slot, mask=hit, other=0) != step)
    tl.store(tags_ptr + slot, step, mask=fresh)
    if COUNTING != COUNT_NONE:
        tl.atomic_add(scores_ptr + slot, amount, mask=hit & counts, sem="relaxed")
    if COUNTING != COUNT_ALL:
        tl.store(scores_ptr + slot, score, mask=fresh & replaces)
    return fresh


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _find_kernel(
    ids_ptr,
    table_ranges_ptr,
    out_ptr,
    frequencies_ptr,
    missing_ptr,
    lengths_ptr,
    num_ids,
    keys_ptr,
    digests_ptr,
    rows_ptr,
    moved_ptr,
    bucket_offsets_ptr,
    scores_ptr,
    tags_ptr,
    stamps_ptr,
    score_values_ptr,
    strategies_ptr,
    ttls_ptr,
    clock_ptr,
    tallies_ptr,
    num_tables,
    INDEX: tl.constexpr,
    WANTED: tl.constexpr,
    TABLES: tl.constexpr,
):
    begin = tl.program_id(0) * _BLOCK
    end = tl.minimum(begin + _BLOCK, num_ids)
    i = begin + tl.arange(0, _BLOCK)
    inside = i < num_ids
    ids = tl.load(ids_ptr + i, mask=inside, other=0)
    table = table_of(i, begin, end, table_ranges_ptr, num_tables, TABLES)
    slot = slots_of(keys_ptr, digests_ptr, bucket_offsets_ptr, ids, table, inside, INDEX.bucket)
    if INDEX.expires:
        found = inside & (slot >= 0)
        gone = expired(tags_ptr, stamps_ptr, ttls_ptr, clock_ptr, slot, table, found)
        slot = tl.where(found & gone, -1, slot)
    hit = inside & (slot >= 0)
    if WANTED.slots:
        row = slot.to(tl.int32)
    else:
        row = rows_of(rows_ptr, bucket_offsets_ptr, moved_ptr, slot, table, hit, INDEX.bucket)
    amount = tl.full([_BLOCK], 1, tl.int64)
    if WANTED.frequencies:
        amount, clamped = clamp_frequencies(tl.load(frequencies_ptr + i, mask=inside, other=1))
        if tl.max(clamped.to(tl.int32), 0) > 0:
            count_by_table(tallies_ptr + CLAMPED, table, clamped, NUM_TALLIES)
    if WANTED.touch:
        counts = tl.full([_BLOCK], INDEX.counting == COUNT_ALL, tl.int1)
        if INDEX.counting == COUNT_SOME:
            counts = tl.load(strategies_ptr + table) >= SCORE_LFU
        replaces = counts == 0
        if INDEX.keeping:
            replaces = replaces & (tl.load(strategies_ptr + table) != SCORE_NO_EVICTION)
        fresh = touch(tags_ptr, scores_ptr, slot, hit, tl.load(clock_ptr + STEP).to(tl.int32), amount,
                      tl.load(score_values_ptr + table), counts, replaces, INDEX.counting)  # fmt: skip
        if INDEX.stamps:
            tl.store(stamps_ptr + slot, tl.load(clock_ptr + NOW), mask=fresh)
        count_by_table(tallies_ptr + HITS, table, hit, NUM_TALLIES)
    miss = inside & (slot < 0)
    if tl.max(miss.to(tl.int32), 0) > 0:
        if WANTED.touch:
            count_by_table(tallies_ptr + MISSES, table, miss, NUM_TALLIES)
        if WANTED.list:
            note(i, table, miss, missing_ptr, lengths_ptr + MISSING_LENGTH)
    tl.store(out_ptr + i, row, mask=inside)
