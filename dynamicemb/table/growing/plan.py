"""Foresee which inserts of a batch will fail, before anything changes.

Torch operators only, so one text serves every device. It counts, it does not place: within a bucket the order of ids
decides which of them fail, never how many.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dynamicemb.table.ids import fmix64
from dynamicemb.table.index import STEP, Index, Residents
from dynamicemb.table.layout import DIGEST_EMPTY, DIGEST_ERASED

# Slots looked at in one go, about 20 bytes of scratch memory each.
SLOTS_AT_A_TIME = 2**22


class InsertPlan(NamedTuple):
    """What an insert will do to one table.

    Attributes:
        table: number of the table.
        failed: distinct ids that will find no slot.
        total: distinct ids of the batch that are not in the table.
    """

    table: int
    failed: int
    total: int


def plan_inserts(
    index: Index, ids: torch.Tensor, table_ranges: torch.Tensor, rows: torch.Tensor, lag: int, tables: list[int]
) -> list[InsertPlan]:
    """Count the inserts of the next step that will fail.

    Args:
        index: the group's index; not changed.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        rows: i32 ``[N]`` of ``find``, -1 where the id is not in its table.
        lag: how many steps before the next one the oldest protected step will be.
        tables: the tables of interest.

    Returns:
        One plan for each of ``tables``.

    Example: a bucket of 16 slots with 2 empty ones, 4 ids that may be evicted and 10 that an outstanding step protects.
    A batch brings one of the 4 and 9 new ids: 2 + 3 slots can be taken, so 4 of the 9 will fail.

    Host sync: several. Memory: a byte for each row of the group, and about 50 for each missing occurrence.
    """
    positions = (rows < 0).nonzero().flatten()
    owners = torch.searchsorted(table_ranges, positions, right=True) - 1
    buckets, demand = _demand(_bucket_of(index, ids[positions], owners), ids[positions])
    room = room_of(index, buckets, taken_slots(index, lag, rows[rows >= 0]))
    owners = torch.searchsorted(index.bucket_offsets, buckets, right=True) - 1
    counts = torch.zeros(2, index.num_tables, dtype=torch.int64, device=ids.device)
    counts.index_add_(1, owners, torch.stack([(demand - room).clamp(min=0), demand]))
    failed, total = counts.tolist()
    return [InsertPlan(t, failed[t], total[t]) for t in tables]


def _bucket_of(index: Residents, ids: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each id, counted over all tables."""
    first = index.bucket_offsets[tables]
    return first + bucket_hashes(ids) % (index.bucket_offsets[tables + 1] - first)


def bucket_hashes(ids: torch.Tensor) -> torch.Tensor:
    """Return what the number of buckets divides to give the bucket of each id, i64 ``[N]``; ``layout`` has the rule."""
    # An int64 shift copies the sign; the mask takes the copies away, and what is left is not negative.
    return (fmix64(ids) >> 20) & (2**44 - 1)


def _demand(buckets: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the different buckets, i64 ``[A]``, and how many different ids want a slot in each, i64 ``[A]``."""
    order = ids.argsort(stable=True)
    order = order[buckets[order].argsort(stable=True)]
    buckets, ids = buckets[order], ids[order]
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = (buckets[1:] != buckets[:-1]) | (ids[1:] != ids[:-1])
    return torch.unique_consecutive(buckets[first], return_counts=True)


def room_of(index: Residents, buckets: torch.Tensor, is_taken: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return how many slots of each bucket a new id may take, i64 ``[A]``; ``is_taken`` is of ``taken_slots``."""
    parts = buckets.split(max(1, SLOTS_AT_A_TIME // index.bucket_capacity))
    return torch.cat([index.bucket_capacity - is_taken(part).sum(1) for part in parts])


def taken_slots(index: Index, lag: int, hits: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what says which slots of buckets i64 ``[A]`` a new id may not take, bool ``[A, bucket_capacity]``.

    Args:
        index: the group's index.
        lag: how many steps before the next one the oldest protected step will be.
        hits: rows of the ids that the batch finds; the step will protect them. None: no id may be evicted.
    """
    oldest = (index.clock[STEP] + 1 - lag).clamp(min=1)
    shape = (-1, index.bucket_capacity)
    digests, tags, rows = (tensor.view(shape) for tensor in (index.digests, index.tags, index.rows))
    hit = None
    if hits is not None:
        hit = torch.zeros(int(index.rows.max()) + 1, dtype=torch.bool, device=hits.device)
        hit[hits.long()] = True

    def taken(buckets: torch.Tensor) -> torch.Tensor:
        # An erased slot keeps the tag of its last id.
        kept = tags[buckets] >= oldest
        kept |= digests[buckets] > DIGEST_ERASED if hit is None else hit[rows[buckets].long()]
        return kept & (digests[buckets] != DIGEST_EMPTY)

    return taken
