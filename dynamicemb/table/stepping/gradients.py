"""The gradients of a batch's occurrences, and the rows that they train."""

from typing import NamedTuple

import torch

from dynamicemb.table.layout import POOLING_NONE, FeatureLayout
from dynamicemb.table.stepping.lookup import Lookup


class Bags(NamedTuple):
    """Bags whose output has one gradient each, from which every occurrence takes its own.

    Attributes:
        offsets: i64 ``[F*B+1]``.
        layout: tables and columns of the features, and the pooling.
        per_sample_weights: f32 ``[N]``, or None for 1.
    """

    offsets: torch.Tensor
    layout: FeatureLayout
    per_sample_weights: torch.Tensor | None = None


class Gradients(NamedTuple):
    """What an update sums by row. An occurrence ``i`` of a table of dim D has the gradient

        ``values[places[i] : places[i] + D] * scales[i]``

    so the gradients of several backward passes can be trained at once, whatever their batch sizes were.

    Attributes:
        ids: i64 ``[N]``; they key the stochastic rounding.
        rows: i32 ``[N]``, rows that still belong to their ids; -1: the gradient is dropped.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        values: float32, float16 or bfloat16, contiguous: ``[B, total_D]`` with pooling, ``[N, D]`` without.
        bags: where places and scales come from; the kernels find them. None without pooling, and with ``places``.
        places: i64 ``[N]``, elements of ``values``, multiples of D's alignment; None: ``i * D``, or those of ``bags``.
        scales: f32 ``[N]``; None: 1, or those of ``bags``.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    table_ranges: torch.Tensor
    values: torch.Tensor
    bags: Bags | None = None
    places: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @classmethod
    def of(cls, lookup: Lookup, grad: torch.Tensor) -> "Gradients":
        """Return the gradients of a lookup's occurrences.

        Args:
            lookup: occurrences of the forward.
            grad: gradient of its output.
        """
        bags = None
        if lookup.layout.pooling != POOLING_NONE:
            bags = Bags(lookup.offsets, lookup.layout, lookup.per_sample_weights)
        return cls(lookup.ids, lookup.rows, lookup.table_ranges, grad.contiguous(), bags)
