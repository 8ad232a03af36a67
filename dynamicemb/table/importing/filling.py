"""Fill a table with random ids, for measurements of full tables."""

import torch

from dynamicemb.table.group import TableGroup
from dynamicemb.table.growing.plan import bucket_hashes, room_of, taken_slots
from dynamicemb.table.initializers import table_key

# Ids are drawn from 0 to this, exclusive.
_END = 2**63 - 1
# Ids drawn in one go, about 60 bytes of scratch memory each.
_DRAWN_AT_A_TIME = 2**22
# Rounds without a new id after which there is no room: some slots of erased ids are protected by outstanding steps.
_IDLE_ROUNDS = 8


def fill(group: TableGroup, table: int, target: int) -> int:
    """Insert random ids until a table holds ``target``, or has no room; return how many it holds.

    No id is evicted and the table does not grow: an id is drawn again if its bucket is full. Which ids are drawn
    follows from the table's seed and name. Host sync: several.
    """
    generator = torch.Generator().manual_seed(table_key(group.seeds[table], group.names[table]) % _END)
    idle = 0
    with group.turn():
        group.erase_expired(table)
        size = group.size(table)
        while size < target and idle < _IDLE_ROUNDS:
            # Part of them find their buckets full.
            number = min(_DRAWN_AT_A_TIME, (target - size) * 5 // 4 + 64)
            ids = torch.randint(0, _END, (number,), generator=generator).to(group.device)
            ids = _placeable(group, table, ids)[: target - size]
            if ids.numel():
                group.insert_without_growing(table, ids)
            idle = 0 if ids.numel() else idle + 1
            size = group.size(table)
    return size


def _placeable(group: TableGroup, table: int, ids: torch.Tensor) -> torch.Tensor:
    """Return those of ids i64 ``[N]`` that the table lacks and that find free slots together, in their order."""
    index = group.index
    begin, end = index.bucket_offsets[table : table + 2].tolist()
    values, inverse = torch.unique(ids, return_inverse=True)
    places = torch.arange(ids.numel(), device=ids.device)
    first = torch.full_like(values, ids.numel()).scatter_reduce_(0, inverse, places, reduce="amin")
    ids = ids[first.sort().values]
    ids = ids[~group.contains(table, ids)]
    buckets = bucket_hashes(ids) % (end - begin)
    order = buckets.argsort(stable=True)
    distinct, counts = torch.unique_consecutive(buckets[order], return_counts=True)
    room = room_of(index, begin + distinct, taken_slots(index, group.steps.next_lag(), None))
    rank = torch.arange(ids.numel(), device=ids.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    fits = rank < room.repeat_interleave(counts)
    return ids[order[fits].sort().values]
