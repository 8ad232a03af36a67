"""Imports by several ranks: whatever they hold, however they disagree, and where one of them fails."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dynamicemb import DynamicEmbError, import_static
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.state_dict.shards import sharded
from tests.support.checkpoints import records
from tests.support.ranks import RankError, RankPool, ranks  # noqa: F401
from tests.support.sharded_model import dynamic_modules
from tests.support.static_model import NUM_IDS, Kind, assert_equal, build, train

pytestmark = pytest.mark.distributed

ONE = Kind("EXACT_ADAGRAD", bags=("row_wise",), sequences=())
KEY = "bags.embedding_bags.bag0.weight"


def held(model: Any, name: str = "bag0") -> dict[int, tuple[bytes, bytes]]:
    (module,) = [m for m in dynamic_modules(model) if name in m.table_names]
    return {i: row[:2] for i, row in records(module, name).items()}


def whole(kind: Kind = ONE) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a state_dict of a table that is not sharded."""
    weights = torch.sin(torch.arange(NUM_IDS * kind.dim).reshape(NUM_IDS, kind.dim) * 1.3)
    return {KEY: weights}, {"state": {KEY: {"bag0.momentum1": weights.abs() + 1}}}


def expected(ids: torch.Tensor) -> dict[int, tuple[bytes, bytes]]:
    (weights,), (state,) = whole()[0].values(), whole()[1]["state"].values()
    pairs = zip(weights.numpy(), state["bag0.momentum1"].numpy(), strict=True)
    return {int(i): (w.tobytes(), s.tobytes()) for i, (w, s) in zip(ids, pairs, strict=True)}


def joined(parts: list[dict[int, Any]]) -> dict[int, Any]:
    found = {i: row for part in parts for i, row in part.items()}
    assert len(found) == sum(map(len, parts)), "an id is on two ranks"
    return found


# What ranks hold


def import_whole(rank: int, world_size: int, holders: list[int], ids: torch.Tensor | None) -> Any:
    dynamic = build(ONE, world_size, dynamic=True)
    weights, state = whole() if rank in holders else ({}, {})
    maps = None if ids is None else {"bag0": ids}
    report = import_static(dynamic, weights, state, id_maps=maps)["model.bags"]["bag0"]
    return report, held(dynamic)


@pytest.mark.parametrize("holders", [[0, 1, 2], [0], [2], [0, 2]])
def test_a_table_that_is_whole_on_some_ranks_reaches_all(
    ranks: RankPool,  # noqa: F811
    holders: list[int],
) -> None:
    ids = torch.cat([torch.tensor([-(2**63), -1, 2**63 - 1]), torch.arange(NUM_IDS - 3) ** 9])
    for given in (None, ids):
        parts = ranks.run(3, import_whole, holders, given)
        assert joined([rows for _, rows in parts]) == expected(torch.arange(NUM_IDS) if given is None else ids)
        assert all(report.num_rows == NUM_IDS and report == parts[0][0] for report, _ in parts)
        assert all(rows for _, rows in parts)


def import_uneven(rank: int, world_size: int, counts: list[int]) -> Any:
    (weights,), (state,) = whole()[0].values(), whole()[1]["state"].values()
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    shards = sharded(weights[own], counts, Ranks())
    moments = {"bag0.momentum1": sharded(state["bag0.momentum1"][own], counts, Ranks())}
    dynamic = build(ONE, world_size, dynamic=True)
    import_static(dynamic, {KEY: shards}, {"state": {KEY: moments}})
    return held(dynamic)


@pytest.mark.parametrize("counts", [[3, 0, 20], [19, 3, 1]])
def test_shards_of_any_size_are_put_in_their_places(ranks: RankPool, counts: list[int]) -> None:  # noqa: F811
    assert joined(ranks.run(3, import_uneven, counts)) == expected(torch.arange(NUM_IDS))


def import_shards_of_dtensor(rank: int, world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    (weights,), (state,) = whole()[0].values(), whole()[1]["state"].values()
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        dynamic = build(ONE, world_size, dynamic=True)
        values: dict[str, DTensor] = {KEY: distribute_tensor(weights, mesh, [placement])}
        moments = {"bag0.momentum1": distribute_tensor(state["bag0.momentum1"], mesh, [placement])}
        import_static(dynamic, values, {"state": {KEY: moments}})
        found.append(held(dynamic))
    return found


def test_dtensors_are_read_by_their_placement(ranks: RankPool) -> None:  # noqa: F811
    parts = ranks.run(2, import_shards_of_dtensor)
    for i in range(3):
        assert joined([part[i] for part in parts]) == expected(torch.arange(NUM_IDS))


def goes_on_from_dtensors(rank: int, world_size: int, folder: str) -> None:
    from torchrec.distributed.types import ShardingEnv

    kind = Kind("EXACT_ADAGRAD", bags=("row_wise", "table_wise", "column_wise"), sequences=("row_wise",))
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    env.output_dtensor = True
    env.device_mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    static = build(kind, world_size, dynamic=False, env=env)
    train(static, kind, rank, range(3))
    assert all(type(value).__name__ == "DTensor" for value in static.state_dict().values())
    states = {"model": static.state_dict(), "optim": static.fused_optimizer.state_dict()}
    dcp.save(states, checkpoint_id=folder)
    dynamic, from_folder = (build(kind, world_size, dynamic=True) for _ in range(2))
    import_static(dynamic, states["model"], states["optim"])
    import_static(from_folder, folder)
    went_on = train(static, kind, rank, range(3, 6))
    assert_equal(train(dynamic, kind, rank, range(3, 6)), went_on)
    assert_equal(train(from_folder, kind, rank, range(3, 6)), went_on)


def test_dtensors_of_torchrec_are_read_by_their_shards(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(2, goes_on_from_dtensors, str(tmp_path / "step"))


def column_state(rank: int, world_size: int, sharding: str, folder: str) -> Any:
    kind = Kind("EXACT_ROWWISE_ADAGRAD", bags=(sharding,), sequences=())
    static = build(kind, world_size, dynamic=False)
    train(static, kind, rank, range(3))
    (state,) = static.fused_optimizer.state_dict()["state"].values()
    shards = [(s.metadata.shard_offsets[0], s.tensor) for s in state["bag0.momentum1"].local_shards()]
    dynamic = build(kind, world_size, dynamic=True)
    import_static(dynamic, static.state_dict(), static.fused_optimizer.state_dict())
    dcp.save({"model": static.state_dict(), "optim": static.fused_optimizer.state_dict()}, checkpoint_id=folder)
    from_folder = build(kind, world_size, dynamic=True)
    import_static(from_folder, folder)
    assert held(from_folder) == held(dynamic)
    return shards, held(dynamic)


@pytest.mark.parametrize("sharding", ["column_wise", "grid_shard"])
def test_row_wise_state_of_column_shards_is_the_mean_of_the_whole_row(
    ranks: RankPool,  # noqa: F811
    sharding: str,
    tmp_path: Path,
) -> None:
    parts = ranks.run(2, column_state, sharding, str(tmp_path / "step"))
    flat = torch.full((2 * NUM_IDS,), torch.nan)
    for shards, _ in parts:
        for offset, values in shards:
            flat[offset : offset + values.numel()] = values
    mean = flat.view(2, NUM_IDS).mean(0)
    assert (mean > 0).any()
    rows = joined([rows for _, rows in parts])
    assert {i: row[1] for i, row in rows.items()} == {i: mean[i : i + 1].numpy().tobytes() for i in range(NUM_IDS)}


# Failures


def fails_together(rank: int, world_size: int, how: str) -> list[str]:
    """Return what went wrong, and in which state the tables are."""
    dynamic = build(ONE, world_size, dynamic=True)
    import_static(dynamic, *whole())
    weights, state = whole()
    options: dict[str, Any] = {}
    if how == "missing":
        weights, state = {}, {}
    elif how == "dim" and rank == 1:
        weights = {KEY: torch.zeros(NUM_IDS, 3)}
    elif how == "map":
        options["id_maps"] = {"bag0": torch.arange(NUM_IDS) + rank}
    elif how == "map of one" and rank == 1:
        options["id_maps"] = {"bag0": torch.arange(NUM_IDS)}
    elif how == "optimizer" and rank == 1:
        state = False  # type: ignore[assignment]
    elif how == "path" and rank == 1:
        weights = "/nowhere"  # type: ignore[assignment]
    elif how == "write" and rank == 1:
        (module,) = dynamic_modules(dynamic)
        original = module.tables.kernels.write_rows

        def fail(*args: Any) -> None:
            raise OSError("rank 1 cannot write")

        module.tables.kernels.write_rows = fail
    try:
        import_static(dynamic, weights, state, **options)
    except Exception as error:
        return [type(error).__name__, str(error), str(len(held(dynamic)))]
    finally:
        if how == "write" and rank == 1:
            module.tables.kernels.write_rows = original
    return ["nothing"]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("missing", "ValueError", "no static table for model.bags/bag0"),
        ("dim", "ValueError", "the ranks disagree about the size of"),
        ("map", "ValueError", "the ranks gave table model.bags/bag0 different ids"),
        ("map of one", "ValueError", "the ranks name different tables"),
        ("optimizer", "DynamicEmbError", "the ranks disagree"),
        ("path", "FileNotFoundError", "nothing at '/nowhere'"),
        ("write", "OSError", "rank 1 cannot write"),
    ],
)
def test_an_error_of_one_rank_is_an_error_of_all(
    ranks: RankPool,  # noqa: F811
    how: str,
    error: str,
    message: str,
) -> None:
    for found in ranks.run(2, fails_together, how):
        assert found[0] == error and message in found[1], found
        # Refused before the table changes, or empty afterwards.
        assert (int(found[2]) == 0) == (how == "write"), found


def import_alone(rank: int, world_size: int) -> None:
    static = build(ONE, world_size, dynamic=False)
    values = static.state_dict()
    if rank == 1:
        values = {}
    import_static(build(ONE, world_size, dynamic=True), values, False)


def test_shards_of_some_ranks_are_refused(ranks: RankPool) -> None:  # noqa: F811
    with pytest.raises(RankError, match="do not make up its 23 x 8 elements") as caught:
        ranks.run(2, import_alone)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not issubclass(ValueError, DynamicEmbError)
