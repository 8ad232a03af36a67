"""The pool of ranks itself: results, errors, deaths and hangs come back to the test."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, RankPool, ranks  # noqa: F401

pytestmark = pytest.mark.distributed


def sum_of_ranks(rank: int, world_size: int, start: int) -> int:
    assert dist.get_world_size() == world_size
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return int(value)


def raise_on(rank: int, world_size: int, guilty: int) -> None:
    if rank == guilty:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


def die(rank: int, world_size: int) -> None:
    os._exit(3)


def sleep(rank: int, world_size: int, seconds: float) -> None:
    threading.Event().wait(seconds)


def test_results_come_back_in_rank_order(ranks: RankPool) -> None:  # noqa: F811
    for world_size in (2, 1, 3):
        assert ranks.run(world_size, sum_of_ranks, 10) == [10 * world_size + sum(range(world_size))] * world_size


def test_an_error_comes_back_with_its_traceback_and_the_pool_recovers() -> None:
    pool = RankPool()
    try:
        with pytest.raises(RankError, match="raise_on(.|\n)*rank 1 says no") as caught:
            pool.run(2, raise_on, 1)
        assert isinstance(caught.value.__cause__, ValueError)
        assert pool.run(2, sum_of_ranks, 0) == [1, 1]
        with pytest.raises(RankError, match="the process died"):
            pool.run(1, die)
        assert not pool.workers
        with pytest.raises(TimeoutError, match="ranks \\[0\\] of 1"):
            pool.run(1, sleep, 30.0, time_limit_s=2.0)
        assert not pool.workers
    finally:
        pool.close()
