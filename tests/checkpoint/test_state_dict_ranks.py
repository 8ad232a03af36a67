"""Rows in ``state_dict()`` over several ranks, with torch.distributed.checkpoint and torch.save."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamicemb import DynamicEmbScoreStrategy
from tests.support.checkpoints import Records, shift_between, without_scores
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.state_dict_model import Kind, batch, build, counted, held, joined, joined_tables, others, train

pytestmark = [
    pytest.mark.distributed,
    # DCP's own, and TorchRec's.
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]

LFU = DynamicEmbScoreStrategy.LFU


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
    from tests.support.placements import owner_of

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
def test_c29_any_world_size_and_routing_loads_any_other(ranks: RankPool, tmp_path: Path, move: str) -> None:  # noqa: F811
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
    # Learning rates of static tables are TorchRec's business.
    rate = 0.5 if kind.static == "data_parallel" else 0.1
    resumed = build(replace(kind, seed=5, learning_rate=rate), world_size)
    train(resumed, kind, rank, range(50, 52))
    load(resumed, path)
    rates = [group["lr"] for group in resumed.fused_optimizer.param_groups]
    assert rates == [group["lr"] for group in model.fused_optimizer.param_groups] and 0.1 in rates
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
def test_c29_training_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path, score: str) -> None:  # noqa: F811
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


def shared_module(rank: int, world_size: int, path: str, kind: str) -> Any:
    """Save or load a module of tables that stands alone, every rank with the ids that it owns."""
    import torch.distributed.checkpoint as dcp

    from dynamicemb import DynamicEmbLoadPlanner
    from tests.support.checkpoints import records
    from tests.support.lookups import EXTREME, bag_per_id, make_module, options
    from tests.support.placements import owner_of

    tables = make_module([options(score_strategy=LFU, capacity=256)], optimizer="adam")
    if kind != "load":
        ids = torch.tensor([*EXTREME, *range(40)])
        mine = ids[owner_of(ids, world_size) == rank]
        if kind == "one":
            # The ranks before and after have no rows.
            mine = mine[mine == 1]
        tables(*bag_per_id(mine.tolist())).pow(2).sum().backward()
        dcp.save({"m": tables.state_dict()}, checkpoint_id=path)
    else:
        state = {"m": tables.state_dict()}
        dcp.load(state, checkpoint_id=path, planner=DynamicEmbLoadPlanner())
        tables.load_state_dict(state["m"])
    return records(tables, "a")


@pytest.mark.parametrize(("kind", "first", "second"), [("save", 2, 3), ("save", 3, 1), ("one", 2, 3), ("one", 3, 2)])
def test_c29_a_module_of_tables_alone(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    kind: str,
    first: int,
    second: int,
) -> None:
    before = joined(ranks.run(first, shared_module, str(tmp_path / "c"), kind))
    after = joined(ranks.run(second, shared_module, str(tmp_path / "c"), "load"))
    assert after == before and len(before) == (1 if kind == "one" else 50)


def misplaced(rank: int, world_size: int) -> None:
    from dynamicemb.errors import DynamicEmbError
    from tests.support.lookups import bag_per_id, make_module, options

    tables = make_module([options()])
    if rank == 1:
        tables(*bag_per_id([0])).sum().backward()
    with pytest.raises(DynamicEmbError, match="holds ids on rank 1 that 'roundrobin' routing over 2 ranks gives to"):
        tables.state_dict()
    with pytest.raises(ValueError, match="'continuous' over 2 ranks needs the table's num_embeddings"):
        make_module([options(dist_type="continuous")]).state_dict()


def test_ids_where_no_lookup_would_find_them_are_an_error(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, misplaced)


def in_small_batches(rank: int, world_size: int, kind: Kind, path: str) -> tuple[int, Any]:
    from dynamicemb.checkpoint.state_dict import exchange as state_dict_exchange

    sizes = []
    exchanged = state_dict_exchange._exchanged

    def noted(columns: list[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        sizes.append(len(columns[0]))
        return exchanged(columns, *arguments)

    state_dict_exchange._exchanged, before = noted, exchanged
    state_dict_exchange._BATCH_BYTES, bound = 1000, state_dict_exchange._BATCH_BYTES
    try:
        told = load_and_tell(rank, world_size, kind, path)
    finally:
        state_dict_exchange._exchanged, state_dict_exchange._BATCH_BYTES = before, bound
    assert max(sizes) <= 1000 // (16 * world_size)
    return len(sizes), told


def test_rows_travel_in_bounded_batches(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    kind = Kind(admit=2)
    before = ranks.run(2, train_and_save, kind, str(tmp_path / "c"))
    after = ranks.run(3, in_small_batches, kind, str(tmp_path / "c"))
    assert {number for number, _ in after} == {after[0][0]} and after[0][0] > 5
    check_same(before, [told for _, told in after], kind)


def one_rank_fails(rank: int, world_size: int, kind: Kind) -> None:
    from dynamicemb.errors import DynamicEmbError
    from dynamicemb.table.importing.rows import RowImport

    model = build(kind, world_size)
    train(model, kind, rank, range(2))
    state, before = model.state_dict(), held(model)
    damaged = dict(state)
    if rank == 1:
        damaged["bags.embedding_bags.users.dynamic_table"] = "{"
    with pytest.raises(DynamicEmbError, match="table users: entry 'dynamic_table' of the state_dict is damaged"):
        model.load_state_dict(damaged)
    partial = {name: value for name, value in state.items() if rank == 0 or ".things." not in name}
    # Warns on rank 1.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DynamicEmbError, match="the ranks disagree about the tables of dynamic tables"):
            model.load_state_dict(partial)
    assert held(model)["things"] == before["things"]
    add, calls = RowImport.add, []

    def fail(self: RowImport, *arguments: Any) -> None:
        calls.append(rank)
        if rank == 1:
            raise MemoryError("rank 1 has no memory")
        add(self, *arguments)

    RowImport.add = fail
    try:
        with pytest.raises(MemoryError, match="rank 1 has no memory"):
            # DistributedModelParallel renames the entries of what it is given.
            model.load_state_dict(dict(state))
    finally:
        RowImport.add = add
    assert calls and held(model)["users"] == {}
    # The ranks still understand each other.
    model.load_state_dict(state)
    assert without_scores(held(model)["users"]) == without_scores(before["users"]) != {}


def test_an_error_of_one_rank_is_raised_on_all(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, one_rank_fails, Kind())


def without_copies(rank: int, world_size: int, kind: Kind) -> None:
    """Do everything in which TorchRec and torch ask for parts of a module's state."""
    import copy

    from dynamicemb import state_dict_without_rows
    from dynamicemb.checkpoint.state_dict import module as state_dict_module

    calls = []
    packing = state_dict_module.state_of_tables

    def noted(*arguments: Any) -> Any:
        calls.append(arguments)
        return packing(*arguments)

    state_dict_module.state_of_tables = noted
    try:
        model = build(kind, world_size)
        train(model, kind, rank, range(2))
        for collection in (model.module.bags, model.module.sequences):
            copy.deepcopy(collection.dynamic_embedding_modules)
            for lookup in collection._lookups:
                lookup.state_dict()
                getattr(lookup, "flush", list)()
        list(model.named_buffers()), list(model.named_parameters()), list(model.named_modules())
        model.fused_optimizer.state_dict()
        model.eval()(batch(0, rank, kind.device))
        model.train().init_data_parallel()
        with state_dict_without_rows():
            # Not a collective: one rank may ask alone.
            kept = model.state_dict() if rank == 0 else {}
        assert not [name for name in kept if ".dynamic_" in name]
        assert calls == []
        model.state_dict()
        assert len(calls) == 2
    finally:
        state_dict_module.state_of_tables = packing


def test_rows_are_copied_for_a_state_dict_and_for_nothing_else(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, without_copies, Kind())


def keys_of(rank: int, world_size: int, kind: Kind) -> tuple[set[str], set[str]]:
    model = build(kind, world_size)
    train(model, kind, rank, range(2))
    optimizer = model.fused_optimizer.state_dict()
    return {name for name in model.state_dict() if "dynamic_" in name}, set(optimizer["state"])


def test_optimizer_state_is_saved_once_with_the_rows(ranks: RankPool) -> None:  # noqa: F811
    kind = Kind(optimizer="EXACT_ROWWISE_ADAGRAD", static="row_wise", admit=2)
    for entries, optimizer in ranks.run(2, keys_of, kind):
        assert {"bags.embedding_bags.users.dynamic_state", "sequences.embeddings.things.dynamic_state"} < entries
        assert "sequences.embeddings.things.dynamic_counter_ids" in entries
        assert optimizer == {"bags.embedding_bags.static.weight"}


def default_planner(rank: int, world_size: int, kind: Kind, path: str) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.api import CheckpointException

    model = build(kind, world_size)
    for partial in (False, True):
        with pytest.raises(CheckpointException, match="Size mismatch"):
            load(model, path, DefaultLoadPlanner(allow_partial_load=partial))
    assert held(model) == {"users": {}, "things": {}}
    train(model, kind, rank, range(60, 61))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(model, path, None)
    # The same numbers of rows, on other ranks than they were.
    load(model, path)
    with_ours = held(model)
    load(model, path, None)
    for name, found in held(model).items():
        assert without_scores(found) == without_scores(with_ours[name]) != {}


def test_the_default_planner_raises_or_is_right(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    kind = Kind()
    ranks.run(2, train_and_save, kind, str(tmp_path / "c"))
    ranks.run(2, default_planner, kind, str(tmp_path / "c"))
    ranks.run(3, default_planner, kind, str(tmp_path / "c"))


def helpers(rank: int, world_size: int, kind: Kind, path: str) -> None:
    """Use what torch offers around state_dict, on the module under DistributedModelParallel."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    from dynamicemb import DynamicEmbLoadPlanner

    model, copy = (build(replace(kind, seed=seed), world_size) for seed in (1, 2))
    train(model, kind, rank, range(3))
    before = held(model)
    state = get_model_state_dict(model.module)
    set_model_state_dict(copy.module, state)
    assert {n: without_scores(f) for n, f in held(copy).items()} == {n: without_scores(f) for n, f in before.items()}
    # What stages tensors by itself; the default of torch cannot do it with any ShardedTensor.
    with pytest.raises(RuntimeError, match="not supported for ShardedTensor"):
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=path)
    # Of its own, for training goes on in the other one.
    group = dist.new_group(backend="gloo")
    writer = dcp.FileSystemWriter(path)
    future = dcp.async_save({"model": model.state_dict()}, storage_writer=writer, process_group=group)
    train(model, kind, rank, range(3, 5))
    future.result()
    dist.destroy_process_group(group)
    state = {"model": copy.state_dict()}
    dcp.load(state, checkpoint_id=path, planner=DynamicEmbLoadPlanner())
    copy.load_state_dict(state["model"])
    assert {n: without_scores(f) for n, f in held(copy).items()} == {n: without_scores(f) for n, f in before.items()}
    assert held(model) != before


def test_helpers_of_torch_around_state_dicts(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(2, helpers, Kind(), str(tmp_path / "c"), time_limit_s=100)


def gathered(rank: int, world_size: int, numbers: list[int]) -> None:
    """Let torch put the state_dict together on all ranks, which it can do where the parts are of the right sizes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from dynamicemb.errors import DynamicEmbError
    from tests.support.checkpoints import records
    from tests.support.lookups import bag_per_id, make_module, options

    tables, copy = make_module([options()]), make_module([options()])
    tables(*bag_per_id([rank + world_size * i for i in range(numbers[rank])])).sum().backward()
    whole = get_model_state_dict(tables, options=StateDictOptions(full_state_dict=True))
    assert type(whole["dynamic_tables.a.dynamic_ids"]) is torch.Tensor
    # Zeros in the midst, and ids lost, of 2, 3 and 2 rows.
    if numbers == [2, 3, 2]:
        with pytest.raises(DynamicEmbError, match=r"'dynamic_ids' .* are other ids than were saved.*full_state_dict"):
            copy.load_state_dict(whole)
    else:
        copy.load_state_dict(whole)
        assert without_scores(records(copy, "a")) == without_scores(records(tables, "a")) != {}


@pytest.mark.parametrize("numbers", [[3, 3, 3], [3, 3, 1], [2, 3, 2]])
def test_a_state_dict_that_torch_put_together_is_right_or_refused(ranks: RankPool, numbers: list[int]) -> None:  # noqa: F811
    ranks.run(3, gathered, numbers)


def missing(rank: int, world_size: int, kind: Kind) -> None:
    """Load what an earlier version of the package, or a model with static tables, left."""
    from dynamicemb import state_dict_without_rows

    model = build(kind, world_size)
    train(model, kind, rank, range(2))
    with state_dict_without_rows():
        state = model.state_dict()
    before = held(model)
    state["bags.embedding_bags.users.weight"] = torch.zeros(kind.num_embeddings, kind.dims[0])
    with pytest.warns(UserWarning, match=r"holds no rows of dynamic tables"):
        with pytest.raises(RuntimeError, match="Missing key.*users.dynamic_ids"):
            model.load_state_dict(dict(state))
    with pytest.warns(UserWarning) as caught:
        found = model.load_state_dict(state, strict=False)
    text = " ".join(str(warning.message) for warning in caught)
    assert "holds no rows of dynamic tables ['embedding_bags.users']" in text
    assert "ignores the weights of dynamic tables ['users']" in text
    assert len(found.missing_keys) == 10
    assert held(model) == before


def test_a_checkpoint_without_rows_is_an_error_or_a_warning(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, missing, Kind())
