"""The missing ids of one lookup: one leader each, listed by bucket, so that every bucket has one owner.

Four steps that need no host. ``note``: ``find`` lists the missing occurrences. ``elect``: those of one id agree on a
place in a scratch hash table, one of them leads, and the leaders queue on the list of their bucket (or ``order`` lists
them, in batch order). ``settle``, after the insert: the others read what became of their leader. A hot new id thus
costs its bucket one entry, however often it occurs.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dynamicemb.dynamicemb_config import is_deterministic
from dynamicemb.table.index import EVICTED, EXPIRED, FAILED, INSERTED, NUM_COUNTERS, Index
from dynamicemb.table.scores import COUNT_NONE
from dynamicemb.table.triton.counting import clamp_frequencies, count_by_table
from dynamicemb.table.triton.hashing import bucket_of, mix, table_of
from dynamicemb.table.triton.launch import carve, cdiv, launch, padded_tables, persistent_grid, power_of_two

# A place of the scratch table is encoded as ``-2 - place`` in an int32, and there are up to four places per occurrence.
MAX_IDS = 2**29 - 1

# Outcomes of a leader: no slot, a free slot, the slot of a victim, that of an expired id (its own or another's).
FAILED_OUTCOME = 0
INSERTED_OUTCOME = 1
EVICTED_OUTCOME = 2
EXPIRED_OUTCOME = 3

# Entries of ``Missing.counts``, each one less than the number.
LEADER_COUNT = 0
LIST_COUNT = 1
MISSING_COUNT = 2

# Sorts after every list.
_LAST = tl.constexpr(2**31 - 1)

_LEADERS = tl.constexpr(LEADER_COUNT)
_LISTS = tl.constexpr(LIST_COUNT)
_MISSING = tl.constexpr(MISSING_COUNT)
_INSERTED = tl.constexpr(INSERTED)
_EVICTED = tl.constexpr(EVICTED)
_FAILED = tl.constexpr(FAILED)
_EXPIRED = tl.constexpr(EXPIRED)
_EVICTED_OUTCOME = tl.constexpr(EVICTED_OUTCOME)
_EXPIRED_OUTCOME = tl.constexpr(EXPIRED_OUTCOME)
_NUM_COUNTERS = tl.constexpr(NUM_COUNTERS)


class _Places(NamedTuple):
    """Where each part of the scratch memory begins, in words of 4 bytes, all multiples of 4; ``end`` is the size."""

    claims: int
    heads: int
    counts: int
    amounts: int
    leader_ids: int
    victim_ids: int
    victim_scores: int
    victim_stamps: int
    leader_tables: int
    leader_buckets: int
    positions: int
    next: int
    work: int
    leader_rows: int
    outcomes: int
    end: int


@functools.lru_cache(maxsize=64)
def _places(num_ids: int, num_claims: int, num_lists: int, counts: bool, stamps: bool) -> _Places:
    padded = (num_ids + 3) // 4 * 4
    sizes = [num_claims, num_lists, 4, 2 * num_claims if counts else 0, *[2 * padded] * 3]
    sizes += [2 * padded if stamps else 0, *[padded] * 7]
    return _Places(*itertools.accumulate(sizes, initial=0))


@dataclass(slots=True)
class Missing:
    """Scratch memory of one lookup; L leaders, of which the device alone knows the number.

    Nothing survives the call, so whatever stops one call cannot spoil the next. It is one allocation, and every part
    is what ``launch.carve`` returns: an address on a GPU.

    Attributes:
        scratch: i32, all of it. The first ``num_ones`` words must start at -1, those up to ``num_filled`` at 0.
        places: where the parts begin.
        num_ids: N.
        num_claims: a power of two >= 2N.
        num_lists: a power of two.
        ordered: leaders are the first occurrences of their ids and are placed in batch order.
        claims: i32 ``[num_claims]``, an occurrence of the id that owns the place, or -1.
        heads: i32 ``[num_lists]``, the last leader of each list, or -1. Bucket b is on list ``b % num_lists``: with
            more buckets than places for lists, several buckets share one list and its owner.
        counts: i32 ``[3]``: leaders, lists that are not empty, missing occurrences, each minus 1.
        amounts: i64 ``[num_claims]``, occurrences or frequencies of the place's id, where a table counts; else nothing.
        leader_ids: i64 ``[N]``, of which ``[L]`` count, like all that follow.
        victim_ids: i64 ``[N]``, who was evicted for the leader.
        victim_scores: i64 ``[N]``.
        victim_stamps: i64 ``[N]``, or nothing in a group without stamps.
        leader_tables: i32 ``[N]``.
        leader_buckets: i32 ``[N]``.
        positions: i32 ``[N]``, the leading occurrence.
        next: i32 ``[N]``, the leader pushed before on the same list, or -1.
        work: i32 ``[N]``, the lists that are not empty.
        leader_rows: i32 ``[N]``, the row the leader got, or -1.
        outcomes: i32 ``[N]``, FAILED_OUTCOME, INSERTED_OUTCOME, EVICTED_OUTCOME or EXPIRED_OUTCOME.
    """

    scratch: torch.Tensor
    places: _Places
    num_ids: int
    num_claims: int
    num_lists: int
    ordered: bool
    claims: Any
    heads: Any
    counts: Any
    amounts: Any
    leader_ids: Any
    victim_ids: Any
    victim_scores: Any
    victim_stamps: Any
    leader_tables: Any
    leader_buckets: Any
    positions: Any
    next: Any
    work: Any
    leader_rows: Any
    outcomes: Any

    @classmethod
    def allocate(cls, index: Index, num_ids: int, ordered: bool | None = None) -> "Missing":
        """Allocate for ``num_ids`` occurrences, about 70 bytes each; ``open_batch`` or ``filled`` fills it.

        Args:
            index: the group's index.
            num_ids: N.
            ordered: None asks ``is_deterministic()``.
        """
        assert num_ids <= MAX_IDS
        if ordered is None:
            ordered = is_deterministic()
        num_claims = max(4, power_of_two(2 * num_ids))
        num_lists = max(4, min(num_claims, power_of_two(index.num_slots // index.bucket_capacity)))
        counts = index.counting != COUNT_NONE
        places = _places(num_ids, num_claims, num_lists, counts, index.has_stamps)
        scratch = torch.empty(places.end, dtype=torch.int32, device=index.keys.device)
        num_stamps = num_ids if index.has_stamps else 0
        sizes = (num_claims, num_lists, 4, num_claims if counts else 0, *[num_ids] * 3, num_stamps, *[num_ids] * 7)
        parts = [
            carve(scratch, begin, size, dtype) for begin, size, dtype in zip(places, sizes, _PART_DTYPES, strict=False)
        ]
        return cls(scratch, places, num_ids, num_claims, num_lists, ordered, *parts)

    def filled(self) -> "Missing":
        """Fill what must be filled; for a lookup that did not begin with ``open_batch``."""
        self.scratch[: self.num_ones] = -1
        self.scratch[self.num_ones : self.num_filled] = 0
        return self

    @property
    def num_ones(self) -> int:
        """Words that start at -1: claims, heads, counts."""
        return self.places.amounts

    @property
    def num_filled(self) -> int:
        """Words that start at a given value."""
        return self.places.leader_ids

    def tensor(self, part: str, count: int) -> torch.Tensor:
        """Return the first entries of a part as a tensor."""
        dtype = _PART_DTYPES[_Places._fields.index(part)]
        begin = getattr(self.places, part)
        return self.scratch[begin : begin + count * (dtype.itemsize // 4)].view(dtype)

    def entries(self) -> Any:
        """Return where the missing occurrences are noted, i64 ``[N]``: before there are victims, in their place."""
        return self.victim_ids


_PART_DTYPES = (*[torch.int32] * 3, *[torch.int64] * 5, *[torch.int32] * 7)


def elect(
    index: Index, ids: torch.Tensor, rows: torch.Tensor, table_ranges: torch.Tensor, frequencies: torch.Tensor | None,
    missing: Missing,
) -> None:  # fmt: skip
    """Give the occurrences of each missing id one place and one leader; list the leaders, unless ``missing.ordered``.

    Args:
        index: the group's index.
        ids: i64 ``[N]``.
        rows: i32 ``[N]``; the entries of missing occurrences become ``-2 - place``.
        table_ranges: i64 ``[T+1]``.
        frequencies: i64 ``[N]`` or None; only tables that count read it.
        missing: the scratch memory, with the missing occurrences noted.

    Host sync: none; the grid is persistent. Bytes moved per missing occurrence: 8 entry, 8 id, 4 place, 4 row; per
    leader 28 for the lists.
    """
    block = 64
    args = (
        ids, table_ranges, index.bucket_offsets, ids if frequencies is None else frequencies, rows, missing.entries(),
        missing.claims, missing.heads, missing.counts, missing.leader_ids, missing.leader_tables,
        missing.leader_buckets, missing.positions, missing.next, missing.work, missing.amounts,
        missing.num_claims - 1, missing.num_lists - 1,
    )  # fmt: skip
    constants = {
        "COUNTS": index.counting != COUNT_NONE,
        "HAS_FREQUENCIES": frequencies is not None,
        "ORDERED": missing.ordered,
        "BLOCK": block,
    }
    launch(_elect_kernel, persistent_grid(ids.device, cdiv(ids.numel(), block)), args, constants, num_warps=1)


def order(index: Index, ids: torch.Tensor, table_ranges: torch.Tensor, rows: torch.Tensor, missing: Missing) -> None:
    """List the leaders, the first occurrences of their ids, bucket by bucket in batch order.

    Args:
        index: the group's index.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``.
        rows: i32 ``[N]`` from ``elect``.
        missing: the scratch memory; the lists are written.

    Example: ``ids = [9, 4, 9, 7]``, all missing, 4 in bucket 2, 7 and 9 in bucket 1: the keys are ``[1, 2, -, 1]``, the
    leaders in order are occurrences 0, 3, 1, and the lists are ``0 -> 1`` for bucket 1 and ``2`` for bucket 2.

    Host sync: none. A stable sort of N 32-bit keys, 0.12 ms for a million.
    """
    num_ids = ids.numel()
    keys = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    block = 256
    grid = (cdiv(num_ids, block),)
    num_tables = index.num_tables
    args = (
        ids, table_ranges, rows, missing.claims, index.bucket_offsets, keys, missing.num_lists - 1, num_ids,
        num_tables,
    )  # fmt: skip
    constants = {"TABLES": padded_tables(num_tables), "BLOCK": block}
    launch(_order_keys_kernel, grid, args, constants, num_warps=4)
    keys, positions = torch.sort(keys, stable=True)
    links = (
        ids, table_ranges, index.bucket_offsets, keys, positions, missing.heads, missing.counts, missing.leader_ids,
        missing.leader_tables, missing.leader_buckets, missing.positions, missing.next, missing.work, num_ids,
        num_tables,
    )  # fmt: skip
    launch(_link_kernel, grid, links, {"BLOCK": block}, num_warps=4)


def settle(index: Index, table_ranges: torch.Tensor, rows: torch.Tensor, missing: Missing) -> None:
    """Give every occurrence of a missing id the row of its leader; count what was inserted, evicted and failed.

    Args:
        index: the group's index; its counters change.
        table_ranges: i64 ``[T+1]``.
        rows: i32 ``[N]``, leaders' rows or -1, and ``-2 - place`` for all other occurrences of missing ids.
        missing: the scratch memory.

    Host sync: none. Bytes moved: 4 per occurrence, 12 more per occurrence of a missing id.
    """
    block = 1024
    args = (
        rows, missing.claims, missing.counts, missing.leader_tables, missing.outcomes, table_ranges, index.counters,
        rows.numel(), index.num_tables,
    )  # fmt: skip
    constants = {
        "EXPIRES": index.expires,
        "TABLES": padded_tables(index.num_tables),
        "BLOCK": block,
    }
    launch(_settle_kernel, (cdiv(rows.numel(), block),), args, constants, num_warps=4)


@triton.jit
def note(i, table, miss, missing_ptr, count_ptr):
    """Append the missing lanes to the missing occurrences: position in the low 32 bits, table in the high ones."""
    number = miss.to(tl.int32)
    at = tl.atomic_add(count_ptr, tl.sum(number, 0), sem="relaxed") + tl.cumsum(number, 0)
    tl.store(missing_ptr + at, (table.to(tl.int64) << 32) | i.to(tl.int64), mask=miss)


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


@triton.jit(do_not_specialize=["claims_mask", "lists_mask"])
def _elect_kernel(
    ids_ptr,
    table_ranges_ptr,
    bucket_offsets_ptr,
    frequencies_ptr,
    rows_ptr,
    missing_ptr,
    claims_ptr,
    heads_ptr,
    counts_ptr,
    leader_ids_ptr,
    leader_tables_ptr,
    leader_buckets_ptr,
    positions_ptr,
    next_ptr,
    work_ptr,
    amounts_ptr,
    claims_mask,
    lists_mask,
    COUNTS: tl.constexpr,
    HAS_FREQUENCIES: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_missing = tl.load(counts_ptr + _MISSING) + 1
    begin = tl.program_id(0) * BLOCK
    while begin < num_missing:
        m = begin + tl.arange(0, BLOCK)
        miss = m < num_missing
        entry = tl.load(missing_ptr + m, mask=miss, other=0)
        i = (entry & 0xFFFFFFFF).to(tl.int32)
        table = (entry >> 32).to(tl.int32)
        ids = tl.load(ids_ptr + i, mask=miss, other=0)
        h = mix(ids)
        place, leader = _claim(i, ids, h, table, miss, claims_ptr, ids_ptr, table_ranges_ptr, claims_mask, ORDERED)
        tl.store(rows_ptr + i, -2 - place, mask=miss)
        if COUNTS:
            amount = tl.full([BLOCK], 1, tl.int64)
            if HAS_FREQUENCIES:
                amount, _ = clamp_frequencies(tl.load(frequencies_ptr + i, mask=miss, other=1))
            tl.atomic_add(amounts_ptr + place, amount, mask=miss, sem="relaxed")
        leading = leader.to(tl.int32)
        number = tl.sum(leading, 0)
        if (not ORDERED) & (number > 0):
            first_bucket = tl.load(bucket_offsets_ptr + table)
            num_buckets = tl.load(bucket_offsets_ptr + table + 1) - first_bucket
            bucket = (first_bucket + bucket_of(h, num_buckets)).to(tl.int32)
            k = tl.atomic_add(counts_ptr + _LEADERS, number, sem="relaxed") + tl.cumsum(leading, 0)
            tl.store(leader_ids_ptr + k, ids, mask=leader)
            tl.store(leader_tables_ptr + k, table, mask=leader)
            tl.store(leader_buckets_ptr + k, bucket, mask=leader)
            tl.store(positions_ptr + k, i, mask=leader)
            before = tl.atomic_xchg(heads_ptr + (bucket & lists_mask), k, mask=leader, sem="relaxed")
            tl.store(next_ptr + k, before, mask=leader)
            begins = (leader & (before == -1)).to(tl.int32)
            lists = tl.sum(begins, 0)
            if lists > 0:
                w = tl.atomic_add(counts_ptr + _LISTS, lists, sem="relaxed") + tl.cumsum(begins, 0)
                tl.store(work_ptr + w, bucket & lists_mask, mask=begins > 0)
        begin += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["lists_mask", "num_ids", "num_tables"])
def _order_keys_kernel(
    ids_ptr,
    table_ranges_ptr,
    rows_ptr,
    claims_ptr,
    bucket_offsets_ptr,
    keys_ptr,
    lists_mask,
    num_ids,
    num_tables,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    inside = i < num_ids
    row = tl.load(rows_ptr + i, mask=inside, other=0)
    miss = row < -1
    leader = miss & (tl.load(claims_ptr + (-2 - row), mask=miss, other=-1) == i)
    table = table_of(i, begin, tl.minimum(begin + BLOCK, num_ids), table_ranges_ptr, num_tables, TABLES)
    first_bucket = tl.load(bucket_offsets_ptr + table)
    num_buckets = tl.load(bucket_offsets_ptr + table + 1) - first_bucket
    ids = tl.load(ids_ptr + i, mask=leader, other=0)
    bucket = first_bucket + bucket_of(mix(ids), num_buckets)
    tl.store(keys_ptr + i, tl.where(leader, (bucket & lists_mask).to(tl.int32), _LAST), mask=inside)


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _link_kernel(
    ids_ptr,
    table_ranges_ptr,
    bucket_offsets_ptr,
    keys_ptr,
    order_ptr,
    heads_ptr,
    counts_ptr,
    leader_ids_ptr,
    leader_tables_ptr,
    leader_buckets_ptr,
    positions_ptr,
    next_ptr,
    work_ptr,
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,
):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + k, mask=k < num_ids, other=_LAST)
    leader = key != _LAST
    number = tl.sum(leader.to(tl.int32), 0)
    if number > 0:
        position = tl.load(order_ptr + k, mask=leader, other=0)
        table = tl.zeros([BLOCK], tl.int32)
        for t in range(1, num_tables):
            table += (position >= tl.load(table_ranges_ptr + t)).to(tl.int32)
        ids = tl.load(ids_ptr + position, mask=leader, other=0)
        first_bucket = tl.load(bucket_offsets_ptr + table)
        bucket = first_bucket + bucket_of(mix(ids), tl.load(bucket_offsets_ptr + table + 1) - first_bucket)
        tl.store(leader_ids_ptr + k, ids, mask=leader)
        tl.store(leader_tables_ptr + k, table, mask=leader)
        tl.store(leader_buckets_ptr + k, bucket.to(tl.int32), mask=leader)
        tl.store(positions_ptr + k, position.to(tl.int32), mask=leader)
        following = tl.load(keys_ptr + k + 1, mask=leader & (k + 1 < num_ids), other=_LAST)
        tl.store(next_ptr + k, tl.where(following == key, k + 1, -1), mask=leader)
        before = tl.load(keys_ptr + k - 1, mask=leader & (k > 0), other=-1)
        begins = leader & (before != key)
        tl.store(heads_ptr + key, k, mask=begins)
        tl.atomic_add(counts_ptr, number, sem="relaxed")
        beginning = begins.to(tl.int32)
        lists = tl.sum(beginning, 0)
        if lists > 0:
            w = tl.atomic_add(counts_ptr + 1, lists, sem="relaxed") + tl.cumsum(beginning, 0)
            tl.store(work_ptr + w, key, mask=begins)


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _settle_kernel(
    rows_ptr,
    claims_ptr,
    counts_ptr,
    leader_tables_ptr,
    outcomes_ptr,
    table_ranges_ptr,
    counters_ptr,
    num_ids,
    num_tables,
    EXPIRES: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i, mask=i < num_ids, other=0)
    follower = row < -1
    # Only followers' entries are written here, and only leaders' entries are read through a claim.
    position = tl.load(claims_ptr + (-2 - row), mask=follower, other=0)
    settled = tl.load(rows_ptr + position, mask=follower, other=0)
    tl.store(rows_ptr + i, settled, mask=follower)
    failed = (tl.where(follower, settled, row) == -1) & (i < num_ids)
    if tl.max(failed.to(tl.int32), 0) > 0:
        table = table_of(i, begin, tl.minimum(begin + BLOCK, num_ids), table_ranges_ptr, num_tables, TABLES)
        count_by_table(counters_ptr + _FAILED, table, failed, _NUM_COUNTERS)
    # There are no more leaders than occurrences, so the same grid covers them.
    num_leaders = tl.load(counts_ptr) + 1
    if begin < num_leaders:
        table = tl.load(leader_tables_ptr + i, mask=i < num_leaders, other=0)
        outcome = tl.load(outcomes_ptr + i, mask=i < num_leaders, other=0)
        count_by_table(counters_ptr + _INSERTED, table, outcome > 0, _NUM_COUNTERS)
        count_by_table(counters_ptr + _EVICTED, table, outcome == _EVICTED_OUTCOME, _NUM_COUNTERS)
        if EXPIRES:
            count_by_table(counters_ptr + _EXPIRED, table, outcome == _EXPIRED_OUTCOME, _NUM_COUNTERS)
