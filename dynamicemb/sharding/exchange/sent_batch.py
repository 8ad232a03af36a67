"""Tell the other ranks about this rank's batch inside the exchange that they wait for anyway.

Two things are told: that the batch is refused, and that its pooling weights want their gradient. Who tells something
appends entries of -1 to the lengths that go to each rank: one for weights that want a gradient, W + 1 for a refusal
among W ranks. How many entries come from where is known to every host by then, so noticing them costs neither a message
nor a wait. After a refusal all ranks raise at the same place: after the exchange, before any lookup.

A collection that has no pooling weights may have counts, how often each occurrence counts. Then the one entry says that
each id is followed by its count.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.sharding.exchange.dedup import pack_counts, unpack_counts

# What is appended; no length is negative.
_APPENDED = -1
# Set on a batch that arrived.
WANTS_GRADIENT = "weights_want_gradient"
_COUNTED_RANKS = "counted_ranks"


@dataclass
class Sending:
    """The batch that a rank is about to send; shared by a collection and its input dists.

    Attributes:
        error: why it is refused; None while it is good.
        started: how many input dists have begun.
        contradicts: bool ``[1]`` on a GPU, whether lengths and ids contradict each other; None where the host knows
            that they do not.
        wants_gradient: whether pooling weights want their gradient.
        counts: i64 ``[N]``, how often each occurrence counts; None is once.
    """

    error: Exception | None = None
    started: int = 0
    contradicts: torch.Tensor | None = None
    wants_gradient: bool = False
    counts: torch.Tensor | None = None

    def begin(self) -> None:
        """Forget the batch before."""
        self.error, self.started, self.contradicts, self.wants_gradient, self.counts = None, 0, None, False, None


class SentBatch(KeyedJaggedTensor):
    """A batch on its way to the owners of its ids; what arrives is a KeyedJaggedTensor again.

    All of its features have one stride: TorchRec pads sequences, and the collection refuses such bags.
    """

    # Why this rank refuses its batch.
    error: Exception | None = None
    # How many entries are appended for each rank, of how many.
    num_appended = 0
    num_ranks = 1
    # Whether its weights are counts, which go behind their ids.
    has_counts = False
    # Whether one appended entry speaks of counts, not of a gradient.
    reads_counts = False

    def dist_labels(self) -> list[str]:
        """Return the names of the tensors that are sent."""
        labels: list[str] = super().dist_labels()
        return labels[:-1] if self.has_counts else labels

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Return how many entries of each tensor go to each rank."""
        lengths, *others = super().dist_splits(key_splits)
        if self.has_counts:
            others = [[2 * number for number in others[0]]]
        return [[number + self.num_appended for number in lengths], *others]

    def dist_tensors(self) -> list[torch.Tensor]:
        """Return what is sent."""
        lengths, *others = super().dist_tensors()
        if self.has_counts:
            ids, packed = others
            others = [torch.stack([ids, unpack_counts(packed)], dim=1).flatten()]
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

        `WANTS_GRADIENT` is set on it if the weights of any rank want their gradient. Counts are its weights, packed;
        ids of ranks that sent none count once.

        Raises:
            Exception: this rank or another one refused its batch.
        """
        lengths, *others = tensors
        num_appended = lengths.numel() - len(keys) * sum(stride_per_rank)
        if num_appended > num_workers:
            raise cls.error or ValueError("features: another rank refuses its batch; its own error says why")
        counted_ranks: list[bool] = []
        if num_appended and cls.reads_counts:
            num_lengths = [len(keys) * stride for stride in stride_per_rank]
            (lengths, *others), counted_ranks = _with_counts(lengths, others[0], num_lengths)
        elif num_appended == num_workers and len(set(stride_per_rank)) == 1:
            lengths = lengths.view(num_workers, -1)[:, :-1].reshape(-1)
        elif num_appended:
            # Waits for a GPU; ranks seldom disagree, or have batches of different size and weights with gradients.
            lengths = lengths[lengths != _APPENDED]
        batch = KeyedJaggedTensor.dist_init(
            keys, [lengths, *others], variable_stride_per_key, num_workers, recat, stride_per_rank, **kwargs
        )
        if counted_ranks:
            setattr(batch, _COUNTED_RANKS, counted_ranks)
        elif num_appended:
            setattr(batch, WANTS_GRADIENT, True)
        return batch


class CountedBatch(SentBatch):
    """A batch of a collection in which one appended entry speaks of counts."""

    reads_counts = True


def _with_counts(
    lengths: torch.Tensor, values: torch.Tensor, num_lengths: list[int]
) -> tuple[list[torch.Tensor], list[bool]]:
    """Return lengths, ids and packed counts of what arrived, and which ranks sent counts.

    Args:
        lengths: of all ranks, behind each other; -1 follows those of a rank that sent counts.
        values: ids of all ranks, each followed by its count where there are any.
        num_lengths: of each rank.

    Host sync: one on a GPU, unless all ranks sent counts and equally many lengths.
    """
    num_ranks = len(num_lengths)
    if len(set(num_lengths)) == 1 and lengths.numel() == sum(num_lengths) + num_ranks:
        ids, counts = values.view(-1, 2).unbind(1)
        lengths = lengths.view(num_ranks, -1)[:, :-1].reshape(-1)
        return [lengths, ids.contiguous(), pack_counts(counts.contiguous())], [True] * num_ranks
    on_host, begin, first = lengths.cpu(), 0, 0
    ids_of_ranks, counts_of_ranks, counted_ranks = [], [], []
    for number in num_lengths:
        num_ids = int(on_host[begin : begin + number].sum())
        begin += number
        counted_ranks.append(begin < on_host.numel() and int(on_host[begin]) == _APPENDED)
        if counted_ranks[-1]:
            begin += 1
            ids, counts = values[first : first + 2 * num_ids].view(-1, 2).unbind(1)
            first += 2 * num_ids
        else:
            ids = values[first : first + num_ids]
            counts = torch.ones_like(ids)
            first += num_ids
        ids_of_ranks.append(ids)
        counts_of_ranks.append(counts)
    parts = [lengths[lengths != _APPENDED], torch.cat(ids_of_ranks), pack_counts(torch.cat(counts_of_ranks))]
    return parts, counted_ranks


def forget_counts(context: Any, batch: Any, rank: int) -> None:
    """Take what was sent for counts out of the numbers by which results travel back.

    Args:
        context: of one sharding of sequences.
        batch: what arrived for it.
        rank: this one.
    """
    counted_ranks = getattr(batch, _COUNTED_RANKS, None)
    if counted_ranks is None or getattr(context, _COUNTED_RANKS, None) is not None:
        return
    setattr(context, _COUNTED_RANKS, counted_ranks)
    splits = zip(context.output_splits, counted_ranks, strict=True)
    context.output_splits = [number // 2 if counted else number for number, counted in splits]
    if counted_ranks[rank]:
        context.input_splits = [number // 2 for number in context.input_splits]


def sent_batch_type(sending: Sending, num_ranks: int, reads_counts: bool = False) -> type[SentBatch]:
    """Return the type of a batch that is to be sent.

    Args:
        sending: what is known of the batch.
        num_ranks: W.
        reads_counts: whether a batch may have counts instead of weights; equal on all ranks.
    """
    kind = CountedBatch if reads_counts else SentBatch
    if sending.error is not None:
        told = {"error": sending.error, "num_appended": num_ranks + 1, "num_ranks": num_ranks}
        return type("RefusedBatch", (kind,), told)
    if num_ranks > 1 and sending.counts is not None:
        return type("BatchWithCounts", (kind,), {"num_appended": 1, "num_ranks": num_ranks, "has_counts": True})
    if sending.wants_gradient and num_ranks > 1:
        return type("BatchWithGradient", (kind,), {"num_appended": 1, "num_ranks": num_ranks})
    return kind


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
