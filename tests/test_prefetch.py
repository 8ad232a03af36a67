"""Prefetching pipelines: all rows of a dynamic table are where they are needed, so there is nothing to fetch ahead."""

from typing import Any

import pytest
import torch

from tests.ranks import RankPool, ranks  # noqa: F401
from tests.sharded_model import dynamic_modules
from tests.test_train_pipeline import contents, make_batches, shard_model


def train(rank: int, world_size: int, prefetched: bool) -> tuple[list[float], dict[str, Any]]:
    """Train with TorchRec's prefetching pipeline, or without one."""
    from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist

    device = torch.device("cpu")
    model = shard_model(world_size, device)
    optimizer = torch.optim.SGD([parameter for _, parameter in model.named_parameters()], lr=0.1)
    batches = make_batches(rank, device)
    losses = []
    if prefetched:
        pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
        remaining = iter(batches)
        losses = [float(pipeline.progress(remaining)) for _ in batches]
    else:
        for batch in batches:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return losses, contents(model)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_c15_a_prefetching_pipeline_changes_nothing(ranks: RankPool, world_size: int) -> None:  # noqa: F811
    assert ranks.run(world_size, train, True) == ranks.run(world_size, train, False)
