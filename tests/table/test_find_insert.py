"""Index kernels against the dict oracle, on random batches."""

import numpy as np
import pytest
import torch

from dynamicemb.table.index import NOW
from dynamicemb.table.layout import fmix64, locate
from dynamicemb.table.scores import (
    SCORE_COMPOUND,
    SCORE_CUSTOMIZED,
    SCORE_LFU,
    SCORE_NO_EVICTION,
    SCORE_STEP,
    SCORE_TIMESTAMP,
)
from tests.support.oracle import ReferenceTable
from tests.support.tables import make_group, ranges

pytestmark = pytest.mark.usefixtures("tensors_on_device")
INT64 = np.iinfo(np.int64)
EXTREME = [-4, -3, -2, -1, 0, 1, INT64.min, INT64.min + 1, INT64.max, INT64.max - 1]


def oracle(num_buckets: int, bucket_capacity: int, strategy: int) -> ReferenceTable:
    empty = np.zeros(0, np.float32)
    return ReferenceTable(num_buckets, bucket_capacity, strategy, lambda key: (empty, empty))


def resident(group, table: int) -> dict[int, tuple[int, int]]:
    """Return the ids, scores and stamps (0 where there are none) of a table."""
    slots = group.scan(table)
    scores = group.index.scores[slots].tolist()
    stamps = group.index.stamps[slots].tolist() if group.index.has_stamps else [0] * len(scores)
    return dict(zip(group.index.keys[slots].tolist(), zip(scores, stamps, strict=True), strict=True))


STRATEGIES = [
    *((strategy, strategy) for strategy in range(SCORE_COMPOUND + 1)),
    (SCORE_NO_EVICTION, SCORE_STEP),
    (SCORE_LFU, SCORE_NO_EVICTION),
    (SCORE_TIMESTAMP, SCORE_COMPOUND),
    (SCORE_COMPOUND, SCORE_LFU),
]


@pytest.mark.parametrize("strategies", STRATEGIES)
def test_c07_random_batches_equal_the_oracle(backend: str, strategies: tuple[int, int]) -> None:
    rng = np.random.default_rng(strategies)
    cases = (40, 60) if backend == "cpu" else (6, 40)
    capacities = [48, 16]
    group = make_group(backend, capacities, strategy=strategies)
    oracles = [oracle(c // 16, 16, strategy) for c, strategy in zip(capacities, strategies, strict=True)]
    num_evicted = 0
    for step in range(cases[0]):
        sizes = [int(rng.integers(0, cases[1])), int(rng.integers(cases[1] // 3, cases[1]))]
        ids = [rng.choice(np.concatenate([EXTREME, np.arange(70)]), n).astype(np.int64) for n in sizes]
        frequencies = torch.tensor(rng.integers(1, 5, sum(sizes)))
        for t in range(2):
            if strategies[t] == SCORE_CUSTOMIZED:
                group.set_score(t, int(rng.integers(1, 9)))
        token = group.begin_step()
        batch = torch.tensor(np.concatenate(ids))
        counts = frequencies if step % 2 else None
        rows, events = group.find_or_insert(batch, ranges(*sizes), counts)
        result = events.result()
        evicted = list(zip(result.evicted_ids.tolist(), result.evicted_scores.tolist(), strict=True))
        now = int(group.index.clock[NOW]) if group.index.has_stamps else 0
        begin = 0
        expected_evicted = []
        for t, keys in enumerate(ids):
            part = counts[begin : begin + len(keys)].tolist() if counts is not None else None
            value = int(group.index.score_values[t])
            entries, out = oracles[t].lookup(keys.tolist(), part, value, token.number, token.number, now)
            expected_evicted += out
            failed = (rows[begin : begin + len(keys)] < 0).tolist()
            assert failed == [entry is None for entry in entries]
            assert resident(group, t) == {key: (e.score, e.stamp) for key, e in oracles[t].entries().items()}
            begin += len(keys)
        assert evicted == [(key, entry.score) for key, entry in expected_evicted]
        if group.index.has_stamps:
            assert result.evicted_stamps.tolist() == [entry.stamp for _, entry in expected_evicted]
        num_evicted += len(evicted)
        token.finish()
        group.check_invariants()
    assert num_evicted > 0
    stats = group.stats()
    for t in range(2):
        assert {name: stats[f"t{t}"][name] for name in oracles[t].counts} == oracles[t].counts
    assert stats["t0"]["evicted"] > 0 and stats["t1"]["failed"] > 0


def test_c01_every_int64_is_found_again(backend: str) -> None:
    group = make_group(backend, [64])
    ids = torch.tensor(EXTREME)
    group.begin_step()
    rows, _ = group.find_or_insert(ids, ranges(len(EXTREME)))
    assert torch.equal(group.find(ids, ranges(len(EXTREME))), rows)
    assert rows.unique().numel() == len(EXTREME) and bool((rows >= 0).all())
    assert sorted(resident(group, 0)) == sorted(EXTREME)


def test_c07_ties_go_to_the_smaller_mixed_id(backend: str) -> None:
    group = make_group(backend, [16], strategy=SCORE_CUSTOMIZED)
    group.set_score(0, 5)
    first = torch.arange(16)
    group.begin_step().finish()
    group.find_or_insert(first, ranges(16))
    group.begin_step()
    _, events = group.find_or_insert(torch.tensor([100, 101]), ranges(2))
    by_hash = first.cpu().numpy()[np.argsort(fmix64(first.cpu().numpy()))]
    assert events.result().evicted_ids.tolist() == by_hash[:2].tolist()


def test_c02_repeated_ids_share_one_row(backend: str) -> None:
    group = make_group(backend, [32])
    group.begin_step()
    rows, events = group.find_or_insert(torch.tensor([7, 7, 3, 7]), ranges(4))
    assert rows[0] == rows[1] == rows[3] != rows[2]
    assert events.result().new.tolist() == [0, 2]


@pytest.mark.parametrize("bucket_capacity", [16, 112, 128, 1024])
def test_c03_a_table_can_be_filled_to_the_last_slot(backend: str, bucket_capacity: int) -> None:
    if backend == "interpret" and bucket_capacity > 16:
        pytest.skip("interpret: thousands of ids take minutes")
    group = make_group(backend, [bucket_capacity * 2], bucket_capacity=bucket_capacity)
    group.begin_step()
    group.find_or_insert(torch.arange(20 * bucket_capacity), ranges(20 * bucket_capacity))
    assert group.size(0) == 2 * bucket_capacity
    group.check_invariants()


def test_kernels_agree_with_the_layout_on_where_ids_live(backend: str) -> None:
    group = make_group(backend, [48 * 16], bucket_capacity=48)
    rng = np.random.default_rng(0)
    ids = rng.integers(INT64.min, INT64.max, 100)
    group.begin_step()
    group.find_or_insert(torch.tensor(ids), ranges(100))
    group.check_invariants()
    bucket, start, digest = locate(ids, 16, 3)
    slots = {int(k): s for k, s in zip(group.index.keys[group.scan(0)], group.scan(0).tolist(), strict=True)}
    for i, key in enumerate(ids.tolist()):
        assert slots[key] // 48 == bucket[i]
        assert group.index.digests[slots[key]] == digest[i]
    assert digest.min() >= 2 and set(start.tolist()) == {0, 1, 2}


def test_find_changes_nothing_without_touch(backend: str) -> None:
    group = make_group(backend, [32], strategy=SCORE_LFU)
    group.begin_step()
    group.find_or_insert(torch.arange(10), ranges(10))
    before = [t.clone() for t in group.index.tensors()]
    assert group.find(torch.arange(20), ranges(20)).ge(0).sum() == 10
    assert all(torch.equal(a, b) for a, b in zip(before, group.index.tensors(), strict=True))


def test_erased_slots_are_found_past_and_reused(backend: str) -> None:
    group = make_group(backend, [16])
    ids = torch.arange(16)
    step = group.begin_step()
    group.find_or_insert(ids, ranges(16))
    # While the step is outstanding, its erased slots stay taken and everything else in the bucket is protected.
    assert group.erase(0, torch.tensor([3, 3, 99, 5])) == 2
    rows, _ = group.find_or_insert(torch.tensor([200]), ranges(1))
    assert rows.tolist() == [-1]
    assert group.find(ids, ranges(16)).ge(0).tolist() == [i not in (3, 5) for i in range(16)]
    step.finish()
    group.begin_step()
    rows, events = group.find_or_insert(torch.tensor([200, 201]), ranges(2))
    assert bool((rows >= 0).all()) and events.result().evicted.numel() == 0
    group.check_invariants()


def test_many_erased_slots_become_empty(backend: str) -> None:
    group = make_group(backend, [64])
    group.begin_step().finish()
    group.find_or_insert(torch.arange(60), ranges(60))
    held = group.scan(0).numel()
    kept = group.find(torch.arange(40, 60), ranges(20))
    group.begin_step().finish()
    group.erase(0, torch.arange(40))
    assert int((group.index.digests == 1).sum()) == 0
    assert torch.equal(group.find(torch.arange(40, 60), ranges(20)), kept)
    assert group.size(0) == int((kept >= 0).sum()) < held
    group.check_invariants()
