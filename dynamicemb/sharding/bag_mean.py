"""The mean over a bag whose rows are spread over ranks.

Every rank adds the rows it owns and the reduce-scatter adds the ranks: a sum. It is divided here, once, by the number
of ids that the bag had before it was spread. Rows and gradients are then those of one process.
"""

from dataclasses import dataclass

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


@dataclass
class DynamicBagContext(EmbeddingBagCollectionContext):
    """TorchRec's context of one batch, with the sizes of bags that are averaged.

    Attributes:
        bag_sizes: ``[B, M]`` for the M averaged features, at least 1; None if there are none.
    """

    bag_sizes: torch.Tensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory alive for work on `stream`."""
        super().record_stream(stream)
        if self.bag_sizes is not None:
            self.bag_sizes.record_stream(stream)


def bag_sizes(features: KeyedJaggedTensor, names: list[str]) -> torch.Tensor:
    """Return the number of ids in each bag of some features, ``[B, M]``; an empty bag counts as 1.

    Args:
        features: a batch before it is spread.
        names: M features.
    """
    keys = features.keys()
    positions = torch.tensor([keys.index(name) for name in names], device=features.lengths().device)
    lengths = features.lengths().view(len(keys), features.stride())
    return lengths.index_select(0, positions).clamp(min=1).t()


def divide_by_bag_sizes(pooled: KeyedTensor, names: list[str], sizes: torch.Tensor) -> KeyedTensor:
    """Divide the columns of averaged features by the sizes of their bags.

    Args:
        pooled: ``[B, total_D]``, sums.
        names: keys of `pooled` that are averaged, M.
        sizes: ``[B, M]``.
    """
    keys, dims, values = pooled.keys(), pooled.length_per_key(), pooled.values()
    divisors = torch.ones(values.shape[0], len(keys), dtype=values.dtype, device=values.device)
    positions = torch.tensor([keys.index(name) for name in names], device=values.device)
    divisors[:, positions] = sizes.to(values.dtype)
    per_column = torch.repeat_interleave(
        divisors, torch.tensor(dims, device=values.device), dim=1, output_size=values.shape[1]
    )
    return KeyedTensor(keys=keys, length_per_key=dims, values=values / per_column, key_dim=1)
