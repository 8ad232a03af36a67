"""Give new ids slots and nothing else: their rows are about to be written."""

import torch

from dynamicemb.table.cpu.insert import insert
from dynamicemb.table.index import Index


def place(index: Index, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
    """Insert ids that are not in the index; their rows hold nothing yet, or a victim's values.

    Args:
        index: the group's index.
        ids: i64 ``[N]``, distinct in a table, and absent.
        table_ranges: i64 ``[T+1]``.

    Returns:
        i32 ``[N]``, their rows; -1 where the bucket is full of protected ids.
    """
    rows = torch.full((ids.numel(),), -1, dtype=torch.int32, device=ids.device)
    insert(index, ids, table_ranges, rows)
    return rows
