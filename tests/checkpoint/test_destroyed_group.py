"""Saving and loading after ``destroy_process_group``: one rank goes on alone, of several each says what to do (29)."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamicemb import DynamicEmbDump, DynamicEmbLoad, state_dict_without_rows
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.errors import DynamicEmbError
from dynamicemb.incremental_dump import get_score, incremental_dump
from dynamicemb.table.importing.rows import clear
from tests.support.checkpoints import without_scores
from tests.support.ranks import ON_CPU, RankPool, _set_up_group, ranks  # noqa: F401
from tests.support.sharded_model import dynamic_modules
from tests.support.state_dict_model import Kind, build, held, others, train

pytestmark = pytest.mark.distributed

# TorchRec shards the static table in the first, and copies it in the second.
KINDS = [Kind(static="table_wise", optimizer="EXACT_ROWWISE_ADAGRAD"), Kind()]


@contextmanager
def without_group(path: Path, rank: int, world_size: int) -> Iterator[Any]:
    """Destroy the process group meanwhile; yields its object. The ranks get a new one for the next test."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    try:
        yield group
    finally:
        _set_up_group(ON_CPU, rank, world_size, str(path / "store"), [])


def rows(model: Any) -> dict[str, Any]:
    return {name: without_scores(found) for name, found in held(model).items()}


def forget(model: Any) -> None:
    for tables in dynamic_modules(model):
        for t in range(len(tables.table_names)):
            clear(tables.tables, t)
    assert not any(rows(model).values())


def go_on_alone(rank: int, world_size: int, path: Path, kind: Kind) -> int:
    model, copy = build(kind, 1), build(kind, 1)
    train(model, kind, rank, range(3))
    train(copy, kind, rank, range(7, 9))
    found, rest = rows(model), others(model)
    tables = model.module.bags.dynamic_embedding_modules[0]
    with without_group(path, rank, world_size) as group:
        state = model.state_dict()
        copy.load_state_dict(dict(state))
        assert rows(copy) == found != {} and others(copy) == rest
        for name, pg in (("all", None), ("its own", group)):
            DynamicEmbDump(path / name, model, optim=True, pg=pg)
            handle = DynamicEmbDump(path / f"{name} later", model, optim=True, pg=pg, blocking=False)
            assert handle is not None
            handle.wait()
            for dump in (name, f"{name} later"):
                forget(copy)
                DynamicEmbLoad(path / dump, copy, optim=True, pg=pg)
                assert rows(copy) == found
        tables.dump(path / "module", optim=True)
        copy.module.bags.dynamic_embedding_modules[0].load(path / "module", optim=True)
        changed = incremental_dump(model, 0, pg=group)
        assert changed is not None and set(changed[0]) == {"model.bags", "model.sequences"}
        assert sum(len(ids) for of in changed[0].values() for ids, _ in of.values()) == sum(map(len, found.values()))
        with state_dict_without_rows():
            copy.load_state_dict(model.state_dict())
        tables.load_state_dict(tables.state_dict())
    # Nor does a new group of the process matter.
    forget(copy)
    copy.load_state_dict(dict(model.state_dict()))
    DynamicEmbDump(path / "new group", model, optim=True)
    DynamicEmbLoad(path / "new group", copy, optim=True)
    assert rows(copy) == rows(model) == found
    return len(found)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.static)
def test_c29_one_rank_saves_and_loads_after_its_group_is_destroyed(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    kind: Kind,
) -> None:
    assert ranks.run(1, go_on_alone, tmp_path, kind) == [2]


def calls(model: Any, state: Any, group: Any, path: Path) -> dict[str, Callable[[], Any]]:
    """Return what wants all ranks."""
    tables = model.module.bags.dynamic_embedding_modules[0]
    return {
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(state),
        "dump": lambda: DynamicEmbDump(path / "new", model),
        "dump over it": lambda: DynamicEmbDump(path / "new", model, pg=group),
        "dump later": lambda: DynamicEmbDump(path / "new", model, blocking=False),
        "load": lambda: DynamicEmbLoad(path / "d", model),
        "load over it": lambda: DynamicEmbLoad(path / "d", model, pg=group),
        "incremental_dump": lambda: incremental_dump(model, 0, pg=group),
        "of a module": lambda: tables.dump(path / "new"),
        "into a module": lambda: tables.load(path / "d" / "model.bags"),
        "state_dict of a module": tables.state_dict,
        "Ranks": lambda: Ranks(group),
    }


def refuse(rank: int, world_size: int, path: Path) -> list[str]:
    model = build(KINDS[1], 2)
    train(model, KINDS[1], rank, range(3))
    state = dict(model.state_dict())
    DynamicEmbDump(path / "d", model)
    found, rest = rows(model), others(model)
    refused = []
    with without_group(path, rank, world_size) as group:
        for name, call in calls(model, state, group, path).items():
            with pytest.raises(DynamicEmbError, match="over 2 ranks.*call state_dict.*before destroy_process_group"):
                call()
            refused.append(name)
        # Nobody else is asked.
        changed = incremental_dump(model, 0)
        assert changed is not None and get_score(model) is not None
        assert {name: len(ids) for of in changed[0].values() for name, (ids, _) in of.items()} == {
            name: len(ids) for name, ids in found.items()
        }
        with state_dict_without_rows():
            model.load_state_dict(model.state_dict())
    assert not (path / "new").exists()
    # A new group is not that of the tables.
    with pytest.raises(DynamicEmbError, match="over 2 ranks"):
        model.state_dict()
    with pytest.raises(DynamicEmbError, match="over 2 ranks"):
        DynamicEmbDump(path / "new", model)
    assert rows(model) == found and others(model) == rest
    return refused


def test_c29_several_ranks_are_told_before_anybody_waits(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    first, second = ranks.run(2, refuse, tmp_path, time_limit_s=120.0)
    assert first == second == [*first] and len(first) == 12


def refuse_over_some(rank: int, world_size: int, path: Path) -> None:
    from tests.checkpoint.test_state_dict_groups import build as build_over
    from tests.checkpoint.test_state_dict_groups import train as train_over

    group = dist.new_group([0, 1])
    model = build_over(group)
    train_over(model, [1, 2, -3])
    dist.destroy_process_group(group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (model.state_dict, lambda: DynamicEmbDump(path / "d", model), lambda: Ranks(group)):
            with pytest.raises(DynamicEmbError, match="over 2 ranks, whose process group was destroyed"):
                call()
    assert not (path / "d").exists() and Ranks().world_size == 2


def test_c29_a_group_of_some_ranks_may_be_the_one_that_is_gone(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(2, refuse_over_some, tmp_path)


def test_c04_an_argument_that_is_no_group_is_still_refused() -> None:
    if dist.is_initialized():
        pytest.skip("another test has a process group")
    with pytest.raises(ValueError, match="pg: torch.distributed is not initialised"):
        Ranks(dist.GroupMember.NON_GROUP_MEMBER)
    assert (Ranks().rank, Ranks().world_size, Ranks().device) == (0, 1, torch.device("cpu"))
