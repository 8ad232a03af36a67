"""Find ids and copy their rows: the sequence lookup of an evaluation."""

import torch

from dynamicemb.table.cpu.find import find
from dynamicemb.table.cpu.gather import gather
from dynamicemb.table.index import Residents
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.table.rows import RowStore


def find_and_gather(
    index: Residents,
    store: RowStore,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    layout: FeatureLayout,
    missing_values: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Return what ``gather`` returns for the rows that ``find`` returns without touching; changes nothing.

    Args:
        index: who is where; the whole index where ids expire.
        store: the rows; all tables have the same dim D.
        ids: i64 ``[N]``, the occurrences of one table after those of another.
        offsets: i64 ``[F*B+1]``, legal.
        layout: tables of the features.
        missing_values: f32 ``[T]``, what every column of a missing id reads.
        output_dtype: float32, float16 or bfloat16.
    """
    table_ranges = layout.table_ranges(offsets)
    return gather(store, find(index, ids, table_ranges, False), table_ranges, missing_values, output_dtype)
