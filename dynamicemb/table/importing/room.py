"""Room in a table's buckets for ids that come with given scores."""

from collections.abc import Callable

import numpy as np
import torch

from dynamicemb.table.ids import fmix64
from dynamicemb.table.index import EVICTED, Index
from dynamicemb.table.layout import DIGEST_ERASED, FIRST_DIGEST
from dynamicemb.table.layout import fmix64 as fmix64_of_array

# Slots of overfull buckets that are ranked at a time.
_RANKED_SLOTS = 2**20


class Room:
    """Gives places to new ids, batch after batch.

    Where more come than a bucket holds, those that rank highest stay, whatever their order; of equal ranks the larger
    unsigned fmix64(id). That is who would survive if they were evicted one by one.

    Attributes:
        num_lost: ids that got no place, or lost it.

    Takes 8 bytes for each bucket of the table. Host sync: yes.
    """

    def __init__(
        self,
        index: Index,
        table: int,
        scores_of: Callable[[torch.Tensor], list[torch.Tensor]],
        ranks_of: Callable[[list[torch.Tensor]], np.ndarray],
    ) -> None:
        """Look at the table as it is; no expired ids may be in it, and no step may protect erased slots.

        Args:
            index: the index.
            table: which table.
            scores_of: returns the columns of scores of slots i64 ``[M]``.
            ranks_of: returns what evictions compare, i64 ``[M]``, from such columns.
        """
        self.num_lost = 0
        self._index = index
        self._table = table
        self._scores_of = scores_of
        self._ranks_of = ranks_of
        self.look()

    def look(self) -> None:
        """Take in anew where the table's buckets are and how full."""
        index = self._index
        self._begin, end = index.bucket_offsets[self._table : self._table + 2].tolist()
        self._num_buckets = end - self._begin
        digests = index.digests.view(-1, index.bucket_capacity)[self._begin : end]
        self._loads = (digests >= FIRST_DIGEST).sum(1)

    def take(self, ids: torch.Tensor, scores: list[torch.Tensor]) -> torch.Tensor:
        """Return the positions of the new ids that get a place, and take it from the ids that must go.

        Args:
            ids: i64 ``[M]``, distinct, none of them in the table.
            scores: each i64 ``[M]``.
        """
        capacity = self._index.bucket_capacity
        buckets = _bucket_of(ids, self._num_buckets)
        distinct, inverse, counts = torch.unique(buckets, return_inverse=True, return_counts=True)
        total = self._loads[distinct] + counts
        overfull = (total > capacity).nonzero().flatten()
        self._loads[distinct] = total.clamp(max=capacity)
        admitted = torch.ones(ids.numel(), dtype=torch.bool, device=ids.device)
        for part in torch.split(overfull, max(1, _RANKED_SLOTS // capacity)):
            here = torch.isin(inverse, part).nonzero().flatten()
            lost, gone = self._weakest(buckets[here], distinct[part], ids[here], [column[here] for column in scores])
            admitted[here[lost]] = False
            self._drop(gone)
            self.num_lost += lost.numel() + gone.numel()
        return admitted.nonzero().flatten()

    def _weakest(
        self, owners: torch.Tensor, buckets: torch.Tensor, ids: torch.Tensor, scores: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the new ids, and which slots of overfull buckets, must go.

        Args:
            owners: i64 ``[M]``, the bucket of each new id.
            buckets: i64 ``[B]``, the distinct ones.
            ids: i64 ``[M]``.
            scores: each i64 ``[M]``.
        """
        index, capacity = self._index, self._index.bucket_capacity
        slots = ((self._begin + buckets)[:, None] * capacity + torch.arange(capacity, device=buckets.device)).flatten()
        slots = slots[index.digests[slots] >= FIRST_DIGEST]
        held = self._scores_of(slots)
        ranks = self._ranks_of([torch.cat(pair) for pair in zip(scores, held, strict=True)])
        hashes = fmix64_of_array(torch.cat([ids, index.keys[slots]]).cpu().numpy())
        owner = torch.cat([owners, slots // capacity - self._begin]).cpu().numpy()
        order = np.lexsort((hashes, ranks, owner))
        _, begins, counts = np.unique(owner[order], return_index=True, return_counts=True)
        place = np.arange(order.size) - np.repeat(begins, counts)
        weakest = torch.from_numpy(order[place < np.repeat(counts - capacity, counts)]).to(ids.device)
        return weakest[weakest < ids.numel()], slots[weakest[weakest >= ids.numel()] - ids.numel()]

    def _drop(self, slots: torch.Tensor) -> None:
        index = self._index
        index.digests[slots] = DIGEST_ERASED
        index.tags[slots] = 0
        index.tallies[self._table, EVICTED] += slots.numel()


def _bucket_of(ids: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Return the bucket of each id in its table, i64; as ``layout.locate``."""
    return ((fmix64(ids) >> 20) & (2**44 - 1)) % num_buckets


def last_of_each(ids: torch.Tensor) -> torch.Tensor:
    """Return the position of the last occurrence of every distinct id, i64, ascending."""
    values, inverse = torch.unique(ids, return_inverse=True)
    if values.numel() == ids.numel():
        return torch.arange(ids.numel(), device=ids.device)
    positions = torch.arange(ids.numel(), device=ids.device)
    last = torch.zeros_like(values).scatter_reduce_(0, inverse, positions, reduce="amax", include_self=False)
    return last.sort().values
