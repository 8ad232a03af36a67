"""Ranks train the same model as one process: rows, outputs, scores, whatever is shared, empty or extreme."""

from typing import Any

import pytest
import torch

from dynamicemb.table.ownership import owner_of
from tests.ranks import RankPool, ranks  # noqa: F401
from tests.sharded_model import STEPS, Case, Reference, Table, initial_rows, train

pytestmark = pytest.mark.distributed

# fp32 sums in another order than the float64 reference.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

A = Table("a", ("f0", "f1"))
B = Table("b", ("f2",), dist_type="hash_roundrobin", score="LFU")
C = Table("c", ("f3", "f0"), dist_type="continuous", num_embeddings=7)
MEAN = Table("m", ("f4",), dim=8, pooling="mean")
STATIC_RW = Table("s_rw", ("g0",), sharding="row_wise", num_embeddings=12)
STATIC_TW = Table("s_tw", ("g1",), sharding="table_wise", num_embeddings=12)
STATIC_DP = Table("s_dp", ("g2",), sharding="data_parallel", num_embeddings=12)

CASES = {
    "ec": Case((A, B, C), pooled=False),
    "ec-dedup": Case((A, B, C), pooled=False, dedup=True),
    # Not data-parallel: FBGEMM's dense sequence lookup is broken on CPUs, without dynamic tables too.
    "ec-mixed": Case((A, STATIC_RW, B, STATIC_TW), pooled=False),
    "ec-mixed-dedup": Case((STATIC_TW, A, STATIC_RW, B), pooled=False, dedup=True),
    "ec-int32": Case((A, B), pooled=False, dedup=True, id_dtype=torch.int32),
    "ebc": Case((A, B, C), pooled=True),
    "ebc-mean": Case((A, MEAN), pooled=True),
    "ebc-weighted": Case((A, B), pooled=True, weighted=True),
    "ebc-weighted-mean": Case((MEAN, A), pooled=True, weighted=True),
    "ebc-mixed": Case((A, STATIC_RW, MEAN, STATIC_TW, STATIC_DP), pooled=True),
}
UNEVEN = {"batch_sizes": (4, 0, 3)}
EMPTY = {"batch_sizes": (0,)}


def check(pool: RankPool, world_size: int, case: Case) -> None:
    results = pool.run(world_size, train, case)
    reference = Reference(case, world_size, initial_rows(case, world_size))
    for step in range(STEPS):
        for rank, expected in enumerate(reference.step(step)):
            got = results[rank]["outputs"][step]
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(got[name].double(), value.detach(), **TOLERANCE)
    for table in case.tables:
        if table.sharding is None:
            check_table(table, results, reference)


def check_table(table: Table, results: list[dict[str, Any]], reference: Reference) -> None:
    """Every id is on its own rank only, with the row and the count of the reference."""
    seen = {}
    for rank, result in enumerate(results):
        rows = result["rows"][table.name]
        ids = torch.tensor(list(rows), dtype=torch.int64)
        owners = owner_of(ids, len(results), table.dist_type, table.num_embeddings)
        assert bool((owners == rank).all())
        seen.update(rows)
        if table.score == "LFU":
            counts = reference.counts[table.name]
            assert result["scores"][table.name] == {i: counts[i] for i in rows}
    assert seen.keys() == reference.ids[table.name].keys()
    for i, row in reference.ids[table.name].items():
        torch.testing.assert_close(seen[i].double(), reference.weights[table.name][row].detach(), **TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_c02_c10_c17_ranks_equal_one_process(ranks: RankPool, case: Case, world_size: int) -> None:  # noqa: F811
    check(ranks, world_size, case)
