"""Erase ids."""

import torch

from dynamicemb.table.index import ERASED, Index
from dynamicemb.table.layout import DIGEST_ERASED
from dynamicemb.table.triton.find import find_slots


def erase(index: Index, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
    """Remove ids; their slots keep their rows, and their tags protect them until the steps that touched them are over.

    Args:
        index: the group's index.
        ids: i64 ``[N]``, the ids of one table after those of another.
        table_ranges: i64 ``[T+1]``, the ids of each table.

    Returns:
        bool ``[N]``: whether this occurrence removed its id (of repeated ids, the first).

    Host sync: yes, to select. Not on the path of a training step.
    """
    slots, order = find_slots(index, ids, table_ranges).sort(stable=True)
    # Equal slots are neighbours now, in batch order.
    first = slots >= 0
    first[1:] &= slots[1:] != slots[:-1]
    erased = torch.zeros_like(first)
    erased[order] = first
    index.digests[slots[first].long()] = DIGEST_ERASED
    tables = torch.searchsorted(table_ranges, order[first], right=True) - 1
    index.tallies[:, ERASED] += torch.bincount(tables, minlength=index.num_tables)
    return erased
