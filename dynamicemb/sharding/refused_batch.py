"""Tell the other ranks that this rank's batch is malformed, inside the exchange that they wait for anyway.

A rank that refuses its batch sends an empty one in its place, with one entry too many in the lengths for each rank. How
many entries come from where is known to every host by then, so noticing it costs neither a message nor a wait, and all
ranks raise at the same place: after the exchange, before any lookup.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass
class Refusal:
    """Why a rank refuses the batch that it is about to send; shared by a collection and its input dists.

    Attributes:
        error: None while the batch is good.
    """

    error: Exception | None = None


class SentBatch(KeyedJaggedTensor):
    """A batch on its way to the owners of its ids; what arrives is a KeyedJaggedTensor again.

    All of its features have one stride: TorchRec pads sequences, and the collection refuses such bags.
    """

    # Why this rank refuses its batch.
    error: Exception | None = None

    @classmethod
    def dist_init(  # type: ignore[override]
        cls, keys: list[str], tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> KeyedJaggedTensor:
        """Put together what arrived; TorchRec calls it on the type of what this rank sent.

        Raises:
            Exception: this rank or another one refused its batch.
        """
        if tensors[0].numel() != len(keys) * sum(kwargs["stride_per_rank"]):
            raise cls.error or ValueError("features: another rank refuses its batch; its own error says why")
        return KeyedJaggedTensor.dist_init(keys, tensors, *args, **kwargs)


class _RefusedBatch(SentBatch):
    """An empty batch with one more entry of lengths for each rank."""

    num_ranks: int

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Return how many entries of each tensor go to each rank."""
        lengths, *others = super().dist_splits(key_splits)
        return [[number + 1 for number in lengths], *others]

    def dist_tensors(self) -> list[torch.Tensor]:
        """Return what is sent."""
        lengths, *others = super().dist_tensors()
        # All are zero, so their order does not matter.
        return [lengths.new_zeros(lengths.numel() + self.num_ranks), *others]


def sent_batch_type(refusal: Refusal, num_ranks: int) -> type[SentBatch]:
    """Return the type of a batch that is to be sent."""
    if refusal.error is None:
        return SentBatch
    return type("RefusedBatch", (_RefusedBatch,), {"error": refusal.error, "num_ranks": num_ranks})


def empty_batch(keys: list[str], weighted: bool, device: torch.device) -> KeyedJaggedTensor:
    """Return a batch of one sample without ids, to be sent in the place of a refused one."""
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.empty(0, dtype=torch.int64, device=device),
        lengths=torch.zeros(len(keys), dtype=torch.int64, device=device),
        weights=torch.empty(0, device=device) if weighted else None,
        stride=1,
    )
