"""Which rows of a table may have changed since a dump."""

from dataclasses import dataclass

import torch

from dynamicemb.table.index import Index
from dynamicemb.table.layout import FIRST_DIGEST
from dynamicemb.table.steps import StepTracker


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


def touched_slots(index: Index, steps: StepTracker, begin: int, end: int, first_step: int) -> torch.Tensor:
    """Return the occupied slots of ``begin..end`` that a step from ``first_step`` on touched; i64 ``[M]``, ascending.

    Tags that were rebased since may be of any earlier step: then more is returned.
    """
    found = index.digests[begin:end] >= FIRST_DIGEST
    if first_step > 0:
        found &= index.tags[begin:end] >= steps.tag_of(first_step)
    return begin + found.nonzero().flatten()
