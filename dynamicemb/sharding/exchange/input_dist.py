"""Send every id to the rank that owns it."""

import itertools

import torch
import torch.distributed as dist
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.sharding.checks.lengths import CONTRADICTION
from dynamicemb.sharding.exchange.bucketize import bucketize
from dynamicemb.sharding.exchange.dedup import pack_counts
from dynamicemb.sharding.exchange.sent_batch import Sending, sent_batch_type
from dynamicemb.sharding.torchrec_compat import keyed_jagged_tensor, replace_values
from dynamicemb.table.ids import as_int64
from dynamicemb.table.placement import Placement


class DynamicFeaturesDist(RwSparseFeaturesDist):
    """Sorts a batch by owner and exchanges it; ids keep their value.

    Args:
        pg: ranks that share the tables.
        placements: of the table of each feature.
        device: of the batches.
        is_sequence: rows travel back per occurrence, so the order must be remembered.
        keep_weights: whether the batch's weights travel along. Equal on all ranks, also on those with an empty batch:
            the exchange would wait for ever otherwise. Where no weights travel, counts of `sending` may.
        sending: what is known of the batch, see `dynamicemb.sharding.exchange.sent_batch`.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        placements: list[Placement],
        device: torch.device | None,
        is_sequence: bool,
        keep_weights: bool,
        sending: Sending,
    ) -> None:
        # TorchRec's block sizes have no meaning here; its code beyond `forward` only needs one per feature.
        super().__init__(
            pg=pg,
            num_features=len(placements),
            feature_hash_sizes=[1] * len(placements),
            device=device,
            is_sequence=is_sequence,
        )
        # Neighbours whose ids take the same way are asked for together; each run by its first placement.
        runs = [list(run) for _, run in itertools.groupby(placements, key=lambda p: (p.rule, p.ranks))]
        self._runs = [(run[0], len(run)) for run in runs]
        self.keep_weights = keep_weights
        self.sending = sending

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start the exchange.

        Args:
            sparse_features: ids ``[N]`` of F features and B samples.

        Returns:
            Two nested awaitables (sizes, then contents) of the ids that this rank owns, of all ranks' samples.
        """
        if self._world_size == 1:
            return NoWait(NoWait(self.kept(sparse_features)))
        ids, weights = as_int64(sparse_features.values()), self._weights(sparse_features)
        owners, remembers = self._owners(ids, sparse_features), self._is_sequence or self.sending.wants_gradient
        lengths, order, position = bucketize(owners, sparse_features.lengths(), self._world_size, remembers)
        ids = ids.index_select(0, order)
        weights = None if weights is None else weights.index_select(0, order)
        self.unbucketize_permute_tensor = position if remembers else None
        length_per_key = self._length_per_key(sparse_features, lengths)
        kind = sent_batch_type(self.sending, self._world_size, not self.keep_weights)
        return self._dist(
            replace_values(sparse_features, ids, lengths, weights, self._world_size, kind, length_per_key)
        )

    def kept(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return what a rank alone looks up: its batch, with the weights that `forward` would send."""
        weights = self._weights(features)
        if weights is features.weights_or_none():
            return features
        is_known = features.length_per_key_or_none() is not None
        return keyed_jagged_tensor(
            features.keys(),
            features.values(),
            weights,
            features.lengths(),
            features.offsets_or_none(),
            features.stride(),
            features.offset_per_key() if is_known else None,
        )

    def _weights(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        if self.sending.counts is not None:
            return pack_counts(self.sending.counts)
        return features.weights() if self.keep_weights else None

    def _length_per_key(self, features: KeyedJaggedTensor, lengths: torch.Tensor) -> list[int] | None:
        """Return the sums of lengths ``[W * F * B]`` per rank and feature; None leaves them to TorchRec.

        Raises:
            ValueError: lengths and ids of the batch contradict each other.

        Host sync: one on a GPU, which spares TorchRec its own.
        """
        contradicts = self.sending.contradicts
        if contradicts is None:
            return None
        sums = lengths.view(self._world_size * len(features.keys()), -1).sum(1)
        *length_per_key, wrong = torch.cat([sums, contradicts]).tolist()
        if wrong:
            raise ValueError(CONTRADICTION)
        return length_per_key

    def _owners(self, ids: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the owner of every id, i64 ``[N]``."""
        if len(self._runs) == 1:
            return self._runs[0][0].owner(ids)
        per_key = iter(features.length_per_key())
        sizes = [sum(itertools.islice(per_key, number)) for _, number in self._runs]
        parts = zip(torch.split(ids, sizes), self._runs, strict=True)
        return torch.cat([placement.owner(part) for part, (placement, _) in parts])
