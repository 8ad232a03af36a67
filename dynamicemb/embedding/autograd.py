"""The autograd function around a lookup: its output forward, the training of its rows backward."""

import itertools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dynamicemb.embedding.phases import phase
from dynamicemb.embedding.step import Placed, Reading, present, read, train
from dynamicemb.table.group import TableGroup
from dynamicemb.table.layout import POOLING_MEAN
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.stepping.lookup import Lookup
from dynamicemb.table.stepping.staging import Staged

# Stands in the place of ids, which autograd keeps.
_SAVED = torch.empty(0, dtype=torch.int64)


class LookupFunction(torch.autograd.Function):
    """Connects a lookup to autograd through an anchor that requires a gradient and never gets one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        group: TableGroup,
        placed: Placed,
        reading: Reading,
    ) -> torch.Tensor:
        """Return the output of a lookup; remember what backward needs."""
        lookup = placed.lookup
        # Only the gradient of pooling weights reads staged rows again.
        ctx.staged = placed.staged if ctx.needs_input_grad[1] else None
        ctx.group, ctx.reading = group, reading
        ctx.weights_dtype = None if per_sample_weights is None else per_sample_weights.dtype
        kept = Lookup(_SAVED, lookup.rows, lookup.table_ranges, lookup.offsets, lookup.layout)
        ctx.placed = Placed(kept, placed.number, placed.epoch, placed.training)
        # Saved, not kept: autograd then refuses a backward after the caller has overwritten the ids or weights, or
        # after the graph has been freed.
        ids, weights = lookup.ids, lookup.per_sample_weights
        ids = ids.clone() if ids.is_inference() else ids
        if weights is None:
            ctx.save_for_backward(ids)
        else:
            ctx.save_for_backward(ids, weights.clone() if weights.is_inference() else weights)
        return read(group, placed, reading)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Train the rows; returns the gradient of the pooling weights if wanted."""
        group, placed = ctx.group, ctx.placed
        training = placed.training
        ids, *weights = ctx.saved_tensors
        lookup = placed.lookup._replace(ids=ids, per_sample_weights=weights[0] if weights else None)
        grad = (grad if grad.layout == torch.strided else grad.to_dense()).contiguous()
        # Whoever keeps the graph may come again; then the step ends with the graph. AOTAutograd asks the same.
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
        try:
            weights_grad = None
            with group.turn(), phase("update"):
                # Rows may have gone to other ids since forward.
                lookup = present(group, placed, lookup)
                if ctx.needs_input_grad[1]:
                    weights_grad = _weights_grad(group, lookup, ctx.staged, grad)
                    if training is None:
                        _set_missing_weights_grad(weights_grad, placed.lookup, ctx.reading, grad)
                    weights_grad = weights_grad.to(ctx.weights_dtype)
                if training is not None and ctx.needs_input_grad[0]:
                    train(group, placed, Gradients.of(lookup, grad))
        except BaseException:
            # The exception may keep this graph alive.
            is_last = True
            raise
        finally:
            if training is not None and is_last:
                training.step.finish()
        return None, weights_grad, None, None, None


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
