"""Table options: defaults, checks, grouping, and what this version cannot honour."""

import re
import warnings
from dataclasses import fields, replace

import pytest
import torch

from dynamicemb.admission import KVCounter
from dynamicemb.dynamicemb_config import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    unsupported_options,
)
from dynamicemb.types import AdmissionStrategy, Counter, DynamicEmbInitializerArgs, DynamicEmbInitializerMode

Score = DynamicEmbScoreStrategy
Mode = DynamicEmbInitializerMode


class AdmitAll(AdmissionStrategy):
    def admit(self, keys, frequencies):
        return torch.ones_like(keys, dtype=torch.bool)

    def initialize_non_admitted_embeddings(self, buffer, indices):
        return False


def test_option_fields_and_defaults_in_order():
    assert {f.name: getattr(DynamicEmbTableOptions(), f.name) for f in fields(DynamicEmbTableOptions)} == {
        "embedding_dtype": None,
        "dim": None,
        "max_capacity": None,
        "evict_strategy": DynamicEmbEvictStrategy.LRU,
        "local_hbm_for_values": 0,
        "device_id": None,
        "training": True,
        "initializer_args": DynamicEmbInitializerArgs(),
        "eval_initializer_args": DynamicEmbInitializerArgs(mode=Mode.CONSTANT, value=0.0),
        "caching": False,
        "init_capacity": None,
        "max_load_factor": 0.5,
        "score_strategy": Score.TIMESTAMP,
        "bucket_capacity": None,
        "safe_check_mode": DynamicEmbCheckMode.IGNORE,
        "global_hbm_for_values": 0,
        "external_storage": None,
        "index_type": None,
        "dist_type": "roundrobin",
        "admit_strategy": None,
        "admission_counter": None,
        "protect_steps": 0,
        "score_function": None,
        "ttl": None,
    }
    assert [f.name for f in fields(DynamicEmbTableOptions)][:3] == ["embedding_dtype", "dim", "max_capacity"]
    # Ours come last, so that positional arguments keep their meaning.
    assert [f.name for f in fields(DynamicEmbTableOptions)][-4:] == [
        "admission_counter",
        "protect_steps",
        "score_function",
        "ttl",
    ]


def test_default_initializers_are_not_shared():
    first, second = DynamicEmbTableOptions(), DynamicEmbTableOptions()
    assert first.initializer_args is not second.initializer_args
    assert first.eval_initializer_args is not second.eval_initializer_args


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dim": 0}, ValueError),
        ({"dim": 2049}, ValueError),
        ({"dim": 8.0}, TypeError),
        ({"dim": True}, TypeError),
        ({"max_capacity": 0}, ValueError),
        ({"max_capacity": 1e6}, TypeError),
        ({"init_capacity": 0}, ValueError),
        ({"init_capacity": 101, "max_capacity": 100}, ValueError),
        ({"local_hbm_for_values": -1}, ValueError),
        ({"global_hbm_for_values": 2.5}, TypeError),
        ({"global_hbm_for_values": None}, TypeError),
        ({"device_id": -1}, ValueError),
        ({"device_id": "cuda"}, TypeError),
        ({"max_load_factor": 0}, ValueError),
        ({"max_load_factor": 1.01}, ValueError),
        ({"max_load_factor": float("nan")}, ValueError),
        ({"max_load_factor": "half"}, TypeError),
        ({"bucket_capacity": 130}, ValueError),
        ({"bucket_capacity": 128.0}, TypeError),
        ({"bucket_capacity": "128"}, TypeError),
        ({"embedding_dtype": torch.float64}, ValueError),
        ({"embedding_dtype": "FP32"}, TypeError),
        ({"index_type": torch.int32}, ValueError),
        ({"index_type": "int64"}, TypeError),
        ({"dist_type": "random"}, ValueError),
        ({"dist_type": 3}, TypeError),
        ({"evict_strategy": "LRU"}, TypeError),
        ({"training": 1}, TypeError),
        ({"caching": None}, TypeError),
        ({"safe_check_mode": 0}, TypeError),
        ({"score_strategy": 0}, TypeError),
        ({"initializer_args": None}, TypeError),
        ({"eval_initializer_args": DynamicEmbInitializerArgs()}, ValueError),
        ({"external_storage": "redis"}, TypeError),
        ({"admit_strategy": 3}, TypeError),
    ],
)
def test_c04_bad_options_raise_naming_option_and_value(options, error):
    name, value = next(iter(options.items()))
    with pytest.raises(error, match=name) as caught:
        DynamicEmbTableOptions(**options)
    shown = value.mode.name if isinstance(value, DynamicEmbInitializerArgs) else str(value)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 1},
        {"dim": 2048},
        {"max_capacity": 1, "init_capacity": 1},
        {"max_load_factor": 1},
        {"bucket_capacity": MAX_BUCKET_CAPACITY},
        {"bucket_capacity": 16},
        {"score_strategy": None},
        {"index_type": torch.uint64},
        {"external_storage": dict},
    ],
)
def test_options_at_the_edge_are_accepted(options):
    made = DynamicEmbTableOptions(**options)
    assert {name: getattr(made, name) for name in options} == options


def test_changed_options_are_checked_again_on_request():
    options = DynamicEmbTableOptions(score_strategy=(Score.STEP,))
    assert options.score_strategy is Score.STEP
    options.max_capacity = -1
    with pytest.raises(ValueError, match="max_capacity.*-1"):
        options.validate()


def test_c27_an_evict_strategy_that_contradicts_the_score_strategy_warns():
    with pytest.warns(UserWarning, match="evict_strategy=LFU has no effect.*LRU") as caught:
        DynamicEmbTableOptions(evict_strategy=DynamicEmbEvictStrategy.LFU)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DynamicEmbTableOptions(evict_strategy=DynamicEmbEvictStrategy.LFU, score_strategy=Score.LFU)


def recorded(call):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        call()
    return [(str(warning.message), warning.filename) for warning in warned]


@pytest.mark.parametrize(
    ("init", "start"), [(None, ", from 100 rows on unless a planner decides"), (50, ""), (101, "")]
)
def test_c27_a_limit_of_a_table_without_one_warns_where_it_is_given(init, start):
    given = {"max_capacity": 100, "init_capacity": init, "score_strategy": Score.NO_EVICTION}
    ((message, filename),) = recorded(lambda: DynamicEmbTableOptions(**given))
    assert message == (
        "max_capacity=100 has no effect as a limit: with score_strategy NO_EVICTION a table grows until memory ends"
        f"{start}; leave it None and set init_capacity, or choose TIMESTAMP"
    )
    assert filename == __file__
    with pytest.warns(UserWarning):
        made = DynamicEmbTableOptions(**given)
    assert (made.max_capacity, made.init_capacity) == (100, init)
    assert recorded(made.validate) == []
    assert recorded(lambda: DynamicEmbTableOptions(init_capacity=100, score_strategy=Score.NO_EVICTION)) == []
    assert recorded(lambda: DynamicEmbTableOptions(max_capacity=100)) == []


def test_c27_a_counter_that_no_strategy_asks_warns_and_groups_with_none():
    ((message, filename),) = recorded(lambda: DynamicEmbTableOptions(admission_counter=KVCounter(100)))
    assert message == "admission_counter has no effect without an admit_strategy; give one, or leave it None"
    assert filename == __file__
    with pytest.warns(UserWarning):
        made = DynamicEmbTableOptions(admission_counter=KVCounter(100))
    assert made == DynamicEmbTableOptions() and hash(made) == hash(DynamicEmbTableOptions())
    assert recorded(made.validate) == []


class OwnCounter(Counter):
    def add(self, keys, table_ids, frequencies):
        return frequencies

    def erase(self, keys, table_ids):
        pass

    def memory_usage(self, mem_type=None):
        return 0

    def load(self, key_file, counter_file, table_id):
        pass

    def dump(self, key_file, counter_file, table_id):
        pass


def oldest_first(scores, cur_timestamp):
    return scores[1] - cur_timestamp


CHANGES = {
    "embedding_dtype": torch.float16,
    "dim": 7,
    "max_capacity": 77,
    "local_hbm_for_values": 1,
    "device_id": 1,
    "training": False,
    "initializer_args": DynamicEmbInitializerArgs(lower=-1.0),
    "eval_initializer_args": DynamicEmbInitializerArgs(mode=Mode.CONSTANT, value=1.0),
    "caching": True,
    "init_capacity": 5,
    "max_load_factor": 0.75,
    "score_strategy": (Score.LFU, Score.TIMESTAMP),
    "bucket_capacity": 256,
    "safe_check_mode": DynamicEmbCheckMode.ERROR,
    "global_hbm_for_values": 1,
    "external_storage": dict,
    "index_type": torch.uint64,
    "dist_type": "continuous",
    "admit_strategy": AdmitAll(),
    "admission_counter": KVCounter(100),
    "protect_steps": 2,
    "score_function": oldest_first,
}
GROUPED = {
    "training",
    "caching",
    "external_storage",
    "index_type",
    "dist_type",
    "score_strategy",
    "admit_strategy",
    "admission_counter",
    "bucket_capacity",
    "protect_steps",
    "score_function",
}


@pytest.mark.parametrize("name", CHANGES)
def test_options_are_equal_unless_they_differ_in_a_grouping_field(name):
    # A function needs two scores, a counter a strategy.
    needed = {"score_function": "score_strategy", "admission_counter": "admit_strategy"}.get(name)
    plain = DynamicEmbTableOptions(**({needed: CHANGES[needed]} if needed else {}))
    changed = replace(plain, **{name: CHANGES[name]})
    assert (plain != changed) == (changed != plain) == (name in GROUPED)
    if name not in GROUPED:
        assert hash(plain) == hash(changed)
        assert len({plain, changed}) == 1


def test_grouped_key_names_the_grouping_fields():
    options = DynamicEmbTableOptions(**{name: CHANGES[name] for name in GROUPED})
    kind = ("KVCounter", 128)
    assert options.get_grouped_key() == {name: CHANGES[name] for name in GROUPED} | {"admission_counter": kind}
    assert hash(options) == hash(replace(options, dim=3))


def test_c28_tables_whose_counters_cannot_share_a_module_are_given_to_several() -> None:
    def key(counter):
        return DynamicEmbTableOptions(admit_strategy=CHANGES["admit_strategy"], admission_counter=counter)

    assert key(KVCounter(100, 16)) == key(KVCounter(5000, 16)) and key(OwnCounter()) == key(OwnCounter())
    different = [None, KVCounter(100, 16), KVCounter(100, 32), KVCounter(100, MAX_BUCKET_CAPACITY), OwnCounter()]
    assert len({key(counter) for counter in different}) == len(different)


def test_comparing_options_with_a_foreign_type_is_left_to_it():
    assert DynamicEmbTableOptions().__eq__(object()) is NotImplemented
    assert DynamicEmbTableOptions() != object()
    assert (DynamicEmbTableOptions() == None) is False  # noqa: E711


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score_strategy": Score.NO_EVICTION, "bucket_capacity": MAX_BUCKET_CAPACITY}, "NO_EVICTION.*single bucket"),
        (
            {"init_capacity": 16, "max_capacity": 17, "bucket_capacity": MAX_BUCKET_CAPACITY},
            "init_capacity=16.*max_capacity=17",
        ),
    ],
)
def test_c27_options_that_this_version_cannot_honour_are_listed(options, words):
    messages = unsupported_options(DynamicEmbTableOptions(**options))
    assert len(messages) == 1
    assert re.search(words, messages[0])
    assert "use " in messages[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init_capacity": 1, "max_capacity": 128},
        {"init_capacity": 128, "max_capacity": 129},
        {"init_capacity": 100, "max_capacity": 112, "bucket_capacity": MAX_BUCKET_CAPACITY},
        {"init_capacity": 100},
        {"caching": True, "external_storage": dict},
        *({"safe_check_mode": mode} for mode in DynamicEmbCheckMode),
        *({"score_strategy": s} for s in Score),
        {"score_strategy": (Score.TIMESTAMP, Score.LFU)},
        {"score_strategy": (Score.LFU, Score.TIMESTAMP)},
        {"admit_strategy": AdmitAll()},
        {"admit_strategy": AdmitAll(), "admission_counter": KVCounter(100)},
        {"training": False, "dist_type": "hash_roundrobin", "embedding_dtype": torch.bfloat16, "dim": 3},
    ],
)
def test_supported_options_are_not_listed(options):
    assert unsupported_options(DynamicEmbTableOptions(**options)) == []


def test_an_index_type_that_is_left_open_is_int64_in_the_grouped_key() -> None:
    # A planner writes int64 where None was given: the options stay what they were, in sets and beside others.
    open_type, written = DynamicEmbTableOptions(), DynamicEmbTableOptions(index_type=torch.int64)
    assert open_type == written and len({open_type, written}) == 1
    assert open_type != DynamicEmbTableOptions(index_type=torch.uint64)
