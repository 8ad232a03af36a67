"""Ids that are forgotten after their table's time to live, against the dict oracle; contract 7, 8, 11."""

import numpy as np
import pytest
import torch

from dynamicemb import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.table.index import NEVER, NOW, OLDEST, SEEN
from dynamicemb.table.scores import SCORE_COMPOUND, SCORE_LFU, SCORE_TIMESTAMP
from tests.support.oracle import ReferenceTable
from tests.support.tables import make_group, ranges, use_backend

pytestmark = pytest.mark.usefixtures("tensors_on_device")
# Later than any clock, so that time passes only where a test says so.
LATE = 4 * 10**18
TTL = 100


def start(group) -> None:
    group.index.clock[[NOW, SEEN]] = LATE


def wait(group, nanoseconds: int) -> None:
    group.index.clock[SEEN] += nanoseconds


def look_up(group, *ids: list[int]) -> torch.Tensor:
    """Run a whole training step on ids of each table; returns their rows."""
    token = group.begin_step()
    rows, _ = group.find_or_insert(torch.tensor([i for part in ids for i in part]), ranges(*map(len, ids)))
    token.finish()
    return rows


def resident(group, table: int) -> dict[int, int]:
    slots = group.scan(table)
    return dict(zip(group.index.keys[slots].tolist(), group.index.scores[slots].tolist(), strict=True))


def observe(group, oracles: list[ReferenceTable]) -> None:
    """Give the oracles the time, and the oldest protected step, of the group."""
    for oracle in oracles:
        oracle.now, oracle.oldest = int(group.index.clock[SEEN]), int(group.index.clock[OLDEST])


def check_accounts(before: dict, after: dict, oracles: list[ReferenceTable]) -> None:
    """Check that every id of a step is somewhere in the counts."""
    for t, name in enumerate(("t0", "t1")):
        change = {count: after[name][count] - before[name][count] for count in after[name]}
        assert change["inserted"] == change["size"] + change["evicted"] + change["expired"]
        assert after[name]["expired"] <= oracles[t].counts["expired"]


def check_counts(group, oracles: list[ReferenceTable]) -> None:
    """Check the counts of all steps."""
    for t, oracle in enumerate(oracles):
        stats = group.stats()[f"t{t}"]
        assert {n: stats[n] for n in oracle.counts if n != "expired"} == {
            n: count for n, count in oracle.counts.items() if n != "expired"
        }
        # Who has no place any more is found by asking.
        group.erase_expired(t)
        observe(group, oracles)
        oracle.erase_expired()
        assert group.stats()[f"t{t}"]["expired"] == oracle.counts["expired"]
        assert group.size(t) == oracle.size() == len(resident(group, t))


CASES = [
    ((SCORE_TIMESTAMP, SCORE_TIMESTAMP), (TTL, 3 * TTL)),
    ((SCORE_COMPOUND, SCORE_TIMESTAMP), (TTL, TTL)),
    ((SCORE_TIMESTAMP, SCORE_LFU), (TTL, NEVER)),
    ((SCORE_COMPOUND, SCORE_COMPOUND), (NEVER, TTL)),
]


@pytest.mark.parametrize(("strategies", "ttls"), CASES)
def test_random_batches_equal_the_oracle(backend: str, strategies: tuple[int, int], ttls: tuple[int, int]) -> None:
    rng = np.random.default_rng(CASES.index((strategies, ttls)))
    capacities = [48, 16]
    group = make_group(backend, capacities, strategy=strategies, ttls=ttls)
    start(group)
    empty = np.zeros(0, np.float32)
    oracles = [
        ReferenceTable(c // 16, 16, strategy, lambda key: (empty, empty), ttl=None if ttl == NEVER else ttl)
        for c, strategy, ttl in zip(capacities, strategies, ttls, strict=True)
    ]
    waiting, revived = [], 0
    for number in range(150 if backend != "interpret" else 16):
        wait(group, int(rng.choice([0, 5, 10, 30, 300])))
        # With two steps in flight no bucket is ever full of protected ids: nothing fails.
        ids = [rng.integers(0, 60, int(rng.integers(0, 13))), rng.integers(0, 40, int(rng.integers(0, 7)))]
        if number % 5 == 4:
            gone = rng.integers(0, 60, 8)
            erased = group.erase(0, torch.tensor(gone))
            observe(group, oracles)
            assert erased == oracles[0].erase(gone.tolist())
        before = group.stats()
        token = group.begin_step()
        old = {t: set(group.index.keys[group.kernels.scan(group.index, t, 0)].tolist()) for t in range(2)}
        rows, events = group.find_or_insert(torch.tensor(np.concatenate(ids)), ranges(*map(len, ids)))
        now, oldest = int(group.index.clock[NOW]), int(group.index.clock[OLDEST])
        assert bool((rows >= 0).all())
        expected = []
        for t, keys in enumerate(ids):
            fresh = {key for key in keys.tolist() if oracles[t].get(key) is None}
            value = int(group.index.score_values[t])
            _, evicted = oracles[t].lookup(keys.tolist(), None, value, token.number, oldest, now)
            expected += [(key, entry.score) for key, entry in evicted]
            revived += len(fresh & old[t])
            assert resident(group, t) == {key: entry.score for key, entry in oracles[t].entries().items()}
        result = events.result()
        assert list(zip(result.evicted_ids.tolist(), result.evicted_scores.tolist(), strict=True)) == expected
        waiting.append(token)
        if len(waiting) == 2:
            waiting.pop(0).finish()
        group.check_invariants()
        check_accounts(before, group.stats(), oracles)
    check_counts(group, oracles)
    assert revived > 0 and any(oracle.counts["evicted"] for oracle in oracles)


def test_c08_an_expired_id_that_returns_has_its_own_slot_and_a_fresh_row(backend: str) -> None:
    group = make_group(backend, [32], strategy=SCORE_COMPOUND, ttls=(TTL,))
    start(group)
    rows = look_up(group, [5, 6, 6, 7])
    fresh = group.read(0, rows)[0].clone()
    group.kernels.write_rows(group.store, 0, rows, torch.full((4, 4), 9.0), None)
    wait(group, TTL // 2)
    look_up(group, [7])
    wait(group, TTL // 2 + 10)
    again = look_up(group, [8, 6, 6, 6, 5])
    # Id 8 came first, but the slots of 5 and 6 are theirs.
    assert again[1:].tolist() == [rows[1]] * 3 + [rows[0]]
    torch.testing.assert_close(group.read(0, again[1:2])[0], fresh[1:2])
    assert bool((group.read(0, rows[3:])[0] == 9).all())
    assert resident(group, 0) == {5: 1, 6: 3, 7: 2, 8: 1}
    stats = group.stats()["t0"]
    assert (stats["inserted"], stats["expired"], stats["size"]) == (6, 2, 4)


def test_expired_ids_make_room_before_live_ones_are_evicted(backend: str) -> None:
    group = make_group(backend, [16], strategy=SCORE_COMPOUND, ttls=(TTL,))
    start(group)
    # Ids 0..3 are the most frequent, and the only ones that expire.
    look_up(group, [0, 1, 2, 3] * 9 + list(range(4, 16)))
    wait(group, TTL // 2)
    look_up(group, list(range(4, 16)))
    wait(group, TTL // 2 + 10)
    look_up(group, [100, 101, 102, 103])
    assert sorted(resident(group, 0)) == [*range(4, 16), 100, 101, 102, 103]
    assert (group.stats()["t0"]["expired"], group.stats()["t0"]["evicted"]) == (4, 0)
    look_up(group, [104])
    assert group.stats()["t0"]["evicted"] == 1


@pytest.mark.parametrize("bucket_capacity", [48, 2048])
def test_a_bucket_of_any_size_is_searched_for_expired_ids(backend: str, bucket_capacity: int) -> None:
    if backend == "interpret" and bucket_capacity > 48:
        pytest.skip("interpret: thousands of ids take minutes")
    group = make_group(backend, [bucket_capacity], bucket_capacity=bucket_capacity, ttls=(TTL,))
    start(group)
    ids = list(range(bucket_capacity))
    look_up(group, ids)
    wait(group, TTL // 2)
    stay = ids[:: bucket_capacity // 16]
    look_up(group, stay)
    wait(group, TTL // 2 + 10)
    new = list(range(-40, 0))[: bucket_capacity - len(stay)]
    look_up(group, new)
    assert sorted(resident(group, 0)) == sorted(stay + new)
    assert (group.stats()["t0"]["evicted"], group.stats()["t0"]["expired"]) == (0, len(new))


def test_c07_ids_of_outstanding_steps_do_not_expire(backend: str) -> None:
    group = make_group(backend, [16], ttls=(TTL,))
    start(group)
    token = group.begin_step()
    rows, _ = group.find_or_insert(torch.tensor([1, 2]), ranges(2))
    wait(group, 10 * TTL)
    look_up(group, list(range(10, 24)))
    assert group.contains(0, torch.tensor([1, 2])).all()
    assert torch.equal(group.find(torch.tensor([1, 2]), ranges(2)), rows)
    token.finish()
    look_up(group, [10])
    wait(group, 1)
    assert not group.contains(0, torch.tensor([1, 2])).any()
    assert group.erase(0, torch.tensor([1, 2])) == 0


def test_erased_expired_ids_leave_places_that_are_rebuilt(backend: str) -> None:
    group = make_group(backend, [48], ttls=(TTL,))
    start(group)
    look_up(group, list(range(24)))
    wait(group, TTL // 2)
    look_up(group, [3, 4, 5])
    wait(group, TTL // 2 + 10)
    look_up(group, [3])
    epoch = group.epoch
    assert group.erase_expired(0) == 21
    assert group.epoch > epoch and int(group.index.moved) == 1
    assert group.size(0) == 3 and sorted(resident(group, 0)) == [3, 4, 5]
    assert group.erase_expired(0) == 0
    group.check_invariants()


def test_the_counters_know_how_many_places_are_taken(backend: str) -> None:
    group = make_group(backend, [16], ttls=(TTL,))
    start(group)
    look_up(group, list(range(10)))
    wait(group, 2 * TTL)
    look_up(group, list(range(5, 15)))
    assert group.stats(wait=False)["t0"]["size"] in (0, group.size(0))
    assert group.tally_reader.wait() and group.stats(wait=True)["t0"]["size"] == group.size(0)


# The module


def make(device: torch.device, **options: object) -> BatchedDynamicEmbeddingTablesV2:
    pooling = options.pop("pooling", DynamicEmbPoolingMode.NONE)
    missing = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=-7.0)
    table = DynamicEmbTableOptions(dim=4, max_capacity=32, bucket_capacity=16, eval_initializer_args=missing, **options)
    return BatchedDynamicEmbeddingTablesV2(
        [table], ["a"], device=device, pooling_mode=pooling, optimizer="sgd", learning_rate=0.5, seed=3
    )


@pytest.mark.parametrize("pooling", [DynamicEmbPoolingMode.NONE, DynamicEmbPoolingMode.SUM])
def test_c11_an_expired_id_is_absent_in_evaluation(device: torch.device, pooling: DynamicEmbPoolingMode) -> None:
    module = make(device, ttl=60.0, pooling=pooling)
    ids, offsets = torch.tensor([1, 2, 3]), torch.arange(4)
    first = module(ids, offsets).detach()
    clock = module.tables.index.clock
    module.eval()
    torch.testing.assert_close(module(ids, offsets), first)
    clock[SEEN] += 61 * 10**9
    before = [t.clone() for t in module.tables.index.tensors() if t is not clock]
    assert bool((module(ids, offsets) == -7).all())
    assert module.export_keys_values("a", "cpu")[0].numel() == 0
    assert not module.contains("a", ids).any()
    after = [t for t in module.tables.index.tensors() if t is not clock]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    module.train()
    torch.testing.assert_close(module(ids, offsets).detach(), first)
    assert module.stats()["a"]["expired"] == 3
    clock[SEEN] += 61 * 10**9
    module(ids[:1], torch.tensor([0, 1]) if pooling else torch.arange(2)).sum().backward()
    assert module.erase_expired("a") == 2


def test_c14_a_gradient_of_an_expired_id_is_dropped_and_counted(device: torch.device) -> None:
    module = make(device, ttl=60.0)
    ids, offsets = torch.tensor([1, 2]), torch.arange(3)
    output = module(ids, offsets)
    # A step that has been given up protects nothing.
    output.grad_fn.placed.training.step.finish()
    module(torch.tensor([9]), torch.arange(2)).sum().backward()
    module.tables.index.clock[SEEN] += 61 * 10**9
    output.sum().backward()
    assert module.stats()["a"]["dropped_gradients"] == 2


def test_c12_an_expired_id_is_admitted_anew(backend: str, device: torch.device) -> None:
    admission = {"admit_strategy": FrequencyAdmissionStrategy(2), "admission_counter": KVCounter(64)}
    strategy = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)
    module = make(device, ttl=60.0, score_strategy=strategy, **admission)
    use_backend(module.tables, backend)
    ids, offsets = torch.tensor([1, 2]), torch.arange(3)
    for count in (1, 2, 3):
        module(ids, offsets)
        assert int(module.contains("a", ids).sum()) == (2 if count >= 2 else 0)
    rows = module.tables.find(ids, ranges(2))
    module.tables.index.clock[SEEN] += 61 * 10**9
    module(ids, offsets)
    assert not module.contains("a", ids).any()
    module(ids[:1], torch.arange(2))
    assert module.contains("a", ids).tolist() == [True, False]
    # In its own slot, with the occurrences since it came back.
    assert module.tables.find(ids[:1], ranges(1)) == rows[:1]
    assert resident(module.tables, 0) == {1: 2}
    stats = module.stats()["a"]
    assert (stats["non_admitted"], stats["expired"], stats["inserted"], stats["failed"]) == (4, 1, 3, 0)


@pytest.mark.cuda
def test_time_passes_for_a_captured_evaluation() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    module = make(torch.device("cuda"), ttl=600.0)
    clock = module.tables.index.clock
    ids, offsets = torch.tensor([1, 2, 3], device="cuda"), torch.arange(4, device="cuda")
    module(ids, offsets)
    module.eval()
    first = module(ids, offsets).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = module(ids, offsets)
    graph.replay()
    assert torch.equal(output, first)
    begin, replays = int(clock[SEEN]), 0
    # Every replay asks the device for the time, however coarse its timer; a time of the capture would stand still.
    while int(clock[SEEN]) == begin:
        graph.replay()
        replays += 1
        assert replays < 100_000
    assert torch.equal(output, first)
    clock[SEEN] += 601 * 10**9
    graph.replay()
    assert bool((output == -7).all())


@pytest.mark.parametrize("strategy", ["STEP", "CUSTOMIZED", "LFU"])
def test_a_ttl_needs_a_timestamp(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"ttl=5 needs to know when ids were touched.*use TIMESTAMP"):
        DynamicEmbTableOptions(ttl=5, score_strategy=DynamicEmbScoreStrategy[strategy])
    assert DynamicEmbTableOptions(ttl=5).ttl == 5


@pytest.mark.parametrize(
    ("ttl", "error"), [(0, ValueError), (-1.0, ValueError), (1e9, ValueError), ("5", TypeError), (True, TypeError),
                       (float("nan"), ValueError)]
)  # fmt: skip
def test_a_wrong_ttl_is_refused(ttl: object, error: type) -> None:
    with pytest.raises(error, match="ttl must be"):
        DynamicEmbTableOptions(ttl=ttl)


def test_erasing_expired_ids_of_a_table_that_keeps_them_does_nothing(device: torch.device) -> None:
    module = make(device)
    module(torch.tensor([1]), torch.arange(2))
    assert module.erase_expired("a") == 0
