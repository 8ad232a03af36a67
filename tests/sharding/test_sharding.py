"""Ranks train the same model as one process: rows, outputs, scores, whatever is shared, empty or extreme."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.sharding.exchange.dedup import (
    Deduplication,
    pack_counts,
    unique_per_table,
    unique_per_table_by_sorting,
    unpack_counts,
)
from tests.support.placements import owner_of
from tests.support.ranks import GpuRanks, RankPool, ranks  # noqa: F401
from tests.support.sharded_model import STEPS, Case, Reference, Table, initial_rows, train

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


def check(pool: RankPool | GpuRanks, world_size: int, case: Case) -> None:
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


@pytest.mark.parametrize("name", ["ec", "ec-mixed-dedup", "ebc-mean", "ebc-weighted", "ebc-mixed"])
@pytest.mark.parametrize("sizes", [(4, 0, 3), (0, 2), (0,)], ids=["uneven", "half-empty", "all-empty"])
def test_c03_empty_ranks_never_hang(ranks: RankPool, name: str, sizes: tuple[int, ...]) -> None:  # noqa: F811
    for world_size in (1, 2, 3):
        check(ranks, world_size, replace(CASES[name], batch_sizes=sizes))


@pytest.mark.parametrize("name", ["ec-dedup", "ebc"])
@pytest.mark.parametrize("empty", [("f0",), ("f2",), ("f0", "f1", "f2", "f3")])
def test_c03_empty_features(ranks: RankPool, name: str, empty: tuple[str, ...]) -> None:  # noqa: F811
    check(ranks, 2, replace(CASES[name], empty_features=empty))


def test_c10_counts_stay_exact_beyond_float32() -> None:
    counts = torch.tensor([1, 2**24 + 1, 2**53 + 1, 2**62 + 3])
    assert torch.equal(unpack_counts(pack_counts(counts)), counts)


def test_dedup_example_of_the_docstring() -> None:
    batch = KeyedJaggedTensor(["x", "y"], torch.tensor([7, 5, 7, 7]), lengths=torch.tensor([2, 0, 1, 1]), stride=2)
    unique, reverse = Deduplication([2], with_counts=True, device=torch.device("cpu"))(batch)
    assert unique.values().tolist() == [5, 7]
    assert unique.lengths().tolist() == [1, 1, 0, 0]
    assert unpack_counts(unique.weights()).tolist() == [1, 3]
    assert reverse.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("batch_size", [0, 1, 5])
@pytest.mark.parametrize("features_per_table", [[1], [2, 1, 3]])
def test_deduplicated_batches_spread_evenly(features_per_table: list[int], batch_size: int) -> None:
    num_features = sum(features_per_table)
    lengths = torch.randint(0, 4, (num_features * batch_size,), generator=torch.Generator().manual_seed(batch_size))
    ids = torch.arange(int(lengths.sum())) % 7
    keys = [f"f{f}" for f in range(num_features)]
    batch = KeyedJaggedTensor(keys, ids, lengths=lengths, stride=batch_size)
    unique, _ = Deduplication(features_per_table, False, torch.device("cpu"))(batch)
    per_key = unique.lengths().view(num_features, batch_size).sum(1).tolist()
    assert unique.length_per_key() == per_key and sum(per_key) == unique.values().numel()
    for bags in torch.split(unique.lengths(), [number * batch_size for number in features_per_table]):
        assert not bags.numel() or bags.max() - bags.min() <= 1
        assert bags.tolist() == sorted(bags.tolist(), reverse=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ids_per_table", [[0], [1], [63], [0, 0], [100, 0, 2000], [5, 1, 1, 0, 63]])
@pytest.mark.parametrize("num_values", [1, 10, 10**9])
def test_both_ways_to_find_distinct_ids_agree(ids_per_table: list[int], num_values: int, dtype: torch.dtype) -> None:
    check_unique(ids_per_table, num_values, dtype, "cpu")


def check_unique(ids_per_table: list[int], num_values: int, dtype: torch.dtype, device: str) -> None:
    total = sum(ids_per_table)
    ids = torch.randint(-num_values, num_values, (total,), generator=torch.Generator().manual_seed(total))
    # The same ids in all tables, and the ends of the range.
    ends = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max])
    ids = torch.where(ids % 7 == 0, ends[ids % 2], ids).to(dtype)
    expected = unique_per_table(ids, ids_per_table)
    tables = torch.repeat_interleave(torch.arange(len(ids_per_table)), torch.tensor(ids_per_table)).to(torch.int16)
    found = unique_per_table_by_sorting(ids.to(device), tables.to(device), len(ids_per_table))
    found = found.cut(expected.ids.numel())
    for name, value in vars(expected).items():
        assert torch.equal(getattr(found, name).cpu(), value), name


def test_c17_static_and_dynamic_mean_are_both_divided_once(ranks: RankPool) -> None:  # noqa: F811
    static = Table("s_mean", ("g0",), pooling="mean", sharding="row_wise", num_embeddings=12)
    # TorchRec divides by (count + 1e-6).
    for world_size in (1, 2):
        check(ranks, world_size, Case((A, static, MEAN), pooled=True))
