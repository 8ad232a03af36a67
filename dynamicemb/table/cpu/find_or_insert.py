"""A training lookup: find and touch, insert what is missing, fill the new rows."""

from dataclasses import dataclass
from typing import Any

import torch

from dynamicemb.table.admission import Newcomers
from dynamicemb.table.cpu.admit import admit
from dynamicemb.table.cpu.erase import erase
from dynamicemb.table.cpu.find import find
from dynamicemb.table.cpu.initialize import initialize
from dynamicemb.table.cpu.insert import insert
from dynamicemb.table.index import Index
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.results import InsertResult
from dynamicemb.table.stepping.staging import Staged


@dataclass(frozen=True)
class Inserted:
    """``InsertEvents`` of the CPU: the outcome is known at once."""

    outcome: InsertResult
    staged: Staged | None = None

    def result(self) -> InsertResult:
        """Return the outcome."""
        return self.outcome


def find_or_insert(
    index: Index,
    store: RowStore,
    newcomers: Newcomers,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    frequencies: torch.Tensor | None,
    scratch: Any = None,
) -> tuple[torch.Tensor, Inserted]:
    """Return the row of every id, placing and initialising those that are missing.

    Args:
        index: the group's index; the step must have begun.
        store: the group's rows.
        newcomers: what becomes of missing ids.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once.
        scratch: not needed here.

    Returns:
        ``(rows i32[N], events)``; rows are -1 where the bucket was full of protected ids, and where the id was not
        admitted.
    """
    rows = find(index, ids, table_ranges, True, frequencies)
    initializers, state_values = newcomers.initializers, newcomers.state_values
    verdict = None
    if newcomers.admission is not None:
        verdict = admit(index, store, newcomers, ids, table_ranges, rows, frequencies)
    if verdict is not None:
        frequencies = verdict.frequencies
        verdict.hide(rows)
    result = insert(index, ids, table_ranges, rows, frequencies)
    if result.new.numel():
        tables = torch.searchsorted(table_ranges, result.new, right=True).sub_(1).to(torch.int32)
        try:
            initialize(store, initializers, rows[result.new], ids[result.new], tables, state_values)
        except BaseException:
            # These rows still hold a victim's values, or nothing: nobody must find them.
            erase(index, ids[result.new], torch.searchsorted(result.new, table_ranges))
            raise
    return rows, Inserted(result, None if verdict is None else verdict.settle(rows))
