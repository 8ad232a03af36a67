"""Evaluation lookups: find the rows of ids, then copy or pool them."""

import torch

from dynamicemb.table.cpu.find import find
from dynamicemb.table.cpu.gather import gather
from dynamicemb.table.cpu.pool import pool
from dynamicemb.table.index import Index
from dynamicemb.table.layout import Bags
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


def find_and_pool(
    index: Index,
    store: RowStore,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    bags: Bags,
    missing_values: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Return what ``pool`` returns for the rows that ``find`` returns without touching; changes nothing."""
    rows = find(index, ids, table_ranges, False)
    return pool(store, rows, bags.offsets, bags.layout, bags.per_sample_weights, missing_values, output_dtype)
