"""Full buckets: below which load none is to be feared, and how far a table must grow to have none."""

import functools
import math
from collections.abc import Callable

import torch

from dynamicemb.table.growing.plan import SLOTS_AT_A_TIME, bucket_hashes
from dynamicemb.table.index import Residents

_BUCKETS = 2**24
_RISK = 1e-12


@functools.cache
def safe_load(bucket_capacity: int) -> float:
    """Return the load of a table below which a full bucket is out of the question.

    The n ids of a table with B buckets give a bucket a binomial number, n trials of 1 / B. Its upper tail is below that
    of the Poisson distribution with the same mean (Anderson and Samuels, 1967), whose terms beyond the bucket fall
    faster than a geometric series. The load is the highest at which one of 2^24 buckets is asked for more than its
    slots with a chance below 10^-12.

    Example: 0.034 for buckets of 16 slots, 0.40 for 128, 0.74 for 1,024.
    """
    wanted = math.log(_RISK / _BUCKETS)
    k = bucket_capacity + 1
    low, high = 0.0, float(bucket_capacity)
    for _ in range(60):
        mean = (low + high) / 2
        first = k * math.log(mean) - mean - math.lgamma(k + 1)
        low, high = (mean, high) if first - math.log1p(-mean / (k + 1)) < wanted else (low, mean)
    return low / bucket_capacity


def roomy_factor(
    index: Residents,
    table: int,
    ids: torch.Tensor,
    taken: Callable[[torch.Tensor], torch.Tensor],
    least: int,
    most: int,
) -> int | None:
    """Return by which power of two a table must grow so that all of ``ids`` find slots; None: not even by ``most``.

    Args:
        index: the group's index; not changed.
        table: which table.
        ids: i64 ``[U]``, distinct ids that the table does not hold.
        taken: of buckets i64 ``[A]``, which slots none of the ids may have, bool ``[A, bucket_capacity]``.
        least: the lowest factor that may be returned.
        most: the highest.

    Example: two buckets of 16 slots, 12 of them taken in bucket 0, whose ids go to buckets 0 and 2 of four by halves.
    Of 5 new ids of bucket 0, 4 go to bucket 0 of four and 1 to bucket 2: 17 would not fit, 6 + 4 and 6 + 1 do, so 2.

    Host sync: one where nothing is crowded. Memory: a byte for each slot of the buckets that the ids go to.
    """
    first, end = index.bucket_offsets[table : table + 2].tolist()
    hashes = bucket_hashes(ids)
    buckets, demand = torch.unique(hashes % (end - first), return_counts=True)
    size = max(1, SLOTS_AT_A_TIME // index.bucket_capacity)
    full = [
        wanted + taken(part + first).sum(1) > index.bucket_capacity
        for part, wanted in zip(buckets.split(size), demand.split(size), strict=True)
    ]
    crowded = buckets[torch.cat(full)] if full else buckets
    if not crowded.numel():
        return least
    keys = index.keys.view(-1, index.bucket_capacity)
    placed = [keys[part][taken(part)] for part in (crowded + first).split(size)]
    hashes = torch.cat([bucket_hashes(torch.cat(placed)), hashes[torch.isin(hashes % (end - first), crowded)]])
    # A bucket that is not crowded now has no crowded part after growth.
    factor = max(least, 2)
    while factor <= most:
        _, numbers = torch.unique(hashes % ((end - first) * factor), return_counts=True)
        if int(numbers.max()) <= index.bucket_capacity:
            return factor
        factor *= 2
    return None
