"""Table options, capacity arithmetic, score strategies, element types."""

import enum
import re
import warnings
from dataclasses import fields, replace
from itertools import combinations, permutations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamicemb import dynamicemb_config as config
from dynamicemb.dynamicemb_config import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbDataType,
    DynamicEmbEvictStrategy,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EvictStrategy,
    _sharded_table_bucket_layout,
    complete_initializer_args,
    get_constraint_capacity,
    get_sharded_table_capacity,
    get_table_row_bytes,
    get_table_value_bytes,
    row_bytes,
    state_offset_bytes,
    unsupported_options,
)
from dynamicemb.types import AdmissionStrategy, DynamicEmbInitializerArgs, DynamicEmbInitializerMode

Score = DynamicEmbScoreStrategy
Mode = DynamicEmbInitializerMode
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BUCKETS = st.integers(1, 64).map(lambda n: 16 * n)


class AdmitAll(AdmissionStrategy):
    def admit(self, keys, frequencies):
        return torch.ones_like(keys, dtype=torch.bool)

    def initialize_non_admitted_embeddings(self, buffer, indices):
        return False


def table(num_embeddings=1000, dim=8, data_type="FP32"):
    return SimpleNamespace(num_embeddings=num_embeddings, embedding_dim=dim, data_type=data_type)


# Capacity


@pytest.mark.parametrize(
    ("rows", "world_size", "bucket", "capacity"),
    [(7, 1, 128, 128), (1001, 4, 128, 256), (1, 8, 16, 16), (128, 1, 128, 128), (129, 1, 128, 256)],
)
def test_sharded_capacity_examples(rows, world_size, bucket, capacity):
    assert get_sharded_table_capacity(table(rows), world_size, bucket) == capacity


def test_single_bucket_examples():
    assert _sharded_table_bucket_layout(table(1001), 4, MAX_BUCKET_CAPACITY) == (1, 256)
    assert _sharded_table_bucket_layout(table(99), 1, MAX_BUCKET_CAPACITY) == (1, 112)


@given(st.integers(1, 10**12), st.integers(1, 1024), BUCKETS | st.just(MAX_BUCKET_CAPACITY))
def test_capacity_holds_every_row_and_wastes_less_than_a_bucket(rows, world_size, bucket):
    num_buckets, effective = _sharded_table_bucket_layout(table(rows), world_size, bucket)
    capacity = get_sharded_table_capacity(table(rows), world_size, bucket)
    share = (rows + world_size - 1) // world_size
    assert capacity == num_buckets * effective
    assert effective % 16 == 0
    if bucket == MAX_BUCKET_CAPACITY:
        assert (num_buckets, share <= capacity < share + 16) == (1, True)
    else:
        assert (effective, share <= capacity < share + bucket) == (bucket, True)


@pytest.mark.parametrize("bucket", [0, -16, 8, 100, MAX_BUCKET_CAPACITY - 1])
def test_bad_bucket_capacity_raises(bucket):
    for call in (
        lambda: get_sharded_table_capacity(table(), 1, bucket),
        lambda: DynamicEmbTableOptions(bucket_capacity=bucket),
        lambda: get_constraint_capacity(2**20, torch.float32, 8, "sgd", bucket),
    ):
        with pytest.raises(ValueError, match=f"bucket_capacity.*16.*{bucket}"):
            call()


@pytest.mark.parametrize("world_size", [0, -1])
def test_bad_world_size_raises(world_size):
    with pytest.raises(ValueError, match=f"world_size.*{world_size}"):
        get_sharded_table_capacity(table(), world_size, 128)


def test_align_to_table_size():
    assert [config.align_to_table_size(n) for n in (-5, 0, 1, 16, 17)] == [16, 16, 16, 16, 32]
    assert [config.align_to_table_size(n, alignment=10) for n in (0, 10, 11)] == [10, 10, 20]


@pytest.mark.parametrize(
    ("dtype", "dim", "num_state", "offset", "total"),
    [
        (torch.float32, 128, 0, 512, 512),
        (torch.float32, 128, 256, 512, 1536),
        (torch.float32, 128, 1, 512, 528),
        (torch.float32, 1, 0, 4, 16),
        (torch.float32, 5, 5, 20, 48),
        (torch.bfloat16, 3, 1, 8, 16),
        (torch.float16, 1, 3, 4, 16),
        (torch.bfloat16, 128, 256, 256, 1280),
        (torch.float16, 7, 0, 16, 16),
    ],
)
def test_row_bytes_examples(dtype, dim, num_state, offset, total):
    assert state_offset_bytes(dtype, dim) == offset
    assert row_bytes(dtype, dim, num_state) == total


@given(st.sampled_from(DTYPES), st.integers(1, 2048), st.integers(0, 4096))
def test_row_holds_weights_and_aligned_state_without_waste(dtype, dim, num_state):
    offset, total = state_offset_bytes(dtype, dim), row_bytes(dtype, dim, num_state)
    assert offset % 4 == 0
    assert dim * dtype.itemsize <= offset < dim * dtype.itemsize + 4
    assert total % 16 == 0
    assert offset + 4 * num_state <= total < offset + 4 * num_state + 16


@pytest.mark.parametrize(
    ("data_type", "optimizer", "per_row"),
    [
        ("FP32", "sgd", 4 * 6),
        ("FP32", "adam", 4 * 18),
        ("FP32", "exact_adagrad", 4 * 12),
        ("FP32", "exact_row_wise_adagrad", 4 * 6 + 16),
        ("BF16", "adam", 2 * 18),
        ("FP16", "exact_row_wise_adagrad", 2 * 6 + 16),
    ],
)
def test_value_bytes_are_the_nominal_ones(data_type, optimizer, per_row):
    assert get_table_value_bytes(table(1001, 6, data_type), optimizer, 4) == per_row * 256 * 4
    assert get_table_value_bytes(table(99, 6, data_type), optimizer, 1, MAX_BUCKET_CAPACITY) == per_row * 112


@given(
    st.sampled_from(["FP32", "FP16", "BF16"]),
    st.sampled_from(["sgd", "adam", "exact_adagrad", "exact_row_wise_adagrad"]),
    st.integers(1, 256).map(lambda n: 8 * n),
)
def test_nominal_and_real_bytes_differ_only_by_the_width_of_state(data_type, optimizer, dim):
    nominal = get_table_value_bytes(table(1000, dim, data_type), optimizer, 2)
    real = get_table_row_bytes(table(1000, dim, data_type), optimizer, 2)
    wide_state = {"adam": 2 * dim, "exact_adagrad": dim}.get(optimizer, 0)
    extra = 0 if data_type == "FP32" else 2 * wide_state
    assert real == nominal + extra * 512 * 2


@given(st.integers(0, 2**24), st.sampled_from(DTYPES), st.integers(1, 64), BUCKETS)
def test_constraint_capacity_fits_and_is_maximal(memory, dtype, dim, bucket):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = get_constraint_capacity(memory, dtype, dim, "adam", bucket)
    row = row_bytes(dtype, dim, 2 * dim)
    assert rows % bucket == 0
    assert (rows + bucket) * row > memory
    if caught:
        assert rows == bucket
        assert bucket * row > memory
        assert str(memory) in str(caught[0].message)
    else:
        assert bucket <= rows
        assert rows * row <= memory


def test_constraint_capacity_of_a_single_bucket():
    assert get_constraint_capacity(50 * 512, torch.float32, 128, "sgd", MAX_BUCKET_CAPACITY) == 48


# Initializer bounds


def test_open_uniform_bounds_are_filled_from_the_table_size():
    args = DynamicEmbInitializerArgs()
    filled = complete_initializer_args(args, embedding_config=table(400))
    assert (filled.lower, filled.upper) == (-0.05, 0.05)
    assert (args.lower, args.upper) == (None, None)
    filled = complete_initializer_args(args)
    assert (filled.lower, filled.upper) == (0.0, 1.0)


def test_given_uniform_bounds_are_kept():
    filled = complete_initializer_args(DynamicEmbInitializerArgs(lower=-3.0), embedding_config=table(400))
    assert (filled.lower, filled.upper) == (-3.0, 0.05)
    closed = DynamicEmbInitializerArgs(lower=-1.0, upper=1.0)
    assert complete_initializer_args(closed, embedding_config=table(400)) is closed
    with pytest.raises(ValueError, match=r"lower=2.0, upper=0.05"):
        complete_initializer_args(DynamicEmbInitializerArgs(lower=2.0), embedding_config=table(400))


@pytest.mark.parametrize("mode", [m for m in Mode if m is not Mode.UNIFORM])
def test_other_initializers_are_left_alone(mode):
    args = DynamicEmbInitializerArgs(mode=mode)
    assert complete_initializer_args(args, embedding_config=table()) is args


# Score strategies


def test_enum_values():
    assert {m.name: int(m) for m in DynamicEmbPoolingMode} == {"SUM": 0, "MEAN": 1, "NONE": 2}
    assert {m.name: int(m) for m in DynamicEmbCheckMode} == {"ERROR": 0, "WARNING": 1, "IGNORE": 2}
    assert [m.name for m in sorted(Score)] == ["TIMESTAMP", "STEP", "CUSTOMIZED", "LFU", "NO_EVICTION"]
    assert {m.name: str(m.value) for m in DynamicEmbEvictStrategy} == {
        "LRU": "EvictStrategy.KLru",
        "LFU": "EvictStrategy.KLfu",
        "EPOCH_LRU": "EvictStrategy.KEpochLru",
        "EPOCH_LFU": "EvictStrategy.KEpochLfu",
        "CUSTOMIZED": "EvictStrategy.KCustomized",
    }


@pytest.mark.parametrize("member", EvictStrategy)
def test_evict_strategy_from_its_name_or_its_saved_form(member):
    assert config.string_to_evict_strategy(member.name) is member
    assert config.string_to_evict_strategy(str(member)) is member


@pytest.mark.parametrize("name", ["", "LRU", "klru", "EvictStrategy."])
def test_unknown_evict_strategy_raises(name):
    with pytest.raises(ValueError, match=f"{name!r}.*KLru"):
        config.string_to_evict_strategy(name)


@pytest.mark.parametrize("strategy", Score)
def test_single_strategies(strategy):
    assert config.normalize_score_strategy(strategy) is strategy
    assert config.normalize_score_strategy((strategy,)) is strategy
    assert config.get_eviction_score_strategy((strategy,)) is strategy
    assert config.get_physical_score_order(strategy) == (strategy,)
    assert config.score_dump_permutation(strategy) == config.score_load_permutation(strategy) == [0]
    assert config.score_strategy_has_timestamp_column(strategy) == (strategy is Score.TIMESTAMP)


@pytest.mark.parametrize("strategy", [*permutations([Score.TIMESTAMP, Score.LFU])])
def test_compound_strategies(strategy):
    assert config.normalize_score_strategy(list(strategy)) == strategy
    assert config.get_eviction_score_strategy(strategy) is Score.LFU
    assert config.get_evict_strategy(strategy) is DynamicEmbEvictStrategy.LFU
    assert config.score_strategy_has_timestamp_column(strategy)
    assert config.get_physical_score_order(strategy) == (Score.TIMESTAMP, Score.LFU)


@pytest.mark.parametrize(
    ("strategy", "on_disk"),
    [((Score.TIMESTAMP, Score.LFU), [[100, 1], [200, 2]]), ((Score.LFU, Score.TIMESTAMP), [[1, 100], [2, 200]])],
)
def test_permutations_move_score_columns_to_the_users_order_and_back(strategy, on_disk):
    in_memory = torch.tensor([[100, 1], [200, 2]])
    dumped = in_memory[:, config.score_dump_permutation(strategy)]
    assert dumped.tolist() == on_disk
    assert torch.equal(dumped[:, config.score_load_permutation(strategy)], in_memory)


BAD_PAIRS = [p for p in combinations(Score, 2) if set(p) != {Score.TIMESTAMP, Score.LFU}] + [(s, s) for s in Score]


@pytest.mark.parametrize("strategy", [*BAD_PAIRS, (Score.TIMESTAMP, Score.LFU, Score.LFU)])
def test_other_combinations_are_refused(strategy):
    for call in (config.validate_score_strategy, lambda s: DynamicEmbTableOptions(score_strategy=s)):
        with pytest.raises(NotImplementedError, match=f"score_strategy.*{strategy[0].name}.*TIMESTAMP with LFU"):
            call(strategy)


@pytest.mark.parametrize("strategy", [0, "LFU", (), (Score.LFU, 0), {Score.LFU}, None])
def test_non_strategies_raise_type_error(strategy):
    with pytest.raises(TypeError, match="score_strategy"):
        config.validate_score_strategy(strategy)


def test_implied_evict_strategies():
    implied = {strategy.name: config.get_evict_strategy(strategy).name for strategy in Score}
    assert implied == {
        "TIMESTAMP": "LRU",
        "STEP": "CUSTOMIZED",
        "CUSTOMIZED": "CUSTOMIZED",
        "LFU": "LFU",
        "NO_EVICTION": "CUSTOMIZED",
    }


@pytest.mark.parametrize(("value", "warn"), [(None, True), ("1", True), ("", True), ("0", False)])
def test_environment_variable_silences_the_score_warning(monkeypatch, value, warn):
    monkeypatch.delenv("DYNAMICEMB_CSTM_SCORE_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", value)
    assert config.warning_for_cstm_score() is warn


# Element types


def test_data_types_by_member_and_by_name():
    expected = {
        "FP32": torch.float32,
        "FP16": torch.float16,
        "BF16": torch.bfloat16,
        "INT64": torch.int64,
        "INT32": torch.int32,
        "INT8": torch.int8,
        "UINT8": torch.uint8,
    }
    members = enum.Enum("DataType", {name: name for name in expected})
    for name, dtype in expected.items():
        assert config.data_type_to_dtype(name) is config.data_type_to_dtype(members(name)) is dtype
        assert config.dyn_emb_to_torch(config.data_type_to_dyn_emb(members(name))) is dtype
    for bad in ("INT4", None, torch.float32):
        with pytest.raises(ValueError, match="data_type.*FP32"):
            config.data_type_to_dtype(bad)


def test_data_types_of_torchrec():
    data_types = pytest.importorskip("torchrec.types").DataType
    assert config.data_type_to_dtype(data_types.BF16) is torch.bfloat16
    assert config.data_type_to_dtype(data_types.FP32) is torch.float32


@pytest.mark.parametrize("member", DynamicEmbDataType)
def test_element_types_round_trip(member):
    assert config.torch_to_dyn_emb(config.dyn_emb_to_torch(member)) is member
    size = torch.empty(1, dtype=member.value).element_size()
    assert config.dtype_to_bytes(member.value) == size


def test_bad_element_types_raise():
    with pytest.raises(ValueError, match="complex64"):
        config.torch_to_dyn_emb(torch.complex64)
    with pytest.raises(TypeError, match="'float32'"):
        config.dtype_to_bytes("float32")
    with pytest.raises(TypeError, match="torch.float32"):
        config.dyn_emb_to_torch(torch.float32)


# Options


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
        "bucket_capacity": 128,
        "safe_check_mode": DynamicEmbCheckMode.IGNORE,
        "global_hbm_for_values": 0,
        "external_storage": None,
        "index_type": None,
        "dist_type": "roundrobin",
        "admit_strategy": None,
        "admission_counter": None,
    }
    assert [f.name for f in fields(DynamicEmbTableOptions)][:3] == ["embedding_dtype", "dim", "max_capacity"]
    assert fields(DynamicEmbTableOptions)[-1].name == "admission_counter"


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
        ({"bucket_capacity": None}, TypeError),
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
    "score_strategy": Score.LFU,
    "bucket_capacity": 256,
    "safe_check_mode": DynamicEmbCheckMode.ERROR,
    "global_hbm_for_values": 1,
    "external_storage": dict,
    "index_type": torch.int64,
    "dist_type": "continuous",
    "admit_strategy": AdmitAll(),
    "admission_counter": object(),
}
GROUPED = {
    "training",
    "caching",
    "external_storage",
    "index_type",
    "dist_type",
    "score_strategy",
    "admit_strategy",
    "bucket_capacity",
}


@pytest.mark.parametrize("name", CHANGES)
def test_options_are_equal_unless_they_differ_in_a_grouping_field(name):
    plain = DynamicEmbTableOptions()
    changed = replace(plain, **{name: CHANGES[name]})
    assert (plain != changed) == (changed != plain) == (name in GROUPED)
    if name not in GROUPED:
        assert hash(plain) == hash(changed)
        assert len({plain, changed}) == 1


def test_grouped_key_names_the_grouping_fields():
    options = DynamicEmbTableOptions(**{name: CHANGES[name] for name in GROUPED})
    assert options.get_grouped_key() == {name: CHANGES[name] for name in GROUPED}
    assert hash(options) == hash(replace(options, dim=3))


def test_comparing_options_with_a_foreign_type_is_left_to_it():
    assert DynamicEmbTableOptions().__eq__(object()) is NotImplemented
    assert DynamicEmbTableOptions() != object()
    assert (DynamicEmbTableOptions() == None) is False  # noqa: E711


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"caching": True}, "caching=True"),
        ({"external_storage": dict}, "external_storage"),
        ({"admit_strategy": AdmitAll()}, "admit_strategy"),
        ({"admission_counter": object()}, "admission_counter"),
        ({"score_strategy": Score.NO_EVICTION}, "NO_EVICTION"),
        ({"score_strategy": (Score.LFU, Score.TIMESTAMP)}, r"\(LFU, TIMESTAMP\)"),
        ({"init_capacity": 128, "max_capacity": 129}, "init_capacity=128.*max_capacity=129"),
        ({"safe_check_mode": DynamicEmbCheckMode.ERROR}, "safe_check_mode=ERROR"),
        ({"safe_check_mode": DynamicEmbCheckMode.WARNING}, "safe_check_mode=WARNING"),
    ],
)
def test_c27_options_that_this_version_cannot_honour_are_listed(options, words):
    messages = unsupported_options(DynamicEmbTableOptions(**options))
    assert len(messages) == 1
    assert re.search(words, messages[0])
    assert "use " in messages[0]


def test_unsupported_options_are_all_listed_at_once():
    options = DynamicEmbTableOptions(caching=True, external_storage=dict, safe_check_mode=DynamicEmbCheckMode.ERROR)
    assert len(unsupported_options(options)) == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init_capacity": 1, "max_capacity": 128},
        {"init_capacity": 100, "max_capacity": 112, "bucket_capacity": MAX_BUCKET_CAPACITY},
        {"init_capacity": 100},
        *({"score_strategy": s} for s in Score if s is not Score.NO_EVICTION),
        {"training": False, "dist_type": "hash_roundrobin", "embedding_dtype": torch.bfloat16, "dim": 3},
    ],
)
def test_supported_options_are_not_listed(options):
    assert unsupported_options(DynamicEmbTableOptions(**options)) == []
