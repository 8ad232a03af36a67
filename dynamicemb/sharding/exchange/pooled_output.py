"""Add the ranks' partial sums of bags where gloo's reduce-scatter cannot: with batches of different size per rank."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist, RwPooledEmbeddingSharding
from torchrec.distributed.types import Awaitable, NoWait, QuantizedCommCodec, QuantizedCommCodecs


class _AllToAllSum(torch.autograd.Function):
    """Exchange partial sums and add what arrives, in rank order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        partial: torch.Tensor,
        batch_sizes: list[int],
        group: dist.ProcessGroup,
        codecs: QuantizedCommCodecs | None,
    ) -> torch.Tensor:
        """Return the bags of this rank ``[B, D]`` from partial sums of all ranks' bags ``[sum of B, D]``."""
        world_size, own, dim = len(batch_sizes), batch_sizes[dist.get_rank(group)], partial.shape[1]
        ctx.batch_sizes, ctx.group, ctx.codec = batch_sizes, group, codecs and codecs.backward
        sent = [size * dim for size in batch_sizes]
        received = _exchange(partial, sent, [own * dim] * world_size, group, codecs and codecs.forward)
        return received.view(world_size, own, dim).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient of the partial sums: every rank gets every rank's gradient, scaled as TorchRec does."""
        world_size, dim = len(ctx.batch_sizes), grad.shape[1]
        expected = [size * dim for size in ctx.batch_sizes]
        copies = grad.repeat(world_size, 1)
        received = _exchange(copies, [grad.numel()] * world_size, expected, ctx.group, ctx.codec).view(-1, dim)
        return received / world_size if get_gradient_division() else received, None, None, None


def _exchange(
    sent: torch.Tensor,
    sent_sizes: list[int],
    received_sizes: list[int],
    group: dist.ProcessGroup,
    codec: QuantizedCommCodec[Any] | None,
) -> torch.Tensor:
    """Exchange the elements of a tensor, in the form that a codec gives them.

    Args:
        sent: parts for all ranks, one after the other.
        sent_sizes: elements for each rank.
        received_sizes: elements from each rank.
        group: the ranks.
        codec: None sends the tensor as it is.

    Returns:
        What came, flat, in rank order.
    """
    encoded, context = sent.contiguous().view(-1), None
    if codec is not None:
        context = codec.create_context()
        sent_sizes, received_sizes = (
            [codec.calc_quantized_size(size, context) for size in sizes] for sizes in (sent_sizes, received_sizes)
        )
        encoded = codec.encode(encoded, context)
    received = encoded.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, encoded, received_sizes, sent_sizes, group=group)
    return received if codec is None else codec.decode(received, context)


class PooledOutputDist(RwPooledEmbeddingDist):
    """TorchRec's reduce-scatter; on gloo, an all-to-all when batch sizes differ between ranks. A rank alone needs none.

    The two move the same number of bytes.
    """

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Start the exchange.

        Args:
            local_embs: ``[sum of B over ranks, D]``, sums over the rows that this rank owns.
            sharding_ctx: holds the batch size of every rank.
        """
        if sharding_ctx is not None and not sharding_ctx.variable_batch_per_feature:
            if self._pg.size() == 1:
                return NoWait(local_embs)
            sizes = sharding_ctx.batch_size_per_rank
            # A group of several backends ("cpu:gloo,cuda:nccl") has no one name: what serves CPU tensors is gloo.
            gloo = local_embs.device.type == "cpu" or dist.get_backend(self._pg) == "gloo"
            if gloo and len(set(sizes)) > 1:
                return NoWait(_AllToAllSum.apply(local_embs, sizes, self._pg, self._codecs))
        return super().forward(local_embs, sharding_ctx)


class RwPooledSharding(RwPooledEmbeddingSharding):
    """TorchRec's row-wise sharding of pooled tables with this output."""

    def create_output_dist(self, device: torch.device | None = None) -> PooledOutputDist:
        """Make the exchange of results."""
        return PooledOutputDist(
            self._pg, embedding_dims=self.embedding_dims(), qcomm_codecs_registry=self.qcomm_codecs_registry
        )
