"""``incremental_dump`` returns what was touched since a threshold; scores of a whole model."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy
from dynamicemb.errors import DynamicEmbError
from dynamicemb.incremental_dump import get_score, incremental_dump, is_valid_score_threshold, set_score
from tests.support.lookups import bag_per_id, batch, make_module, options, row_of
from tests.support.ranks import RankPool, ranks  # noqa: F401

TIMESTAMP, STEP, CUSTOMIZED, LFU, _ = DynamicEmbScoreStrategy


def touched(result: Any, table: str = "a") -> list[int]:
    assert result is not None
    return sorted(result[0]["model"][table][0].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", [TIMESTAMP, STEP, CUSTOMIZED, (TIMESTAMP, LFU), (LFU, TIMESTAMP)])
def test_c26_a_call_finds_what_was_touched_since_the_call_before(strategy: Any, dtype: torch.dtype) -> None:
    module = make_module([options(score_strategy=strategy, embedding_dtype=dtype)])

    def step(*ids: int) -> None:
        if strategy is CUSTOMIZED:
            module.set_score({"a": module.get_score()["a"] + 1})
        module(*bag_per_id(ids)).sum().backward()

    step(1, 2, -3)
    first = incremental_dump(module, 0)
    assert first is not None and touched(first) == [-3, 1, 2]
    step(2, 4)
    step(5)
    second = incremental_dump(module, first[1])
    # The threshold of CUSTOMIZED is the score last set, which the ids of before had.
    assert second is not None and touched(second) == ([-3, 1, 2, 4, 5] if strategy is CUSTOMIZED else [2, 4, 5])
    ids, weights = second[0]["model"]["a"]
    assert weights.dtype == dtype and weights.device.type == "cpu"
    for key, row in zip(ids.tolist(), weights):
        assert torch.equal(row.float(), row_of(module, "a", key)[0])
    module.eval()(*bag_per_id([1, 2]))
    module.train()
    assert touched(incremental_dump(module, second[1])) == ([5] if strategy is CUSTOMIZED else [])
    for name, following in second[1]["model"].items():
        assert name == "a" and following >= first[1]["model"]["a"]


def test_c26_lfu_thresholds_are_counts() -> None:
    module = make_module([options(score_strategy=LFU)])
    module(*bag_per_id([1, 2, 2, 3, 3, 3])).sum().backward()
    assert touched(incremental_dump(module, 2)) == [2, 3]
    assert touched(incremental_dump(module, 3)) == [3]
    assert incremental_dump(module, 3)[1] == {"model": {"a": 1}}  # type: ignore[index]


def test_c26_thresholds_by_table_and_names_that_are_not_there() -> None:
    module = make_module([options(), options()])
    module(*bag_per_id([1, 2])).sum().backward()
    rows, following = incremental_dump(module, {"model": {"b": 0}})  # type: ignore[misc]
    assert rows.keys() == {"model"} and rows["model"].keys() == {"b"} and following["model"].keys() == {"b"}
    with pytest.warns(UserWarning, match="'model/z', which the model does not have"):
        incremental_dump(module, {"model": {"z": 0}})
    with pytest.warns(UserWarning, match="'elsewhere', which"):
        incremental_dump(module, {"elsewhere": {"a": 0}})
    for bad in ("1", 1.5, True, -1, {"model": 3}, {"model": {"a": "x"}}):
        assert not is_valid_score_threshold(bad)
        with pytest.raises(ValueError, match="score_threshold must be an int >= 0, or map"):
            incremental_dump(module, bad)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no dynamic tables"):
        assert incremental_dump(torch.nn.Linear(1, 1), 0) is None
    ids, weights = module.incremental_dump({"a": 0})[0]["a"]
    assert ids.tolist() == [1] and weights.shape == (1, 4)


def test_c26_a_module_begins_with_all_rows_of_all_tables() -> None:
    module = make_module([options(score_strategy=strategy) for strategy in (TIMESTAMP, LFU)])
    module(*batch([1, 2], [2, 3, 3])).sum().backward()
    rows, following = module.incremental_dump()
    assert {name: sorted(ids.tolist()) for name, (ids, _) in rows.items()} == {"a": [1, 2], "b": [2, 3]}
    module(*batch([4], [3])).sum().backward()
    rows, _ = module.incremental_dump(following)
    assert rows["a"][0].tolist() == [4]
    # No thresholds are something else than thresholds of no table.
    assert module.incremental_dump({}) == ({}, {})


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = make_module([options(score_strategy=CUSTOMIZED), options(score_strategy=LFU)])
        self.second = make_module([options(score_strategy=CUSTOMIZED)])


def test_c10_scores_of_a_model_are_set_by_path_or_name() -> None:
    model = Model()
    set_score(model, scores=2)
    set_score(model, table_score=3)
    assert get_score(model) == {"model.first": {"a": 3, "b": 1}, "model.second": {"a": 3}}
    set_score(model, {"model.first": {"a": 5}, "second": {"a": 6}})
    assert get_score(model) == {"model.first": {"a": 5, "b": 1}, "model.second": {"a": 6}}
    with pytest.raises(ValueError, match=r"collection 'third' is unknown.*model.first"):
        set_score(model, {"third": {"a": 5}})
    with pytest.raises(ValueError, match="set_score needs score_strategy CUSTOMIZED"):
        set_score(model, {"first": {"b": 5}})
    with pytest.raises(ValueError, match="no table of the model has"):
        set_score(make_module(), 5)
    with pytest.raises(TypeError, match="must be an int"):
        set_score(model, "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scores of collection 'model.first' must map tables to ints, got 5"):
        set_score(model, {"model.first": 5})  # type: ignore[dict-item]


def gather(rank: int, world_size: int) -> tuple[list[int], list[int], bool]:
    from dynamicemb.checkpoint import rows_since as incremental

    incremental._GATHER_BYTES = 64
    module = make_module([options(capacity=256)])
    module(*bag_per_id(range(rank, 50, world_size) if rank != 1 else [])).sum().backward()
    rows, following = incremental_dump(module, 0, pg=dist.group.WORLD)  # type: ignore[misc]
    ids, weights = rows["model"]["a"]
    mine = dict(zip(ids.tolist(), weights))
    own = incremental_dump(module, 0)[0]["model"]["a"]  # type: ignore[index]
    same = all(torch.equal(mine[key], row) for key, row in zip(own[0].tolist(), own[1]))
    return ids.tolist(), own[0].tolist(), same


@pytest.mark.distributed
def test_c26_ranks_put_their_rows_together(ranks: RankPool) -> None:  # noqa: F811
    results = ranks.run(3, gather)
    union = [i for _, own, _ in results for i in own]
    assert all(ids == union and same for ids, _, same in results)
    assert sorted(union) == sorted({*range(0, 50, 3), *range(2, 50, 3)})


def disagree(rank: int, world_size: int) -> list[str]:
    """Call with arguments that fit on one rank only; return the errors."""
    module, group = make_module([options(), options()]), dist.group.WORLD
    module(*bag_per_id([rank, rank])).sum().backward()
    calls = (
        # Rows of "b" would pass for rows of "a".
        lambda: incremental_dump(module, {"model": {"ab"[rank]: 0}}, pg=group),
        lambda: incremental_dump(module, -rank, pg=group),
        lambda: incremental_dump(module if rank == 0 else torch.nn.Linear(1, 1), 0, pg=group),
    )
    found = []
    for call in calls:
        try:
            call()
        except (DynamicEmbError, ValueError) as error:
            found.append(str(error))
    # The group can be used after it.
    rows, _ = incremental_dump(module, 0, pg=group)  # type: ignore[misc]
    assert rows["model"]["a"][0].tolist() == [0, 1]
    return found


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:model has no dynamic tables")
def test_c26_ranks_that_disagree_raise_on_all(ranks: RankPool) -> None:  # noqa: F811
    for tables, threshold, model in ranks.run(2, disagree):
        assert re.search(r"ranks disagree about the tables: \[\[\('model', 'a', 4.*\[\('model', 'b', 4", tables)
        assert "score_threshold must be an int >= 0, or map" in threshold and "got -1" in threshold
        assert "ranks disagree about the tables" in model
