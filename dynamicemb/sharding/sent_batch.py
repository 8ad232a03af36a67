"""Tell the other ranks about this rank's batch inside the exchange that they wait for anyway.

Two things are told: that the batch is refused, and that its pooling weights want their gradient. Who tells something
appends entries of -1 to the lengths that go to each rank: one for weights that want a gradient, W + 1 for a refusal
among W ranks. How many entries come from where is known to every host by then, so noticing them costs neither a message
nor a wait. After a refusal all ranks raise at the same place: after the exchange, before any lookup.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# What is appended; no length is negative.
_APPENDED = -1


@dataclass
class Sending:
    """The batch that a rank is about to send; shared by a collection and its input dists.

    Attributes:
        error: why it is refused; None while it is good.
        started: how many input dists have begun.
        contradicts: bool ``[1]`` on a GPU, whether lengths and ids contradict each other; None where the host knows
            that they do not.
        wants_gradient: whether pooling weights want their gradient.
    """

    error: Exception | None = None
    started: int = 0
    contradicts: torch.Tensor | None = None
    wants_gradient: bool = False

    def begin(self) -> None:
        """Forget the batch before."""
        self.error, self.started, self.contradicts, self.wants_gradient = None, 0, None, False


class SentBatch(KeyedJaggedTensor):
    """A batch on its way to the owners of its ids; what arrives is a KeyedJaggedTensor again.

    All of its features have one stride: TorchRec pads sequences, and the collection refuses such bags.
    """

    # Why this rank refuses its batch.
    error: Exception | None = None
    # How many entries are appended for each rank, of how many.
    num_appended = 0
    num_ranks = 1

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Return how many entries of each tensor go to each rank."""
        lengths, *others = super().dist_splits(key_splits)
        return [[number + self.num_appended for number in lengths], *others]

    def dist_tensors(self) -> list[torch.Tensor]:
        """Return what is sent."""
        lengths, *others = super().dist_tensors()
        if self.num_appended:
            of_ranks = lengths.view(self.num_ranks, -1)
            appended = of_ranks.new_full((self.num_ranks, self.num_appended), _APPENDED)
            lengths = torch.cat([of_ranks, appended], dim=1).flatten()
        return [lengths, *others]

    @classmethod
    def dist_init(  # type: ignore[override]
        cls,
        keys: list[str],
        tensors: list[torch.Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: torch.Tensor | None,
        stride_per_rank: list[int],
        **kwargs: Any,
    ) -> KeyedJaggedTensor:
        """Put together what arrived; TorchRec calls it on the type of what this rank sent.

        Weights of which any rank wants the gradient require one.

        Raises:
            Exception: this rank or another one refused its batch.
        """
        lengths, *others = tensors
        num_appended = lengths.numel() - len(keys) * sum(stride_per_rank)
        if num_appended > num_workers:
            raise cls.error or ValueError("features: another rank refuses its batch; its own error says why")
        if num_appended == num_workers and len(set(stride_per_rank)) == 1:
            lengths = lengths.view(num_workers, -1)[:, :-1].reshape(-1)
        elif num_appended:
            # Waits for a GPU; ranks seldom disagree, or have batches of different size and weights with gradients.
            lengths = lengths[lengths != _APPENDED]
        batch = KeyedJaggedTensor.dist_init(
            keys, [lengths, *others], variable_stride_per_key, num_workers, recat, stride_per_rank, **kwargs
        )
        if num_appended:
            batch.weights().requires_grad_()
        return batch


def sent_batch_type(sending: Sending, num_ranks: int) -> type[SentBatch]:
    """Return the type of a batch that is to be sent."""
    if sending.error is not None:
        told = {"error": sending.error, "num_appended": num_ranks + 1, "num_ranks": num_ranks}
        return type("RefusedBatch", (SentBatch,), told)
    if sending.wants_gradient and num_ranks > 1:
        return type("BatchWithGradient", (SentBatch,), {"num_appended": 1, "num_ranks": num_ranks})
    return SentBatch


def empty_batch(keys: list[str], weights: torch.Tensor | None, device: torch.device) -> KeyedJaggedTensor:
    """Return a batch of one sample without ids, to be sent in the place of a refused one.

    Args:
        keys: its features.
        weights: any tensor of the dtype of its weights; None if it has none.
        device: where it is.
    """
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.empty(0, dtype=torch.int64, device=device),
        lengths=torch.zeros(len(keys), dtype=torch.int64, device=device),
        weights=None if weights is None else torch.empty(0, dtype=weights.dtype, device=device),
        stride=1,
        length_per_key=[0] * len(keys),
    )
