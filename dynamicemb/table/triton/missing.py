"""The missing ids of one lookup, and the scratch memory in which they are placed.

Every step of an insert is a file. ``note``, which is here and called by ``find``, lists the missing occurrences.
``elect`` gives the occurrences of one id one leader, and lists the leaders by bucket. ``order`` lists them in batch
order instead, where that is asked for. ``insert`` places them. ``settle`` gives the other occurrences what their leader
got. No step needs the host. A hot new id costs its bucket one entry, however often it occurs.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dynamicemb.dynamicemb_config import is_deterministic
from dynamicemb.table.index import Index
from dynamicemb.table.scores import COUNT_NONE
from dynamicemb.table.triton.launch import carve, power_of_two

# Kernels number words of scratch memory in 32 bits. The last part begins 17 words for each occurrence behind the first;
# what is filled is less.
MAX_IDS = (2**31 - 1) // 17

# Words of ``lengths``, each one less than the number.
LEADERS_LENGTH = 0
WORK_LENGTH = 1
MISSING_LENGTH = 2
LOSERS_LENGTH = 3
# Not a length: how many programs have arrived where all wait for each other. It has a cache line of its own: those that
# wait read it again and again, and must not hold up those that count.
ARRIVED = 32
_NUM_LENGTHS = 64

_LENGTHS = tl.constexpr(_NUM_LENGTHS)

# Parts of the lists after heads and lengths. A part begins at its number times ``Missing.stride``; those of 64-bit
# integers are two strides wide.
LEADER_IDS = tl.constexpr(0)
VICTIM_IDS = tl.constexpr(2)
VICTIM_SCORES = tl.constexpr(4)
LEADER_TABLES = tl.constexpr(6)
LEADER_BUCKETS = tl.constexpr(7)
POSITIONS = tl.constexpr(8)
NEXT = tl.constexpr(9)
WORK = tl.constexpr(10)
LEADER_ROWS = tl.constexpr(11)
OUTCOMES = tl.constexpr(12)
MISSED = tl.constexpr(13)
VICTIM_STAMPS = tl.constexpr(15)


# Words of all parts for each of ``Missing.stride``, without and with the last one.
_WORDS = VICTIM_STAMPS.value
_WORDS_WITH_STAMPS = _WORDS + 2
# The same by name, and what they hold.
_LISTED = {
    "leader_ids": (LEADER_IDS.value, torch.int64),
    "victim_ids": (VICTIM_IDS.value, torch.int64),
    "victim_scores": (VICTIM_SCORES.value, torch.int64),
    "leader_tables": (LEADER_TABLES.value, torch.int32),
    "leader_buckets": (LEADER_BUCKETS.value, torch.int32),
    "positions": (POSITIONS.value, torch.int32),
    "next": (NEXT.value, torch.int32),
    "work": (WORK.value, torch.int32),
    "leader_rows": (LEADER_ROWS.value, torch.int32),
    "outcomes": (OUTCOMES.value, torch.int32),
    "missed": (MISSED.value, torch.int64),
    "victim_stamps": (VICTIM_STAMPS.value, torch.int64),
}


class Leaders(NamedTuple):
    """Leaders of a lookup; every part is what ``launch.carve`` returns.

    Attributes:
        rows: i32 ``[L]``, the row that each got, or -1.
        ids: i64 ``[L]``.
        tables: i32 ``[L]``.
        lengths: i32 ``[64]``, of the lists.
        word: which of them is L minus 1.
        most: what L is at most.
    """

    rows: Any
    ids: Any
    tables: Any
    lengths: Any
    word: int
    most: int


@dataclass(slots=True)
class Missing:
    """Scratch memory of one lookup; L leaders, of which the device alone knows the number.

    Nothing survives the call, so whatever stops one call cannot spoil the next. It is one allocation. Kernels take
    ``claims``, ``amounts``, and the lists as ``lists_ptr, num_lists, stride``; ``list_part`` finds a part of the lists.

    - amounts, i64 ``[num_claims]``: occurrences or frequencies of the place's id, where a table counts; else nothing.
    - claims, i32 ``[num_claims]``: an occurrence of the id that owns the place, or -1.
    - heads, i32 ``[num_lists]``: the last leader of each list, or -1. Bucket b is on list ``b % num_lists``: with more
      buckets than places for lists, several buckets share one list and its owner.
    - lengths, i32 ``[64]``: leaders, lists that are not empty, missing occurrences, leaders that lost, programs that
      have arrived; each minus 1.
    - leader_ids, i64 ``[N]``, of which ``[L]`` count, like all that follow.
    - victim_ids, i64 ``[N]``: the id that was evicted for the leader.
    - victim_scores, i64 ``[N]``.
    - leader_tables, i32 ``[N]``.
    - leader_buckets, i32 ``[N]``.
    - positions, i32 ``[N]``: the leading occurrence.
    - next, i32 ``[N]``: the leader pushed before on the same list, or -1.
    - work, i32 ``[N]``: the lists that are not empty.
    - leader_rows, i32 ``[N]``: the row the leader got, or -1.
    - outcomes, i32 ``[N]``: FAILED_OUTCOME, INSERTED_OUTCOME, EVICTED_OUTCOME or EXPIRED_OUTCOME of ``results.py``.
    - missed, i64 ``[N]``: the missing occurrences, as ``note`` writes them.
    - victim_stamps, i64 ``[N]``, or nothing in a group without stamps.

    Attributes:
        scratch: i32, all of it. The first ``num_zeros`` words must start at 0, those up to ``num_filled`` at -1.
        base: its address on a GPU, else 0.
        num_ids: N.
        stride: N rounded up to a multiple of 4.
        num_claims: a power of two >= 2N.
        num_lists: a power of two.
        ordered: leaders are the first occurrences of their ids and are placed in batch order.
        has_stamps: the last part is there.
        num_zeros: words that start at 0: the amounts.
        num_filled: words that start at a given value: amounts, claims, heads, lengths. The other parts are behind them.
        claims: as ``launch.carve`` returns parts: an address on a GPU.
        amounts: likewise.
        lists: likewise, where heads and all that follows begin.
    """

    scratch: torch.Tensor
    base: int
    num_ids: int
    stride: int
    num_claims: int
    num_lists: int
    ordered: bool
    has_stamps: bool
    num_zeros: int
    num_filled: int
    claims: Any
    amounts: Any
    lists: Any

    @classmethod
    def allocate(cls, index: Index, num_ids: int, ordered: bool | None = None) -> "Missing":
        """Allocate for ``num_ids`` occurrences, about 80 bytes each; ``open_batch`` or ``filled`` fills it.

        Args:
            index: the group's index.
            num_ids: N.
            ordered: None asks ``is_deterministic()``.

        Raises:
            ValueError: more than MAX_IDS.
        """
        if num_ids > MAX_IDS:
            raise ValueError(f"indices: a lookup of {num_ids} ids is too large, the most are {MAX_IDS}; look up parts")
        if ordered is None:
            ordered = is_deterministic()
        num_claims = max(4, power_of_two(2 * num_ids))
        num_lists = _num_lists(index, num_claims)
        stride = (num_ids + 3) // 4 * 4
        has_stamps = index.has_stamps
        num_zeros = 0 if index.counting == COUNT_NONE else 2 * num_claims
        heads = num_zeros + num_claims
        num_filled = heads + num_lists + _NUM_LENGTHS
        end = num_filled + (_WORDS_WITH_STAMPS if has_stamps else _WORDS) * stride
        scratch = torch.empty(end, dtype=torch.int32, device=index.keys.device)
        if scratch.is_cuda:
            base = scratch.data_ptr()
            claims, amounts, lists = base + 4 * num_zeros, base, base + 4 * heads
        else:
            base = 0
            claims = carve(scratch, num_zeros, num_claims, torch.int32)
            amounts = carve(scratch, 0, num_zeros // 2, torch.int64)
            lists = carve(scratch, heads, end - heads, torch.int32)
        return cls(
            scratch, base, num_ids, stride, num_claims, num_lists, ordered, has_stamps, num_zeros, num_filled, claims,
            amounts, lists,
        )  # fmt: skip

    def beside(self, index: Index, num_more: int) -> "Missing":
        """Return lists for the same leaders by the buckets of another index, filled; claims and amounts are shared.

        Args:
            index: the other index.
            num_more: words of scratch memory behind all parts.
        """
        num_lists = _num_lists(index, self.num_claims)
        num_filled = num_lists + _NUM_LENGTHS
        end = num_filled + _WORDS * self.stride
        scratch = torch.empty(end + num_more, dtype=torch.int32, device=self.scratch.device)
        scratch[:num_filled] = -1
        lists = carve(scratch, 0, end, torch.int32)
        base = scratch.data_ptr() if scratch.is_cuda else 0
        beside = replace(self, scratch=scratch, base=base, num_lists=num_lists, lists=lists)
        beside.has_stamps, beside.num_zeros, beside.num_filled = False, 0, num_filled
        return beside

    def counting(self) -> "Missing":
        """Return the same with amounts, all 0, also where no table counts."""
        if self.num_zeros:
            return self
        amounts = torch.zeros(self.num_claims, dtype=torch.int64, device=self.scratch.device)
        return replace(self, amounts=amounts)

    def filled(self) -> "Missing":
        """Fill what must be filled; for a lookup that did not begin with ``open_batch``."""
        self.scratch[: self.num_zeros] = 0
        self.scratch[self.num_zeros : self.num_filled] = -1
        return self

    def note_all(self, table_ranges: torch.Tensor) -> None:
        """Note all N occurrences as missing.

        Args:
            table_ranges: i64 ``[T+1]``.
        """
        positions = torch.arange(self.num_ids, device=self.scratch.device)
        tables = torch.searchsorted(table_ranges, positions, right=True) - 1
        torch.add(tables << 32, positions, out=self.tensor("missed", self.num_ids))
        self.tensor("lengths", _NUM_LENGTHS)[MISSING_LENGTH] = self.num_ids - 1

    @property
    def end(self) -> int:
        """Words of all parts."""
        return self.num_filled + (_WORDS_WITH_STAMPS if self.has_stamps else _WORDS) * self.stride

    def tensor(self, part: str, count: int) -> torch.Tensor:
        """Return the first entries of a part as a tensor."""
        begin, dtype = self._begin(part)
        return self.scratch[begin : begin + count * (dtype.itemsize // 4)].view(dtype)

    def part(self, part: str) -> Any:
        """Return a part as kernels take it."""
        begin, dtype = self._begin(part)
        return carve(self.scratch, begin, _NUM_LENGTHS if part == "lengths" else self.stride, dtype)

    def _begin(self, part: str) -> tuple[int, torch.dtype]:
        """Return the first word of a part, and what it holds."""
        if part in _LISTED:
            number, dtype = _LISTED[part]
            return self.num_filled + number * self.stride, dtype
        if part == "lengths":
            return self.num_filled - _NUM_LENGTHS, torch.int32
        return (0, torch.int64) if part == "amounts" else (self.num_zeros, torch.int32)

    def entries(self) -> Any:
        """Return where the missing occurrences are noted, i64 ``[N]``."""
        return self.base + 4 * (self.num_filled + MISSED.value * self.stride) if self.base else self.part("missed")

    def lengths(self) -> Any:
        """Return the lengths of the lists."""
        return self.base + 4 * (self.num_filled - _NUM_LENGTHS) if self.base else self.part("lengths")

    def leaders(self) -> Leaders:
        """Return the leaders, for ``initialize_leaders``."""
        if self.base:
            first, width = self.base + 4 * self.num_filled, 4 * self.stride
            rows, ids = first + LEADER_ROWS.value * width, first + LEADER_IDS.value * width
            return Leaders(rows, ids, first + LEADER_TABLES.value * width, self.lengths(), LEADERS_LENGTH, self.num_ids)
        rows, ids, tables = self.part("leader_rows"), self.part("leader_ids"), self.part("leader_tables")
        return Leaders(rows, ids, tables, self.lengths(), LEADERS_LENGTH, self.num_ids)


def _num_lists(index: Index, num_claims: int) -> int:
    lists: int | None = index.prepared.get("lists")
    if lists is None:
        lists = index.prepared["lists"] = power_of_two(index.num_slots // index.bucket_capacity)
    return max(4, min(num_claims, lists))


@triton.jit
def lengths_of(lists_ptr, num_lists):
    """Return where the lengths of the lists begin."""
    return lists_ptr + num_lists


@triton.jit
def list_part(lists_ptr, num_lists, stride, PART: tl.constexpr):
    """Return where a part of the lists begins: i64 for ids and scores, else i32; of stamps, which are i64, too."""
    words_ptr = lists_ptr + tl.multiple_of(num_lists, 4) + _LENGTHS + PART * tl.multiple_of(stride, 4)
    if PART < LEADER_TABLES:
        return words_ptr.to(tl.pointer_type(tl.int64))
    else:
        return words_ptr


@triton.jit
def note(i, table, miss, missing_ptr, count_ptr):
    """Append the missing lanes to the missing occurrences: position in the low 32 bits, table in the high ones."""
    number = miss.to(tl.int32)
    at = tl.atomic_add(count_ptr, tl.sum(number, 0), sem="relaxed") + tl.cumsum(number, 0)
    tl.store(missing_ptr + at, (table.to(tl.int64) << 32) | i.to(tl.int64), mask=miss)


@triton.jit
def noted(begin, num_missing, lists_ptr, num_lists, stride, ids_ptr, BLOCK: tl.constexpr):
    """Return occurrence, table and id of missing entries from ``begin`` on, and which of them exist."""
    m = begin + tl.arange(0, BLOCK)
    miss = m < num_missing
    missed_ptr = list_part(lists_ptr, num_lists, stride, MISSED).to(tl.pointer_type(tl.int64))
    entry = tl.load(missed_ptr + m, mask=miss, other=0)
    i = (entry & 0xFFFFFFFF).to(tl.int32)
    return i, (entry >> 32).to(tl.int32), tl.load(ids_ptr + i, mask=miss, other=0), miss
