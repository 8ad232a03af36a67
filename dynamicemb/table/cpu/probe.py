"""How kernels see an index, and the walk through a bucket.

Addresses instead of arrays, for the reason given in ``vectors.py``.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from dynamicemb.table.cpu.hashing import bucket_of, bytes_equal, digest_of, group_of, lowest_byte, mix
from dynamicemb.table.cpu.memory import read_i32, read_i64, read_u64
from dynamicemb.table.cpu.score_function import compile_score
from dynamicemb.table.index import NOW, OLDEST, SEEN, STEP, Index, Residents
from dynamicemb.table.scores import SCORE_LFU, SCORE_NO_EVICTION


class IndexView(NamedTuple):
    """Addresses of an index's arrays, and the numbers of the current step; touches are 0 where nobody touches."""

    keys: int
    digests: int
    rows: int
    bucket_offsets: int
    bucket_capacity: int
    num_tables: int
    # Whether slot i of a table need not own the table's row i.
    moved: bool
    scores: int = 0
    tags: int = 0
    # 0 where there are none.
    stamps: int = 0
    score_values: int = 0
    strategies: int = 0
    ttls: int = 0
    step: int = 0
    oldest: int = 0
    now: int = 0
    seen: int = 0
    score_function: int = 0


def index_view(index: Residents) -> IndexView:
    """Return the addresses of an index on the CPU, or of its residents alone; the caller keeps it alive."""
    residents = (
        index.keys.data_ptr(),
        index.digests.data_ptr(),
        index.rows.data_ptr(),
        index.bucket_offsets.data_ptr(),
        index.bucket_capacity,
        index.num_tables,
        bool(index.moved.numpy()[0]),
    )
    if not isinstance(index, Index):
        return IndexView(*residents)
    clock = index.clock.numpy()
    return IndexView(
        *residents,
        index.scores.data_ptr(),
        index.tags.data_ptr(),
        index.stamps.data_ptr(),
        index.score_values.data_ptr(),
        index.strategies.data_ptr(),
        index.ttls.data_ptr(),
        int(clock[STEP]),
        int(clock[OLDEST]),
        int(clock[NOW]),
        int(clock[SEEN]),
        0 if index.score_function is None else compile_score(index.score_function).address,
    )


@njit
def home_bucket(view, t, h):
    """Return the bucket, counted from the index's first, of a mixed id of table ``t``."""
    first = read_i64(view.bucket_offsets, t)
    return first + bucket_of(h, read_i64(view.bucket_offsets, t + 1) - first)


@njit
def home(view, t, key):
    """Return where ``probe`` looks for an id of table ``t``: first slot of its bucket, start group, digest."""
    h = mix(key)
    base = home_bucket(view, t, h) * view.bucket_capacity
    return base, group_of(h, view.bucket_capacity // 16), digest_of(h)


@njit
def counts(view, t):
    """Return whether touches of table ``t`` add to the score instead of replacing it."""
    return read_i32(view.strategies, t) >= SCORE_LFU


@njit
def expired(view, t, slot):
    """Return whether an occupied slot of table ``t`` holds an id that is forgotten: untouched for longer than its time
    to live, also by the steps that are not over.
    """
    if view.ttls == 0:
        return False
    touched = read_i64(view.stamps if view.stamps != 0 else view.scores, slot)
    return touched < view.seen - read_i64(view.ttls, t) and read_i32(view.tags, slot) < view.oldest


@njit
def keeps(view, t):
    """Return whether touches of table ``t`` leave the score as it is."""
    return read_i32(view.strategies, t) == SCORE_NO_EVICTION


@njit
def next_group(group, num_groups):
    """Return the group probed after ``group``."""
    return group + 1 if group + 1 < num_groups else 0


@njit
def probe(view, base, group, digest, key):
    """Return the slot of ``key`` in the bucket that starts at slot ``base``, or -1.

    Walks the groups from ``group`` on, compares keys only where digests match, and stops after the first group with an
    empty slot.
    """
    num_groups = view.bucket_capacity // 16
    for _ in range(num_groups):
        first = base + group * 16
        empty = np.uint64(0)
        for half in range(2):
            word = read_u64(view.digests + first, half)
            marks = bytes_equal(word, digest)
            while marks != 0:
                slot = first + half * 8 + lowest_byte(marks)
                if read_i64(view.keys, slot) == key:
                    return slot
                marks &= marks - np.uint64(1)
            empty |= bytes_equal(word, 0)
        if empty != 0:
            return -1
        group = next_group(group, num_groups)
    return -1
