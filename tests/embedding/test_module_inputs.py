"""Wrong and idle arguments of the module: refused by name, and nothing has changed (lines 4, 27 and 28)."""

import warnings

import pytest
import torch

from dynamicemb import DynamicEmbPoolingMode, DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.embedding.construct import _idle_options, check_device_ids
from dynamicemb.errors import DynamicEmbError, UnsupportedOptionError
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
    snapshot,
)

IDS = torch.tensor([1, 2, 3])
OFFSETS = torch.tensor([0, 1, 3])
ONES = torch.ones(3)
META = torch.device("meta")

SIZES = ["batch_size_per_feature_per_rank"]
# name: (arguments, exception, what the message must contain)
BAD_LOOKUPS = {
    "ids list": (([1, 2, 3], OFFSETS), TypeError, ["indices", "list", "torch.tensor"]),
    "ids float": ((IDS.float(), OFFSETS), TypeError, ["indices", "float32", "long()"]),
    "ids NaN": ((torch.tensor([1.0, float("nan"), 2.0]), OFFSETS), TypeError, ["indices", "float32"]),
    "ids bool": ((IDS > 1, OFFSETS), TypeError, ["indices", "bool"]),
    "ids uint8": ((IDS.to(torch.uint8), OFFSETS), TypeError, ["indices", "uint8"]),
    "ids complex": ((IDS.to(torch.complex64), OFFSETS), TypeError, ["indices", "complex64"]),
    "ids 2-D": ((IDS.view(1, 3), OFFSETS), ValueError, ["indices", "(1, 3)", "flatten"]),
    "ids 0-D": ((torch.tensor(3), torch.tensor([0, 1])), ValueError, ["indices", "()"]),
    "ids sparse": ((IDS.to_sparse(), OFFSETS), TypeError, ["indices", "sparse", "to_dense"]),
    "ids on another device": ((IDS.to(META), OFFSETS), ValueError, ["indices", "meta", "cpu"]),
    "offsets list": ((IDS, [0, 1, 3]), TypeError, ["offsets", "list"]),
    "offsets float": ((IDS, OFFSETS.float()), TypeError, ["offsets", "float32", "long()"]),
    "offsets uint64": ((IDS, OFFSETS.to(torch.uint64)), TypeError, ["offsets", "uint64"]),
    "offsets 2-D": ((IDS, OFFSETS.view(3, 1)), ValueError, ["offsets", "(3, 1)"]),
    "offsets on another device": ((IDS, OFFSETS.to(META)), ValueError, ["offsets", "meta", "cpu"]),
    "offsets empty": ((IDS, OFFSETS[:0]), ValueError, ["offsets", "0 entries", "2 features"]),
    "offsets too short": ((IDS, torch.tensor([0, 3])), ValueError, ["offsets", "2 entries", "2 features"]),
    "offsets start": ((IDS, torch.tensor([1, 2, 3])), ValueError, ["offsets", "start at 0", "got 1 and 3"]),
    "offsets start below 0": ((IDS, torch.tensor([-1, 2, 3])), ValueError, ["offsets", "got -1"]),
    "offsets end early": ((IDS, torch.tensor([0, 1, 2])), ValueError, ["offsets", "3", "got 0 and 2"]),
    "offsets end late": ((IDS, torch.tensor([0, 1, 4])), ValueError, ["offsets", "3", "got 0 and 4"]),
    "offsets huge": ((IDS, torch.tensor([0, 2**62, 3])), ValueError, ["offsets", str(2**62), "position 2"]),
    "offsets decrease": ((IDS, torch.tensor([0, 2, 1, 3, 3])), ValueError, ["offsets", "2 before 1", "position 2"]),
    "offsets wrap": ((IDS, torch.tensor([0, -(2**63), 3])), ValueError, ["offsets", str(-(2**63)), "position 1"]),
    "weights list": ((IDS, OFFSETS, [1.0] * 3), TypeError, ["per_sample_weights", "list"]),
    "weights uint64": (
        (IDS, OFFSETS, IDS.to(torch.uint64)),
        TypeError,
        ["per_sample_weights", "uint64", "frequency_counters"],
    ),
    "weights int short": ((IDS, OFFSETS, IDS[:2]), ValueError, ["per_sample_weights", "2 entries", "3 ids"]),
    "weights int 2-D": ((IDS, OFFSETS, IDS[None]), ValueError, ["per_sample_weights", "(1, 3)"]),
    "weights bool": ((IDS, OFFSETS, IDS > 1), TypeError, ["per_sample_weights", "bool", "frequency_counters"]),
    "weights short": ((IDS, OFFSETS, ONES[:2]), ValueError, ["per_sample_weights", "2 entries", "3 ids"]),
    "weights 2-D": ((IDS, OFFSETS, ONES[None]), ValueError, ["per_sample_weights", "(1, 3)"]),
    "weights elsewhere": ((IDS, OFFSETS, ONES.to(META)), ValueError, ["per_sample_weights", "meta", "cpu"]),
    "feature_requires_grad": ((IDS, OFFSETS, None, [1, 1]), TypeError, ["feature_requires_grad", "list", "None"]),
    "batch sizes": ((IDS, OFFSETS, None, None, [[1], [2]]), ValueError, [*SIZES, "2 features has 1", "[[1], [2]]"]),
    "batch sizes by rank": ((IDS, OFFSETS, None, None, [[1, 0], [1, 1]]), ValueError, SIZES),
    "batch sizes of one": ((IDS, OFFSETS, None, None, [[1]]), ValueError, SIZES),
    "batch sizes flat": ((IDS, OFFSETS, None, None, [1, 1]), TypeError, SIZES),
}


def says(error: BaseException, parts: list[str]) -> None:
    for part in parts:
        assert part in str(error), f"{part!r} is missing in: {error}"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", BAD_LOOKUPS)
def test_c04_a_malformed_lookup_is_refused_and_changes_nothing(name: str, training: bool) -> None:
    arguments, expected, parts = BAD_LOOKUPS[name]
    module = make_module([options(), options()])
    module(*batch([1, 5], [2])).sum().backward()
    module.train(training)
    before = snapshot(module)
    with pytest.raises(expected) as held:
        module(*arguments)
    says(held.value, parts)
    assert_unchanged(module, before)


BAD_FREQUENCIES = {
    "list": ([1, 1, 1], TypeError, ["frequency_counters", "list"]),
    "float": (ONES, TypeError, ["frequency_counters", "float32", "per_sample_weights"]),
    "bool": (IDS > 0, TypeError, ["frequency_counters", "bool"]),
    "zero": (torch.tensor([1, 0, 2]), ValueError, ["frequency_counters", "0..2", "leave"]),
    "negative": (torch.tensor([1, -5, 2]), ValueError, ["frequency_counters", "-5..2"]),
    "too large": (torch.tensor([1, 2**31, 2]), ValueError, ["frequency_counters", str(2**31)]),
    "short": (torch.tensor([1, 2]), ValueError, ["frequency_counters", "2 entries", "3 ids"]),
    "2-D": (torch.tensor([[1, 2, 3]]), ValueError, ["frequency_counters", "(1, 3)"]),
    "elsewhere": (IDS.to(META), ValueError, ["frequency_counters", "meta"]),
}


@pytest.mark.parametrize("name", BAD_FREQUENCIES)
def test_c04_malformed_frequencies_are_refused_and_change_nothing(name: str) -> None:
    frequencies, expected, parts = BAD_FREQUENCIES[name]
    module = make_module([options(score_strategy=DynamicEmbScoreStrategy.LFU)])
    module(IDS, OFFSETS)
    before = snapshot(module)
    with pytest.raises(expected) as held:
        module(IDS, OFFSETS, frequency_counters=frequencies)
    says(held.value, parts)
    assert_unchanged(module, before)


def test_c04_frequencies_and_weights_need_a_module_that_reads_them() -> None:
    module = make_module()
    before = snapshot(module)
    with pytest.raises(ValueError, match="frequency_counters has no effect: only score_strategy LFU"):
        module(IDS, OFFSETS, frequency_counters=IDS)
    assert_unchanged(module, before)
    module = make_module([options(score_strategy=DynamicEmbScoreStrategy.LFU)])
    before = snapshot(module)
    with pytest.raises(ValueError, match="per_sample_weights of integers are taken for frequency_counters, which are"):
        module(IDS, OFFSETS, IDS, frequency_counters=IDS)
    with pytest.raises(ValueError, match="per_sample_weights of integers, which count, must be in 1.*, got 0..2"):
        module(IDS, OFFSETS, IDS - 1)
    assert_unchanged(module, before)
    module = make_module(pooling_mode=NONE)
    before = snapshot(module)
    with pytest.raises(ValueError, match="per_sample_weights.*NONE; use SUM or MEAN"):
        module(IDS, OFFSETS, ONES)
    assert_unchanged(module, before)


BAD_CALLS = {
    "insert table": (lambda m: m.insert("x", IDS, torch.zeros(3, 4)), ValueError, ["table_name", "'x'", "a"]),
    "insert ids": (lambda m: m.insert("a", IDS.float(), torch.zeros(3, 4)), TypeError, ["ids", "float32"]),
    "insert rows dtype": (lambda m: m.insert("a", IDS, torch.zeros(3, 4).int()), TypeError, ["rows", "(3, 4)"]),
    "insert rows list": (lambda m: m.insert("a", IDS, [[0.0] * 4] * 3), TypeError, ["rows", "(3, 4)"]),
    "insert rows shape": (lambda m: m.insert("a", IDS, torch.zeros(3, 5)), ValueError, ["rows", "(3, 4)", "(3, 5)"]),
    "insert rows device": (
        lambda m: m.insert("a", IDS, torch.zeros(3, 4, device=META)),
        ValueError,
        ["rows", "cpu", "meta"],
    ),
    "erase table": (lambda m: m.erase("x", IDS), ValueError, ["table_name", "'x'"]),
    "erase ids": (lambda m: m.erase("a", [1]), TypeError, ["ids", "list"]),
    "contains ids": (lambda m: m.contains("a", IDS.view(1, 3)), ValueError, ["ids", "(1, 3)"]),
    "export table": (lambda m: m.export_keys_values("x", "cpu"), ValueError, ["table_name", "'x'"]),
    "export 0": (lambda m: m.export_keys_values("a", "cpu", 0), ValueError, ["batch_size", "got 0"]),
    "export -1": (lambda m: m.export_keys_values("a", "cpu", -1), ValueError, ["batch_size", "got -1"]),
    "export float": (lambda m: m.export_keys_values("a", "cpu", 2.0), TypeError, ["batch_size", "2.0"]),
    "learning rate": (lambda m: m.set_learning_rate(-0.5), ValueError, ["learning_rate", "-0.5"]),
    "learning rate NaN": (lambda m: m.set_learning_rate(float("nan")), ValueError, ["learning_rate", "nan"]),
    "learning rate str": (lambda m: m.set_learning_rate("1"), TypeError, ["learning_rate", "'1'"]),
    "score": (lambda m: m.set_score({"a": 1}), ValueError, ["set_score", "CUSTOMIZED"]),
    "unknown argument": (lambda m: m(IDS, OFFSETS, weights=ONES), TypeError, ["weights"]),
    "half": (lambda m: m.half(), DynamicEmbError, ["float32", "embedding_dtype"]),
    "double": (lambda m: torch.nn.Sequential(m).double(), DynamicEmbError, ["float32", "embedding_dtype"]),
    "to meta": (lambda m: m.to("meta"), DynamicEmbError, ["cpu", "device="]),
    "share_memory": (lambda m: m.share_memory(), DynamicEmbError, ["share_memory", "processes"]),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_c04_a_malformed_call_is_refused_and_changes_nothing(name: str) -> None:
    call, expected, parts = BAD_CALLS[name]
    module = make_module()
    module(IDS, OFFSETS)
    before = snapshot(module)
    with pytest.raises(expected) as held:
        call(module)
    says(held.value, parts)
    assert_unchanged(module, before)
    module(IDS, OFFSETS).sum().backward()


def build(tables: object = None, **arguments: object) -> BatchedDynamicEmbeddingTablesV2:
    tables = [options(), options()] if tables is None else tables
    return BatchedDynamicEmbeddingTablesV2(tables, **arguments)


BAD_MODULES = {
    "no tables": (lambda: build([]), ValueError, ["table_options", "empty"]),
    "one option": (lambda: build(options()), TypeError, ["table_options", "list"]),
    "not options": (lambda: build([{"dim": 4}]), TypeError, ["table_options", "dict"]),
    "no dim": (lambda: build([DynamicEmbTableOptions(max_capacity=64)]), ValueError, ["dim", "table_0", "not set"]),
    "no capacity": (lambda: build([DynamicEmbTableOptions(dim=4)]), ValueError, ["max_capacity", "table_0"]),
    "dim 0": (lambda: build([options(0)]), ValueError, ["dim", "1..2048", "got 0"]),
    "dim 2049": (lambda: build([options(2049)]), ValueError, ["dim", "1..2048", "2049"]),
    "dim 4.0": (lambda: build([options(4.0)]), TypeError, ["dim", "4.0"]),
    "capacity 0": (lambda: build([options(capacity=0)]), ValueError, ["max_capacity", "got 0"]),
    "capacity -16": (lambda: build([options(capacity=-16)]), ValueError, ["max_capacity", "-16"]),
    "capacity 2^31": (lambda: build([options(capacity=2**31)]), ValueError, ["max_capacity", str(2**31)]),
    "bucket 24": (lambda: build([options(bucket_capacity=24)]), ValueError, ["bucket_capacity", "24", "16"]),
    "bucket 0": (lambda: build([options(bucket_capacity=0)]), ValueError, ["bucket_capacity", "0"]),
    "score None": (lambda: build([options(score_strategy=None)]), ValueError, ["score_strategy", "None"]),
    "unknown option": (lambda: options(capcity=3), TypeError, ["capcity"]),
    "changed later": (lambda: build([changed("dim", -1)]), ValueError, ["dim", "-1"]),
    "names int": (lambda: build(table_names=[1, 2]), TypeError, ["table_names", "strings"]),
    "names str": (lambda: build(table_names="ab"), TypeError, ["table_names", "'ab'"]),
    "names short": (lambda: build(table_names=["a"]), ValueError, ["table_names", "2 distinct", "['a']"]),
    "names equal": (lambda: build(table_names=["a", "a"]), ValueError, ["table_names", "distinct"]),
    "map short": (lambda: build(feature_table_map=[0]), ValueError, ["feature_table_map", "0..1", "[0]"]),
    "map gap": (lambda: build(feature_table_map=[0, 2]), ValueError, ["feature_table_map", "[0, 2]"]),
    "map unordered": (lambda: build(feature_table_map=[1, 0]), ValueError, ["feature_table_map", "in order"]),
    "map returns": (lambda: build(feature_table_map=[0, 1, 0]), ValueError, ["feature_table_map", "in order"]),
    "map negative": (lambda: build(feature_table_map=[-1, 0, 1]), ValueError, ["feature_table_map", "-1"]),
    "map empty": (lambda: build(feature_table_map=[]), ValueError, ["feature_table_map", "[]"]),
    "map bool": (lambda: build(feature_table_map=[False, True]), TypeError, ["feature_table_map", "ints"]),
    "pooling": (lambda: build(pooling_mode="sum"), ValueError, ["pooling_mode", "'sum'", "DynamicEmbPoolingMode.SUM"]),
    "NONE with two dims": (lambda: build([options(4), options(8)], pooling_mode=NONE), ValueError, ["dim", "[4, 8]"]),
    "output dtype": (lambda: build(output_dtype=torch.float64), ValueError, ["output_dtype", "float64"]),
    "table dtype": (lambda: build([options(embedding_dtype=torch.int8)]), ValueError, ["embedding_dtype", "int8"]),
    "dtypes differ": (
        lambda: build([options(), options(embedding_dtype=torch.float16)]),
        ValueError,
        ["embedding_dtype", "float16"],
    ),
    "steps differ": (lambda: build([options(), options(protect_steps=1)]), ValueError, ["protect_steps", "several"]),
    "optimizer": (lambda: build(optimizer="lamb"), ValueError, ["optimizer", "lamb", "adam"]),
    "learning rate": (lambda: build(learning_rate=float("inf")), ValueError, ["learning_rate", "inf"]),
    "max_gradient": (lambda: build(gradient_clipping=True, max_gradient=0.0), ValueError, ["max_gradient", "0"]),
    "seed": (lambda: build(seed=1.5), TypeError, ["seed", "1.5"]),
    "meta device": (lambda: build(device="meta"), NotImplementedError, ["device", "meta", "cpu"]),
    "eval initializer": (
        lambda: options(eval_initializer_args=options().initializer_args),
        ValueError,
        ["eval_initializer_args", "UNIFORM"],
    ),
}


def changed(field: str, value: object) -> DynamicEmbTableOptions:
    option = options()
    setattr(option, field, value)
    return option


@pytest.mark.parametrize("name", BAD_MODULES)
def test_c04_a_module_that_cannot_work_is_refused(name: str) -> None:
    construct, expected, parts = BAD_MODULES[name]
    with pytest.raises(expected) as held:
        construct()
    says(held.value, parts)


IDLE_ARGUMENTS = {
    "max_norm": {"max_norm": 1.0},
    "momentum": {"momentum": 0.5},
    "eta": {"eta": 0.5},
    "eps": {"eps": 0.5},
    "weight_decay": {"weight_decay": 0.5},
    "beta1": {"beta1": 0.5},
    "initial_accumulator_value": {"initial_accumulator_value": 0.5},
    "max_gradient": {"max_gradient": 2.0},
    "enforce_hbm": {"enforce_hbm": True},
    "bounds_check_mode": {"bounds_check_mode": 1},
}
IDLE_OPTIONS = {"local_hbm_for_values": 1024, "global_hbm_for_values": 1024, "device_id": 1, "max_load_factor": 0.75}


@pytest.mark.parametrize("name", IDLE_ARGUMENTS)
def test_c27_arguments_without_effect_warn(name: str) -> None:
    with pytest.warns(UserWarning, match=name):
        make_module(**IDLE_ARGUMENTS[name])


@pytest.mark.parametrize("name", IDLE_OPTIONS)
def test_c27_options_without_effect_warn_where_the_module_is_made(name: str) -> None:
    with pytest.warns(UserWarning, match=f"table 'table_1': {name}=.*has no effect") as recorded:
        build([options(), options(**{name: IDLE_OPTIONS[name]})])
    assert [warning.filename for warning in recorded] == [__file__]


def test_c27_a_device_id_that_is_not_the_device_of_the_module_is_refused() -> None:
    tables = [options(), options(device_id=1)]
    for device in ("cpu", "cuda:1"):
        check_device_ids(tables, ["a", "b"], torch.device(device))
    with pytest.raises(ValueError, match="table 'b': device_id=1, but the module is on cuda:0; leave device_id None"):
        check_device_ids(tables, ["a", "b"], torch.device("cuda:0"))


def test_c27_bytes_of_all_ranks_that_nobody_divided_warn_on_a_gpu() -> None:
    gpu = torch.device("cuda:0")
    assert "the planner divides it" in _idle_options(options(global_hbm_for_values=9), gpu)["global_hbm_for_values"]
    assert not _idle_options(options(global_hbm_for_values=9, local_hbm_for_values=9), gpu)


@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
def test_c27_defaults_and_every_effective_option_are_silent(pooling: DynamicEmbPoolingMode, capfd) -> None:
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        module = make_module(
            [options(protect_steps=2, eval_initializer_args=constant(1.0), index_type=torch.uint64)],
            pooling_mode=pooling,
            optimizer="adam",
            weight_decay=0.1,
            device="cpu",
        )
        module(*bag_per_id([1, 2])).sum().backward()
        build().eval()(*batch([1], []))
    assert messages(recorded) == []
    assert capfd.readouterr() == ("", "")


def test_c28_a_table_made_for_evaluation_refuses_training_and_has_no_state() -> None:
    module = make_module([options(training=False)], optimizer="adam")
    before = snapshot(module)
    with pytest.raises(DynamicEmbError, match=r"'a'.*training=False.*eval\(\)"):
        module(IDS, OFFSETS)
    assert_unchanged(module, before)
    assert module.insert("a", IDS, torch.ones(3, 4)).all()
    assert module.eval()(IDS, OFFSETS).all() and module.contains("a", IDS).all()
    assert module.tables.store.row_bytes.tolist() == [16]


def test_c28_a_budget_of_gpu_memory_is_that_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamicemb.embedding.construct import _check_gpu_memory

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 20_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    # A table with a budget for all of its rows, beside one without any.
    tables = [options(local_hbm_for_values=4000), options()]
    _check_gpu_memory(tables, [4000, 5000], 1000, gpu)
    with pytest.raises(UnsupportedOptionError, match="local_hbm_for_values=4000 is less than the 4001 bytes"):
        _check_gpu_memory(tables, [4001, 0], 0, gpu)
    with pytest.raises(torch.OutOfMemoryError, match="need 9000 bytes of rows and 1001 of index, cuda:0 has 10000"):
        _check_gpu_memory(tables, [4000, 5000], 1001, gpu)
