"""What one lookup leaves behind for its backward."""

from dataclasses import dataclass

import torch

from dynamicemb.table.layout import FeatureLayout


@dataclass(frozen=True)
class Lookup:
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
