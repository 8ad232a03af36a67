"""Rows in ``state_dict()`` over several ranks, with torch.distributed.checkpoint and torch.save."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import Records, shift_between, without_scores
from tests.ranks import GpuRanks, RankPool, gpu_ranks, ranks  # noqa: F401
from tests.state_dict_model import Kind, build, counted, held, joined, joined_tables, others, train

pytestmark = [
    pytest.mark.distributed,
    # DCP's own, and TorchRec's.
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]


def save(model: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}, checkpoint_id=path)


def load(model: Any, path: str, planner: Any = "ours") -> None:
    import torch.distributed.checkpoint as dcp

    from dynamicemb import DynamicEmbLoadPlanner

    state = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path, planner=DynamicEmbLoadPlanner() if planner == "ours" else planner)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optim"])


def train_and_save(rank: int, world_size: int, kind: Kind, path: str) -> tuple[dict[str, Records], Any, Any]:
    model = build(kind, world_size)
    train(model, kind, rank, range(4))
    save(model, path)
    return held(model), counted(model) if kind.admit else {}, others(model)


def load_and_tell(rank: int, world_size: int, kind: Kind, path: str) -> tuple[dict[str, Records], Any, Any]:
    model = build(kind, world_size)
    # What was there before goes.
    train(model, kind, rank, range(70, 72))
    load(model, path)
    for tables in (model.module.bags, model.module.sequences):
        for module in tables.dynamic_embedding_modules:
            module.tables.check_invariants()
            for t, name in enumerate(module.table_names):
                ids = module.export_scores(name, "cpu")[0]
                assert (tables_owners(module, t, ids, kind, world_size) == rank).all()
                report = tables.load_report[name]
                assert report.num_lost == report.num_repeated == report.num_counts_lost == 0
    return held(model), counted(model) if kind.admit else {}, others(model)


def tables_owners(module: Any, table: int, ids: torch.Tensor, kind: Kind, world_size: int) -> torch.Tensor:
    from dynamicemb.table.ownership import owner_of

    return owner_of(ids, world_size, kind.dist_type, kind.num_embeddings)


def check_same(before: list[Any], after: list[Any], kind: Kind) -> None:
    was, now = joined_tables([part[0] for part in before]), joined_tables([part[0] for part in after])
    for name, found in was.items():
        assert len(found) > 8 and any(i < 0 for i in found)
        assert without_scores(now[name]) == without_scores(found)
        columns = len(next(iter(found.values()))[2])
        strategies = kind.score.split("+") if name == "users" else ["TIMESTAMP"]
        for column in range(columns):
            shift = shift_between(found, now[name], column)
            assert shift == 0 or strategies[column] in ("TIMESTAMP", "NO_EVICTION")
    assert joined([part[1] for part in before]) == joined([part[1] for part in after])
    assert bool(before[0][1]) == bool(kind.admit)
    if kind.static == "data_parallel":
        assert after[0][2] == before[0][2]


# From so many ranks, to so many, with the routing before and after.
MOVES = {
    "2 to 3": (2, 3, "roundrobin", "roundrobin"),
    "2 to 1": (2, 1, "hash_roundrobin", "hash_roundrobin"),
    "3 to 2": (3, 2, "continuous", "continuous"),
    "1 to 2": (1, 2, "roundrobin", "hash_roundrobin"),
    "2 to 2": (2, 2, "continuous", "roundrobin"),
}


@pytest.mark.parametrize("move", MOVES)
def test_c23_any_world_size_and_routing_loads_any_other(ranks: RankPool, tmp_path: Path, move: str) -> None:  # noqa: F811
    first, second, routing, other = MOVES[move]
    kind = Kind(routing, admit=2)
    before = ranks.run(first, train_and_save, kind, str(tmp_path / "c"))
    after = ranks.run(second, load_and_tell, replace(kind, dist_type=other, seed=5), str(tmp_path / "c"))
    check_same(before, after, kind)


SCORES = ["TIMESTAMP", "STEP", "LFU", "CUSTOMIZED", "NO_EVICTION", "TIMESTAMP+LFU", "LFU+TIMESTAMP"]


def resume(rank: int, world_size: int, kind: Kind, path: str) -> None:
    """Save, load into another model; both train on alike."""
    model = build(kind, world_size)
    train(model, kind, rank, range(3))
    save(model, path)
    resumed = build(replace(kind, seed=5), world_size)
    train(resumed, kind, rank, range(50, 52))
    load(resumed, path)
    assert resumed.fused_optimizer.param_groups[0]["lr"] == 0.1
    further = range(3, 23)
    assert train(resumed, kind, rank, further) == train(model, kind, rank, further)
    assert others(resumed) == others(model)
    for name, found in held(model).items():
        again = held(resumed)[name]
        assert without_scores(again) == without_scores(found)
        if name == "users" and not {"TIMESTAMP", "NO_EVICTION"} & set(kind.score.split("+")):
            assert again == found
    if kind.admit:
        assert counted(resumed) == counted(model)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_c23_training_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path, score: str) -> None:  # noqa: F811
    users = {"init_capacity": 64, "bucket_capacity": 16} if score == "NO_EVICTION" else {}
    if "TIMESTAMP" in score:
        users = {"ttl": 3600.0}
    ranks.run(2, resume, Kind(score=score, admit=3 if score == "LFU" else 0, users=users), str(tmp_path / "c"))


@pytest.mark.parametrize("static", ["row_wise", "table_wise"])
def test_static_tables_beside_dynamic_ones_keep_their_weights_and_state(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    static: str,
) -> None:
    kind = Kind(optimizer="EXACT_ROWWISE_ADAGRAD", static=static)
    ranks.run(2, resume, kind, str(tmp_path / "c"))


def in_files(rank: int, world_size: int, kind: Kind, path: str, saves: bool) -> Any:
    model = build(kind, world_size)
    name = f"{path}.{rank}"
    if saves:
        train(model, kind, rank, range(3))
        torch.save(model.state_dict(), name)
        return held(model)
    try:
        state = torch.load(name if Path(name).exists() else f"{path}.0", weights_only=False)
    except RuntimeError as error:
        return str(error)
    model.load_state_dict(state)
    return held(model)


def test_torch_save_of_every_rank_loads_on_as_many_ranks_and_on_no_other_number(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
) -> None:
    kind, path = Kind(score="LFU"), str(tmp_path / "state")
    before = ranks.run(2, in_files, kind, path, True)
    after = ranks.run(2, in_files, replace(kind, seed=5), path, False)
    for was, now in zip(before, after, strict=True):
        assert now["users"] == was["users"] and without_scores(now["things"]) == without_scores(was["things"])
    assert "world size at save time was 2" in ranks.run(1, in_files, kind, path, False)[0]
    assert any("at save time was" in message for message in ranks.run(3, in_files, kind, path, False))


def test_what_one_rank_saved_whole_loads_on_several(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    kind, path = Kind(score="LFU"), str(tmp_path / "state")
    before = joined_tables(ranks.run(1, in_files, kind, path, True))
    after = joined_tables(ranks.run(3, in_files, kind, path, False))
    assert after["users"] == before["users"] and without_scores(after["things"]) == without_scores(before["things"])
