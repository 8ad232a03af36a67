"""A training lookup: find and touch, insert what is missing, fill the new rows."""

from typing import NamedTuple

import torch

from dynamicemb.table.admission import Newcomers
from dynamicemb.table.index import Index
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.results import EVICTED_OUTCOME, FAILED_OUTCOME, InsertResult
from dynamicemb.table.stepping.staging import Staged
from dynamicemb.table.triton.admit import admit
from dynamicemb.table.triton.elect import elect
from dynamicemb.table.triton.find import find_and_list
from dynamicemb.table.triton.initialize import initialize_leaders
from dynamicemb.table.triton.insert import insert
from dynamicemb.table.triton.insert_missing import insert_missing
from dynamicemb.table.triton.missing import Missing
from dynamicemb.table.triton.order import order
from dynamicemb.table.triton.revive import revive
from dynamicemb.table.triton.settle import settle


class Inserted(NamedTuple):
    """``InsertEvents`` of the GPU: the outcome of each leader, still on the device."""

    missing: Missing
    staged: Staged | None = None

    def result(self) -> InsertResult:
        """Return the outcome in batch order. Host sync: one, for the number of leaders, and those of the selections."""
        num_leaders = int(self.missing.tensor("lengths", 1)[0]) + 1
        parts = ("positions", "outcomes", "victim_ids", "victim_scores")
        positions, outcomes, victim_ids, victim_scores = (self.missing.tensor(part, num_leaders) for part in parts)
        positions, by_position = positions.long().sort()
        outcomes = outcomes[by_position]
        evicted = outcomes == EVICTED_OUTCOME
        victims = by_position[evicted]
        return InsertResult(
            positions[outcomes != FAILED_OUTCOME],
            positions[evicted],
            victim_ids[victims],
            victim_scores[victims],
            self.missing.tensor("victim_stamps", num_leaders)[victims] if self.missing.has_stamps else victim_ids[:0],
        )


def find_or_insert(
    index: Index,
    store: RowStore,
    newcomers: Newcomers,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    frequencies: torch.Tensor | None,
    scratch: Missing | None = None,
) -> tuple[torch.Tensor, Inserted]:
    """Return the row of every id, placing and initialising those that are missing.

    Args:
        index: the group's index; the step must have begun.
        store: the group's rows.
        newcomers: what becomes of missing ids.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once.
        scratch: of ``open_batch``; None allocates and fills it here. Its ``ordered`` says whether the ids of a bucket
            are placed in batch order, as on the CPU, so that the same ids get the same rows and, where a bucket cannot
            hold all, the same ids fail. Otherwise the order within a bucket is any; without failures it leaves the same
            ids and scores.

    Returns:
        ``(rows i32[N], events)``; rows are -1 where the bucket was full of protected ids, and where the id was not
        admitted. Not ordered, an event names any one of the occurrences of its id.

    Host sync: none; capturable in a CUDA graph. All scratch memory is per call (about 80 bytes per id, from torch's
    allocator), so a call that is cut short leaves nothing behind in the next one's way. Admission takes as much again,
    and a staged row per id.
    """
    missing = Missing.allocate(index, ids.numel()).filled() if scratch is None else scratch
    rows = find_and_list(index, ids, table_ranges, frequencies, missing)
    admission, staged = newcomers.admission, None
    is_plain = admission is None and not missing.ordered and not index.expires
    batch = (ids, table_ranges, frequencies, rows, missing)
    if ids.numel() > 0 and not (is_plain and insert_missing(index, store, newcomers, *batch)):
        if admission is not None and admission.needs_amounts:
            missing = missing.counting()
        elect(index, ids, rows, table_ranges, frequencies, missing, admission)
        rejected = None
        if admission is not None:
            rejected = admit(index, store, admission, ids, table_ranges, rows, missing)
        if missing.ordered:
            order(index, ids, table_ranges, rows, missing)
        if index.expires:
            revive(index, rows, missing)
        insert(index, rows, missing)
        initialize_leaders(store, newcomers.initializers, missing.leaders(), newcomers.state_values)
        if rejected is None:
            settle(index, table_ranges, rows, missing)
        else:
            # Before the user's code, which may raise: what was inserted must be counted.
            staged = rejected.settle(index, table_ranges, rows, missing)
            rejected.initialize(table_ranges, newcomers.state_values)
    return rows, Inserted(missing, staged)
