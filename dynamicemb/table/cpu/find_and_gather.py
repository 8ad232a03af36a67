"""Find ids and copy their rows: the sequence lookup of an evaluation."""

import torch

from dynamicemb.table.cpu.find import find
from dynamicemb.table.cpu.gather import gather
from dynamicemb.table.index import Index
from dynamicemb.table.rows import RowStore


def find_and_gather(
    index: Index,
    store: RowStore,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    missing_values: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Return what ``gather`` returns for the rows that ``find`` returns without touching; changes nothing."""
    return gather(store, find(index, ids, table_ranges, False), table_ranges, missing_values, output_dtype)
