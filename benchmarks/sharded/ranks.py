"""Processes that run a case together: this one alone, or several of one host."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@contextlib.contextmanager
def process_group(device: str, rank: int = 0, ranks: int = 1, file: str | None = None) -> Iterator[torch.device]:
    """Join the ranks of a case.

    Args:
        device: ``cpu`` or ``cuda``; on a GPU, rank r has GPU r.
        rank: of this process.
        ranks: how many there are.
        file: where they meet; one rank needs none.

    Yields:
        The device of this rank.
    """
    # TorchRec says a lot about plans, which are of no interest here.
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    own = torch.device(device) if device == "cpu" else torch.device("cuda", rank)
    if device == "cuda":
        torch.cuda.set_device(own)
    with tempfile.TemporaryDirectory() as folder:
        meeting = file or str(Path(folder) / "ranks")
        bound = {"device_id": own} if device == "cuda" else {}
        dist.init_process_group(
            _BACKENDS[device], init_method=f"file://{meeting}", rank=rank, world_size=ranks, **bound
        )
        try:
            yield own
        finally:
            dist.destroy_process_group()


def agree(wish: bool) -> bool:
    """Return the wish of rank 0."""
    if dist.get_world_size() == 1:
        return wish
    wishes = [wish]
    dist.broadcast_object_list(wishes)
    return wishes[0]


def slowest(values: list[float]) -> list[float]:
    """Return, for each of the values, the largest of all ranks: a step ends when its last rank has ended."""
    if dist.get_world_size() == 1:
        return values
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    return [max(each) for each in zip(*gathered, strict=True)]


def on_ranks(ranks: int, device: str, work: Callable[[torch.device], Any]) -> Any:
    """Run ``work`` on all ranks, in processes of their own if there are several; return what rank 0 returns."""
    if ranks == 1:
        with process_group(device) as own:
            return work(own)
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"ranks is {ranks}, but there are {torch.cuda.device_count()} GPUs; ask for fewer ranks")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        arguments = (ranks, device, work, str(Path(folder) / "ranks"), str(answer), torch.get_num_threads())
        torch.multiprocessing.spawn(_work_of_rank, arguments, nprocs=ranks)
        return torch.load(answer, weights_only=False)


def _work_of_rank(
    rank: int, ranks: int, device: str, work: Callable[[torch.device], Any], file: str, answer: str, threads: int
) -> None:
    torch.set_num_threads(max(1, threads // ranks))
    with process_group(device, rank, ranks, file) as own:
        result = work(own)
        if rank == 0:
            torch.save(result, answer)
        # The file of the meeting goes with its folder.
        dist.barrier()
