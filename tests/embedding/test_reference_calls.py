"""Calls and arguments of the reference implementation that have little to do here: said once, and what they leave."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.admission import FrequencyAdmissionStrategy, KVCounter
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.index import SEEN
from tests.conftest import reason_to_skip
from tests.support.lookups import (
    MEAN,
    NONE,
    SUM,
    assert_unchanged,
    bag_per_id,
    batch,
    constant,
    make_module,
    messages,
    options,
    row_of,
    score_of,
    snapshot,
)
from tests.support.tables import device_of, use_backend

Module = BatchedDynamicEmbeddingTablesV2
Score = DynamicEmbScoreStrategy
IDS, OFFSETS = batch([5, 7], [5])
COUNTS = torch.tensor([2, 3, 4])


def said(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        call()
    assert all(warning.filename == __file__ for warning in recorded)
    return messages(recorded)


# Integer per_sample_weights


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
def test_c10_integer_weights_are_counts_and_weigh_nothing(pooling: Any, dtype: torch.dtype) -> None:
    counted = make_module([options(score_strategy=Score.LFU)], pooling_mode=pooling)
    named = copy.deepcopy(counted)
    expected = named(IDS, OFFSETS, frequency_counters=COUNTS)
    output: list[torch.Tensor] = []
    warned = said(lambda: output.append(counted(IDS, OFFSETS, COUNTS.to(dtype))))
    assert warned == [
        "per_sample_weights of integers are taken for how often each occurrence counts, and weigh nothing; name them "
        "frequency_counters, or give floating weights to weigh rows"
    ]
    assert torch.equal(output[0], expected)
    assert (score_of(counted, "a", 5), score_of(counted, "a", 7)) == (6, 3)
    assert said(lambda: counted(IDS, OFFSETS, COUNTS)) == []
    assert score_of(counted, "a", 7) == 6
    # Evaluation counts nothing.
    counted.eval()(IDS, OFFSETS, COUNTS)
    assert score_of(counted, "a", 7) == 6


def test_c12_integer_weights_count_for_admission() -> None:
    table = options(admit_strategy=FrequencyAdmissionStrategy(4), admission_counter=KVCounter(64, 16))
    module = make_module([table])
    said(lambda: module(IDS, OFFSETS, COUNTS))
    assert module.contains("a", torch.tensor([5, 7])).tolist() == [True, False]


def test_c27_integer_weights_that_no_table_counts_have_no_effect() -> None:
    module, plain = make_module(), make_module()
    output: list[torch.Tensor] = []
    # Neither as counts nor as weights, and 0 is no wrong count where nobody counts.
    warned = said(lambda: output.append(module(IDS, OFFSETS, torch.tensor([0, 3, 4]))))
    assert len(warned) == 1 and warned[0].startswith("per_sample_weights of integers have no effect: they are taken")
    assert torch.equal(output[0], plain(IDS, OFFSETS))
    assert said(lambda: module(IDS, OFFSETS, COUNTS)) == []
    assert said(lambda: module(IDS, OFFSETS, COUNTS.float())) == []
    # Each module says so for itself.
    assert len(said(lambda: plain(IDS, OFFSETS, COUNTS))) == 1


def test_floating_weights_weigh_rows_also_of_tables_that_count() -> None:
    module = make_module([options(score_strategy=Score.LFU, initializer_args=constant(1.0))])
    assert module(IDS, OFFSETS, COUNTS.float())[:, 0].tolist() == [5.0, 4.0]
    assert score_of(module, "a", 5) == 2


# Arguments that only static tables read

IDLE: dict[str, tuple[tuple[Any, ...], str | None]] = {
    "requires_grad": ((torch.tensor([1, 0]), None, None), "feature_requires_grad has no effect: all features train"),
    "requires_grad bool": ((torch.tensor([False]), None, None), "feature_requires_grad has no effect"),
    "requires_grad ones": ((torch.ones(2), None, None), None),
    "sizes": ((None, [[1], [1]], None), None),
    "sizes by rank": ((None, [[1, 0], [0, 1]], None), None),
    "unique": ((None, None, 2), "total_unique_indices has no effect"),
    "nothing": ((None, None, None), None),
}


@pytest.mark.parametrize("name", IDLE)
def test_c27_arguments_that_only_static_tables_read_are_named_once(name: str) -> None:
    arguments, start = IDLE[name]
    module, plain = make_module([options(), options()]), make_module([options(), options()])
    output: list[torch.Tensor] = []
    warned = said(lambda: output.append(module(IDS, OFFSETS, None, *arguments)))
    assert [start in message for message in warned] == ([] if start is None else [True])
    expected = plain(IDS, OFFSETS)
    assert torch.equal(output[0], expected)
    output[0].sum().backward()
    expected.sum().backward()
    # Also a feature that was not to be trained is.
    assert torch.equal(row_of(module, "a", 5)[0], row_of(plain, "a", 5)[0])
    assert torch.equal(row_of(module, "b", 5)[0], row_of(plain, "b", 5)[0])
    assert said(lambda: module(IDS, OFFSETS, None, *arguments)) == []


def test_c27_what_freezes_a_feature_is_named() -> None:
    (message,) = said(lambda: make_module()(*bag_per_id([1]), None, torch.zeros(1)))
    assert "requires_grad_(False) on the module" in message


# Prefetch


def test_c27_a_prefetch_checks_and_changes_nothing_and_says_once_that_the_forward_works() -> None:
    module = make_module([options(score_strategy=Score.STEP), options()])
    module(IDS, OFFSETS).sum().backward()
    before = snapshot(module)
    (message,) = said(lambda: module.prefetch(IDS, OFFSETS))
    assert message.startswith("prefetch() has no effect: all rows are in the memory of their device")
    sizes = [[1], [1]]
    assert said(lambda: module.prefetch(IDS, OFFSETS, None, sizes, COUNTS)) == []
    assert said(lambda: module.eval().prefetch(indices=IDS, offsets=OFFSETS, forward_stream="any")) == []
    assert_unchanged(module, before)
    assert said(lambda: copy.deepcopy(module).prefetch(IDS, OFFSETS)) == []
    assert said(lambda: pickle.loads(pickle.dumps(module)).prefetch(IDS, OFFSETS)) == []
    # The same results as without.
    plain = make_module([options(score_strategy=Score.STEP), options()])
    plain(IDS, OFFSETS).sum().backward()
    assert torch.equal(module.train()(IDS, OFFSETS), plain(IDS, OFFSETS))


@pytest.mark.parametrize(
    ("arguments", "expected", "part"),
    [
        (([5], OFFSETS), TypeError, "indices"),
        ((IDS, OFFSETS + 1), ValueError, "offsets"),
        ((IDS, OFFSETS, None, [[1], [2]]), ValueError, "batch_size_per_feature_per_rank"),
        ((IDS, OFFSETS, None, None, COUNTS[:1]), ValueError, "frequency_counters has 1 entries"),
        ((IDS, OFFSETS, None, None, COUNTS.float()), TypeError, "frequency_counters must be"),
    ],
)
def test_c04_a_prefetch_refuses_what_its_forward_would(arguments: Any, expected: Any, part: str) -> None:
    for strategy in (Score.LFU, Score.TIMESTAMP):
        module = make_module([options(score_strategy=strategy), options()])
        with pytest.raises(expected, match=part):
            module.prefetch(*arguments)
    with pytest.raises(DynamicEmbError, match="has no score"):
        make_module([options(score_strategy=Score.CUSTOMIZED), options()]).prefetch(IDS, OFFSETS)


def test_c27_enabling_prefetch_says_once_that_nothing_follows() -> None:
    module = make_module()
    assert module.enable_prefetch is False
    assert said(lambda: setattr(module, "enable_prefetch", False)) == []
    (message,) = said(lambda: setattr(module, "enable_prefetch", True))
    assert message.startswith("enable_prefetch=True has no effect: all rows are in the memory")
    assert module.enable_prefetch is True
    assert said(lambda: setattr(module, "enable_prefetch", True)) == []
    assert said(lambda: make_module(enable_prefetch=False)) == []
    with pytest.raises(TypeError, match="enable_prefetch must be a bool, got 1"):
        module.enable_prefetch = 1  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="prefetch_pipeline=True has no effect"):
        assert make_module(prefetch_pipeline=True).enable_prefetch is True


# Cache


def test_c27_there_is_no_cache_to_reset_or_to_record() -> None:
    module = make_module()
    module(*bag_per_id([1, 2])).sum().backward()
    before = snapshot(module)
    (message,) = said(module.reset_cache_states)
    assert message == "reset_cache_states() has no effect: there is no cache, and all rows stay"
    assert said(module.reset_cache_states) == [] and module.flush() is None and module.cache is None
    assert said(lambda: module.set_record_cache_metrics(False)) == []
    (message,) = said(lambda: module.set_record_cache_metrics(True))
    assert message.startswith("set_record_cache_metrics(True) has no effect: there is no cache, and cache_metrics stay")
    assert said(lambda: module.set_record_cache_metrics(record=True)) == []
    assert module.cache_metrics is None
    with pytest.raises(TypeError, match="record must be a bool, got 1"):
        module.set_record_cache_metrics(1)  # type: ignore[arg-type]
    assert_unchanged(module, before)


# Filling


def sizes(module: Module) -> dict[str, tuple[int, int, int]]:
    return {name: (int(s["size"]), int(s["evicted"]), int(s["failed"])) for name, s in module.stats().items()}


FILLED: dict[str, dict[str, Any]] = {
    "timestamp": {"max_capacity": 256},
    "one bucket": {"max_capacity": 64, "bucket_capacity": 64},
    "large buckets": {"max_capacity": 4096, "bucket_capacity": 1024},
    "growing": {"max_capacity": 1024, "init_capacity": 256},
    "no eviction": {"init_capacity": 256, "score_strategy": Score.NO_EVICTION},
    "lfu": {"max_capacity": 256, "score_strategy": Score.LFU},
    "step": {"max_capacity": 256, "score_strategy": Score.STEP},
    "compound": {"max_capacity": 256, "score_strategy": (Score.TIMESTAMP, Score.LFU)},
    "expiring": {"max_capacity": 256, "ttl": 60.0},
    "admitting": {
        "max_capacity": 256,
        "admit_strategy": FrequencyAdmissionStrategy(9),
        "admission_counter": KVCounter(64, 16),
    },
    "only read": {"max_capacity": 256, "training": False},
}


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", FILLED)
def test_filled_tables_hold_exactly_as_many_ids_as_asked(name: str, backend: str) -> None:
    if reason := reason_to_skip(backend):
        pytest.skip(reason)

    def make() -> Module:
        table = DynamicEmbTableOptions(**{"dim": 4, "bucket_capacity": 16, **FILLED[name]})
        module = Module([table], ["t"], optimizer="adam", device=device_of(backend), seed=3)
        use_backend(module.tables, backend)
        return module

    module = make()
    capacity = int(module.stats()["t"]["capacity"])
    for load, wanted in ((0.25, capacity // 4), (0.95, int(0.95 * capacity)), (0.5, int(0.95 * capacity))):
        module.fill_tables(load)
        assert sizes(module) == {"t": (wanted, 0, 0)}
        assert module.stats()["t"]["capacity"] == capacity
    module.fill_tables(1.0)
    assert sizes(module) == {"t": (int(0.95 * capacity), 0, 0)}
    module.tables.check_invariants()
    assert module.tables.steps.num_outstanding == 0
    ids, rows = module.export_keys_values("t", "cpu")
    assert 0 <= int(ids.min()) and int(ids.max()) < 2**63 - 1 and ids.unique().numel() == ids.numel()
    # The ids follow from seed and name, their rows from seed, name and id, as in a lookup.
    again = make()
    again.fill_tables()
    if name != "growing":
        first = make()
        first.fill_tables(0.25)
        assert set(first.export_keys_values("t", "cpu")[0].tolist()) <= set(ids.tolist())
    assert again.stats()["t"]["size"] == module.stats()["t"]["size"]
    looked_up = Module(
        [DynamicEmbTableOptions(dim=4, max_capacity=8192)], ["t"], pooling_mode=NONE, device=device_of(backend), seed=3
    )
    some = ids[:50].to(looked_up.tables.device)
    assert torch.equal(looked_up(some, torch.tensor([0, 50], device=some.device)).cpu(), rows[:50])
    weights, state = row_of(module, "t", int(ids[0]))
    assert torch.equal(weights.cpu(), rows[0]) and not state.any()


def test_filling_tops_up_and_evicts_nobody() -> None:
    module = make_module([options(capacity=256), options(capacity=64)])
    held = torch.arange(120)
    assert module.insert("a", held, torch.ones(120, 4)).all()
    before = {int(i): row_of(module, "a", int(i))[0] for i in held[:20]}
    module.fill_tables(0.4)
    # Table "a" has more already.
    assert sizes(module) == {"a": (120, 0, 0), "b": (25, 0, 0)}
    module.fill_tables(load_factor=0.9, tolerance=0.0)
    assert sizes(module) == {"a": (230, 0, 0), "b": (57, 0, 0)}
    assert module.contains("a", held).all()
    assert all(torch.equal(row_of(module, "a", key)[0], row) for key, row in before.items())
    assert set(module.export_keys_values("a", "cpu")[0].tolist()) != set(module.export_keys_values("b", "cpu")[0])


def test_filling_skips_ids_that_are_there_and_those_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module([options(capacity=64, bucket_capacity=64, score_strategy=Score.LFU)])
    draw = torch.randint
    monkeypatch.setattr(torch, "randint", lambda low, high, *args, **more: draw(0, 70, *args, **more))
    module.insert("a", torch.arange(10), torch.ones(10, 4))
    module.fill_tables()
    assert sizes(module) == {"a": (60, 0, 0)}
    assert module.stats()["a"]["inserted"] == 60
    # Nobody is touched twice.
    assert set(module.export_scores("a", "cpu")[1].tolist()) == {1}


def test_c06_filling_says_so_when_erased_ids_still_hold_their_places() -> None:
    module = make_module([options(capacity=64, bucket_capacity=64)])
    output = module(*bag_per_id(range(40)))
    assert module.erase("a", torch.arange(40)) == 40
    (message,) = said(module.fill_tables)
    assert message.startswith("fill_tables: table 'a' holds 24 ids, 60 were wanted: places of erased ids are protected")
    assert said(lambda: module.fill_tables(tolerance=0.6)) == []
    output.sum().backward()
    assert said(module.fill_tables) == []
    assert sizes(module) == {"a": (60, 0, 0)}


def test_filling_gives_places_of_expired_ids_to_new_ones() -> None:
    module = make_module([options(capacity=64, bucket_capacity=64, ttl=60.0)])
    module(*bag_per_id(range(50))).sum().backward()
    module.tables.index.clock[SEEN] += 10**12
    module.fill_tables(0.5)
    assert (int(module.stats()["a"]["size"]), int(module.stats()["a"]["expired"])) == (32, 50)
    assert not module.contains("a", torch.arange(50)).any()


def test_c10_filled_ids_have_the_scores_of_an_import() -> None:
    for strategy, expected in ((Score.STEP, 2), (Score.LFU, 1), (Score.CUSTOMIZED, 9)):
        module = make_module([options(score_strategy=strategy)])
        if strategy is Score.CUSTOMIZED:
            with pytest.raises(DynamicEmbError, match="has no score"):
                module.fill_tables()
            assert sizes(module) == {"a": (0, 0, 0)}
            module.set_score({"a": 9})
        module(*bag_per_id([1]))
        module.fill_tables(0.5)
        ids, scores = module.export_scores("a", "cpu")
        assert set(scores[ids != 1].tolist()) == {expected}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "load_factor must be in"),
        ((1.5,), ValueError, "load_factor must be in"),
        (("half",), TypeError, "load_factor must be a number, got 'half'"),
        ((0.5, -1.0), ValueError, "tolerance must be in"),
        ((0.5, None), TypeError, "tolerance must be a number"),
    ],
)
def test_c04_a_load_that_cannot_be_is_refused(arguments: Any, error: Any, message: str) -> None:
    module = make_module()
    with pytest.raises(error, match=message):
        module.fill_tables(*arguments)
    assert sizes(module) == {"a": (0, 0, 0)}
