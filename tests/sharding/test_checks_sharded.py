"""``safe_check_mode`` across ranks: ERROR raises on all before any table has changed, WARNING warns where ids fail."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from dynamicemb.errors import InsertFailedError
from tests.support.lookups import messages
from tests.support.ranks import GpuRanks, RankPool, gpu_ranks, ranks  # noqa: F401
from tests.support.sharded_model import Case, Table, build, dynamic_modules, exported, loss_of, make_kjt, outputs_of

pytestmark = pytest.mark.distributed

# Two groups, for their scores differ: "a" is looked up before "b". Each rank has one bucket of each.
CAPACITY = 128
A = Table("a", ("f0",), num_embeddings=CAPACITY)
B = Table("b", ("f1",), num_embeddings=CAPACITY, score="LFU", check="ERROR")
CASES = {
    "ec": Case((A, B), pooled=False),
    "ec-dedup": Case((A, B), pooled=False, dedup=True),
    "ebc": Case((A, B), pooled=True),
}
KINDS = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def batch_of(case: Case, f0: list[int], f1: list[int]) -> Any:
    """Return a batch of one sample."""
    lengths = torch.tensor([len(f0), len(f1)])
    parts = {"keys": ["f0", "f1"], "lengths": lengths, "values": torch.tensor(f0 + f1), "weights": None}
    return make_kjt(parts, case)


def step(model: Any, case: Case, batch: Any) -> dict[str, torch.Tensor]:
    outputs = outputs_of(case, model(batch))
    loss_of(outputs).backward()
    return {name: value.detach().clone() for name, value in outputs.items()}


def statistics(model: Any) -> dict[str, dict[str, float]]:
    return {name: values for tables in dynamic_modules(model) for name, values in tables.stats().items()}


def overflow_one_rank(rank: int, world_size: int, case: Case) -> tuple[str, int, int, float]:
    """Train, overflow table "b" of rank 0, go on; returns the error's numbers and how many ids "b" holds."""
    model, twin = build(case, world_size), build(case, world_size)
    first = batch_of(case, [rank, 5], [2, 4, 4])
    for either in (model, twin):
        step(either, case, first)
    before = exported(model), statistics(model)
    assert before[1]["b"]["capacity"] == CAPACITY
    # Rank 0 owns the multiples of the world size; 2 and 4 may be evicted, for no step is outstanding.
    ids = [world_size * (100 + i) for i in range(CAPACITY + 3)]
    with pytest.raises(InsertFailedError) as caught:
        model(batch_of(case, [77 + rank], ids if rank == 0 else [world_size * 300 + rank, ids[0]]))
    rows, stats = exported(model), statistics(model)
    assert stats == before[1]
    for name, of_table in before[0].items():
        assert rows[name].keys() == of_table.keys()
        assert all(torch.equal(row, rows[name][i]) for i, row in of_table.items())
    # As if it had never been.
    batch = batch_of(case, [rank, 6], ids[:4])
    outputs = [step(either, case, batch) for either in (model, twin)]
    assert all(torch.equal(value, outputs[1][name]) for name, value in outputs[0].items())
    assert statistics(model) == statistics(twin)
    error = caught.value
    return error.table, error.failed, error.total, statistics(model)["b"]["size"]


def check_overflow(pool: RankPool | GpuRanks, world_size: int, case: Case) -> None:
    results = pool.run(world_size, overflow_one_rank, case)
    new = CAPACITY + 3
    # The other ranks bring an id of their own each, and one of those that rank 0 has too.
    assert [result[:3] for result in results] == [("b", 3, new + world_size - 1)] * world_size
    assert results[0][3] == 6


@KINDS
@pytest.mark.parametrize("world_size", [1, 2])
def test_c06_error_raises_on_all_ranks(ranks: RankPool, case: Case, world_size: int) -> None:  # noqa: F811
    check_overflow(ranks, world_size, case)


@pytest.mark.cuda
@KINDS
def test_c06_error_raises_on_all_gpus(gpu_ranks: GpuRanks, case: Case) -> None:  # noqa: F811
    check_overflow(gpu_ranks, 2, replace(case, device="cuda"))


def refuse_one_rank(rank: int, world_size: int, case: Case) -> str:
    """Let the check of rank 1 fail; returns the error of this rank."""
    model = build(case, world_size)
    step(model, case, batch_of(case, [1], [2]))
    before = statistics(model)
    kernels = [kernel for lookup in model.module.collection._lookups for kernel in lookup._emb_modules]
    assert len(kernels) == 2

    def fail(features: Any) -> None:
        raise ValueError("offsets of rank 1")

    if rank == 1:
        for kernel in kernels:
            kernel.plan_inserts = fail
    with pytest.raises(ValueError) as caught:
        model(batch_of(case, [11], [12]))
    assert statistics(model) == before
    if rank == 1:
        for kernel in kernels:
            del kernel.plan_inserts
    step(model, case, batch_of(case, [11], [12]))
    model.eval()
    outputs_of(case, model(batch_of(case, [11], list(range(99)))))
    return str(caught.value)


@KINDS
def test_c04_a_batch_refused_on_one_rank_raises_on_all(ranks: RankPool, case: Case) -> None:  # noqa: F811
    other = "features: another rank refuses its batch; its own error says why"
    assert ranks.run(2, refuse_one_rank, case) == [other, "offsets of rank 1"]


def warn_on_one_rank(rank: int, world_size: int, case: Case) -> list[str]:
    model = build(case, world_size)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        step(model, case, batch_of(case, [rank], [2 * i for i in range(CAPACITY + 8)]))
    return [text for text in messages(recorded) if "found no slot" in text]


def test_c06_warning_warns_on_the_rank_whose_table_is_full(ranks: RankPool) -> None:  # noqa: F811
    case = Case((A, replace(B, check="WARNING")), pooled=True)
    full, other = ranks.run(2, warn_on_one_rank, case)
    # Both ranks brought the 8 ids that found no slot.
    assert other == [] and len(full) == 1 and "table 'b': 16 occurrences" in full[0]
