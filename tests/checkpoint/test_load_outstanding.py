"""Loads while forwards wait for their backward: gradients of rows that were replaced are dropped (contract 14, 23)."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbDump, DynamicEmbLoad, DynamicEmbScoreStrategy
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.importing.rows import RowImport
from dynamicemb.table.index import UPDATES
from tests.support.admitting import admitting, holds, lengths_of, module_on
from tests.support.checkpoints import records, train, trained, without_scores
from tests.support.lookups import EXTREME, batch, contents, make_module, messages, options, snapshot

LFU, STEP = DynamicEmbScoreStrategy.LFU, DynamicEmbScoreStrategy.STEP


def warned(number: int, table: str = r"\['a', 'b'\]") -> Any:
    return pytest.warns(UserWarning, match=rf"backward of forwards has not run: {number} of tables {table}")


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def forward(module: Any, *bags: list[int], weights: torch.Tensor | None = None) -> torch.Tensor:
    device = module.tables.device
    ids, offsets = (part.to(device) for part in batch(*bags))
    out: torch.Tensor = module(ids, offsets, weights)
    return out


def step(module: Any, *bags: list[int]) -> torch.Tensor:
    out = forward(module, *bags)
    out.pow(2).sum().backward()
    return out.detach()


def dropped(module: Any) -> dict[str, float]:
    return {name: counts["dropped_gradients"] for name, counts in module.stats().items()}


def rows(module: Any) -> dict[str, Any]:
    return {name: without_scores(records(module, name)) for name in module.table_names}


def places(module: Any, ids: list[int]) -> list[int]:
    group = module.tables
    found: list[int] = group.find(torch.tensor(ids, device=group.device), group.ranges_of(0, len(ids))).tolist()
    return found


WAYS = ("state_dict", "DynamicEmbLoad", "load", "merge")


def save(module: Any, way: str, path: Path) -> Any:
    if way == "state_dict":
        return module.state_dict()
    DynamicEmbDump(path / "d", module, optim=True)
    return path / "d"


def load(module: Any, way: str, saved: Any) -> None:
    if way == "state_dict":
        module.load_state_dict(saved)
    elif way == "DynamicEmbLoad":
        DynamicEmbLoad(saved, module, optim=True)
    else:
        module.load(saved / "model", optim=True, merge=way == "merge")


@pytest.mark.parametrize("way", WAYS)
def test_c14_gradients_of_rows_that_a_load_replaced_are_dropped(backend: str, tmp_path: Path, way: str) -> None:
    def make() -> Any:
        module = module_on(backend, options(), options(dim=3), optimizer="adam")
        step(module, EXTREME, [5, 6])
        return module

    module, other = make(), make()
    saved = save(module, way, tmp_path)
    for one in (module, other):
        step(one, EXTREME[:3], [5])
    # Ids of the checkpoint, in the places that they will have again; new ones; one twice.
    out = forward(module, [EXTREME[0], EXTREME[0], EXTREME[5], 77], [6, 88])
    if way == "merge":
        # The ids of that forward are kept.
        forward(other, [EXTREME[0], EXTREME[0], EXTREME[5], 77], [6, 88])
    before, read = places(module, EXTREME), out.detach().clone()
    with warned(1, r"\['(model/)?a', '(model/)?b'\]"):
        load(module, way, saved)
    # Kernels in Triton fill a bucket in any order.
    assert backend != "cpu" or places(module, EXTREME) == before
    with silence():
        load(other, way, saved)
    assert torch.equal(out, read) and rows(module) == rows(other)
    assert module.tables.steps.num_outstanding == 0
    was, tallies = snapshot(module), module.tables.index.tallies.clone()
    out.pow(2).sum().backward()
    assert dropped(module) == {"a": 4, "b": 2}
    module.tables.index.tallies.copy_(tallies)
    assert all(torch.equal(one, two) for one, two in zip(snapshot(module), was, strict=True))
    # The optimizer counts on alike.
    assert torch.equal(step(module, [EXTREME[0], 77], [5]), step(other, [EXTREME[0], 77], [5]))
    assert rows(module) == rows(other)
    module.tables.check_invariants()


def test_c14_only_gradients_of_forwards_before_the_load_are_dropped(backend: str) -> None:
    module, other = (module_on(backend, options(), optimizer="adam") for _ in range(2))
    for one in (module, other):
        step(one, [1, 2, 3])
    state = module.state_dict()
    first, second = forward(module, [1, 2]), forward(module, [3, 3, 9])
    with warned(2, r"\['a'\]"):
        module.load_state_dict(state)
    after = forward(module, [1, 2, 4])
    with warned(1, r"\['a'\]"):
        module.load_state_dict(state)
    last = forward(module, [1, 3])
    for out in (last, first, after, second):
        out.pow(2).sum().backward()
    other.load_state_dict(state)
    step(other, [1, 3])
    assert rows(module) == rows(other) and dropped(module) == {"a": 2 + 3 + 3}


def test_c14_tables_beside_the_loaded_ones_take_their_gradients(tmp_path: Path) -> None:
    def make() -> Any:
        return make_module([options(), options(dim=3)], optimizer="adam")

    module, other = make(), make()
    for one in (module, other):
        step(one, EXTREME, [1, 2])
    module.dump(tmp_path / "d", optim=True)
    outs = [forward(one, [0, 5, 5], [1, 7, 7]) for one in (module, other)]
    with warned(1, r"\['a'\]"):
        module.load(tmp_path / "d", table_names=["a"])
    assert module.tables.steps.num_outstanding == 1
    with silence():
        # Of this table nothing is awaited any more.
        module.load(tmp_path / "d", table_names=["a"])
    kept = rows(module)["a"]
    for out in outs:
        out.pow(2).sum().backward()
    assert rows(module)["a"] == kept and rows(module)["b"] == rows(other)["b"]
    assert dropped(module) == {"a": 3, "b": 0} and module.tables.steps.num_outstanding == 0
    # What is loaded bit by bit is over too.
    out = forward(module, [0], [1])
    for name in "ba":
        with warned(1, rf"\['{name}'\]"):
            module.load(tmp_path / "d", table_names=[name])
    assert module.tables.steps.num_outstanding == 0
    out.sum().backward()
    assert dropped(module) == {"a": 4, "b": 1}


def test_c14_a_retained_graph_is_dropped_each_time() -> None:
    module = make_module([options(capacity=16)])
    out = forward(module, [1, 2, 2])
    state = module.state_dict()
    out.sum().backward(retain_graph=True)
    with warned(1, r"\['a'\]"):
        module.load_state_dict(state)
    kept = rows(module)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert rows(module) == kept and dropped(module) == {"a": 6}
    assert int(module.tables.index.clock[UPDATES]) == 0


@pytest.mark.parametrize("merge", [False, True])
def test_c07_outputs_from_before_a_load_protect_nothing_after_it(backend: str, tmp_path: Path, merge: bool) -> None:
    module = module_on(backend, options(capacity=16))
    step(module, list(range(16)))
    module.dump(tmp_path / "d")
    out = forward(module, list(range(16)))
    with warned(1, r"\['a'\]"):
        module.load(tmp_path / "d", merge=merge)
    for first in (100, 200):
        step(module, list(range(first, first + 16)))
    assert module.stats()["a"]["failed"] == 0 and holds(module, list(range(200, 216))) == [True] * 16
    # The row of each id has gone to another.
    kept = rows(module)
    out.sum().backward()
    assert rows(module) == kept and dropped(module) == {"a": 16}


def test_c23_a_merge_makes_room_among_ids_of_outstanding_forwards(backend: str, tmp_path: Path) -> None:
    lfu = options(capacity=16, score_strategy=LFU)
    module, source = module_on(backend, lfu, lfu), module_on(backend, lfu, lfu)
    step(source, [i for i in range(100, 112) for _ in range(3)], [1])
    source.dump(tmp_path / "d")
    step(module, list(range(10)), [1])
    module.erase("a", torch.tensor([9], device=module.tables.device))
    out = forward(module, list(range(8)), [2])
    with warned(1, r"\['a'\]"), pytest.warns(UserWarning, match="5 of 12 ids of the dump found no place"):
        report = module.load(tmp_path / "d", merge=True, table_names=["a"])
    assert report["a"].num_lost == 12 + 9 - 16 and holds(module, list(range(100, 112))) == [True] * 12
    kept = rows(module)["a"]
    out.sum().backward()
    assert rows(module)["a"] == kept and dropped(module) == {"a": 8, "b": 0}
    module.tables.check_invariants()


def test_c14_a_load_that_is_refused_keeps_gradients() -> None:
    module = trained()
    state = module.state_dict()
    out, kept = forward(module, [1], [2]), rows(module)
    state["dynamic_tables.b.dynamic_ids"] = state["dynamic_tables.b.dynamic_ids"][:-1]
    with silence(), pytest.raises(DynamicEmbError, match="'dynamic_ids' of the state_dict must have"):
        module.load_state_dict(state)
    assert rows(module) == kept and module.tables.steps.num_outstanding == 1
    out.sum().backward()
    assert rows(module)["a"][1] != kept["a"][1] and dropped(module) == {"a": 0, "b": 0}


def test_c14_a_warning_that_is_an_error_comes_before_the_load(tmp_path: Path) -> None:
    module = trained()
    DynamicEmbDump(tmp_path / "d", module)
    out, kept = forward(module, [1], [2]), rows(module)
    state = module.state_dict()
    for replace in (lambda: module.load_state_dict(state), lambda: DynamicEmbLoad(tmp_path / "d", module)):
        with silence(), pytest.raises(UserWarning, match="1 of tables"):
            replace()
    assert rows(module) == kept and module.tables.steps.num_outstanding == 1
    out.sum().backward()
    assert dropped(module) == {"a": 0, "b": 0}


def test_c14_a_load_that_fails_drops_gradients_of_ids_that_return(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module([options(capacity=16), options(capacity=16)])
    out = forward(module, [1, 2], [3])
    state, before = module.state_dict(), places(module, [1, 2])
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise MemoryError("no memory")

    with monkeypatch.context() as patch, warned(1), pytest.raises(MemoryError):
        patch.setattr(RowImport, "add", fail)
        module.load_state_dict(state)
    # The second table was emptied all the same.
    assert len(calls) == 1 and module.stats()["b"]["size"] == 0
    forward(module, [1, 2], [3])
    kept = rows(module)
    assert places(module, [1, 2]) == before
    out.sum().backward()
    assert rows(module) == kept and dropped(module) == {"a": 2, "b": 1}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_c14_pooling_weights_of_replaced_rows_get_no_gradient(backend: str, mode: str) -> None:
    module = module_on(backend, options(), optimizer="adam")
    step(module, [1, 2, 3])
    state = module.state_dict()
    module.train(mode == "train")
    weights = torch.ones(2, device=module.tables.device, requires_grad=True)
    out = forward(module, [1, 3], weights=weights)
    if mode == "train":
        with warned(1, r"\['a'\]"):
            module.load_state_dict(state)
    else:
        with silence():
            module.load_state_dict(state)
    out.sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [0.0, 0.0]
    assert dropped(module) == {"a": 2 if mode == "train" else 0}


def test_c12_ids_without_a_row_lose_no_gradient_in_a_load(backend: str) -> None:
    def make() -> Any:
        module = module_on(backend, admitting(3), optimizer="adam")
        step(module, [1, 1, 1, 2])
        return module

    module, other = make(), make()
    state = module.state_dict()
    weights = torch.ones(4, device=module.tables.device, requires_grad=True)
    with torch.no_grad():
        read = forward(other, [7])
    out = forward(module, [1, 7, 2, 2], weights=weights)
    assert holds(module, [1, 7, 2]) == [True, False, True]
    with warned(1, r"\['a'\]"):
        module.load_state_dict(state)
    other.load_state_dict(state)
    out.sum().backward()
    # What was not admitted read a value of its own, which nobody replaced.
    assert weights.grad is not None
    assert weights.grad.tolist() == [0.0, pytest.approx(float(read.sum())), 0.0, 0.0] and weights.grad[1] != 0
    assert dropped(module) == {"a": 3} and lengths_of(module) == lengths_of(other) == {2: 1}
    assert torch.equal(step(module, [1, 2, 2]), step(other, [1, 2, 2])) and rows(module) == rows(other)


def test_c26_increments_after_a_load_have_nothing_of_dropped_gradients(tmp_path: Path) -> None:
    module = trained()
    module.dump(tmp_path / "base", optim=True)
    out = forward(module, [1, 2], [3])
    with warned(1):
        module.load(tmp_path / "base", optim=True)
    out.pow(2).sum().backward()
    step(module, [4], [5])
    module.dump(tmp_path / "next", optim=True, base=tmp_path / "base")
    restored = trained(num_steps=0)
    restored.load([tmp_path / "base", tmp_path / "next"], optim=True)
    assert rows(restored) == rows(module)
    sizes = [(tmp_path / "next" / f"{t}_emb_keys.rank_0.world_size_1").stat().st_size for t in "ab"]
    assert sizes == [8, 8]


def test_c10_steps_and_optimizer_go_on_as_after_any_load() -> None:
    def make() -> Any:
        return trained(options={"score_strategy": STEP})

    module, other = make(), make()
    state = module.state_dict()
    outs = [forward(module, [1], [2]) for _ in range(3)]
    with warned(3):
        module.load_state_dict(state)
    other.load_state_dict(state)
    for out in outs:
        out.sum().backward()
    assert train(module, 2, seed=5) == train(other, 2, seed=5)
    assert contents(module) == contents(other) and module.get_score() == other.get_score()


def test_c14_a_copy_has_no_outstanding_forwards_and_trains() -> None:
    module = trained()
    out = forward(module, [1], [2])
    state = module.state_dict()
    with warned(1):
        module.load_state_dict(state)
    twin = copy.deepcopy(module)
    with silence():
        twin.load_state_dict(state)
    assert train(twin, 2, seed=3) == train(module, 2, seed=3)
    out.sum().backward()
    assert rows(twin) == rows(module)


def test_c14_one_warning_tells_of_all_modules_of_a_load(tmp_path: Path) -> None:
    parts = torch.nn.ModuleList([trained(), trained(num_tables=1, seed=3)])
    DynamicEmbDump(tmp_path / "d", parts)
    held = [forward(parts[0], [1], [2]), forward(parts[1], [1]), forward(parts[1], [1])]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        DynamicEmbLoad(tmp_path / "d", parts)
    (message,) = messages(found)
    assert "1 of tables ['model.0/a', 'model.0/b'], 2 of tables ['model.1/a']" in message
    assert "stats()['<table>']['dropped_gradients']" in message and len(held) == 3
