"""What an import of static tables says where one rank has the whole checkpoint."""

from typing import Any

import torch

from dynamicemb import import_static
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.static_model import NUM_IDS, Kind, build

ONE = Kind(bags=("row_wise",), sequences=())


def import_another(rank: int, world_size: int) -> str:
    model = build(ONE, world_size, dynamic=True)
    checkpoint = {"bags.embedding_bags.other.weight": torch.zeros(NUM_IDS, ONE.dim)} if rank == 1 else {}
    try:
        import_static(model, checkpoint, False)
    except ValueError as error:
        return str(error)
    return "no error"


def test_what_any_rank_has_is_listed_on_all(ranks: RankPool) -> None:  # noqa: F811
    found: list[Any] = ranks.run(2, import_another)
    for message in found:
        assert (
            "no static table for model.bags/bag0; the checkpoint has the weights bags.embedding_bags.other.weight"
            in message
        )
