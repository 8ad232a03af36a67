"""Buckets of several groups against the dict oracle: probes that wrap, erased slots on the way, rebuilds.

A bucket of 16 slots has one group, so that nothing of this happens in it.
"""

import numpy as np
import pytest
import torch

from dynamicemb.table.scores import SCORE_LFU, SCORE_STEP
from tests.support.oracle import ReferenceTable
from tests.support.tables import make_group, ranges


def resident(group, table: int) -> dict[int, int]:
    slots = group.scan(table)
    return dict(zip(group.index.keys[slots].tolist(), group.index.scores[slots].tolist(), strict=True))


@pytest.mark.parametrize("strategy", [SCORE_STEP, SCORE_LFU])
@pytest.mark.parametrize("bucket_capacity", [32, 48, 128])
def test_c07_buckets_of_several_groups_equal_the_oracle(bucket_capacity: int, strategy: int) -> None:
    rng = np.random.default_rng(bucket_capacity)
    empty = np.zeros(0, np.float32)
    num_buckets = [2, 1]
    group = make_group("cpu", [n * bucket_capacity for n in num_buckets], None, bucket_capacity, strategy)
    oracles = [ReferenceTable(n, bucket_capacity, strategy, lambda key: (empty, empty)) for n in num_buckets]
    outstanding = []
    num_rebuilt = 0
    for step in range(60):
        sizes = rng.integers(0, bucket_capacity // 2, 2).tolist()
        ids = [rng.integers(0, 4 * bucket_capacity, n) for n in sizes]
        outstanding.append(group.begin_step())
        number, oldest = outstanding[-1].number, outstanding[0].number
        rows, _ = group.find_or_insert(torch.from_numpy(np.concatenate(ids)), ranges(*sizes))
        for t, keys in enumerate(ids):
            entries, _ = oracles[t].lookup(keys.tolist(), None, int(group.index.score_values[t]), number, oldest)
            part = rows[: sizes[0]] if t == 0 else rows[sizes[0] :]
            assert (part < 0).tolist() == [entry is None for entry in entries]
        if len(outstanding) > step % 4:
            # In order, so that the oldest outstanding step is the first of the list.
            del outstanding[: 1 + step % 2]
        if step % 3 == 2:
            for t in range(2):
                erased = rng.choice(4 * bucket_capacity, bucket_capacity)
                num_before = int((group.index.digests == 1).sum())
                assert group.erase(t, torch.from_numpy(erased)) == oracles[t].erase(erased.tolist())
                num_rebuilt += int((group.index.digests == 1).sum()) < num_before
        for t in range(2):
            assert resident(group, t) == {key: entry.score for key, entry in oracles[t].entries().items()}
        group.check_invariants()
    stats = group.stats()
    for t in range(2):
        assert {name: stats[f"t{t}"][name] for name in oracles[t].counts} == oracles[t].counts
        assert stats[f"t{t}"]["evicted"] > 0
    assert num_rebuilt > 0


@pytest.mark.parametrize("bucket_capacity", [32, 128])
def test_c07_the_last_free_slot_of_a_bucket_is_found_from_every_group(bucket_capacity: int) -> None:
    group = make_group("cpu", [bucket_capacity], None, bucket_capacity)
    group.begin_step().finish()
    group.find_or_insert(torch.arange(bucket_capacity), ranges(bucket_capacity))
    for victim in range(bucket_capacity):
        group.begin_step().finish()
        assert group.erase(0, torch.tensor([victim])) == 1
        group.begin_step().finish()
        rows, events = group.find_or_insert(torch.tensor([1000 + victim]), ranges(1))
        assert rows[0] >= 0 and events.result().evicted.numel() == 0
        assert group.find(torch.tensor([1000 + victim]), ranges(1)).tolist() == rows.tolist()
    assert group.size(0) == bucket_capacity
    group.check_invariants()
