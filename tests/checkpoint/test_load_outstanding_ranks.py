"""Loads over several ranks of which some have forwards that wait for their backward (contract 14)."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbDump, DynamicEmbLoad
from tests.support.checkpoints import without_scores
from tests.support.lookups import messages
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import dynamic_modules
from tests.support.state_dict_model import Kind, batch, build, held, train

pytestmark = pytest.mark.distributed

KIND = Kind()


def rows(model: Any) -> dict[str, Any]:
    return {name: without_scores(found) for name, found in held(model).items()}


def dropped(model: Any) -> int:
    stats = [of_table for tables in dynamic_modules(model) for of_table in tables.stats().values()]
    return sum(int(of_table["dropped_gradients"]) for of_table in stats)


def waiting(model: Any) -> list[int]:
    return [tables.tables.steps.num_outstanding for tables in dynamic_modules(model)]


def loads(model: Any, path: Path) -> list[Callable[[], Any]]:
    state = model.state_dict()
    DynamicEmbDump(path / "d", model, optim=True)
    return [lambda: model.load_state_dict(dict(state)), lambda: DynamicEmbLoad(path / "d", model, optim=True)]


def one_waits(rank: int, world_size: int, path: Path) -> list[int]:
    """Load while rank 0 alone holds an output; returns how many warnings each load gave here."""
    model = build(KIND, world_size)
    train(model, KIND, rank, range(2))
    kept, numbers = rows(model), []
    for load in loads(model, path):
        # Outputs that are dropped end their step at once.
        gc.disable()
        out = model(batch(5, rank, KIND.device))
        if rank == 1:
            del out
        assert waiting(model) == ([1, 1] if rank == 0 else [0, 0])
        gc.enable()
        with warnings.catch_warnings():
            # Who makes an error of it on one rank has one on all, and no table has changed.
            warnings.filterwarnings("error" if rank == 0 else "ignore", "load: the backward")
            with pytest.raises(UserWarning, match="1 of tables"):
                load()
        assert waiting(model) == ([1, 1] if rank == 0 else [0, 0])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            load()
        numbers.append(sum("the backward of forwards has not run" in text for text in messages(found)))
        assert rows(model) == kept and waiting(model) == [0, 0]
    return numbers


def test_c14_ranks_without_outstanding_forwards_load_with_those_that_have(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
) -> None:
    # A collection loads its state_dict by itself, a dump is loaded at once.
    assert ranks.run(2, one_waits, tmp_path) == [[2, 1], [0, 0]]


def forward(model: Any, rank: int) -> torch.Tensor:
    """Return what a dynamic table gives; torch refuses a backward through dense weights that a load has overwritten."""
    values: torch.Tensor = model.module.sequences(batch(5, rank, KIND.device))["i"].values()
    return values.pow(2).sum()


def all_wait(rank: int, world_size: int, path: Path) -> int:
    model, other = build(KIND, world_size), build(KIND, world_size)
    for one in (model, other):
        train(one, KIND, rank, range(2))
    for load, reload in zip(loads(model, path), loads(other, path / "other"), strict=True):
        loss = forward(model, rank)
        with pytest.warns(UserWarning, match="the backward of forwards has not run"):
            load()
        reload()
        loss.backward()
        assert rows(model) == rows(other) and waiting(model) == [0, 0]
        further = range(6, 8)
        assert train(model, KIND, rank, further) == train(other, KIND, rank, further)
        assert rows(model) == rows(other)
    return dropped(model)


def test_c14_gradients_of_all_ranks_are_dropped(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "other").mkdir()
    number = sum(ranks.run(2, all_wait, tmp_path))
    occurrences = sum(batch(5, rank, "cpu")["i"].values().numel() for rank in range(2))
    assert number == 2 * occurrences > 0
