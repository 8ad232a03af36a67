"""Sharded collections at the edge: unusual inputs, process groups and plans; what cannot work says so on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import RankPool, ranks  # noqa: F401
from tests.sharded_model import Case, Table, build, exported, make_batch, make_kjt, outputs_of

pytestmark = pytest.mark.distributed

A = Table("a", ("f0",))
B = Table("b", ("f1",), dist_type="hash_roundrobin", score="LFU")
CASES = {
    "ec": Case((A, B), pooled=False),
    "ec-dedup": Case((A, B), pooled=False, dedup=True),
    "ebc": Case((A, B), pooled=True),
}
KINDS = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def look_up_unsigned(rank: int, world_size: int, case: Case) -> None:
    batch = make_batch(case, 0, rank)
    signed, unsigned = build(case, world_size), build(case, world_size)
    expected = outputs_of(case, signed(make_kjt(batch)))
    batch["values"] = batch["values"].view(torch.uint64)
    # Non-contiguous, too: every second of doubled ids.
    batch["values"] = batch["values"].repeat_interleave(2)[::2]
    outputs = outputs_of(case, unsigned(make_kjt(batch)))
    assert all(torch.equal(value, outputs[name]) for name, value in expected.items())
    assert {n: set(rows) for n, rows in exported(signed).items()} == {
        n: set(rows) for n, rows in exported(unsigned).items()
    }


@KINDS
@pytest.mark.parametrize("world_size", [1, 2])
def test_c01_uint64_ids_are_their_bit_pattern(ranks: RankPool, case: Case, world_size: int) -> None:  # noqa: F811
    ranks.run(world_size, look_up_unsigned, case)
