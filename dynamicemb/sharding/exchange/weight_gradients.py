"""The gradient of pooling weights, which travel to the ranks that own the ids and whose gradient travels back.

TorchRec sends a batch outside of autograd. Here the weights that arrived are tied to those that were sent: backward
exchanges their gradients the other way round. All ranks take part as soon as the weights of one of them want a
gradient; `dynamicemb.sharding.exchange.sent_batch` tells them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.errors import UnsupportedOptionError
from dynamicemb.sharding.exchange.sent_batch import WANTS_GRADIENT
from dynamicemb.sharding.torchrec_compat import replace_values

# What a lookup without tables returns.
_EMPTY = "_dummy_embs_tensor"
# Static tables whose batch goes over two exchanges.
_TWO_STEPS = frozenset({ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value})


class WeightedContext(EmbeddingShardingContext):
    """TorchRec's context of one sharding; TorchRec fills in how many values went where.

    Args:
        context: the one that TorchRec made.
        sent: the weights that were sent, f32 ``[N]``, with their graph; None if they want no gradient.

    Attributes:
        input_splits: values sent to each rank.
        output_splits: values received from each rank.
    """

    def __init__(self, context: EmbeddingShardingContext, sent: torch.Tensor | None) -> None:
        super().__init__()
        self.__dict__.update(context.__dict__)
        self.input_splits: list[int] = []
        self.output_splits: list[int] = []
        self.sent = sent


def check_gradients(sharding_types: Sequence[str], static_tables: dict[str, str]) -> None:
    """Check that the gradient of pooling weights comes back from all tables.

    Args:
        sharding_types: of the collection.
        static_tables: sharding type by table name.

    Raises:
        UnsupportedOptionError: a table is sharded so that it does not.
    """
    if _TWO_STEPS & set(sharding_types):
        names = [name for name, kind in static_tables.items() if kind in _TWO_STEPS]
        raise UnsupportedOptionError(
            f"features: weights require a gradient, which static tables {names} sharded {sorted(_TWO_STEPS)} cannot "
            "give; shard them otherwise, or pass weights.detach()"
        )


@contextmanager
def remembering_order(input_dists: Iterable[Any]) -> Iterator[None]:
    """Make input dists of static row-wise tables tell where they put each id, as they do for sequences."""
    changed = [one for one in input_dists if isinstance(one, RwSparseFeaturesDist) and not one._is_sequence]
    for one in changed:
        one._is_sequence = True
    try:
        yield
    finally:
        for one in changed:
            one._is_sequence = False


def sent_weights(weights: torch.Tensor, places: torch.Tensor | None, position: torch.Tensor | None) -> torch.Tensor:
    """Return weights in the order in which they are sent, with their graph.

    Args:
        weights: ``[N]``, as the user gave them.
        places: i64 ``[M]``, which of them an input dist got, in its order; None is all, as they are.
        position: i64 ``[M]``, where the input dist put each of those; None is where it was.
    """
    chosen = weights.to(torch.float32)
    if places is not None:
        chosen = chosen.index_select(0, places)
    return chosen if position is None else torch.zeros_like(chosen).index_copy(0, position.long(), chosen)


def with_gradients(features: list[KeyedJaggedTensor], contexts: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Tie the weights that arrived to those that were sent; changes the list in place.

    Args:
        features: what each sharding received.
        contexts: of the same shardings.
        group: the ranks that share the tables.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        wanted = any(getattr(context, "sent", None) is not None for context in contexts)
    else:
        # Weights that another module has made since then have a graph of their own.
        wanted = any(getattr(batch, WANTS_GRADIENT, False) for batch in features)
    if not wanted:
        return
    for i, (batch, context) in enumerate(zip(features, contexts, strict=True)):
        if not isinstance(context, WeightedContext):
            continue
        # Without splits nothing was exchanged: every rank has these tables in full.
        if world_size == 1 or not context.input_splits:
            weights = batch.weights() if context.sent is None else context.sent
        else:
            sent = context.sent
            if sent is None:
                sent = batch.weights().new_zeros(sum(context.input_splits))
            received = batch.weights().detach()
            anchor = torch.zeros((), device=received.device, requires_grad=True)
            weights = _Exchanged.apply(sent, anchor, received, _places_received(batch, context), context, group)
        # Sums of lengths that are known spare the host of a GPU a wait.
        per_key = batch.length_per_key_or_none()
        features[i] = replace_values(batch, batch.values(), batch.lengths(), weights, length_per_key=per_key)


@contextmanager
def taking_part(lookups: Sequence[Any], features: Sequence[KeyedJaggedTensor]) -> Iterator[None]:
    """Make backward exchange gradients also on ranks that have no part of a sharding's tables.

    The lookup of such a rank returns an empty tensor, through which backward passes on all ranks.

    Args:
        lookups: of the shardings.
        features: what each of them received.
    """
    empty = {}
    for lookup, batch in zip(lookups, features, strict=True):
        weights = batch.weights_or_none()
        if not batch.keys() and weights is not None and weights.requires_grad and hasattr(lookup, _EMPTY):
            empty[lookup] = getattr(lookup, _EMPTY)
            setattr(lookup, _EMPTY, empty[lookup] + weights.sum())
    try:
        yield
    finally:
        for lookup, before in empty.items():
            setattr(lookup, _EMPTY, before)


def _places_received(batch: KeyedJaggedTensor, context: WeightedContext) -> torch.Tensor:
    """Return where each value stood as it arrived, i64 ``[N]``.

    Values arrive by (rank, feature, sample) and stand by (feature, rank, sample).
    """
    sizes = context.batch_size_per_rank
    lengths = batch.lengths().view(len(batch.keys()), sum(sizes))
    per_part = torch.stack([part.sum(1) for part in lengths.split(sizes, dim=1)], dim=1).to(torch.int64)
    now = per_part.flatten().cumsum(0).view_as(per_part) - per_part
    by_rank = per_part.t().contiguous()
    then = (by_rank.flatten().cumsum(0).view_as(by_rank) - by_rank).t()
    num_values = batch.values().numel()
    moved = torch.repeat_interleave((then - now).flatten(), per_part.flatten(), output_size=num_values)
    return moved + torch.arange(num_values, device=moved.device)


class _Exchanged(torch.autograd.Function):
    """Weights that arrived; their gradients go back to who sent them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        sent: torch.Tensor,
        anchor: torch.Tensor,
        received: torch.Tensor,
        places: torch.Tensor,
        context: WeightedContext,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Return the weights that arrived ``[N]``."""
        ctx.places, ctx.splits, ctx.group = places, (context.input_splits, context.output_splits), group
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Exchange the gradients; each is of the loss of the rank that sent the weight."""
        input_splits, output_splits = ctx.splits
        as_received = torch.empty_like(grad).index_copy_(0, ctx.places, grad.contiguous())
        back = grad.new_empty(sum(input_splits))
        dist.all_to_all_single(back, as_received, input_splits, output_splits, group=ctx.group)
        # Already of one rank's loss: TorchRec's lookups multiply it by the number of ranks that its outputs divide by.
        return back, None, None, None, None, None
