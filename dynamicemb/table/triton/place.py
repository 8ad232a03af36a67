"""Give new ids slots and nothing else: their rows are about to be written."""

import torch

from dynamicemb.table.index import Index
from dynamicemb.table.triton.elect import elect
from dynamicemb.table.triton.insert import insert
from dynamicemb.table.triton.missing import Missing
from dynamicemb.table.triton.order import order
from dynamicemb.table.triton.revive import revive
from dynamicemb.table.triton.settle import settle


def place(index: Index, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
    """Insert ids that are not in the index; see the CPU twin.

    Host sync: none.
    """
    num_ids = ids.numel()
    rows = torch.full((num_ids,), -1, dtype=torch.int32, device=ids.device)
    if num_ids == 0:
        return rows
    missing = Missing.allocate(index, num_ids).filled()
    missing.note_all(table_ranges)
    elect(index, ids, rows, table_ranges, None, missing)
    if missing.ordered:
        order(index, ids, table_ranges, rows, missing)
    if index.expires:
        revive(index, rows, missing)
    insert(index, rows, missing)
    settle(index, table_ranges, rows, missing)
    return rows
