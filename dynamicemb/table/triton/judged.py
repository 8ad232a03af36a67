"""What admission decided about the missing ids of one lookup, and the scratch memory in which it decides."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import Index
from dynamicemb.table.triton.missing import (
    LOSERS_LENGTH,
    NEXT,
    VICTIM_IDS,
    VICTIM_STAMPS,
    WORK,
    Leaders,
    Missing,
    noted,
)

# Parts behind the lists, which have no victims' stamps.
LOST = VICTIM_STAMPS
SLOTS = tl.constexpr(VICTIM_STAMPS.value + 1)
_NUM_PARTS = 2

# The losers stand in the place of parts that have served by then.
LOSER_ROWS = NEXT
LOSER_IDS = VICTIM_IDS
LOSER_TABLES = WORK


@dataclass(slots=True)
class Judged:
    """Lists of the leaders by the buckets of the counter, and what was decided about each.

    Attributes:
        lists: the lists. Behind them are two parts that belong to leading occurrences: ``LOST``, i32 ``[N]``, 1 where
            the id lost and 0 where it won; and ``SLOTS``, i32 ``[N]``, ``-2 - place`` for leaders that the counter does
            not know and shall, then their slots.
    """

    lists: Missing

    @classmethod
    def allocate(cls, missing: Missing, index: Index) -> "Judged":
        """Allocate for the leaders of a lookup.

        Args:
            missing: of the lookup.
            index: the counter; the group's index where nobody counts.
        """
        return cls(missing.beside(index, _NUM_PARTS * missing.stride))

    def lost(self) -> torch.Tensor:
        """Return ``LOST``."""
        end = self.lists.end
        return self.lists.scratch[end : end + self.lists.num_ids]

    def slots(self) -> torch.Tensor:
        """Return ``SLOTS``."""
        begin = self.lists.end + self.lists.stride
        return self.lists.scratch[begin : begin + self.lists.num_ids]

    def losers(self) -> Leaders:
        """Return the leaders that lost, with their staged rows."""
        lists = self.lists
        rows, ids, tables = lists.part("next"), lists.part("victim_ids"), lists.part("work")
        return Leaders(rows, ids, tables, lists.lengths(), LOSERS_LENGTH, lists.num_ids)


@triton.jit
def leaders_of(
    begin, num_missing, ids_ptr, rows_ptr, claims_ptr, lists_ptr, num_lists, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Return occurrence, table, id, place and leading occurrence of missing entries, and which of them exist."""
    i, table, ids, miss = noted(begin, num_missing, lists_ptr, num_lists, stride, ids_ptr, BLOCK)
    place = -2 - tl.load(rows_ptr + i, mask=miss, other=-2)
    leader = tl.load(claims_ptr + place, mask=miss, other=-1)
    return i, table, ids, place, leader, miss
