"""Dump and load of one process: everything comes back, into other tables too."""

import ast
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dump_load import find_sharded_modules, get_dynamic_emb_module
from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.index import NOW, SEEN
from dynamicemb.table.layout import fmix64, locate
from tests.project import test_layers
from tests.support.checkpoints import Records, load_quietly, records, shift_between, train, trained, without_scores
from tests.support.lookups import EXTREME, OPTIMIZERS, bag_per_id, make_module, options, poison
from tests.support.tables import device_of, use_backend

TIMESTAMP, STEP, CUSTOMIZED, LFU, _ = DynamicEmbScoreStrategy
STRATEGIES = {
    "TIMESTAMP": TIMESTAMP,
    "STEP": STEP,
    "CUSTOMIZED": CUSTOMIZED,
    "LFU": LFU,
    "TIMESTAMP+LFU": (TIMESTAMP, LFU),
    "LFU+TIMESTAMP": (LFU, TIMESTAMP),
}


def decayed(scores: Any, cur_timestamp: float) -> float:
    return math.log(max(scores[1], 1)) + (cur_timestamp - scores[0]) * 1e-9 * math.log(0.9)


def module_of(strategy: str, optimizer: str = "adam", **more: Any) -> BatchedDynamicEmbeddingTablesV2:
    tables = [options(dim=dim, capacity=256, score_strategy=STRATEGIES[strategy], **more) for dim in (5, 8)]
    module = make_module(tables, optimizer=optimizer)
    if strategy == "CUSTOMIZED":
        module.set_score({"a": 5, "b": 7})
    return module


def time_column(strategy: str) -> int | None:
    parts = strategy.split("+")
    return parts.index("TIMESTAMP") if "TIMESTAMP" in parts else None


def assert_equal_but_for_time(before: Records, after: Records, strategy: str) -> None:
    assert without_scores(before) == without_scores(after)
    for column in range(len(strategy.split("+"))):
        shift = shift_between(before, after, column)
        # A load comes after the dump, and ages stay.
        assert shift > 0 if column == time_column(strategy) else shift == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c23_everything_comes_back(tmp_path: Path, strategy: str, dtype: torch.dtype, optimizer: str) -> None:
    module = module_of(strategy, optimizer, embedding_dtype=dtype)
    train(module, 3)
    before = {name: records(module, name) for name in "ab"}
    assert set(EXTREME[:1] + EXTREME[-1:] + [0, -1]) <= before["a"].keys()
    module.dump(tmp_path / "d", optim=True)
    assert {name: records(module, name) for name in "ab"} == before
    copy = module_of(strategy, optimizer, embedding_dtype=dtype)
    train(copy, 1, seed=9)
    report = copy.load(tmp_path / "d", optim=True)
    for name in "ab":
        assert_equal_but_for_time(before[name], records(copy, name), strategy)
        assert (report[name].num_rows, report[name].num_lost) == (len(before[name]), 0)
        assert copy.stats()[name]["size"] == len(before[name])
    copy.tables.check_invariants()
    assert strategy == "CUSTOMIZED" or copy.optimizer == module.optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "CUSTOMIZED"])
def test_c16_training_goes_on_bit_for_bit(tmp_path: Path, strategy: str, dtype: torch.dtype) -> None:
    module = module_of(strategy, embedding_dtype=dtype)
    train(module, 3)
    module.dump(tmp_path / "d", optim=True)
    # Another seed and learning rate: the dump's hold.
    tables = [options(dim=d, capacity=256, score_strategy=STRATEGIES[strategy], embedding_dtype=dtype) for d in (5, 8)]
    copy = make_module(tables, optimizer="adam", seed=1000, learning_rate=0.25)
    copy.load(tmp_path / "d", optim=True)
    assert train(copy, 20, num_ids=60, seed=4) == train(module, 20, num_ids=60, seed=4)
    for name in "ab":
        before, after = records(module, name), records(copy, name)
        assert without_scores(before) == without_scores(after)
        column = time_column(strategy)
        if column is None:
            assert before == after
        elif column == 0:
            order = [sorted(found, key=lambda i: (found[i][2], i)) for found in (before, after)]
            assert order[0] == order[1]
    # A second dump has the seed of the first.
    copy.dump(tmp_path / "e", optim=True)
    assert '"seed": 7' in (tmp_path / "e" / "manifest.json").read_text()


def test_c21_a_dump_and_a_load_change_nothing_else(tmp_path: Path) -> None:
    module = trained(options={"score_strategy": LFU})
    stats = module.stats()
    module.dump(tmp_path / "d", optim=True)
    assert module.stats() == stats
    module.load(tmp_path / "d", optim=True, table_names=["b"])
    after = module.stats()
    assert after["a"] == stats["a"]
    assert {n: after["b"][n] for n in ("hits", "misses", "size")} == {
        n: stats["b"][n] for n in ("hits", "misses", "size")
    }


def test_c23_a_load_replaces_what_was_there_and_merge_keeps_it(tmp_path: Path) -> None:
    module = make_module([options(score_strategy=LFU)])
    module(*bag_per_id([1, 2, 2, 3])).sum().backward()
    module.dump(tmp_path / "d")
    before = records(module, "a")
    for merge in (False, True):
        other = make_module([options(score_strategy=LFU)], learning_rate=0.125)
        other(*bag_per_id([3, 3, 3, 4])).sum().backward()
        kept = records(other, "a")[4]
        report = other.load(tmp_path / "d", merge=merge)
        expected = {**before, **({4: kept} if merge else {})}
        assert records(other, "a") == expected
        assert report["a"].num_repeated == int(merge)
        other.tables.check_invariants()


def test_c24_only_named_tables_change(tmp_path: Path) -> None:
    module = trained()
    DynamicEmbDump(tmp_path / "d", module, {"model": ["b"]}, optim=True)
    assert {path.name[:2] for path in (tmp_path / "d" / "model").iterdir()} == {"b_"}
    other = trained(seed=5)
    a = records(other, "a")
    with pytest.raises(DynamicEmbError, match=r"no table 'model/a', it holds \['model/b'\].*table_names"):
        DynamicEmbLoad(tmp_path / "d", other)
    DynamicEmbLoad(tmp_path / "d", other, {"model": ["b"]}, optim=True)
    assert records(other, "a") == a
    assert without_scores(records(other, "b")) == without_scores(records(module, "b"))
    one = trained(num_tables=1)
    module.dump(tmp_path / "both")
    with pytest.warns(UserWarning, match=r"also holds \['b'\]"):
        one.load(tmp_path / "both")


def strongest(found: Records, num_buckets: int, capacity: int, rank: Any) -> set[int]:
    """Return which ids a table of so many buckets keeps: the best of each bucket."""
    ids = np.array(list(found), dtype=np.int64)
    owners = locate(ids, num_buckets, 1)[0].tolist()
    hashes = fmix64(ids).tolist()
    ranked = sorted(zip(owners, [rank(found[i][2]) for i in ids.tolist()], hashes, ids.tolist()), reverse=True)
    kept: set[int] = set()
    for _, group in itertools.groupby(ranked, key=lambda entry: entry[0]):
        kept |= {i for *_, i in itertools.islice(group, capacity)}
    return kept


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("strategy", ["TIMESTAMP", "LFU", "TIMESTAMP+LFU"])
def test_c23_into_a_smaller_table_go_the_highest_scores(tmp_path: Path, strategy: str, shuffle: bool) -> None:
    more = {"score_strategy": STRATEGIES[strategy]}
    big = make_module([options(capacity=512, **more)], optimizer="adam")
    generator = torch.Generator().manual_seed(3)
    for _ in range(12):
        big(*bag_per_id((torch.randn(60, generator=generator) * 90).long().tolist())).sum().backward()
    before = records(big, "a")
    big.dump(tmp_path / "d", optim=True)
    if shuffle:
        # Without a manifest any order is good.
        (tmp_path / "d" / "manifest.json").unlink()
        order = np.random.default_rng(1).permutation(len(before))
        for path in (tmp_path / "d").glob("a_emb_*"):
            rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(len(before), -1)
            path.write_bytes(rows[order].tobytes())
    small = make_module([options(capacity=64, **more)], optimizer="adam")
    with pytest.warns(UserWarning, match=r"\d+ of \d+ ids of the dump found no place.*max_capacity"):
        report = load_quietly(small, tmp_path / "d", optim=True)["a"]
    after = records(small, "a")
    kept = strongest(before, 4, 16, lambda score: score[-1])
    assert after.keys() == kept and len(before) > 150
    assert report.num_lost == len(before) - len(kept) and report.num_rows == len(before)
    assert_equal_but_for_time({i: before[i] for i in kept}, after, strategy)
    small.tables.check_invariants()
    assert small.stats()["a"]["size"] == len(kept)


def test_c23_a_score_function_ranks_in_a_smaller_table(tmp_path: Path) -> None:
    more = {"score_strategy": (TIMESTAMP, LFU), "score_function": decayed}
    big = make_module([options(capacity=256, **more)])
    for ids in (range(0, 90), range(60, 120), range(0, 20)):
        big(*bag_per_id(list(ids) * 2)).sum().backward()
    big.dump(tmp_path / "d")
    # Files in another order than scores, in batches that displace what came before.
    small = make_module([options(capacity=32, **more)])
    with pytest.warns(UserWarning, match="found no place"):
        small.load(tmp_path / "d")
    before, now = records(big, "a"), 2 * 10**18
    kept = strongest(before, 2, 16, lambda score: decayed(score, now))
    assert records(small, "a").keys() == kept


def test_c23_batches_that_come_later_displace_weaker_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dynamicemb.checkpoint.reading import rows as read

    big = make_module([options(capacity=512, score_strategy=LFU)])
    for ids in (range(200), range(150, 200), range(170, 200)):
        big(*bag_per_id(ids)).sum().backward()
    before = records(big, "a")
    big.dump(tmp_path / "d")
    monkeypatch.setattr(read, "BATCH_SIZE_PER_DUMP", 7)
    small = make_module([options(capacity=32, score_strategy=LFU)])
    with pytest.warns(UserWarning, match="168 of 200 ids"):
        report = small.load(tmp_path / "d")
    assert records(small, "a") == {i: before[i] for i in strongest(before, 2, 16, lambda score: score[0])}
    assert report["a"].num_lost == 168
    small.tables.check_invariants()


def test_c19_a_table_that_may_grow_does_so_in_a_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dynamicemb.checkpoint.reading import rows as read

    monkeypatch.setattr(read, "BATCH_SIZE_PER_DUMP", 30)
    module = make_module([options(capacity=512)], optimizer="adam")
    module(*bag_per_id(range(-100, 100))).sum().backward()
    module.dump(tmp_path / "d", optim=True)
    growing = make_module([options(capacity=512, init_capacity=32, max_load_factor=0.75)], optimizer="adam")
    report = growing.load(tmp_path / "d", optim=True)
    assert report["a"].num_lost == 0
    assert growing.tables.capacities == [512]
    assert without_scores(records(growing, "a")) == without_scores(records(module, "a"))
    growing.tables.check_invariants()
    half = make_module([options(capacity=512, init_capacity=32, max_load_factor=0.75)], optimizer="adam")
    half(*bag_per_id(range(20))).sum().backward()
    half.load(tmp_path / "d", merge=True)
    assert records(half, "a").keys() == set(range(-100, 100)) and half.tables.capacities == [512]
    half.tables.check_invariants()


def test_c19_a_table_that_was_loaded_grows_in_time(tmp_path: Path) -> None:
    module = make_module([options(capacity=256)], optimizer="adam")
    module(*bag_per_id(range(20))).sum().backward()
    module.dump(tmp_path / "d", optim=True)
    growing = make_module([options(capacity=256, init_capacity=32, max_load_factor=0.75)], optimizer="adam")
    growing.load(tmp_path / "d", optim=True)
    assert growing.tables.capacities == [32]
    for first in range(20, 180, 10):
        growing(*bag_per_id(range(first, first + 10))).sum().backward()
        assert growing.stats()["a"]["load"] <= 0.75
    assert growing.tables.capacities == [256]
    growing.load(tmp_path / "d", optim=True)
    assert growing.stats(wait=False)["a"]["size"] == 20


def test_c25_without_optim_state_starts_anew(tmp_path: Path) -> None:
    module = make_module([options()], optimizer="exact_adagrad", initial_accumulator_value=0.5)
    module(*bag_per_id([1, 2])).sum().backward()
    for optim in (False, True):
        module.dump(tmp_path / "d", optim=optim, allow_overwrite=optim)
        copy = make_module([options()], optimizer="exact_adagrad", initial_accumulator_value=0.5, learning_rate=0.25)
        copy.load(tmp_path / "d", optim=False)
        assert {state for _, state, _ in records(copy, "a").values()} == {np.full(4, 0.5, np.float32).tobytes()}
        assert copy.optimizer.learning_rate == 0.25
    (tmp_path / "d" / "x").mkdir()
    copy.load(tmp_path / "d", optim=True)
    assert records(copy, "a").keys() == {1, 2} and copy.optimizer.learning_rate == 1.0


def test_c25_a_dump_without_state_warns_where_state_is_wanted(tmp_path: Path) -> None:
    module = trained(num_tables=1)
    module.dump(tmp_path / "d")
    with pytest.warns(UserWarning, match="no optimizer state"):
        module.load(tmp_path / "d", optim=True)
    assert {state for _, state, _ in records(module, "a").values()} == {bytes(40)}


@pytest.mark.parametrize("chained", [False, True])
def test_c09_rows_of_a_table_that_only_evaluates_begin_with_the_initial_state(tmp_path: Path, chained: bool) -> None:
    serving = make_module([options(training=False)], optimizer="adam")
    serving.insert("a", torch.arange(5), torch.ones(5, 4))
    # Its file of optimizer state is there, and has no values.
    serving.dump(tmp_path / "0", optim=True)
    chain = [tmp_path / "0"]
    if chained:
        serving.insert("a", torch.arange(3), torch.zeros(3, 4))
        chain.append(tmp_path / "1")
        serving.dump(chain[1], optim=True, base=chain[0])
    module = make_module([options()], optimizer="adam")
    poison(module)
    with pytest.warns(UserWarning, match="no optimizer state; rows begin with the initial state of adam"):
        module.load(chain, optim=True)
    assert {state for _, state, _ in records(module, "a").values()} == {bytes(32)}
    module(*bag_per_id([1])).sum().backward()
    module.dump(tmp_path / "2", optim=True, base=chain)
    copy = make_module([options()], optimizer="adam")
    copy.load([*chain, tmp_path / "2"], optim=True)
    assert without_scores(records(copy, "a")) == without_scores(records(module, "a"))


@pytest.mark.parametrize(
    ("other", "arguments", "message"),
    [
        ({"dim": 6}, {}, r"dim 6, the dump 5.*dim=5"),
        ({"score_strategy": LFU}, {}, r"score_strategy LFU, the dump TIMESTAMP.*fresh_scores=True"),
        ({"score_strategy": STEP}, {}, r"score_strategy STEP, the dump TIMESTAMP"),
        ({"score_strategy": (LFU, TIMESTAMP)}, {}, r"LFU\+TIMESTAMP, the dump TIMESTAMP"),
        ({"optimizer": "sgd"}, {"optim": True}, "opt_type is 'adam'.*optim=False"),
    ],
)
def test_c22_a_dump_that_does_not_fit_is_refused_before_anything_changes(
    tmp_path: Path, other: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    trained(num_tables=1).dump(tmp_path / "d", optim=True)
    optimizer = other.pop("optimizer", "adam")
    module = make_module([options(**{"dim": 5, "capacity": 256, **other})], optimizer=optimizer)
    train(module, 1)
    before = records(module, "a")
    with pytest.raises(ValueError, match=message):
        module.load(tmp_path / "d", **arguments)
    assert records(module, "a") == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c23_fresh_scores_are_those_of_the_present(tmp_path: Path, strategy: str) -> None:
    trained(num_tables=1).dump(tmp_path / "d")
    module = make_module([options(dim=5, capacity=256, score_strategy=STRATEGIES[strategy])], optimizer="adam")
    if strategy == "CUSTOMIZED":
        module.set_score({"a": 41})
    module.load(tmp_path / "d", fresh_scores=True)
    (score,) = {score for _, _, score in records(module, "a").values()}
    column = time_column(strategy)
    expected = {"STEP": 0, "CUSTOMIZED": 41, "LFU": 1}
    for place, part in enumerate(strategy.split("+")):
        assert score[place] == expected[part] if place != column else score[place] > 10**18


def test_c10_columns_of_both_scores_may_be_in_another_order(tmp_path: Path) -> None:
    module = module_of("LFU+TIMESTAMP")
    train(module, 3)
    module.dump(tmp_path / "d")
    copy = module_of("TIMESTAMP+LFU")
    copy.load(tmp_path / "d")
    before = {i: (score[1], score[0]) for i, (_, _, score) in records(module, "a").items()}
    after = {i: score for i, (_, _, score) in records(copy, "a").items()}
    assert {i: score[1] for i, score in before.items()} == {i: score[1] for i, score in after.items()}
    assert len({after[i][0] - before[i][0] for i in after}) == 1


def test_c10_a_step_after_a_load_is_later_than_all_that_was_loaded(tmp_path: Path) -> None:
    module = trained(num_tables=1)
    module.dump(tmp_path / "d")
    copy = trained(num_tables=1, num_steps=0)
    copy.load(tmp_path / "d")
    loaded = max(score for _, _, score in records(copy, "a").values())
    copy(*bag_per_id([1])).sum().backward()
    assert records(copy, "a")[1][2] > loaded


def test_c10_a_clock_that_is_ahead_moves_those_of_all_tables(tmp_path: Path) -> None:
    model = Outer(trained(num_tables=1, seed=1), trained(num_tables=1, seed=2))
    DynamicEmbDump(tmp_path / "d", model)
    ahead, behind = copy = [trained(num_tables=1, num_steps=0) for _ in range(2)]
    ahead.tables.index.clock[[NOW, SEEN]] = 2**62
    for fresh_scores in (False, True):
        DynamicEmbLoad(tmp_path / "d", Outer(*copy), fresh_scores=fresh_scores)
        loaded = max(score for _, _, score in records(behind, "a").values())
        assert loaded[0] >= 2**62 - 10**12
        behind(*bag_per_id([1])).sum().backward()
        assert records(behind, "a")[1][2] > loaded


def test_c11_a_dump_in_evaluation_mode_is_the_same(tmp_path: Path) -> None:
    module = trained(num_tables=1)
    module.dump(tmp_path / "d")
    module.eval()
    module.dump(tmp_path / "e")
    for item in ("keys", "values"):
        name = f"a_emb_{item}.rank_0.world_size_1"
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "e" / name).read_bytes()


def test_c03_empty_tables_and_tables_that_grew_are_dumped(tmp_path: Path) -> None:
    module = make_module([options(capacity=256, init_capacity=16), options(capacity=256)], optimizer="adam")
    module.dump(tmp_path / "empty", optim=True)
    module(*bag_per_id([*range(100), *range(100)])).sum().backward()
    module.dump(tmp_path / "d", optim=True)
    copy = make_module([options(capacity=256), options(capacity=256)], optimizer="adam")
    copy.load(tmp_path / "d", optim=True)
    for name in "ab":
        assert without_scores(records(copy, name)) == without_scores(records(module, name))
    copy.load(tmp_path / "empty", optim=True)
    assert records(copy, "a") == {} == records(copy, "b")


class Outer(torch.nn.Module):
    def __init__(self, *modules: torch.nn.Module) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(2, 2)
        self.parts = torch.nn.ModuleList(modules)
        self.again = self.parts[0]


def test_c23_one_rank_owns_all_ids_of_continuous_routing(tmp_path: Path) -> None:
    module, other = (make_module([options(dist_type="continuous")], device="cpu") for _ in range(2))
    module(*bag_per_id([3, -7, 2**40])).sum().backward()
    module.dump(str(tmp_path / "dump"), optim=True)
    other.load(str(tmp_path / "dump"), optim=True)
    assert without_scores(records(other, "a")) == without_scores(records(module, "a"))


def test_c21_collections_have_folders_named_by_their_path(tmp_path: Path) -> None:
    first, second = trained(num_tables=1, seed=1), trained(num_tables=1, seed=2)
    model = Outer(first, second)
    assert [(path, name) for path, name, _ in find_sharded_modules(model)] == [
        ("model.parts.0", "0"),
        ("model.parts.1", "1"),
    ]
    assert get_dynamic_emb_module(model) == [first, second]
    DynamicEmbDump(tmp_path / "d", model, optim=True)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"model.parts.0", "model.parts.1", "manifest.json"}
    copy = Outer(trained(num_tables=1, seed=3), trained(num_tables=1, seed=4))
    report = DynamicEmbLoad(tmp_path / "d", copy, optim=True)
    assert report.keys() == {"model.parts.0", "model.parts.1"}
    for module, other in zip(model.parts, copy.parts):
        assert without_scores(records(module, "a")) == without_scores(records(other, "a"))
    # One folder of a dump loads into one module, checked by the manifest above it.
    alone = trained(num_tables=1, seed=5)
    alone.load(tmp_path / "d" / "model.parts.1", optim=True)
    assert without_scores(records(alone, "a")) == without_scores(records(second, "a"))


def test_c27_wrong_names_are_errors_and_nothing_to_dump_is_warned_about(tmp_path: Path) -> None:
    module = trained(num_tables=1)
    for names, kind, message in (
        ({"model.x": ["a"]}, ValueError, r"no collection 'model.x'.*\['model'\]"),
        ({"model": ["z"]}, ValueError, r"no dynamic tables \['z'\].*\['a'\]"),
        ({"model": "a"}, TypeError, "list of names"),
        (["a"], TypeError, "must map collection paths"),
    ):
        with pytest.raises(kind, match=message):
            DynamicEmbDump(tmp_path / "d", module, names)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path must be"):
        DynamicEmbDump(None, module)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no dynamic tables"):
        DynamicEmbDump(tmp_path / "d", torch.nn.Linear(2, 2))
    assert not (tmp_path / "d").exists()
    slash = make_module([options()], table_names=["a/b"])
    with pytest.raises(ValueError, match="'a/b' cannot begin a file name"):
        slash.dump(tmp_path / "d")
    with pytest.raises(ValueError, match="collection 'model.x/y' cannot name a folder"):
        DynamicEmbDump(tmp_path / "d", torch.nn.ModuleDict({"x/y": module}))
    with pytest.warns(UserWarning, match="counter=True has no effect"):
        module.dump(tmp_path / "d", counter=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load(tmp_path / "d")


def test_c27_a_selection_of_no_tables_is_warned_about(tmp_path: Path) -> None:
    module = trained(num_tables=1)
    module.dump(tmp_path / "d")
    before = records(module, "a")
    calls = (
        lambda: module.dump(tmp_path / "e", table_names=[]),
        lambda: module.load(tmp_path / "d", table_names=[]),
        lambda: DynamicEmbDump(tmp_path / "e", module, {"model": []}),
        lambda: DynamicEmbLoad(tmp_path / "d", module, {"model": []}),
    )
    for call in calls:
        with pytest.warns(UserWarning, match=r"\[\].* names no table: nothing is dumped or loaded"):
            assert not call()
    assert not (tmp_path / "e").exists() and records(module, "a") == before


def test_names_of_files_are_those_of_the_reference() -> None:
    from dynamicemb import batched_dynamicemb_tables as names

    assert names.encode_meta_json_file_path("/d/model", "t") == "/d/model/t_opt_args.json"
    path = names.encode_checkpoint_file_path("/d/model", "t", 1, 4, "opt_values")
    assert path == "/d/model/t_emb_opt_values.rank_1.world_size_4"
    path = names.encode_counter_checkpoint_file_path("/d", "t", 0, 1, "frequencies")
    assert path == "/d/t_counter_frequencies.rank_0.world_size_1"
    with pytest.raises(ValueError, match="item must be one of"):
        names.encode_checkpoint_file_path("/d", "t", 0, 1, "frequencies")


LAYER = test_layers.ROOT / "dynamicemb" / "checkpoint"
# Dumps go through the first; the others read files of torch.save and folders of torch.distributed.checkpoint.
TOUCH_THE_SYSTEM = {LAYER / "disk" / "io.py", LAYER / "static" / "sources.py", LAYER / "static" / "folder.py"}


@pytest.mark.parametrize("path", sorted(LAYER.rglob("*.py")), ids=lambda path: str(path.relative_to(LAYER)))
def test_one_file_for_each_format_touches_the_operating_system(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = test_layers.imported_modules(tree, test_layers.module_of(path)[0], False)
    modules = {target.split(".")[0] for target, _ in imported}
    calls = {test_layers.dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    touches = bool(modules & (test_layers.FILE_MODULES | {"glob", "ctypes"}))
    touches |= bool(calls & (test_layers.FILE_CALLS | {"np.fromfile"}))
    assert touches == (path in TOUCH_THE_SYSTEM)


def module_on(backend: str, **more: Any) -> BatchedDynamicEmbeddingTablesV2:
    tables = [options(capacity=64, score_strategy=(LFU, TIMESTAMP), **more)]
    module = make_module(tables, optimizer="adam", device=device_of(backend))
    use_backend(module.tables, backend)
    return module


def test_c23_every_backend_loads_what_every_other_wrote(backend: str, tmp_path: Path) -> None:
    written = {}
    for name in dict.fromkeys((backend, "cpu")):
        module = module_on(name)
        device = device_of(name)
        for ids in ([1, 2, -3, 2**63 - 1], [2, 2, 9, -(2**63)]):
            out = module(torch.tensor(ids, device=device), torch.arange(5, device=device))
            out.sum().backward()
        module.dump(tmp_path / f"from {name}", optim=True)
        written[name] = records(module, "a")
        assert len(written[name]) == 6
    for writer, reader in ((backend, "cpu"), ("cpu", backend)):
        copy = module_on(reader, init_capacity=16, max_load_factor=0.25)
        copy.load(tmp_path / f"from {writer}", optim=True)
        assert_equal_but_for_time(written[writer], records(copy, "a"), "LFU+TIMESTAMP")
        assert copy.tables.capacities == [32]
        copy.tables.check_invariants()
    rows, _ = copy.incremental_dump({"a": 0})
    assert set(rows["a"][0].tolist()) == set(written["cpu"])
