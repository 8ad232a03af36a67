"""The autograd function behind a training lookup: pool or gather forward, fused optimizer backward."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from dynamicemb.embedding.inputs import Batch
from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.group import TableGroup
from dynamicemb.table.layout import POOLING_NONE, FeatureLayout
from dynamicemb.table.steps import Step


class OptimizerOwner(Protocol):
    """Who knows the present optimizer settings when backward runs."""

    optimizer_spec: OptimizerSpec


@dataclass
class Lookup:
    """One forward of a group.

    Attributes:
        group: the tables.
        batch: the checked input.
        layout: how bags map to tables and columns.
        table_ranges: i64 ``[T+1]``.
        rows: i32 ``[N]``, -1 for missing or failed ids.
        missing_values: f32 ``[T]``, what a missing id reads.
        output_dtype: dtype of the result.
        owner: holds the optimizer settings; None when nothing will be trained.
        step: protects the rows until backward has run; None for evaluation.
        epoch: ``group.epoch`` at forward.
    """

    group: TableGroup
    batch: Batch
    layout: FeatureLayout
    table_ranges: torch.Tensor
    rows: torch.Tensor
    missing_values: torch.Tensor
    output_dtype: torch.dtype
    owner: OptimizerOwner | None = None
    step: Step | None = None
    epoch: int = 0

    def output(self) -> torch.Tensor:
        """Return ``[N, D]`` without pooling, else ``[B, total_D]``."""
        group = self.group
        if self.layout.pooling == POOLING_NONE:
            return group.kernels.gather(
                group.store, self.rows, self.table_ranges, self.missing_values, self.output_dtype
            )
        weights = self.batch.per_sample_weights
        return group.kernels.pool(
            group.store,
            self.rows,
            self.batch.offsets,
            self.layout,
            None if weights is None else weights.detach().float(),
            self.missing_values,
            self.output_dtype,
        )

    def weights_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``per_sample_weights`` f32 ``[N]``, with the rows as they are now."""
        group = self.group
        return group.kernels.pool_weights_grad(group.store, self.rows, self.batch.offsets, self.layout, grad)

    def train(self, grad: torch.Tensor) -> None:
        """Apply one optimizer step with the gradient of the output."""
        assert self.owner is not None and self.step is not None
        rows = self.rows
        if self.epoch != self.group.epoch or self.step.finished:
            # Rows may have gone to other ids: look again, and drop what moved.
            rows = self.group.rows_still_owned(self.batch.ids, self.table_ranges, rows)
        self.group.update(self.owner.optimizer_spec, self, rows, grad)
        self.step.finish()


class LookupFunction(torch.autograd.Function):
    """Connects a lookup to autograd through an anchor that requires a gradient and never gets one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, anchor: torch.Tensor, per_sample_weights: torch.Tensor | None, lookup: Lookup
    ) -> torch.Tensor:
        """Return the lookup's output."""
        ctx.lookup = lookup
        return lookup.output()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Train the rows; returns the gradient of the pooling weights if wanted."""
        lookup: Lookup = ctx.lookup
        grad = grad.contiguous()
        weights_grad = None
        if ctx.needs_input_grad[1]:
            weights_grad = lookup.weights_grad(grad).to(lookup.batch.per_sample_weights.dtype)
        lookup.train(grad)
        return None, weights_grad, None
