"""The autograd function behind a training lookup: pool or gather forward, fused optimizer backward."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from dynamicemb.embedding.optimizer_settings import OptimizerSettings
from dynamicemb.embedding.phases import phase
from dynamicemb.table.group import TableGroup
from dynamicemb.table.layout import POOLING_MEAN, POOLING_NONE, FeatureLayout
from dynamicemb.table.lookup import Lookup, without_tables
from dynamicemb.table.staging import Staged
from dynamicemb.table.steps import Step


class OptimizerOwner(Protocol):
    """Who knows the present optimizer settings when backward runs, and which tables are frozen then."""

    optimizer_settings: OptimizerSettings

    def frozen_tables(self) -> tuple[int, ...]:
        """Return the tables that are not trained."""


@dataclass(frozen=True)
class TrainingStep:
    """What backward needs beside the lookup.

    Attributes:
        owner: holds the optimizer settings.
        step: protects the rows until backward has run, or the graph is gone.
        epoch: ``group.epoch`` at forward.
        staged: what is read where ids were not admitted; None: the rows of the lookup.
        frozen: tables that were frozen at forward.
    """

    owner: OptimizerOwner
    step: Step
    epoch: int
    staged: Staged | None = None
    frozen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reading:
    """How rows become an output.

    Attributes:
        missing_values: f32 ``[T]``, what an occurrence without a row reads.
        dtype: dtype of the output.
    """

    missing_values: torch.Tensor
    dtype: torch.dtype


def read_rows(group: TableGroup, lookup: Lookup, reading: Reading, staged: Staged | None = None) -> torch.Tensor:
    """Return the output of a lookup.

    Args:
        group: the tables.
        lookup: occurrences and their rows.
        reading: what missing ids read, and the dtype of the result.
        staged: what is read in the place of the lookup's rows.

    Returns:
        ``[N, D]`` without pooling, else ``[B, total_D]``.
    """
    kernels = group.kernels
    store, rows = (group.store, lookup.rows) if staged is None else (staged.store, staged.rows)
    missing, dtype = reading.missing_values, reading.dtype
    with phase("read"):
        if lookup.layout.pooling == POOLING_NONE:
            return kernels.gather(store, rows, lookup.table_ranges, missing, dtype)
        return kernels.pool(store, rows, lookup.offsets, lookup.layout, lookup.per_sample_weights, missing, dtype)


def find_and_read_rows(
    group: TableGroup, ids: torch.Tensor, offsets: torch.Tensor, layout: FeatureLayout, reading: Reading
) -> torch.Tensor:
    """Return what ``read_rows`` returns for ids ``[N]`` without pooling, ``[N, D]``, of a lookup not yet opened."""
    missing, dtype = reading.missing_values, reading.dtype
    with phase("find_and_read"):
        return group.kernels.find_and_gather(group.index, group.store, ids, offsets, layout, missing, dtype)


class LookupFunction(torch.autograd.Function):
    """Connects a lookup to autograd through an anchor that requires a gradient and never gets one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        group: TableGroup,
        lookup: Lookup,
        training: TrainingStep | None,
        reading: Reading,
    ) -> torch.Tensor:
        """Return the output of the lookup; remember what backward needs. No ``training`` is evaluation."""
        staged = None if training is None else training.staged
        # Only the gradient of pooling weights reads staged rows again.
        ctx.staged = staged if ctx.needs_input_grad[1] else None
        ctx.group, ctx.reading = group, reading
        ctx.training = training if training is None or staged is None else replace(training, staged=None)
        ctx.weights_dtype = None if per_sample_weights is None else per_sample_weights.dtype
        # Nobody else has these.
        ctx.rows, ctx.table_ranges, ctx.offsets = lookup.rows, lookup.table_ranges, lookup.offsets
        ctx.layout = lookup.layout
        # A load since then replaces the rows, of an evaluation's lookup too.
        ctx.step = group.steps.current
        # Saved, not kept: autograd then refuses a backward after the caller has overwritten his ids or weights, or
        # after the graph has been freed.
        ids, weights = lookup.ids, lookup.per_sample_weights
        ids = ids.clone() if ids.is_inference() else ids
        if weights is None:
            ctx.save_for_backward(ids)
        else:
            ctx.save_for_backward(ids, weights.clone() if weights.is_inference() else weights)
        return read_rows(group, lookup, reading, staged)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Train the rows; returns the gradient of the pooling weights if wanted."""
        group, training = ctx.group, ctx.training
        ids, *weights = ctx.saved_tensors
        rows, table_ranges, offsets = ctx.rows, ctx.table_ranges, ctx.offsets
        lookup = Lookup(ids, rows, table_ranges, offsets, ctx.layout, weights[0] if weights else None)
        grad = (grad if grad.layout == torch.strided else grad.to_dense()).contiguous()
        # Whoever keeps the graph may come again; then the step ends with the graph. AOTAutograd asks the same.
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
        try:
            weights_grad = None
            with group.lock, phase("update"):
                # Rows may have gone to other ids since forward: look again, and drop what moved.
                if training is None:
                    lookup = group.still_owned(lookup, ctx.step)
                elif training.epoch != group.epoch or training.step.finished:
                    present = group.still_owned(lookup, ctx.step)
                    group.count_dropped(lookup, present)
                    lookup = present
                if ctx.needs_input_grad[1]:
                    weights_grad = _weights_grad(group, lookup, ctx.staged, grad)
                    if training is None:
                        _set_missing_weights_grad(weights_grad, replace(lookup, rows=rows), ctx.reading, grad)
                    weights_grad = weights_grad.to(ctx.weights_dtype)
                if training is not None and ctx.needs_input_grad[0]:
                    _update(group, training, lookup, grad, group.steps.replaced_since(ctx.step))
        except BaseException:
            # The exception may keep this graph alive.
            is_last = True
            raise
        finally:
            if training is not None and is_last:
                training.step.finish()
        return None, weights_grad, None, None, None, None


def _update(
    group: TableGroup, training: TrainingStep, lookup: Lookup, grad: torch.Tensor, replaced: tuple[int, ...]
) -> None:
    """Train the tables that were not frozen at forward and are not now, as autograd treats a parameter.

    An update in which no table takes part, be it frozen or ``replaced`` by a load, is not counted.
    """
    owner = training.owner
    frozen = {*training.frozen, *owner.frozen_tables(), *replaced}
    if len(frozen) == len(group.names):
        return
    if frozen:
        lookup = without_tables(lookup, frozen)
    group.update(owner.optimizer_settings.hand_on(), lookup, grad)


def _weights_grad(group: TableGroup, lookup: Lookup, staged: Staged | None, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the pooling weights, f32 ``[N]``; 0 where a row is lost or was never there."""
    store, rows = group.store, lookup.rows
    if staged is not None:
        store, rows = staged.store, torch.where(staged.rows >= staged.first_row, staged.rows, rows)
    return group.kernels.pool_weights_grad(store, rows, lookup.offsets, lookup.layout, grad)


def _set_missing_weights_grad(weights_grad: torch.Tensor, lookup: Lookup, reading: Reading, grad: torch.Tensor) -> None:
    """Write the gradient of the pooling weights of ids that read a constant.

    Args:
        weights_grad: f32 ``[N]``, changed in place.
        lookup: rows are those of the forward.
        reading: the constants.
        grad: ``[B, total_D]``.
    """
    missing = (lookup.rows < 0).nonzero().flatten()
    if not missing.numel():
        return
    layout, offsets = lookup.layout, lookup.offsets
    columns = layout.column_offsets.tolist()
    sums = [grad[:, begin:end].float().sum(1) for begin, end in itertools.pairwise(columns)]
    bags = torch.searchsorted(offsets, missing, right=True) - 1
    values = reading.missing_values[layout.feature_tables.long()[bags // layout.batch_size]] * torch.cat(sums)[bags]
    if layout.pooling == POOLING_MEAN:
        values = values / (offsets[bags + 1] - offsets[bags])
    weights_grad[missing] = values
