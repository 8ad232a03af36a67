"""Ranks that dump on the real disk, one of which is killed; a server that has imported everything forks them."""

import multiprocessing
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from tests.support.failing_disk import FailingDisk

# A rank whose peer has died must say so by then.
TIME_LIMIT_S = 30
NUM_IDS = 60


def context() -> Any:
    """Return the context of multiprocessing that starts the ranks."""
    found = multiprocessing.get_context("forkserver")
    # It only imports: a pool of threads would not survive the fork.
    found.set_forkserver_preload(
        ["tests.support.dying_ranks", "tests.support.checkpoints", "dynamicemb", "torch.distributed"]
    )
    return found


class DeadlyDisk(FailingDisk):
    """Kills its process before the `number`-th operation; -1 is none."""

    def __init__(self, number: int) -> None:
        super().__init__(-1, 0)
        self._deadly = number
        self._lock = threading.Lock()

    def _count(self, name: str) -> None:
        with self._lock:
            self.count += 1
            if self.count == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)


def make(trial: int, rank: int, world_size: int) -> Any:
    """Return a module whose ids and rows tell which trial it is of, with the ids of one rank."""
    from dynamicemb import DynamicEmbScoreStrategy
    from tests.support.lookups import bag_per_id, make_module, options

    table = options(capacity=256, score_strategy=DynamicEmbScoreStrategy.LFU)
    module = make_module([table], optimizer="adam", seed=trial)
    ids = [i for i in range(-trial, NUM_IDS) if i % world_size == rank]
    for _ in range(2):
        module(*bag_per_id(ids)).sum().backward()
    return module


def dump(place: str, module: Any, number: int) -> int:
    """Dump, or die; returns how many operations there were."""
    from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
    from dynamicemb.checkpoint.ranks import Ranks
    from dynamicemb.checkpoint.tables import tables_of_modules

    disk = DeadlyDisk(number)
    request = DumpRequest(place, optim=True, allow_overwrite=True)
    dump_tables(request, tables_of_modules([module], "model"), Ranks(), disk)
    return disk.count


def run_rank(rank: int, world_size: int, folder: str, trial: int, number: int) -> None:
    """Dump once; the number of operations is the exit code's file."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    if world_size > 1:
        store = f"file://{folder}/store {trial}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    count = dump(f"{folder}/dumps/dump", make(trial, rank, world_size), number)
    Path(folder, f"count {rank}").write_text(str(count))


def run(world_size: int, folder: Path, trial: int, guilty: int, number: int) -> list[int | None]:
    """Let all ranks dump, the guilty one die before an operation of its own; returns their exit codes."""
    start = context().Process
    ranks = [
        start(target=run_rank, args=(rank, world_size, str(folder), trial, number if rank == guilty else -1))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    ranks[guilty].join()
    deadline = time.monotonic() + TIME_LIMIT_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            raise AssertionError(f"a rank still waits {TIME_LIMIT_S} s after the other one died at operation {number}")
    return [process.exitcode for process in ranks]
