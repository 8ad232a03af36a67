"""Elect a leader among the occurrences of each missing id, and list the leaders by bucket."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.admission import Admission
from dynamicemb.table.index import Index
from dynamicemb.table.scores import COUNT_NONE
from dynamicemb.table.triton.constants import LEADERS_LENGTH, MISSING_LENGTH, WORK_LENGTH
from dynamicemb.table.triton.counting import clamp_frequencies
from dynamicemb.table.triton.hashing import home_bucket, mix
from dynamicemb.table.triton.launch import Launcher, cdiv
from dynamicemb.table.triton.missing import (
    LEADER_BUCKETS,
    LEADER_IDS,
    LEADER_TABLES,
    NEXT,
    POSITIONS,
    WORK,
    Missing,
    lengths_of,
    list_part,
    noted,
)

BLOCK = 64


def elect(
    index: Index, ids: torch.Tensor, rows: torch.Tensor, table_ranges: torch.Tensor, frequencies: torch.Tensor | None,
    missing: Missing, admission: Admission | None = None,
) -> None:  # fmt: skip
    """Give the occurrences of each missing id one place and one leader; list the leaders, unless ``missing.ordered``.

    Args:
        index: the group's index.
        ids: i64 ``[N]``.
        rows: i32 ``[N]``; the entries of missing occurrences become ``-2 - place``.
        table_ranges: i64 ``[T+1]``.
        frequencies: i64 ``[N]`` or None; only tables that count read it.
        missing: the scratch memory, with the missing occurrences noted.
        admission: if there is one, nobody is listed yet, and occurrences are summed where it needs that.

    Host sync: none; the grid is persistent. Bytes moved per missing occurrence: 8 entry, 8 id, 4 place, 4 row; per
    leader 28 for the lists.
    """
    counts = index.counting != COUNT_NONE or (admission is not None and admission.needs_amounts)
    is_listing = not missing.ordered and admission is None
    key = ("elect", counts, frequencies is not None, missing.ordered, is_listing)
    launcher = index.prepared.get(key) or index.prepared.setdefault(key, _prepare(index, *key[1:]))
    launcher(
        min(cdiv(ids.numel(), BLOCK), launcher.fill),
        (ids, table_ranges, ids if frequencies is None else frequencies, rows, missing.claims, missing.amounts,
         missing.lists),
        (missing.num_claims - 1, missing.num_lists, missing.stride),
    )  # fmt: skip


def _prepare(index: Index, counts: bool, has_frequencies: bool, ordered: bool, is_listing: bool) -> Launcher:
    """Prepare launches for an index."""
    constants = {
        "COUNTS": counts, "HAS_FREQUENCIES": has_frequencies, "ORDERED": ordered, "LIST": is_listing, "BLOCK": BLOCK
    }  # fmt: skip
    return Launcher(index.keys.device, _elect_kernel, constants, (index.bucket_offsets,), num_warps=1)


@triton.jit
def _claim(i, ids, h, table, pending, claims_ptr, ids_ptr, table_ranges_ptr, claims_mask, ORDERED: tl.constexpr):
    """Return the place of each pending lane's id in the scratch table, and whether the lane was first to take it.

    A place is won by compare-and-swap, or is found to hold another occurrence of the same id of the same table, or else
    the walk goes on; it ends because at most half of the places are taken. Ordered, a place ends up with the first
    occurrence of its id, whoever won it.
    """
    start = tl.load(table_ranges_ptr + table)
    end = tl.load(table_ranges_ptr + table + 1)
    # The same id in many tables must not make one cluster.
    scrambled = (h + table.to(tl.uint64)) * 0x9E3779B97F4A7C15
    place = (scrambled >> 33).to(tl.int32) & claims_mask
    leader = pending & (pending == 0)
    while tl.max(pending.to(tl.int32), 0) > 0:
        # atomic_cas takes no mask: lanes that are done expect a value that never stands there, so they only read.
        holder = tl.atomic_cas(claims_ptr + place, tl.where(pending, -1, -2), i, sem="relaxed")
        won = pending & (holder == -1)
        ours = pending & (holder >= start) & (holder < end)
        ours = ours & (tl.load(ids_ptr + holder, mask=ours, other=0) == ids)
        if ORDERED:
            tl.atomic_min(claims_ptr + place, i, mask=ours & (i < holder), sem="relaxed")
        leader = leader | won
        pending = pending & (won == 0) & (ours == 0)
        place = tl.where(pending, (place + 1) & claims_mask, place)
    return place, leader


@triton.jit
def push(leader, i, ids, h, table, bucket_offsets_ptr, lists_ptr, num_lists, stride):
    """Put leaders on the lists of their buckets.

    Args:
        leader: which lanes.
        i: int32, the leading occurrences.
        ids: their ids.
        h: uint64, mixed.
        table: int32, their tables.
        bucket_offsets_ptr: i64 ``[T+1]``, the buckets of the index that has the lists.
        lists_ptr: of ``Missing``.
        num_lists: of ``Missing``.
        stride: of ``Missing``.
    """
    lengths_ptr = lengths_of(lists_ptr, num_lists)
    leading = leader.to(tl.int32)
    number = tl.sum(leading, 0)
    if number > 0:
        bucket = home_bucket(bucket_offsets_ptr, table, h).to(tl.int32)
        k = tl.atomic_add(lengths_ptr + LEADERS_LENGTH, number, sem="relaxed") + tl.cumsum(leading, 0)
        tl.store(list_part(lists_ptr, num_lists, stride, LEADER_IDS) + k, ids, mask=leader)
        tl.store(list_part(lists_ptr, num_lists, stride, LEADER_TABLES) + k, table, mask=leader)
        tl.store(list_part(lists_ptr, num_lists, stride, LEADER_BUCKETS) + k, bucket, mask=leader)
        tl.store(list_part(lists_ptr, num_lists, stride, POSITIONS) + k, i, mask=leader)
        of_bucket = bucket & (num_lists - 1)
        before = tl.atomic_xchg(lists_ptr + of_bucket, k, mask=leader, sem="relaxed")
        tl.store(list_part(lists_ptr, num_lists, stride, NEXT) + k, before, mask=leader)
        begins = (leader & (before == -1)).to(tl.int32)
        lists_begun = tl.sum(begins, 0)
        if lists_begun > 0:
            w = tl.atomic_add(lengths_ptr + WORK_LENGTH, lists_begun, sem="relaxed") + tl.cumsum(begins, 0)
            tl.store(list_part(lists_ptr, num_lists, stride, WORK) + w, of_bucket, mask=begins > 0)


@triton.jit
def elect_missed(
    program, num_programs, num_missing, ids_ptr, table_ranges_ptr, frequencies_ptr, rows_ptr, claims_ptr, amounts_ptr,
    lists_ptr, claims_mask, num_lists, stride, bucket_offsets_ptr, COUNTS: tl.constexpr, HAS_FREQUENCIES: tl.constexpr,
    ORDERED: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elect leaders among the missing occurrences of which this program, one of ``num_programs``, takes a share."""
    begin = program * BLOCK
    while begin < num_missing:
        i, table, ids, miss = noted(begin, num_missing, lists_ptr, num_lists, stride, ids_ptr, BLOCK)
        h = mix(ids)
        place, leader = _claim(i, ids, h, table, miss, claims_ptr, ids_ptr, table_ranges_ptr, claims_mask, ORDERED)
        tl.store(rows_ptr + i, -2 - place, mask=miss)
        if COUNTS:
            amount = tl.full([BLOCK], 1, tl.int64)
            if HAS_FREQUENCIES:
                amount, _ = clamp_frequencies(tl.load(frequencies_ptr + i, mask=miss, other=1))
            tl.atomic_add(amounts_ptr + place, amount, mask=miss, sem="relaxed")
        if LIST:
            push(leader, i, ids, h, table, bucket_offsets_ptr, lists_ptr, num_lists, stride)
        begin += num_programs * BLOCK


@triton.jit(do_not_specialize=["claims_mask", "num_lists", "stride"])
def _elect_kernel(
    ids_ptr,
    table_ranges_ptr,
    frequencies_ptr,
    rows_ptr,
    claims_ptr,
    amounts_ptr,
    lists_ptr,
    claims_mask,
    num_lists,
    stride,
    bucket_offsets_ptr,
    COUNTS: tl.constexpr,
    HAS_FREQUENCIES: tl.constexpr,
    ORDERED: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_missing = tl.load(lengths_of(lists_ptr, num_lists) + MISSING_LENGTH) + 1
    elect_missed(
        tl.program_id(0), tl.num_programs(0), num_missing, ids_ptr, table_ranges_ptr, frequencies_ptr, rows_ptr,
        claims_ptr, amounts_ptr, lists_ptr, claims_mask, num_lists, stride, bucket_offsets_ptr, COUNTS,
        HAS_FREQUENCIES, ORDERED, LIST, BLOCK,
    )  # fmt: skip
