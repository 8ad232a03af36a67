"""Which rows of a table may have changed since a dump."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dynamicemb.table.index import Index, Residents
from dynamicemb.table.layout import FIRST_DIGEST
from dynamicemb.table.stepping.tracker import StepTracker


@dataclass(frozen=True)
class Mark:
    """A dump that a table agreed with.

    Attributes:
        dump_id: names the dump.
        first_step: the first step of which the dump may have missed something: the oldest one outstanding then.
        time_shift: by how much the table's timestamps are later than the dump's, since a load moved them.
    """

    dump_id: str
    first_step: int
    time_shift: int


def next_change(steps: StepTracker) -> int:
    """Return the first step that may still change rows: the oldest outstanding one, or the next."""
    return min([*steps.outstanding(), steps.current + 1])


def touched_slots(index: Index, steps: StepTracker, table: int, slots: range, first_step: int = 0) -> torch.Tensor:
    """Return which of a table's slots hold ids that a step from ``first_step`` on touched; i64 ``[M]``, ascending.

    Ids that have expired by the time last observed are not there. Tags that were rebased since may be of any earlier
    step: then more is returned.
    """
    found = index.digests[slots.start : slots.stop] >= FIRST_DIGEST
    if first_step > 0:
        found &= index.tags[slots.start : slots.stop] >= steps.tag_of(first_step)
    touched = slots.start + found.nonzero().flatten()
    return touched[~index.expired(table, touched)] if index.expires else touched


def slot_ranges(index: Residents, table: int, size: int) -> Iterator[range]:
    """Yield the slots of a table, at most ``size`` at a time."""
    slots = index.slots_of(table)
    for first in range(slots.start, slots.stop, size):
        yield range(first, min(slots.stop, first + size))
