"""Structural invariants of an index, checked in tests. Numbers are those of ``docs/architecture.md``."""

import numpy as np

from dynamicemb.table.index import Index
from dynamicemb.table.layout import DIGEST_EMPTY, FIRST_DIGEST, GROUP_SIZE, locate
from dynamicemb.table.rows import RowStore


def check_invariants(index: Index, store: RowStore, capacities: list[int]) -> None:
    """Raise ``AssertionError`` naming the invariant that does not hold."""
    for t, capacity in enumerate(capacities):
        begin = int(index.bucket_offsets[t]) * index.bucket_capacity
        end = int(index.bucket_offsets[t + 1]) * index.bucket_capacity
        assert end - begin == capacity, f"table {t} has {end - begin} slots for {capacity} rows"
        rows = np.sort(index.rows.cpu().numpy()[begin:end])
        assert np.array_equal(rows, store.row_ids(t).numpy()), f"invariant 1: rows of table {t} not a permutation"
        if not index.moved:
            assert (np.diff(index.rows.cpu().numpy()[begin:end]) == 1).all(), f"rows of table {t} moved unnoticed"
        digests = index.digests.cpu().numpy()[begin:end]
        live = np.flatnonzero(digests >= FIRST_DIGEST)
        keys = index.keys.cpu().numpy()[begin:end][live]
        assert np.unique(keys).size == keys.size, f"invariant 2: an id of table {t} is in two slots"
        _check_places(digests, live, keys, index.bucket_capacity, t)


def _check_places(digests: np.ndarray, live: np.ndarray, keys: np.ndarray, bucket_capacity: int, table: int) -> None:
    """Check that ids are in their buckets, with their digests, and reachable by a probe."""
    num_groups = bucket_capacity // GROUP_SIZE
    bucket, group, digest = locate(keys, digests.size // bucket_capacity, num_groups)
    assert np.array_equal(live // bucket_capacity, bucket), (
        f"invariant 2: an id of table {table} is in a foreign bucket"
    )
    assert np.array_equal(digests[live], digest), f"invariant 3: a digest of table {table} is wrong"
    has_empty = (digests.reshape(-1, num_groups, GROUP_SIZE) == DIGEST_EMPTY).any(2)
    own = live % bucket_capacity // GROUP_SIZE
    for step in range(num_groups):
        probed = (group + step) % num_groups
        before = step < (own - group) % num_groups
        blocked = before & has_empty[bucket, probed]
        assert not blocked.any(), f"invariant 7: an empty slot hides ids {keys[blocked][:3]} of table {table}"
