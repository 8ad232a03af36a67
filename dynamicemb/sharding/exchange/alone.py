"""The way of a batch on a rank alone: nothing is exchanged, and who awaits gets what is there.

TorchRec's awaitables do the same, but each of them costs the host some microseconds: labels for profilers, lists of one
part, views. The ones here stand in their place, so that pipelines and modules around a collection see no difference.
"""

from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionAwaitable
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable
from torchrec.distributed.types import Awaitable, LazyAwaitable, NoWait
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dynamicemb.sharding.torchrec_compat import jagged_tensors


class _Ready(Awaitable[Any]):
    """Returns what is there; leaves out the label that TorchRec gives to every wait."""

    def wait(self) -> Any:
        """Return the result, by way of the callbacks."""
        result = self._wait_impl()
        for callback in self._callbacks:
            result = callback(result)
        return result


class ReadyBatches(_Ready):
    """What the second wait for an exchange returns.

    Args:
        batches: one for each sharding.
    """

    def __init__(self, batches: KJTList) -> None:
        super().__init__()
        self._batches = batches

    def _wait_impl(self) -> KJTList:
        return self._batches


class ReadySplits(_Ready, KJTListSplitsAwaitable[Any]):
    """An exchange of ids that needs none.

    Args:
        batch: what the one sharding of a collection got.
        context: of the batch.
    """

    def __init__(self, batch: KeyedJaggedTensor, context: Any) -> None:
        Awaitable.__init__(self)
        self.ctx = context
        self._batch = batch

    @property
    def awaitables(self) -> list[Awaitable[Awaitable[KeyedJaggedTensor]]]:
        """The exchange of each sharding, which pipelines take from here to await those of all modules together."""
        return [NoWait(NoWait(self._batch))]

    def _wait_impl(self) -> ReadyBatches:
        return ReadyBatches(KJTList([self._batch]))


class ReadyBags(_Ready, EmbeddingBagCollectionAwaitable):
    """Pooled outputs that are there.

    Args:
        values: ``[B, total_D]``.
        names: of the outputs.
        dims: columns of each.
    """

    def __init__(self, values: torch.Tensor, names: list[str], dims: list[int]) -> None:
        LazyAwaitable.__init__(self)
        self._values = values
        self._embedding_names = names
        self._embedding_dims = dims

    def _wait_impl(self) -> KeyedTensor:
        return KeyedTensor(self._embedding_names, self._embedding_dims, self._values)


class ReadySequences(_Ready, EmbeddingCollectionAwaitable):
    """Sequences that are there.

    Args:
        values: ``[N, D]``.
        features: what was looked up, ids ``[N]`` of F features.
        names: of the outputs, F, once each.
        with_ids: whether an output has its ids as weights.
    """

    def __init__(self, values: torch.Tensor, features: KeyedJaggedTensor, names: list[str], with_ids: bool) -> None:
        LazyAwaitable.__init__(self)
        self._values = values
        self._features = features
        self._names = names
        self._with_ids = with_ids

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        features, names = self._features, self._names
        sizes = features.length_per_key()
        rows = torch.split_with_sizes(self._values, sizes)
        ids = torch.split_with_sizes(features.values(), sizes) if self._with_ids else None
        lengths = features.lengths().view(len(names), features.stride()).unbind()
        return jagged_tensors(names, rows, ids, lengths)
