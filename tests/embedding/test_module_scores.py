"""Scores and reports of the module: what each strategy stores, counts, memory (lines 6, 7, 10 and 20)."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy as Score
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.index import STEP
from dynamicemb.table.stepping.tracker import REBASE_AT
from tests.support.lookups import (
    EXTREME,
    OPTIMIZERS,
    assert_unchanged,
    bag_per_id,
    batch,
    constant,
    contents,
    make_module,
    options,
    row_of,
    score_of,
    snapshot,
)
from tests.support.oracle import mixed
from tests.support.tables import device_of, use_backend

COMPOUND = (Score.LFU, Score.TIMESTAMP)


def scores(module, table: str = "a") -> dict[int, int]:
    return {key: score for key, (score, _) in contents(module)[table].items()}


def test_c10_timestamp_is_unix_nanoseconds_and_strictly_increases() -> None:
    module = make_module()
    begin = time.time_ns()
    for step in range(50):
        module(*bag_per_id([step, step]))
    values = [scores(module)[step] for step in range(50)]
    assert begin <= values[0] and values[-1] <= time.time_ns()
    assert all(a < b for a, b in zip(values, values[1:]))
    threshold = module.get_score()["a"]
    module(*bag_per_id([3, 100]))
    late = scores(module)
    assert late[3] == late[100] >= threshold > late[49]


def test_c10_timestamp_survives_a_clock_that_is_set_back(monkeypatch) -> None:
    module = make_module()
    now = [10**18]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    module(*bag_per_id([1]))
    assert scores(module)[1] == 10**18
    now[0] += 1000
    threshold = module.get_score()["a"]
    now[0] -= 10**9
    module(*bag_per_id([2]))
    module(*bag_per_id([3]))
    assert 10**18 < threshold <= scores(module)[2] < scores(module)[3]


def test_c10_step_counts_training_forwards_from_1() -> None:
    module = make_module([options(score_strategy=Score.STEP), options(score_strategy=Score.STEP)])
    assert module.get_score() == {"a": 1, "b": 1}
    module(*batch([5], []))
    assert score_of(module, "a", 5) == 1 and module.get_score() == {"a": 2, "b": 2}
    module.eval()(*batch([5], [9]))
    module.train().insert("b", torch.tensor([9]), torch.zeros(1, 4))
    module.erase("b", torch.tensor([9]))
    module.set_learning_rate(0.5)
    assert module.get_score() == {"a": 2, "b": 2}
    with torch.no_grad():
        module(*batch([6], [7]))
    assert score_of(module, "a", 6) == score_of(module, "b", 7) == 2 and score_of(module, "a", 5) == 1
    with pytest.raises(ValueError):
        module(*batch([6]))
    assert module.get_score() == {"a": 3, "b": 3}


@pytest.mark.parametrize(
    "strategy", [Score.TIMESTAMP, Score.STEP, Score.CUSTOMIZED, Score.LFU, Score.NO_EVICTION, COMPOUND]
)
def test_c26_an_import_is_found_by_the_threshold_of_before(backend: str, strategy: Any) -> None:
    growing = {"capacity": None, "init_capacity": 64} if strategy is Score.NO_EVICTION else {}
    module = make_module([options(score_strategy=strategy, **growing)], device=device_of(backend))
    use_backend(module.tables, backend)
    if strategy is Score.CUSTOMIZED:
        module.set_score({"a": 7})
    for number in range(2):
        threshold = module.get_score()["a"]
        new = torch.tensor([10 + number, 20 + number], device=module.tables.device)
        assert module.insert("a", new, torch.zeros(2, 4, device=new.device)).all()
        ids, columns = module.export_scores("a", "cpu")
        # Of a compound table the time counts, its second score here.
        found = dict(zip(ids.tolist(), (columns if columns.dim() == 1 else columns[:, 1]).tolist(), strict=True))
        assert all(found[key] >= threshold > 0 for key in new.tolist()), (found, threshold)
        if strategy is Score.STEP:
            # The import is no training forward: the next one has the same number.
            assert module.get_score()["a"] == threshold == number + 1
        module(new, torch.arange(3, device=new.device)).sum().backward()


@pytest.mark.parametrize("wrong", [5, None, [("a", 1)]])
def test_c04_scores_that_are_not_by_table_are_refused(wrong: Any) -> None:
    module = make_module([options(score_strategy=Score.CUSTOMIZED)])
    with pytest.raises(TypeError, match="named_score must map table names to ints, got"):
        module.set_score(wrong)


def test_c10_customized_scores_are_those_last_set_per_table() -> None:
    module = make_module([options(score_strategy=Score.CUSTOMIZED)] * 2)
    before = snapshot(module)
    for call in (
        lambda: module(*batch([1], [1])),
        lambda: module.insert("b", torch.tensor([1]), torch.zeros(1, 4)),
    ):
        with pytest.raises(DynamicEmbError, match="CUSTOMIZED.*set_score"):
            call()
    assert_unchanged(module, before)
    assert module.get_score() == {"a": 0, "b": 0}
    module.set_score({"a": 2**63 - 1})
    with pytest.raises(DynamicEmbError, match="b has no score"):
        module(*batch([1], [1]))
    module.set_score({"b": np.int64(7)})
    module(*batch([1], [1]))
    assert score_of(module, "a", 1) == 2**63 - 1 and score_of(module, "b", 1) == 7
    assert module.get_score() == {"a": 2**63 - 1, "b": 7}


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2**63, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)],
)
def test_c10_wrong_customized_scores_are_refused_for_all_tables(value: object, error: type) -> None:
    module = make_module([options(score_strategy=Score.CUSTOMIZED)] * 2)
    with pytest.raises(error, match="score of table 'b'"):
        module.set_score({"a": 3, "b": value})
    with pytest.raises(ValueError, match="'x' is unknown"):
        module.set_score({"a": 3, "x": 1})
    assert module.get_score() == {"a": 0, "b": 0}


def test_c10_a_decreasing_customized_score_warns_unless_told_not_to(monkeypatch, recwarn) -> None:
    module = make_module([options(score_strategy=Score.CUSTOMIZED)])
    module.set_score({"a": 9})
    with pytest.warns(UserWarning, match="'a' decreases from 9 to 8"):
        module.set_score({"a": 8})
    monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", "0")
    recwarn.clear()
    module.set_score({"a": 7})
    assert not recwarn.list and module.get_score() == {"a": 7}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_c10_lfu_counts_are_exact(dtype: torch.dtype) -> None:
    module = make_module(
        [options(score_strategy=Score.LFU), options(score_strategy=Score.LFU)], feature_table_map=[0, 0, 1]
    )
    expected: dict[tuple[str, int], int] = {}
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        bags = [torch.randint(0, 12, (20,), generator=generator).tolist() for _ in range(3)]
        counts = (
            torch.randint(1, 2**31 - 1, (60,), generator=generator).to(dtype) if step % 2 else torch.ones(60).to(dtype)
        )
        module(*batch(*bags), frequency_counters=counts if step else None)
        for i, key in enumerate(key for bag in bags for key in bag):
            name = "b" if i >= 40 else "a"
            expected[name, key] = expected.get((name, key), 0) + int(counts[i])
    assert {(name, key): s for name in "ab" for key, s in scores(module, name).items()} == expected
    assert max(expected.values()) > 2**32
    module.eval()(*batch([1], [], []))
    assert scores(module)[1] == expected["a", 1] and module.get_score() == {"a": 1, "b": 1}


def test_c10_tables_of_one_module_have_strategies_of_their_own() -> None:
    strategies = [Score.TIMESTAMP, Score.STEP, Score.CUSTOMIZED, Score.LFU, COMPOUND]
    module = make_module([options(score_strategy=strategy) for strategy in strategies])
    with pytest.raises(ValueError, match="CUSTOMIZED, which table 'd' does not have"):
        module.set_score({"c": 7, "d": 7})
    with pytest.raises(DynamicEmbError, match="table c has no score"):
        module(*batch([1], [1], [1], [1], [1]))
    module.set_score({"c": 7})
    begin = time.time_ns()
    for step in range(3):
        counts = torch.tensor([5, 6] * 5) if step == 2 else None
        module(*batch(*[[1, 1]] * 5), frequency_counters=counts)
    got = {name: score_of(module, name, 1) for name in "abcde"}
    assert begin < got.pop("a") <= time.time_ns()
    assert got == {"b": 3, "c": 7, "d": 15, "e": 15}
    module.insert("b", torch.tensor([1]), torch.zeros(1, 4))
    module.insert("d", torch.tensor([1]), torch.zeros(1, 4))
    assert (score_of(module, "b", 1), score_of(module, "d", 1)) == (4, 16)
    threshold = module.get_score()
    assert threshold["a"] == threshold["e"] > begin
    assert [threshold[name] for name in "bcd"] == [4, 7, 1]


@pytest.mark.parametrize("strategy", [COMPOUND, COMPOUND[::-1]])
def test_c10_compound_scores_are_exported_in_the_order_of_the_tuple(strategy: tuple) -> None:
    module = make_module([options(score_strategy=strategy)] * 2)
    module(*batch([1, 1, 2], [9]))
    threshold = module.get_score()["a"]
    module(*batch([2, 3, 3, 3], []))
    ids, scores = module.export_scores("a", "cpu")
    time_column = strategy.index(Score.TIMESTAMP)
    got = dict(zip(ids.tolist(), scores.tolist(), strict=True))
    assert {key: row[1 - time_column] for key, row in got.items()} == {1: 2, 2: 2, 3: 3}
    assert got[1][time_column] < threshold <= got[2][time_column] == got[3][time_column]
    late = module.tables.index.keys[module.tables.scan(0, threshold)]
    assert sorted(late.tolist()) == [2, 3]
    before = snapshot(module)
    module.eval()(*batch([1, 7], [9]))
    assert_unchanged(module, before)


def test_c10_a_compound_table_evicts_the_least_frequent_and_reports_both_scores() -> None:
    module = make_module([options(capacity=16, score_strategy=COMPOUND), options(capacity=16)])
    module(*batch([key for key in range(16) for _ in range(16 - key)], [1]))
    stamp = int(module.export_scores("a", "cpu")[1][0, 1])
    module(*batch([15, 15, 14], [1]))
    group = module.tables
    step = group.begin_step()
    result = group.find_or_insert(torch.tensor([100, 101]), torch.tensor([0, 2, 2]))[1].result()
    step.finish()
    # 13 has 3 occurrences, and so have 14 and 15 now.
    victims = sorted((13, 14, 15), key=mixed)[:2]
    assert result.evicted_ids.tolist() == victims and result.evicted_scores.tolist() == [3, 3]
    assert [s > stamp for s in result.evicted_stamps.tolist()] == [key > 13 for key in victims]
    ids, scores = module.export_scores("a", "cpu")
    assert {100, 101} < set(ids.tolist())
    assert scores[ids >= 100][:, 0].tolist() == [1, 1] and bool((scores[ids >= 100][:, 1] > stamp).all())


@pytest.mark.parametrize("strategy", [Score.TIMESTAMP, Score.STEP, Score.CUSTOMIZED, Score.LFU, COMPOUND])
def test_c07_the_lowest_score_is_evicted_and_the_newcomer_wins(strategy: Score) -> None:
    module = make_module([options(capacity=16, score_strategy=strategy)])
    if strategy is Score.CUSTOMIZED:
        module.set_score({"a": 5})
    module(*bag_per_id(range(16)))
    for key in range(15, 0, -1):
        if strategy is Score.CUSTOMIZED:
            module.set_score({"a": 5 + 16 - key})
        module(*bag_per_id([key] * (17 - key)))
    if strategy is Score.CUSTOMIZED:
        with pytest.warns(UserWarning):
            module.set_score({"a": 1})
    for k, victim in enumerate([0, 15, 14]):
        # With LFU and the lowest custom score, the newcomer itself is the next victim: touch it often.
        more = [100 + k] * (50 if strategy in (Score.LFU, COMPOUND) else 1)
        if strategy is Score.CUSTOMIZED:
            module.set_score({"a": 1000 + k})
        module(*bag_per_id(more))
        assert not module.contains("a", torch.tensor([victim])).any()
        assert module.stats()["a"]["evicted"] == k + 1


@pytest.mark.parametrize("protect_steps", [0, 1])
def test_c07_tags_are_rebased_long_before_they_overflow(protect_steps: int) -> None:
    module = make_module([options(capacity=16, protect_steps=protect_steps)], pooling_mode=2)
    module.tables.steps.current = REBASE_AT - 5
    module.tables.index.clock[STEP] = REBASE_AT - 5
    waiting = module(*bag_per_id([1, 2]))
    for step in range(12):
        module(*bag_per_id([10 + step])).sum().backward()
    assert int(module.tables.index.tags.max()) < 100
    assert module.contains("a", torch.tensor([1, 2])).all()
    row = row_of(module, "a", 1)[0]
    module(*bag_per_id(range(100, 120))).sum().backward()
    assert module.contains("a", torch.tensor([1, 2])).all() and module.stats()["a"]["failed"] > 0
    waiting.sum().backward()
    assert torch.equal(row_of(module, "a", 1)[0], row - 1)
    module(*bag_per_id([500])).sum().backward()
    module(*bag_per_id([501])).sum().backward()
    module(*bag_per_id(range(600, 610))).sum().backward()
    assert not module.contains("a", torch.tensor([1, 2])).any()


# Reports


def test_c06_failed_ids_are_counted_read_zeros_and_drop_their_gradients() -> None:
    module = make_module([options(capacity=16), options(capacity=16)], pooling_mode=2)
    ids, offsets = batch([*range(16), 20, 20], [1])
    output = module(ids, offsets)
    assert not output[16:18].any() and output[18].any()
    kept = contents(module)["a"]
    grad = torch.zeros_like(output)
    grad[16:18] = 5
    output.backward(grad)
    assert contents(module)["a"] == kept
    assert module.stats()["a"]["failed"] == 2 and module.stats()["b"]["failed"] == 0


def test_c06_stats_count_what_happened() -> None:
    module = make_module([options(capacity=16), options(capacity=32)])
    module(*batch([1, 1, 2], [5])).sum().backward()
    module(*batch([1, 3], [])).sum().backward()
    module.erase("a", torch.tensor([3, 3, 4]))
    module(*batch(range(100, 116), [])).sum().backward()
    stats = module.stats()
    assert stats["a"] == {
        "size": 16, "capacity": 16, "load": 1.0, "hits": 1, "misses": 20, "inserted": 19, "evicted": 2, "failed": 0,
        "erased": 1, "dropped_gradients": 0, "clamped_inputs": 0, "expired": 0, "non_admitted": 0,
    }  # fmt: skip
    assert stats["b"]["size"] == 1 and stats["b"]["load"] == 1 / 32 and stats["b"]["misses"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c20_memory_usage_is_what_the_tensors_hold(optimizer: str, dtype: torch.dtype) -> None:
    module = make_module([options(d, c, embedding_dtype=dtype) for d, c in ((5, 100), (64, 33))], optimizer=optimizer)
    group = module.tables
    usage = module.memory_usage()
    assert usage["index"] == sum(t.untyped_storage().nbytes() for t in group.index.tensors())
    assert usage["rows"] == sum(chunk.untyped_storage().nbytes() for chunk in group.store.chunks)
    exact = 0
    for d, c in ((5, 112), (64, 48)):
        state = {"sgd": 0, "adam": 2 * d, "exact_adagrad": d, "exact_row_wise_adagrad": 1}[optimizer]
        weights = (d * dtype.itemsize + 3) // 4 * 4
        exact += c * ((weights + 4 * state + 15) // 16 * 16)
    assert exact <= usage["rows"] <= exact + 128
    assert 25 * 160 <= usage["index"] <= 25 * 160 + 1024


def test_c20_a_compound_table_adds_8_bytes_for_each_slot_of_its_module() -> None:
    plain = make_module([options(4, 1600)] * 2).memory_usage()["index"]
    for order in (COMPOUND, COMPOUND[::-1]):
        assert make_module([options(4, 1600), options(4, 1600, score_strategy=order)]).memory_usage()["index"] == (
            plain + 8 * 3200
        )


def test_representation_and_attributes_describe_the_module() -> None:
    module = make_module([options(4), options(8, 20)], feature_table_map=[0, 0, 1], optimizer="adam")
    described = "a: 64x4 TIMESTAMP (0 ids, 0%), b: 32x8 TIMESTAMP (0 ids, 0%), adam, SUM, device=cpu"
    assert repr(module) == f"BatchedDynamicEmbeddingTablesV2({described})"
    assert (module.dims, module.total_D, module.max_D, module.feature_num) == ([4, 8], 16, 8, 3)
    assert module.feature_offsets == [0, 2, 3] and module.table_names == ["a", "b"] and module.cache is None
    assert module.optimizer.name == "adam" and module.optimizer.learning_rate == 1.0
    module.set_learning_rate(0.25)
    assert module.optimizer.learning_rate == 0.25
    assert [w.shape for w in module.split_embedding_weights()] == [(1, 1), (1, 1)]
    module.flush()


@pytest.mark.parametrize("batch_size", [1, 3, 16, 65536])
def test_export_returns_every_row_whatever_the_batch_size(batch_size: int) -> None:
    module = make_module([options(d, 64, embedding_dtype=torch.bfloat16) for d in (3, 5)])
    module(*batch(EXTREME, [1, 2])).sum().backward()
    for name, dim, expected in (("a", 3, EXTREME), ("b", 5, [1, 2])):
        ids, rows = module.export_keys_values(name, torch.device("cpu"), batch_size=batch_size)
        assert ids.dtype is torch.int64 and rows.dtype is torch.float32 and rows.shape == (len(expected), dim)
        assert sorted(ids.tolist()) == sorted(expected)
        for key, row in zip(ids.tolist(), rows, strict=True):
            assert torch.equal(row, row_of(module, name, key)[0])
    empty, nothing = make_module([options(3)]).export_keys_values("a", "cpu", batch_size)
    assert empty.shape == (0,) and nothing.shape == (0, 3)


def test_erase_and_contains_take_any_ids_and_change_only_their_table() -> None:
    module = make_module([options(initializer_args=constant(1.0))] * 2)
    module(*batch(range(40), range(40)))
    other = contents(module)["b"]
    assert module.erase("a", torch.arange(40)[::2].to(torch.int32)) == 20
    assert module.erase("a", torch.tensor([], dtype=torch.int64)) == 0
    assert module.contains("a", torch.arange(42)).tolist() == [k % 2 == 1 for k in range(40)] + [False] * 2
    assert module.contains("a", torch.tensor([], dtype=torch.int64)).shape == (0,)
    assert contents(module)["b"] == other and module.stats()["a"]["erased"] == 20
    module.tables.check_invariants()
