"""Prefetching pipelines: all rows of a dynamic table are where they are needed, so there is nothing to fetch ahead."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.sharding.test_train_pipeline import contents, make_batches, shard_model
from tests.support.ranks import GpuRanks, RankPool, gpu_ranks, ranks  # noqa: F401

pytestmark = pytest.mark.distributed


def train(rank: int, world_size: int, how: str, kind: str) -> tuple[list[float], dict[str, Any]]:
    """Train by TorchRec's prefetching pipeline, by its steps, or without one."""
    torch.use_deterministic_algorithms(kind == "cuda", warn_only=True)
    try:
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        model = shard_model(world_size, device)
        optimizer = torch.optim.SGD([parameter for _, parameter in model.named_parameters()], lr=0.1)
        steps = {"pipeline": by_pipeline, "by hand": by_hand, "plain": plainly}[how]
        return list(steps(model, optimizer, make_batches(rank, device), device)), contents(model)
    finally:
        torch.use_deterministic_algorithms(False)


def by_pipeline(model: Any, optimizer: Any, batches: list[Any], device: torch.device) -> Iterator[float]:
    from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist

    pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    remaining = iter(batches)
    for _ in batches:
        yield float(pipeline.progress(remaining))


def by_hand(model: Any, optimizer: Any, batches: list[Any], device: torch.device) -> Iterator[float]:
    """Call what the pipeline calls, in its order; itself it needs a GPU."""
    collections = {"sequences": model.module.sequences, "bags": model.module.bags}
    forwards = {name: collection.forward for name, collection in collections.items()}

    def prefetched(batch: Any) -> dict[str, Any]:
        ready = {}
        for name, collection in collections.items():
            context = collection.create_context()
            features = collection.input_dist(context, batch).wait().wait()
            collection.prefetch(ctx=context, dist_input=features, forward_stream=None)
            ready[name] = (context, features)
        return ready

    ready = prefetched(batches[0])
    for following in [*batches[1:], None]:
        for name, collection in collections.items():
            context, features = ready[name]
            collection.forward = lambda *_, c=collection, x=context, f=features: c.compute_and_output_dist(x, f)
        optimizer.zero_grad()
        loss, _ = model(None)
        # The next batch is fetched before this one is trained.
        ready = prefetched(following) if following is not None else {}
        loss.backward()
        optimizer.step()
        yield float(loss)
    for name, collection in collections.items():
        collection.forward = forwards[name]


def plainly(model: Any, optimizer: Any, batches: list[Any], device: torch.device) -> Iterator[float]:
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        yield float(loss)


@pytest.mark.parametrize("world_size", [1, 2])
def test_prefetching_changes_nothing(ranks: RankPool, world_size: int) -> None:  # noqa: F811
    plain = ranks.run(world_size, train, "plain", "cpu")
    assert ranks.run(world_size, train, "by hand", "cpu") == plain
    assert all(rows for _, tables in plain for rows in tables.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_prefetching_pipeline_changes_nothing(gpu_ranks: GpuRanks, world_size: int) -> None:  # noqa: F811
    plain = gpu_ranks.run(world_size, train, "plain", "cuda")
    assert gpu_ranks.run(world_size, train, "pipeline", "cuda") == plain
