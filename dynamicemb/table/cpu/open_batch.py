"""Begin a lookup: find the occurrences of each table, and begin the training step."""

import torch

from dynamicemb.table.cpu.advance import advance
from dynamicemb.table.index import Index, Residents
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.table.stepping.results import OpenBatch


def open_batch(
    index: Residents,
    offsets: torch.Tensor,
    layout: FeatureLayout,
    num_ids: int,
    lag: int | None = None,
    deterministic: bool | None = None,
) -> OpenBatch:
    """Begin a lookup, for training with the step that it is. On the CPU offsets are checked before, and legal.

    Args:
        index: who is where; a whole index for a step: its clock advances, see ``advance``.
        offsets: i64 ``[F*B+1]``; a step copies them, since its backward trusts them and the caller may refill his.
        layout: tables of the features.
        num_ids: N.
        lag: of ``advance``; None for evaluation.
        deterministic: not needed here: ids are always placed in batch order.

    Returns:
        The offsets and ``table_ranges`` i64 ``[T+1]``; nothing needs scratch memory.
    """
    ranges = layout.table_ranges(offsets)
    if lag is None:
        return OpenBatch(offsets, ranges)
    assert isinstance(index, Index)
    advance(index, lag)
    return OpenBatch(offsets.clone(), ranges)
