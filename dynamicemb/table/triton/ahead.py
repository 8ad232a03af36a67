"""Group the occurrences of a lookup for its backward while the forward copies rows."""

import functools

import torch

from dynamicemb.table.lookup import Lookup
from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.group import Groups, group_by_row

# Below, the events between two streams cost the host more than the GPU saves.
FEWEST_IDS = 65_536


def start_grouping(store: RowStore, lookup: Lookup) -> Groups | None:
    """Begin ``group_by_row`` on a stream of its own; call ``finish_grouping`` after the rows have been read.

    Sorting is bound by latency and reading rows by bandwidth, so together they take little longer than the longer one.

    Args:
        store: the rows.
        lookup: a lookup whose backward will come.

    Returns:
        What ``update`` takes as ``groups``; None for a lookup too small to gain.

    Concurrency: the second stream waits for all work queued so far, and what it allocates belongs to it. It is given
    new work only here, after such a wait, so memory that is freed and taken again is still ordered. Host sync: none;
    in a CUDA graph this is a fork, and ``finish_grouping`` the join.
    """
    if lookup.rows.numel() < FEWEST_IDS or not lookup.rows.is_cuda:
        return None
    side = _side_stream(lookup.rows.device)
    side.wait_stream(torch.cuda.current_stream(lookup.rows.device))
    with torch.cuda.stream(side):
        return group_by_row(store, lookup)


def finish_grouping(groups: Groups | None) -> None:
    """Make the current stream wait for the grouping, and whatever follows with it."""
    if groups is not None:
        device = groups.order.device
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
