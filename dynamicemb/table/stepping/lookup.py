"""What one lookup leaves behind for its backward."""

from collections.abc import Collection
from typing import NamedTuple

import torch

from dynamicemb.table.layout import FeatureLayout


class Lookup(NamedTuple):
    """The occurrences of one batch and the rows they read.

    Attributes:
        ids: i64 ``[N]``.
        rows: i32 ``[N]``, -1 for an id without a row: its gradient is dropped.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        offsets: i64 ``[F*B+1]``; not read when ``layout.pooling`` is POOLING_NONE.
        layout: tables and columns of the features.
        per_sample_weights: f32 ``[N]``, or None for 1.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    table_ranges: torch.Tensor
    offsets: torch.Tensor
    layout: FeatureLayout
    per_sample_weights: torch.Tensor | None = None


def rows_without(rows: torch.Tensor, table_ranges: torch.Tensor, tables: Collection[int]) -> torch.Tensor:
    """Return rows in which no occurrence of some tables has one, so that an update leaves them alone.

    Args:
        rows: i32 ``[N]``.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        tables: which.

    Host sync: none; a CUDA graph captures it. Bytes moved: 30 N.

    Example::

        rows [4, 5, 6, 7], table_ranges [0, 1, 1, 4], tables {2}  ->  [4, -1, -1, -1]
    """
    num_tables = table_ranges.numel() - 1
    # Filled on the device one by one: a list of the host would be a copy, for which the host waits.
    chosen = torch.zeros(num_tables, dtype=torch.bool, device=rows.device)
    for t in tables:
        chosen[t].fill_(True)
    positions = torch.arange(rows.numel(), device=rows.device)
    table_of = torch.searchsorted(table_ranges[1:], positions, right=True).clamp_(max=num_tables - 1)
    return torch.where(chosen[table_of], -1, rows)
