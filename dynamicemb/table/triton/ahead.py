"""Group the occurrences of a lookup for its backward while the forward copies rows."""

import functools
import threading
from typing import NamedTuple

import torch

from dynamicemb.table.lookup import Lookup
from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.group import Groups, group_by_row

# Below, the second stream costs the host more than the GPU saves.
FEWEST_IDS = 65_536


class _Side(NamedTuple):
    """A stream beside the one that reads rows, and the events at which one waits for the other; a device has one."""

    stream: torch.cuda.Stream
    fork: torch.cuda.Event
    join: torch.cuda.Event
    lock: threading.Lock


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
    side = _side(lookup.rows.device)
    with side.lock:
        side.fork.record(torch.cuda.current_stream(lookup.rows.device))
        side.stream.wait_event(side.fork)
        with torch.cuda.stream(side.stream):
            groups = group_by_row(store, lookup)
            side.join.record(side.stream)
    return groups


def finish_grouping(groups: Groups | None) -> None:
    """Make the current stream wait for the grouping, and whatever follows with it."""
    if groups is not None:
        side = _side(groups.order.device)
        torch.cuda.current_stream(groups.order.device).wait_event(side.join)


@functools.cache
def _side(device: torch.device) -> _Side:
    # Of higher priority: the blocks of the kernel that reads rows would otherwise all be served first.
    return _Side(torch.cuda.Stream(device, priority=-1), torch.cuda.Event(), torch.cuda.Event(), threading.Lock())
