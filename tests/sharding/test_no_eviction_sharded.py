"""NO_EVICTION across ranks: every rank's part of a table grows by itself."""

import pytest
import torch

from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import Case, Table, build, dynamic_modules, exported, loss_of, make_kjt, outputs_of

pytestmark = pytest.mark.distributed


def train_and_grow(rank: int, world_size: int, case: Case) -> tuple[set[int], dict[str, float]]:
    """Train on more ids than were planned for; return the ids of this rank and the numbers of its table."""
    model = build(case, world_size)
    for step in range(3):
        ids = [*range(1000 * step + 300 * rank, 1000 * step + 300 * rank + 300), 7]
        lengths = torch.tensor([len(ids)])
        batch = {"keys": ["f0"], "lengths": lengths, "values": torch.tensor(ids), "weights": None}
        loss_of(outputs_of(case, model(make_kjt(batch, case)))).backward()
    (tables,) = dynamic_modules(model)
    return set(exported(model)["a"]), tables.stats()["a"]


@pytest.mark.parametrize("pooled", [False, True])
def test_c10_sharded_tables_grow_beyond_what_was_planned(ranks: RankPool, pooled: bool) -> None:  # noqa: F811
    case = Case((Table("a", ("f0",), num_embeddings=100, score="NO_EVICTION"),), pooled=pooled)
    results = ranks.run(2, train_and_grow, case)
    expected = {1000 * step + i for step in range(3) for i in range(600)}
    assert results[0][0] | results[1][0] == expected and not results[0][0] & results[1][0]
    for ids, stats in results:
        assert stats["evicted"] == stats["failed"] == 0 and stats["size"] == len(ids) == 900
        assert stats["capacity"] == 2048
    # Id 7 was there in later steps.
    assert sum(stats["hits"] for _, stats in results) > 0
