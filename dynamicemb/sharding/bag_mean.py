"""The mean over a bag whose rows are spread over ranks.

Every rank adds the rows it owns and the reduce-scatter adds the ranks: a sum. It is divided here, once, by the number
of ids that the bag had before it was spread. Rows and gradients are then those of one process.
"""

import functools
from dataclasses import dataclass

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


@dataclass
class DynamicBagContext(EmbeddingBagCollectionContext):
    """TorchRec's context of one batch, with the sizes of bags that are averaged.

    Attributes:
        bag_sizes: ``[B, M]`` for the M averaged features, at least 1; None if there are none.
        is_padded: the batch had no samples and got one without ids.
    """

    bag_sizes: torch.Tensor | None = None
    is_padded: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory alive for work on `stream`."""
        super().record_stream(stream)
        if self.bag_sizes is not None:
            self.bag_sizes.record_stream(stream)


@functools.cache
def _constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return i64 ``[len(values)]``, made once: a copy to a GPU waits for it. Not to be written."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def bag_sizes(features: KeyedJaggedTensor, names: list[str]) -> torch.Tensor:
    """Return the number of ids in each bag of some features, ``[B, M]``; an empty bag counts as 1.

    Args:
        features: a batch before it is spread.
        names: M features.

    Host sync: none after the first call.
    """
    keys = features.keys()
    lengths = features.lengths().view(len(keys), features.stride())
    positions = _constant(tuple(keys.index(name) for name in names), lengths.device)
    return lengths.index_select(0, positions).clamp(min=1).t()


def divide_by_bag_sizes(pooled: KeyedTensor, names: list[str], sizes: torch.Tensor) -> KeyedTensor:
    """Divide the columns of averaged features by the sizes of their bags.

    Args:
        pooled: ``[B, total_D]``, sums.
        names: keys of `pooled` that are averaged, M.
        sizes: ``[B, M]``.

    Host sync: none after the first call.
    """
    keys, dims, values = pooled.keys(), pooled.length_per_key(), pooled.values()
    # Divisor M stands for all features that are not averaged.
    divisors = torch.cat([sizes.to(values.dtype), values.new_ones(values.shape[0], 1)], dim=1)
    divisor_of = {name: m for m, name in enumerate(names)}
    divisor_per_key = tuple(divisor_of.get(key, len(names)) for key in keys)
    per_column = divisors.index_select(1, _per_column(divisor_per_key, tuple(dims), values.device))
    return KeyedTensor(keys=keys, length_per_key=dims, values=values / per_column, key_dim=1)


@functools.cache
def _per_column(value_per_key: tuple[int, ...], dims: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return i64 ``[total_D]``: each key's value, once for each of its columns."""
    return torch.repeat_interleave(torch.tensor(value_per_key), torch.tensor(dims)).to(device)
