"""A training lookup: find and touch, insert what is missing, fill the new rows."""

from dataclasses import dataclass

import torch

from dynamicemb.table.cpu.erase import erase
from dynamicemb.table.cpu.find import find
from dynamicemb.table.cpu.initialize import initialize
from dynamicemb.table.cpu.insert import insert
from dynamicemb.table.index import Index
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.results import InsertResult
from dynamicemb.table.rows import RowStore


@dataclass(frozen=True)
class Inserted:
    """``InsertEvents`` of the CPU: the outcome is known at once."""

    outcome: InsertResult

    def result(self) -> InsertResult:
        """Return the outcome."""
        return self.outcome


def find_or_insert(
    index: Index,
    store: RowStore,
    initializers: InitializerTable,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    frequencies: torch.Tensor | None,
    state_values: torch.Tensor,
) -> tuple[torch.Tensor, Inserted]:
    """Return the row of every id, placing and initialising those that are missing.

    Args:
        index: the group's index; the step must have begun.
        store: the group's rows.
        initializers: how new rows are filled.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once.
        state_values: f32 ``[T]``, what optimizer state starts at.

    Returns:
        ``(rows i32[N], events)``; rows are -1 where the bucket was full of protected ids.
    """
    rows = find(index, ids, table_ranges, True, frequencies)
    result = insert(index, ids, table_ranges, rows, frequencies)
    if result.new.numel():
        tables = torch.searchsorted(table_ranges, result.new, right=True).sub_(1).to(torch.int32)
        try:
            initialize(store, initializers, rows[result.new], ids[result.new], tables, state_values)
        except BaseException:
            # These rows still hold a victim's values, or nothing: nobody must find them.
            erase(index, ids[result.new], torch.searchsorted(result.new, table_ranges))
            raise
    return rows, Inserted(result)
