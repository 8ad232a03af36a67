"""Rows of a module of tables in ``state_dict()``: what is there, and what a load makes of it."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, state_dict_without_rows
from dynamicemb.errors import DynamicEmbError
from tests.checkpoint.test_checkpoint_expiry import make as make_forgetful
from tests.checkpoint.test_checkpoint_expiry import step as step_forgetful
from tests.checkpoint.test_checkpoint_expiry import wait
from tests.embedding.test_admission_own import DictCounter
from tests.support.admitting import admitting, by_chance, holds, lengths_of, module_on
from tests.support.checkpoints import records, shift_between, train, trained, without_scores
from tests.support.lookups import EXTREME, assert_unchanged, batch, make_module, options, snapshot

TIMESTAMP, STEP, CUSTOMIZED, LFU, NO_EVICTION = (
    DynamicEmbScoreStrategy[name] for name in ("TIMESTAMP", "STEP", "CUSTOMIZED", "LFU", "NO_EVICTION")
)
STRATEGIES = [TIMESTAMP, STEP, CUSTOMIZED, LFU, NO_EVICTION, (TIMESTAMP, LFU), (LFU, TIMESTAMP)]
A = "dynamic_tables.a."


def step(module: Any, *bags: list[int]) -> torch.Tensor:
    """Run a whole training step on ids of each table; returns what was read."""
    ids, offsets = batch(*bags)
    out = module(ids.to(module.tables.device), offsets.to(module.tables.device))
    out.pow(2).sum().backward()
    return out.detach().cpu()


def table(strategy: Any = TIMESTAMP, dim: int = 4, **more: Any) -> Any:
    if strategy is NO_EVICTION:
        more |= {"init_capacity": 64, "capacity": None}
    return options(dim, score_strategy=strategy, **more)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Return what torch.load makes of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def described(state: dict[str, Any], name: str = "a") -> Any:
    return json.loads(state[f"dynamic_tables.{name}.dynamic_table"])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_c29_what_is_saved_comes_back(backend: str, strategy: Any) -> None:
    def make(**more: Any) -> Any:
        tables = [table(strategy), table(strategy, dim=3)]
        module = module_on(backend, *tables, optimizer="adam", **more)
        if strategy is CUSTOMIZED:
            module.set_score({"a": 3, "b": 2**62})
        return module

    module, copy = make(), make(seed=123, learning_rate=0.25)
    step(module, EXTREME[:6], [5, 5, -5])
    step(module, EXTREME[4:], [5, 6])
    # What is there before goes.
    step(copy, [1, 2, 77], [5])
    state = through_a_file(module.state_dict())
    assert [tuple(state[A + name].shape) for name in ("dynamic_ids", "dynamic_values")] == [(12,), (12, 4)]
    assert copy.load_state_dict(state).missing_keys == []
    copy.tables.check_invariants()
    assert copy.load_report["a"].num_rows == 12 and copy.load_report["b"].num_lost == 0
    for name in "ab":
        was, now = records(module, name), records(copy, name)
        assert without_scores(now) == without_scores(was)
        for column in range(len(strategy) if isinstance(strategy, tuple) else 1):
            of_column = strategy[column] if isinstance(strategy, tuple) else strategy
            assert shift_between(was, now, column) == 0 or of_column in (TIMESTAMP, NO_EVICTION)
    # New ids begin alike, the optimizer counts on, steps too.
    for bags in ([[1, -7, 88], [9]], [[1, 88], [9, 9]]):
        assert torch.equal(step(copy, *bags), step(module, *bags))
    assert without_scores(records(copy, "a")) == without_scores(records(module, "a"))
    assert copy.optimizer.learning_rate == 1.0
    if strategy in (STEP, CUSTOMIZED):
        assert copy.get_score() == module.get_score()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_have_the_dtype_of_the_table(backend: str, dtype: torch.dtype) -> None:
    module = module_on(backend, options(embedding_dtype=dtype), optimizer="exact_row_wise_adagrad")
    step(module, EXTREME)
    state = module.state_dict()
    assert state[A + "dynamic_values"].dtype == dtype and state[A + "dynamic_state"].dtype == torch.float32
    assert all(
        value.device.type == "cpu" for name, value in state.items() if ".dynamic_" in name and name[-5:] != "table"
    )
    other = module_on(backend, options(embedding_dtype=dtype), optimizer="exact_row_wise_adagrad")
    other.load_state_dict(state)
    assert without_scores(records(other, "a")) == without_scores(records(module, "a"))


def test_a_state_dict_is_a_copy() -> None:
    module = trained()
    before = without_scores(records(module, "a"))
    state = module.state_dict()
    train(module, 3, seed=9)
    other = trained(num_steps=0)
    other.load_state_dict(state)
    assert without_scores(records(other, "a")) == before != without_scores(records(module, "a"))


def test_no_rows_are_a_state_too() -> None:
    empty, full = trained(num_steps=0), trained()
    full.load_state_dict(through_a_file(empty.state_dict()))
    assert full.stats()["a"]["size"] == full.stats()["b"]["size"] == 0
    assert train(full, 2) == train(empty, 2)


def test_entries_are_missing_where_a_table_has_nothing_for_them() -> None:
    names = {name.removeprefix(A) for name in make_module([options()]).state_dict() if name.startswith(A)}
    assert names == {"dynamic_ids", "dynamic_values", "dynamic_scores", "dynamic_table"}
    module = make_module([admitting(3)], optimizer="adam")
    names = {name.removeprefix(A) for name in module.state_dict() if name.startswith(A)}
    assert {"dynamic_state", "dynamic_counter_ids", "dynamic_counter_counts"} < names


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_without_rows_is_not_loaded_in_silence(strict: bool) -> None:
    module = trained()
    before = snapshot(module)
    # As earlier versions of the package wrote it.
    with state_dict_without_rows():
        state = module.state_dict()
    assert list(state) == ["_empty_tensor"]
    with pytest.warns(UserWarning, match=r"holds no rows of dynamic tables \['dynamic_tables.a', .*stay as they"):
        if strict:
            with pytest.raises(RuntimeError, match=r"Missing key.*dynamic_tables\.a\.dynamic_ids.*b\.dynamic_table"):
                module.load_state_dict(state)
        else:
            assert A + "dynamic_ids" in module.load_state_dict(state, strict=False).missing_keys
    assert_unchanged(module, before)


def test_rows_can_be_left_out() -> None:
    module, other = trained(), trained(seed=4)
    state, before = module.state_dict(), snapshot(other)
    with warnings.catch_warnings(), state_dict_without_rows():
        warnings.simplefilter("error")
        other.load_state_dict(other.state_dict())
        other.load_state_dict(state)
    assert_unchanged(other, before)
    assert A + "dynamic_ids" in other.state_dict()


BAD = {
    "dim": ({"options": {"dim": 7}}, ValueError, "has dim 7, the dump 5; make the table with dim=5"),
    "optimizer": ({"optimizer": "sgd"}, ValueError, r"table a: .*adam"),
    "state of another one": ({"optimizer": "exact_adagrad"}, ValueError, r"table a: .*adam"),
    "strategy": ({"options": {"score_strategy": LFU}}, ValueError, "has score_strategy LFU, the dump TIMESTAMP"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_dict_that_does_not_fit_is_refused(case: str) -> None:
    arguments, kind, message = BAD[case]
    state = trained().state_dict()
    module = trained(**arguments)
    before = snapshot(module)
    with pytest.raises(kind, match=message):
        module.load_state_dict(state)
    assert_unchanged(module, before)


def damage(state: dict[str, Any], how: str) -> None:
    text, ids = json.loads(state[A + "dynamic_table"]), state[A + "dynamic_ids"]
    if how == "version":
        state[A + "dynamic_table"] = json.dumps(text | {"format_version": 3, "package_version": "9.9"})
    elif how == "text":
        state[A + "dynamic_table"] = "{"
    elif how == "field":
        text["entry"]["dim"] = "5"
        state[A + "dynamic_table"] = json.dumps(text)
    elif how == "no table":
        del state[A + "dynamic_table"]
    elif how in ("dynamic_values", "dynamic_state", "dynamic_scores"):
        del state[A + how]
    elif how == "fewer":
        state[A + "dynamic_ids"] = ids[:-1]
    elif how == "all fewer":
        for name in ("ids", "values", "state", "scores"):
            state[A + f"dynamic_{name}"] = state[A + f"dynamic_{name}"][:-1]
    elif how == "width":
        state[A + "dynamic_values"] = state[A + "dynamic_values"][:, :-1]
    elif how in CASTS:
        name, cast = CASTS[how]
        state[A + name] = cast(state[A + name])
    else:
        state[A + "dynamic_ids"] = ids.tolist()


# What a cast of all entries, or of those of a checkpoint of another tool, may bring.
CASTS: dict[str, tuple[str, Any]] = {
    "float ids": ("dynamic_ids", torch.Tensor.double),
    "short scores": ("dynamic_scores", torch.Tensor.int),
    "float scores": ("dynamic_scores", torch.Tensor.double),
    "integer values": ("dynamic_values", torch.Tensor.int),
    "integer state": ("dynamic_state", torch.Tensor.int),
    "sparse values": ("dynamic_values", torch.Tensor.to_sparse),
    "no data": ("dynamic_values", lambda values: values.to("meta")),
}

DAMAGES = {
    "float ids": "'dynamic_ids' of the state_dict must have torch.int64, got torch.float64",
    "short scores": "'dynamic_scores' of the state_dict must have torch.int64, got torch.int32",
    "float scores": "'dynamic_scores' of the state_dict must have torch.int64, got torch.float64",
    "integer values": "'dynamic_values' of the state_dict must have a floating dtype, got torch.int32",
    "integer state": "'dynamic_state' of the state_dict must have a floating dtype, got torch.int32",
    "sparse values": "dynamic_values of the state_dict must be a dense tensor with data, got layout torch.sparse_coo",
    "no data": "dynamic_values of the state_dict must be a dense tensor with data, got .* on meta",
    "version": "have version 3, this package reads up to 2; load them with dynamicemb 9.9",
    "text": "'dynamic_table' of the state_dict is damaged",
    "field": r"'dynamic_table' of the state_dict is damaged.*dim",
    "no table": "'dynamic_table' of the state_dict is damaged",
    "dynamic_values": "no 'dynamic_values', though",
    "dynamic_state": "no 'dynamic_state', though",
    "dynamic_scores": "no 'dynamic_scores', though",
    "fewer": r"'dynamic_ids' of the state_dict must have the size \(59,\).*\[\(58,\)\].*DynamicEmbLoadPlanner",
    "all fewer": r"must have the size \(59,\)",
    "width": r"'dynamic_values' of the state_dict must have the size \(59, 5\)",
    "a list": "dynamic_ids of the state_dict must be a ShardedTensor or a tensor, got list",
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", DAMAGES)
def test_incomplete_or_damaged_entries_are_refused(how: str, strict: bool) -> None:
    state = trained().state_dict()
    damage(state, how)
    module = trained(seed=3)
    before = snapshot(module)
    with pytest.raises(DynamicEmbError, match=DAMAGES[how]):
        module.load_state_dict(state, strict=strict)
    assert_unchanged(module, before)


def test_a_failure_leaves_the_tables_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamicemb.table.importing.rows import RowImport

    state, module = trained().state_dict(), trained()
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(RowImport, "add", fail)
        with pytest.raises(MemoryError, match="no memory"):
            module.load_state_dict(state)
    assert len(calls) == 1 and module.stats()["a"]["size"] == module.stats()["b"]["size"] == 0
    module.load_state_dict(state)
    assert module.stats()["a"]["size"] == 59


def test_c29_a_smaller_table_keeps_the_highest_scores(backend: str) -> None:
    module = module_on(backend, table(LFU, capacity=64, bucket_capacity=64))
    ids = list(range(-10, 14))
    step(module, [i for i in ids for _ in range(11 + i)])
    small = module_on(backend, table(LFU, capacity=16, bucket_capacity=16))
    with pytest.warns(UserWarning, match=r"8 of 24 ids .* found no place"):
        small.load_state_dict(module.state_dict())
    assert small.load_report["a"].num_lost == 8
    was, now = records(module, "a"), records(small, "a")
    assert sorted(now) == ids[-16:] and all(now[i] == was[i] for i in now)


def test_c10_ids_that_have_expired_stay_out(backend: str) -> None:
    module = make_forgetful(backend)
    step_forgetful(module, 1, 2, -(2**63))
    wait(module, 60)
    step_forgetful(module, 2, 3)
    wait(module, 50)
    state = module.state_dict()
    assert described(state)["entry"]["counts"] == [2] and described(state, "b")["entry"]["counts"] == [4]
    assert set(state[A + "dynamic_ids"].tolist()) == {2, 3}
    later = make_forgetful(backend, ttl=40.0)
    wait(later, 10**6)
    # The time between save and load does not count; the shorter ttl does.
    later.load_state_dict(state)
    assert later.stats()["a"]["size"] == 0 and later.load_report["a"].num_expired == 2
    assert later.stats()["b"]["size"] == 4
    same = make_forgetful(backend)
    wait(same, 10**6)
    same.load_state_dict(state)
    assert set(records(same, "a")) == {2, 3}
    wait(same, 51)
    assert set(records(same, "a")) == set()


def test_c12_counters_go_on_counting(backend: str) -> None:
    def make(**more: Any) -> Any:
        return module_on(backend, admitting(3, score_strategy=LFU), admitting(3, dim=3), optimizer="adam", **more)

    module, copy = make(), make()
    step(module, [1, 1, *EXTREME], [5, 6])
    step(module, [2, 2, 2, 1], [5])
    step(copy, [7, 8], [9])
    copy.load_state_dict(through_a_file(module.state_dict()))
    assert (lengths_of(copy, 0), lengths_of(copy, 1)) == (lengths_of(module, 0), lengths_of(module, 1))
    assert lengths_of(copy) == dict.fromkeys(set(EXTREME) - {1}, 1)
    for bags in ([[0, -4], [5]], [[0, -4, -1], [6, 6, 6]]):
        assert torch.equal(step(copy, *bags), step(module, *bags))
    assert records(copy, "a") == records(module, "a") and lengths_of(copy) == lengths_of(module)


@pytest.mark.parametrize("path", ["state_dict", "dump"])
@pytest.mark.parametrize("kind", ["count", "chance"])
def test_c12_who_is_not_admitted_reads_by_the_seed_of_the_checkpoint(path: str, kind: str, tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        return make_module([admitting(3) if kind == "count" else by_chance(0.5)], seed=seed)

    module, copy = make(1), make(2)
    step(module, [1, 2, 3])
    if path == "dump":
        module.dump(tmp_path / "d", counter=True)
        copy.load(tmp_path / "d", counter=True)
    else:
        copy.load_state_dict(module.state_dict())
    # Chances are drawn anew at every step, of which loads are one too.
    copy.tables.index.clock.copy_(module.tables.index.clock)
    ids = list(range(50, 80))
    read = [step(copy, [i]) for i in ids]
    assert all(torch.equal(out, step(module, [i])) for i, out in zip(ids, read, strict=True))
    assert holds(copy, ids) == holds(module, ids) and not all(holds(copy, ids))


def test_counts_that_cannot_be_loaded_are_named() -> None:
    counting, plain = make_module([admitting(3)]), make_module([options()])
    step(counting, [1, 2, 2])
    step(plain, [1])
    with pytest.warns(UserWarning, match="has admission counts of 2 ids, but the table has no counter"):
        plain.load_state_dict(counting.state_dict(), strict=False)
    with pytest.warns(UserWarning, match="has no admission counts, which begin anew"):
        counting.load_state_dict(make_module([options()]).state_dict())
    assert lengths_of(counting) == {}


class FileCounter(DictCounter):
    """Counts in a dict that can be written."""

    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        mine = {key: count for (table, key), count in self.counts.items() if table == table_id}
        np.array(list(mine), np.int64).tofile(key_file)
        np.array(list(mine.values()), np.int64).tofile(counter_file)

    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        keys, counts = (np.fromfile(file, np.int64).tolist() for file in (key_file, counter_file))
        self.counts = {(table_id, key): count for key, count in zip(keys, counts, strict=True)}


def test_a_counter_of_the_user_writes_and_reads_its_counts() -> None:
    def make() -> tuple[Any, FileCounter]:
        counter = FileCounter()
        tables = [options(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=counter)]
        return make_module(tables), counter

    (module, counter), (copy, other) = make(), make()
    step(module, [1, 2, 2, -3, 4, 4, 4])
    step(copy, [9])
    copy.load_state_dict(through_a_file(module.state_dict()))
    assert other.counts == counter.counts == {(0, 1): 1, (0, 2): 2, (0, -3): 1}
    assert holds(copy, [4, 2, 9]) == [True, False, False]


def test_an_increment_after_a_load_needs_a_full_dump(tmp_path: Path) -> None:
    module = trained()
    module.dump(tmp_path / "base", optim=True)
    module.load_state_dict(module.state_dict())
    with pytest.raises(DynamicEmbError, match="the last dump or load of the table was none"):
        module.dump(tmp_path / "next", optim=True, base=tmp_path / "base")


def test_names_may_have_dots() -> None:
    def make() -> Any:
        return make_module([options(), options()], table_names=["a.b", "a.b.c"])

    module, copy = make(), make()
    step(module, [1, 2], [3])
    copy.load_state_dict(module.state_dict())
    assert (set(records(copy, "a.b")), set(records(copy, "a.b.c"))) == ({1, 2}, {3})
