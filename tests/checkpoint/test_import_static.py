"""Dynamic tables that begin with what static ones have learnt: on several ranks, and from folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dynamicemb import import_static
from tests.support.checkpoints import records
from tests.support.ranks import GpuRanks, RankPool, gpu_ranks, ranks  # noqa: F401
from tests.support.sharded_model import dynamic_modules
from tests.support.static_model import NUM_IDS, Kind, assert_equal, build, train

pytestmark = pytest.mark.distributed

KINDS = [
    Kind("EXACT_SGD", bags=("row_wise", "table_wise", "column_wise", "grid_shard", "data_parallel")),
    Kind("EXACT_ADAGRAD", bags=("row_wise", "table_wise", "column_wise"), sequences=("row_wise", "column_wise")),
    Kind("EXACT_ADAGRAD", bags=("grid_shard", "table_row_wise"), sequences=("table_wise",)),
    Kind("EXACT_ROWWISE_ADAGRAD", bags=("row_wise", "table_wise"), sequences=("row_wise", "table_wise")),
]


def kind_id(kind: Kind) -> str:
    return f"{kind.optimizer}-{kind.bags[0]}"


def trained(rank: int, world_size: int, kind: Kind) -> Any:
    static = build(kind, world_size, dynamic=False)
    train(static, kind, rank, range(3))
    return static


def goes_on(
    rank: int, world_size: int, kind: Kind, options: tuple[tuple[str, Any], ...] = (), step: int | None = None
) -> dict[str, Any]:
    static = trained(rank, world_size, kind)
    dynamic = build(Kind(**{**kind.__dict__, "options": options}), world_size, dynamic=True)
    train(dynamic, kind, rank, range(40, 42))
    with pytest.MonkeyPatch.context() as patch:
        # Many blocks, of which the last ones are not full.
        patch.setattr("dynamicemb.checkpoint.static.stream._BLOCK_ROWS", 5)
        report = import_static(dynamic, static.state_dict(), static.fused_optimizer.state_dict(), step=step)
    found = train(dynamic, kind, rank, range(3, 8))
    # FBGEMM's kernel of Adam computes powers of the betas in another way: 2e-6 after five steps on an H200.
    assert_equal(found, train(static, kind, rank, range(3, 8)), 5e-6 if kind.optimizer == "ADAM" else 1e-6)
    return report


GPU_KINDS = [
    Kind("EXACT_SGD", bags=("row_wise", "table_wise", "data_parallel"), device="cuda"),
    Kind("EXACT_ADAGRAD", bags=("row_wise", "column_wise"), sequences=("row_wise", "table_wise"), device="cuda"),
    Kind("EXACT_ROWWISE_ADAGRAD", bags=("row_wise", "table_wise"), sequences=("row_wise",), device="cuda"),
    Kind("ADAM", bags=("row_wise", "table_wise"), sequences=("row_wise",), device="cuda"),
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", GPU_KINDS, ids=lambda kind: kind.optimizer)
def test_training_goes_on_on_gpus(gpu_ranks: GpuRanks, kind: Kind, world_size: int) -> None:  # noqa: F811
    step = 3 if kind.optimizer == "ADAM" else None
    for report in gpu_ranks.run(world_size, goes_on, kind, (), step):
        assert all(of_table.num_rows == NUM_IDS for tables in report.values() for of_table in tables.values())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_training_goes_on_as_if_the_tables_had_not_changed(
    ranks: RankPool,  # noqa: F811
    kind: Kind,
    world_size: int,
) -> None:
    reports = ranks.run(world_size, goes_on, kind)
    assert all(report == reports[0] for report in reports)
    assert sorted(reports[0]) == ["model.bags", "model.sequences"]
    for path, tables in reports[0].items():
        assert len(tables) == len(kind.bags if path == "model.bags" else kind.sequences)
        for name, of_table in tables.items():
            part = "embedding_bags" if path == "model.bags" else "embeddings"
            assert of_table.source == f"{path.removeprefix('model.')}.{part}.{name}.weight"
            assert (of_table.num_rows, of_table.num_lost, of_table.num_without_id) == (NUM_IDS, 0, 0)
            assert of_table.has_state == (kind.optimizer != "EXACT_SGD")


@pytest.mark.parametrize("dist_type", ["hash_roundrobin", "continuous"])
def test_rows_find_the_owner_of_any_routing(ranks: RankPool, dist_type: str) -> None:  # noqa: F811
    ranks.run(2, goes_on, KINDS[1], (("dist_type", dist_type),))


def goes_on_with_other_ids(rank: int, world_size: int, kind: Kind, ids: torch.Tensor) -> None:
    static = trained(rank, world_size, kind)
    dynamic = build(kind, world_size, dynamic=True)
    maps = {f"bag{i}": ids for i in range(len(kind.bags))} | {"model.sequences.seq0": ids, "seq1": ids}
    import_static(dynamic, static.state_dict(), static.fused_optimizer.state_dict(), id_maps=maps)
    found = train(dynamic, kind, rank, range(3, 8), ids)
    assert_equal(found, train(static, kind, rank, range(3, 8)))


def test_training_goes_on_with_the_ids_of_a_map(ranks: RankPool) -> None:  # noqa: F811
    ids = torch.cat([torch.tensor([2**63 - 1, -(2**63), -1]), torch.arange(NUM_IDS - 3) * 7919**3 - 2**50])
    ranks.run(2, goes_on_with_other_ids, KINDS[1], ids)


# Folders


def save(rank: int, world_size: int, kind: Kind, folder: str, names: tuple[str, str]) -> list[dict[str, torch.Tensor]]:
    static = trained(rank, world_size, kind)
    model: Any = static.state_dict()
    for name in reversed(names[0].split(".")):
        model = {name: model}
    dcp.save({**model, names[1]: static.fused_optimizer.state_dict(), "step": 3}, checkpoint_id=folder)
    return train(static, kind, rank, range(3, 8))


def load(rank: int, world_size: int, kind: Kind, folder: str) -> Any:
    dynamic = build(kind, world_size, dynamic=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynamicemb.checkpoint.static.stream._BLOCK_ROWS", 5)
        report = import_static(dynamic, folder)
    held = {name: records(m, name) for m in dynamic_modules(dynamic) for name in m.table_names}
    return report, held, train(dynamic, kind, rank, range(3, 8))


def rows_and_state(parts: list[Any]) -> dict[str, dict[int, tuple[bytes, bytes]]]:
    found: dict[str, dict[int, tuple[bytes, bytes]]] = {}
    for _, held, _ in parts:
        for name, rows in held.items():
            of_table = found.setdefault(name, {})
            assert not set(of_table) & set(rows), "an id is on two ranks"
            of_table.update({i: row[:2] for i, row in rows.items()})
    return found


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[3]], ids=kind_id)
def test_a_folder_of_any_world_size_is_read_by_any(
    ranks: RankPool,  # noqa: F811
    kind: Kind,
    writers: int,
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "step3")
    names = [("model", "optim"), ("app.model", "optimizer")][writers - 1]
    went_on = ranks.run(writers, save, kind, folder, names)
    found = {readers: ranks.run(readers, load, kind, folder) for readers in (1, 2)}
    for rank in range(writers):
        assert_equal(found[writers][rank][2], went_on[rank])
    assert rows_and_state(found[1]) == rows_and_state(found[2])
    sizes = {name: len(rows) for name, rows in rows_and_state(found[1]).items()}
    assert set(sizes.values()) == {NUM_IDS} and len(sizes) == len(kind.bags) + len(kind.sequences)
    source = found[2][0][0]["model.bags"]["bag0"].source
    assert source == f"{names[0]}.bags.embedding_bags.bag0.weight"
