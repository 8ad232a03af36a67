"""Tensors of a state_dict, of which each rank holds some rows."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.errors import DynamicEmbError


class RowsOfRanks(ShardedTensor):
    """A ``ShardedTensor`` that ``torch.save`` writes as a plain tensor: the rows of this rank.

    So the file of a rank is read with ``weights_only=True``, by a process that knows neither this package nor other
    ranks. What else the ``ShardedTensor`` knows, how many rows each rank has, the description of the table says too.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Other picklers, such as that which sends a state_dict to a process that saves it, have a later protocol; who
        # receives it must see that these are not all rows.
        if protocol != torch.serialization.DEFAULT_PROTOCOL:
            return super().__reduce_ex__(protocol)
        return local_rows(self, "rows").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowsOfRanks":
        return _as_rows(super().__deepcopy__(memo))


def _as_rows(tensor: ShardedTensor) -> RowsOfRanks:
    # torch makes a ShardedTensor whatever class is asked to.
    tensor.__class__ = RowsOfRanks
    assert isinstance(tensor, RowsOfRanks)
    return tensor


def sharded(local: torch.Tensor, counts: list[int], ranks: Ranks) -> torch.Tensor:
    """Return the tensor whose shard on this rank is ``local``; of a single rank ``local`` itself. No communication.

    Args:
        local: ``[counts[rank], ...]`` in host memory.
        counts: rows of each rank.
        ranks: the ranks.

    Example::

        sharded(tensor([7, 8]), [2, 0, 1], ranks)  # on rank 0; rank 1 has no shard, that of rank 2 begins at 2
    """
    if ranks.world_size == 1:
        return local
    assert ranks.group is not None
    rest = list(local.shape[1:])
    # torch.distributed.checkpoint knows a shard by where it begins, so that empty ones would be mistaken for others. Of
    # a tensor without rows it wants one.
    holders = [rank for rank, count in enumerate(counts) if count] or [0]
    shards = {
        rank: ShardMetadata(
            [sum(counts[:rank]), *(0 for _ in rest)],
            [counts[rank], *rest],
            f"rank:{dist.get_global_rank(ranks.group, rank)}/cpu",
        )
        for rank in holders
    }
    size = torch.Size([sum(counts), *rest])
    return _as_rows(
        ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(local, shards[ranks.rank])] if ranks.rank in shards else [],
            ShardedTensorMetadata(list(shards.values()), size, TensorProperties(dtype=local.dtype)),
            process_group=ranks.group,
        )
    )


def evenly_sharded(size: list[int], dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
    """Return a tensor of a global size, whose rows are shared evenly, for a load to fill."""
    bounds = [size[0] * rank // ranks.world_size for rank in range(ranks.world_size + 1)]
    counts = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    return sharded(torch.empty([counts[ranks.rank], *size[1:]], dtype=dtype), counts, ranks)


def ranks_of(tensor: Any) -> Ranks | None:
    """Return the ranks over which a tensor is sharded, None for a plain one."""
    return Ranks(tensor._process_group) if isinstance(tensor, ShardedTensor) else None


def local_rows(value: Any, name: str) -> torch.Tensor:
    """Return the rows of a tensor that this rank holds, in host memory.

    Raises:
        DynamicEmbError: it is no such tensor.
    """
    if isinstance(value, ShardedTensor):
        parts = [shard.tensor.cpu() for shard in value.local_shards()]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty([0, *value.size()[1:]], dtype=value.dtype)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise DynamicEmbError(f"{name} must be a ShardedTensor or a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_meta:
        raise DynamicEmbError(f"{name} must be a dense tensor with data, got layout {value.layout} on {value.device}")
    return value.detach().cpu()
