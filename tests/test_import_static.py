"""Dynamic tables that begin with what static ones have learnt, in one process."""

from typing import Any

import pytest

from dynamicemb import import_static
from tests.ranks import RankPool, ranks  # noqa: F401
from tests.static_model import NUM_IDS, Kind, assert_equal, build, train

KINDS = [
    Kind("EXACT_SGD"),
    Kind("EXACT_ADAGRAD", bags=("row_wise", "table_wise", "column_wise"), sequences=("row_wise", "table_wise")),
    Kind("EXACT_ROWWISE_ADAGRAD", bags=("row_wise", "table_wise"), sequences=("row_wise", "table_wise")),
]


def goes_on(rank: int, world_size: int, kind: Kind) -> dict[str, Any]:
    static = build(kind, world_size, dynamic=False)
    train(static, kind, rank, world_size, range(3))
    dynamic = build(kind, world_size, dynamic=True)
    report = import_static(dynamic, static.state_dict(), static.fused_optimizer.state_dict())
    found = train(dynamic, kind, rank, world_size, range(3, 8))
    assert_equal(found, train(static, kind, rank, world_size, range(3, 8)))
    return report


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.optimizer)
def test_training_goes_on_as_if_the_tables_had_not_changed(ranks: RankPool, kind: Kind) -> None:  # noqa: F811
    (report,) = ranks.run(1, goes_on, kind)
    assert sorted(report) == ["model.bags", "model.sequences"]
    for path, tables in report.items():
        assert len(tables) == len(kind.bags if path == "model.bags" else kind.sequences)
        for name, of_table in tables.items():
            part = "embedding_bags" if path == "model.bags" else "embeddings"
            assert of_table.source == f"{path.removeprefix('model.')}.{part}.{name}.weight"
            assert (of_table.num_rows, of_table.num_lost, of_table.num_without_id) == (NUM_IDS, 0, 0)
            assert of_table.has_state == (kind.optimizer != "EXACT_SGD")
