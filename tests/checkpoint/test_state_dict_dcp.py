"""torch.distributed.checkpoint in one process: what its planners make of rows, and its helpers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)

from dynamicemb import DynamicEmbLoadPlanner, state_dict_without_rows
from dynamicemb.errors import DynamicEmbError
from tests.support.admitting import admitting, lengths_of, module_on
from tests.support.checkpoints import records, train, trained, without_scores
from tests.support.lookups import EXTREME, assert_unchanged, batch, make_module, options, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning"),
]


def same(one: Any, other: Any, name: str = "a") -> bool:
    return without_scores(records(one, name)) == without_scores(records(other, name))


def some_ids(number: int, first: int, **more: Any) -> Any:
    """Return a module whose table holds so many ids."""
    module = make_module([options(capacity=256)], optimizer="adam", **more)
    ids, offsets = batch(list(range(first, first + number)))
    module(ids, offsets).pow(2).sum().backward()
    return module


@pytest.mark.parametrize("shape", ["nested", "flat", "stateful", "in a list"])
def test_our_planner_makes_room(backend: str, tmp_path: Path, shape: str) -> None:
    def make() -> Any:
        return module_on(backend, admitting(2), optimizer="adam")

    module, copy = make(), make()
    for bag in ([*EXTREME, 1, 2], [*EXTREME[:5], 3]):
        ids, offsets = batch(bag)
        module(ids.to(module.tables.device), offsets.to(module.tables.device)).pow(2).sum().backward()
    wrap = {
        "nested": lambda state: {"all": {"model": state}, "step": 3},
        "flat": lambda state: state,
        "stateful": lambda state: None,
        "in a list": lambda state: {"models": [state]},
    }[shape]
    states = [module.state_dict(), copy.state_dict()]
    saved, wanted = (wrap(state) or {"m": m} for state, m in zip(states, (module, copy), strict=True))
    dcp.save(saved, checkpoint_id=tmp_path)
    dcp.load(wanted, checkpoint_id=tmp_path, planner=DynamicEmbLoadPlanner())
    if shape != "stateful":
        copy.load_state_dict(states[1] if shape != "flat" else wanted)
    assert len(records(copy, "a")) > 5 and same(copy, module)
    assert lengths_of(copy) == lengths_of(module) != {}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("saved", "present"), [(40, 0), (0, 40), (40, 39)])
def test_the_default_planner_refuses_another_number_of_rows(
    tmp_path: Path, saved: int, present: int, partial: bool
) -> None:
    module, copy = some_ids(saved, 0), some_ids(present, 1000)
    before = records(copy, "a")
    dcp.save({"m": module.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match=rf"Size mismatch.*\[{saved}.*\[{present}.*dynamic_tables"):
        dcp.load(
            {"m": copy.state_dict()}, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=partial)
        )
    assert records(copy, "a") == before and len(before) == present


@pytest.mark.parametrize("partial", [False, True])
def test_the_default_planner_is_right_where_numbers_agree_by_chance(tmp_path: Path, partial: bool) -> None:
    module, copy = some_ids(40, -5), some_ids(40, 1000)
    dcp.save({"m": module.state_dict()}, checkpoint_id=tmp_path)
    state = {"m": copy.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=partial))
    copy.load_state_dict(state["m"])
    assert same(copy, module) and len(records(copy, "a")) == 40


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, DynamicEmbLoadPlanner])
@pytest.mark.parametrize("saved", ["adam", "sgd"])
def test_the_optimizer_is_compared_whatever_the_planner_leaves_out(tmp_path: Path, saved: str, planner: Any) -> None:
    """Without the comparison the state of the checkpoint would be lost, or that of other rows be taken."""

    def make(optimizer: str) -> Any:
        module = make_module([options()], optimizer=optimizer)
        ids, offsets = batch([1, 2, 3])
        module(ids, offsets).sum().backward()
        return module

    module, copy = make(saved), make("sgd" if saved == "adam" else "adam")
    dcp.save(module.state_dict(), checkpoint_id=tmp_path)
    state = copy.state_dict()
    before = snapshot(copy)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner(allow_partial_load=True))
    with pytest.raises(ValueError, match="table a: .*; load with optim=False"):
        copy.load_state_dict(state, strict=False)
    assert_unchanged(copy, before)


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, DynamicEmbLoadPlanner])
def test_a_checkpoint_without_rows_is_an_error_or_leaves_the_rows(tmp_path: Path, planner: Any) -> None:
    module, copy = trained(), trained(seed=5)
    with state_dict_without_rows():
        dcp.save(module.state_dict(), checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: dynamic_tables.a.dynamic_ids"):
        dcp.load(copy.state_dict(), checkpoint_id=tmp_path, planner=planner())
    state, before = copy.state_dict(), without_scores(records(copy, "a"))
    if planner is DynamicEmbLoadPlanner:
        with pytest.warns(UserWarning, match="holds no rows of 'dynamic_tables.a'"):
            dcp.load(state, checkpoint_id=tmp_path, planner=planner(allow_partial_load=True))
    else:
        dcp.load(state, checkpoint_id=tmp_path, planner=planner(allow_partial_load=True))
    copy.load_state_dict(state)
    assert without_scores(records(copy, "a")) == before != {}


def test_a_checkpoint_of_another_dim_is_refused_in_our_words(tmp_path: Path) -> None:
    dcp.save(trained().state_dict(), checkpoint_id=tmp_path)
    copy = trained(options={"dim": 7})
    state = copy.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, planner=DynamicEmbLoadPlanner())
    with pytest.raises(ValueError, match="has dim 7, the dump 5; make the table with dim=5"):
        copy.load_state_dict(state)


@pytest.mark.parametrize(("saved", "present"), [(True, False), (False, True)])
def test_counters_of_one_side_only(tmp_path: Path, saved: bool, present: bool) -> None:
    module, copy = (make_module([admitting(2) if counts else options()]) for counts in (saved, present))
    for made in (module, copy):
        ids, offsets = batch([1, 1, 2])
        made(ids, offsets).sum().backward()
    dcp.save(module.state_dict(), checkpoint_id=tmp_path)
    state = copy.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, planner=DynamicEmbLoadPlanner())
    with pytest.warns(UserWarning, match="admission counts"):
        copy.load_state_dict(state)
    assert same(copy, module)
    assert not present or lengths_of(copy) == {}


@pytest.mark.parametrize("root", ["module", "model"])
def test_get_and_set_model_state_dict(root: str) -> None:
    module, copy = trained(), trained(seed=5)
    wrap = nn.Sequential if root == "model" else lambda made: made
    state = get_model_state_dict(wrap(module))
    set_model_state_dict(wrap(copy), state)
    assert same(copy, module) and same(copy, module, "b")
    offloaded = get_model_state_dict(wrap(module), options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    other = trained(seed=6)
    wrap(other).load_state_dict(offloaded)
    assert same(other, module)


def test_get_state_dict_with_an_optimizer_of_dense_weights(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Any, Any, Any]:
        tables, dense = trained(seed=seed, num_tables=1), nn.Linear(5, 1)
        model = nn.ModuleDict({"tables": tables, "dense": dense})
        return model, tables, torch.optim.Adam(dense.parameters())

    (model, tables, optimizer), (copy, other, _) = make(0), make(3)
    dcp.save(
        dict(zip(("model", "optim"), get_state_dict(model["dense"], optimizer), strict=True)), checkpoint_id=tmp_path
    )
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "model")
    wanted = {"model": get_model_state_dict(copy)}
    dcp.load(wanted, checkpoint_id=tmp_path / "model", planner=DynamicEmbLoadPlanner())
    set_model_state_dict(copy, wanted["model"])
    assert same(other, tables) and torch.equal(copy["dense"].weight, model["dense"].weight)


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    module, copy = trained(), trained(num_steps=0)
    before = without_scores(records(module, "a"))
    future = dcp.async_save({"m": module.state_dict()}, checkpoint_id=tmp_path)
    train(module, 3, seed=8)
    future.result()
    dcp.load({"m": copy}, checkpoint_id=tmp_path, planner=DynamicEmbLoadPlanner())
    assert without_scores(records(copy, "a")) == before != without_scores(records(module, "a"))


def test_the_planner_leaves_what_is_not_ours_alone(tmp_path: Path) -> None:
    state = {"m": {"my_dynamic_table": "text", "w": torch.arange(3.0)}}
    dcp.save(state, checkpoint_id=tmp_path)
    wanted = {"m": {"my_dynamic_table": "", "w": torch.zeros(3)}}
    dcp.load(wanted, checkpoint_id=tmp_path, planner=DynamicEmbLoadPlanner())
    assert wanted["m"]["my_dynamic_table"] == "text" and torch.equal(wanted["m"]["w"], state["m"]["w"])
    assert wanted["m"].keys() == state["m"].keys()
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"m": {"w": torch.zeros(4)}}, checkpoint_id=tmp_path, planner=DynamicEmbLoadPlanner())


def test_a_part_of_a_checkpoint_that_was_kept_as_a_placeholder_is_noticed() -> None:
    """Entries of two checkpoints do not pass for one."""
    module, other = some_ids(40, 0), some_ids(30, 0)
    state = module.state_dict()
    name = "dynamic_tables.a.dynamic_table"
    with pytest.raises(DynamicEmbError, match=r"must have the size \(30,\)"):
        other.load_state_dict(state | {name: other.state_dict()[name]})
