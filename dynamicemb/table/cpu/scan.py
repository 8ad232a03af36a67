"""List the occupied slots of a table."""

import numpy as np
import torch
from numba import njit, prange

from dynamicemb.table.cpu.threads import launcher, num_parts
from dynamicemb.table.index import Index
from dynamicemb.table.scores import SCORE_COMPOUND


@launcher("index")
def scan(index: Index, table: int, min_score: int = 0) -> torch.Tensor:
    """Return the occupied slots of a table whose score, or of a compound table the stamp, is at least ``min_score``.

    Args:
        index: the group's index.
        table: which table.
        min_score: lowest score or stamp wanted.

    Returns:
        i64 ``[M]`` slots, ascending.
    """
    begin = int(index.bucket_offsets[table]) * index.bucket_capacity
    end = int(index.bucket_offsets[table + 1]) * index.bucket_capacity
    counts = np.zeros(num_parts(end - begin, 4096) + 1, np.int64)
    digests = index.digests.numpy()[begin:end]
    column = index.stamps if int(index.strategies[table]) == SCORE_COMPOUND else index.scores
    scores = column.numpy()[begin:end]
    _count_kernel(digests, scores, min_score, counts)
    starts = np.cumsum(counts)
    slots = np.empty(starts[-1], np.int64)
    _list_kernel(digests, scores, min_score, starts, begin, slots)
    return torch.from_numpy(slots)


@njit(parallel=True, cache=True, nogil=True)
def _count_kernel(digests, scores, min_score, counts):
    parts = counts.size - 1
    for part in prange(parts):
        count = 0
        for slot in range(digests.size * part // parts, digests.size * (part + 1) // parts):
            if digests[slot] >= 2 and scores[slot] >= min_score:
                count += 1
        counts[part + 1] = count


@njit(parallel=True, cache=True, nogil=True)
def _list_kernel(digests, scores, min_score, starts, begin, slots):
    parts = starts.size - 1
    for part in prange(parts):
        to = starts[part]
        for slot in range(digests.size * part // parts, digests.size * (part + 1) // parts):
            if digests[slot] >= 2 and scores[slot] >= min_score:
                slots[to] = begin + slot
                to += 1
