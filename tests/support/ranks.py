"""Pools of ranks for the whole pytest session: on the CPU, sharing one GPU, and with a GPU each.

The workers are spawned once (never forked: numba's OpenMP layer kills a forked child) and wait for jobs. A job is the
qualified name of a function and its arguments; every rank of the job calls it in a process group of that world size::

    def check(rank, world_size, x): ...              # at module level of a test file
    def test_it(ranks): ranks.run(2, check, 5)       # returns [result of rank 0, result of rank 1]
    def test_it(gpu_ranks): gpu_ranks.run(2, check)  # twice: on one GPU over gloo, and on two GPUs over NCCL

NCCL wants a GPU for each rank. Gloo takes CUDA tensors too, through host memory, so that several ranks may share a GPU:
all that TorchRec does there, kernels, streams and exchanges, runs where there is only one.

Nothing hangs: a job that exceeds its time limit is stopped together with the pool, the next job starts a new one.
"""

import atexit
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

# Generous: the first job of a fresh checkout compiles the kernels.
TIME_LIMIT_S = 400.0
# How long the other ranks may go on once one has failed: they often wait for it in a collective.
GRACE_S = 3.0


# How ranks talk and where their tensors are: on the CPU; all on the first GPU; rank r on GPU r.
ON_CPU, ON_ONE_GPU, ON_OWN_GPUS = "gloo", "gloo on one GPU", "nccl"


class RankError(Exception):
    """A rank raised; the message holds its traceback, `__cause__` the exception when it can be pickled."""


def _set_up_group(kind: str, rank: int, world_size: int, store: str, current: list[str]) -> None:
    import torch
    import torch.distributed as dist

    if current == [store]:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    if kind != ON_CPU:
        torch.cuda.set_device(rank if kind == ON_OWN_GPUS else 0)
    dist.init_process_group(
        # "gloo" serves tensors of CPUs and GPUs alike.
        "nccl" if kind == ON_OWN_GPUS else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIME_LIMIT_S),
        device_id=torch.device("cuda", rank) if kind == ON_OWN_GPUS else None,
    )
    # TorchRec broadcasts a flag in its first model only: ranks that served another world size before would stay away.
    flags = sys.modules.get("torchrec.distributed.collective_utils")
    if flags is not None:
        flags._INITIALIZED = False  # type: ignore[attr-defined]
    # And it keeps the groups of the ranks of a host.
    groups = sys.modules.get("torchrec.distributed.comm")
    if groups is not None:
        groups._INTRA_PG = groups._CROSS_PG = None  # type: ignore[attr-defined]
    current[:] = [store]


def _serve(kind: str, rank: int, connection: Connection) -> None:
    """Run jobs until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    current: list[str] = []
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        world_size, store, (module, name), arguments, limit = job
        faulthandler.dump_traceback_later(limit, exit=False)
        try:
            _set_up_group(kind, rank, world_size, store, current)
            function = getattr(importlib.import_module(module), name)
            answer = ("done", pickle.dumps(function(rank, world_size, *arguments)))
        except BaseException as error:
            answer = ("failed", pickle.dumps((traceback.format_exc(), _picklable(error))))
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(answer))


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return None


class RankPool:
    """Worker processes, one per rank, started when a job needs them.

    Args:
        kind: one of ON_CPU, ON_ONE_GPU, ON_OWN_GPUS.
    """

    def __init__(self, kind: str = ON_CPU) -> None:
        self.kind = kind
        self.workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.num_groups = 0
        self.stores: dict[int, str] = {}

    def run(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, time_limit_s: float = TIME_LIMIT_S
    ) -> list[Any]:
        """Call ``function(rank, world_size, *arguments)`` on every rank; return the results in rank order.

        Raises:
            RankError: a rank raised.
            TimeoutError: a rank did not answer in time.
        """
        self._start(world_size)
        store = self._store(world_size)
        target = (function.__module__, function.__qualname__)
        job = pickle.dumps((world_size, store, target, arguments, max(1.0, time_limit_s - 2)))
        pending = {}
        for rank in range(world_size):
            connection = self.workers[rank][1]
            connection.send_bytes(job)
            pending[connection] = rank
        return self._collect(pending, world_size, time.monotonic() + time_limit_s)

    def close(self) -> None:
        """Stop the workers."""
        for process, connection in self.workers:
            connection.close()
            process.terminate()
        for process, _ in self.workers:
            process.join(5)
            if process.is_alive():
                process.kill()
        self.workers.clear()
        self.stores.clear()

    def _collect(self, pending: dict[Connection, int], world_size: int, deadline: float) -> list[Any]:
        results: list[Any] = [None] * world_size
        failures: list[tuple[int, str, BaseException | None]] = []
        died = False
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    verdict, payload = pickle.loads(connection.recv_bytes())
                except EOFError:
                    verdict, payload = "failed", pickle.dumps(("the process died", None))
                    died = True
                if verdict == "done":
                    results[rank] = pickle.loads(payload)
                else:
                    failures.append((rank, *pickle.loads(payload)))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if pending or died:
            self.close()
        elif failures and self.kind != ON_CPU:
            # Leaving an NCCL group waits for collectives that went out of step; a GPU's context may be lost.
            self.close()
        elif failures:
            # The next job gets a new group.
            self.stores.clear()
        if failures:
            rank, text, cause = failures[0]
            raise RankError(f"rank {rank} of {world_size} failed (all: {[f[0] for f in failures]})\n{text}") from cause
        if pending:
            raise TimeoutError(f"ranks {sorted(pending.values())} of {world_size} did not answer in time")
        return results

    def _start(self, num_workers: int) -> None:
        if len(self.workers) >= num_workers:
            return
        context = multiprocessing.get_context("spawn")
        # Read when the child imports numba and OpenMP; the ranks share the cores of one machine.
        limits = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self.kind != ON_CPU:
            # Deterministic algorithms need it.
            limits["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if self.kind == ON_ONE_GPU:
            # To TorchRec each rank is a host with one GPU; it would look for rank 1 on GPU 1. See `local_world_size`.
            limits["LOCAL_WORLD_SIZE"] = "1"
        before = {name: os.environ.get(name) for name in limits}
        os.environ.update(limits)
        try:
            for rank in range(len(self.workers), num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(self.kind, rank, theirs), daemon=True)
                process.start()
                theirs.close()
                self.workers.append((process, ours))
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _store(self, world_size: int) -> str:
        """Return the rendezvous file of the group in use, a new one when the last job had another size."""
        if world_size not in self.stores:
            self.num_groups += 1
            # A worker keeps one group: entering a new one leaves the old one behind.
            self.stores = {world_size: os.path.join(self.folder.name, str(self.num_groups))}
        return self.stores[world_size]


def skip_without_gpus(number: int) -> None:
    """Skip the test if there are fewer GPUs, or if kernels are interpreted."""
    import torch

    from tests.conftest import reason_to_skip

    reason = reason_to_skip("cuda")
    if reason is None and torch.cuda.device_count() < number:
        reason = f"{number} ranks need a GPU each, there are {torch.cuda.device_count()}"
    if reason:
        pytest.skip(reason)


def local_world_size() -> int | None:
    """Return how many ranks a planner's topology has to put on a host, None for all."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None


@functools.cache
def pool(kind: str = ON_CPU, name: str = "") -> RankPool:
    """Return a pool of this process, made by the first call; pools of different names share no workers."""
    assert multiprocessing.current_process().name == "MainProcess", f"ranks start no ranks: {sys.argv}"
    made = RankPool(kind)
    atexit.register(made.close)
    return made


class GpuRanks:
    """Ranks on GPUs, of kind ON_ONE_GPU or ON_OWN_GPUS."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def run(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, time_limit_s: float = TIME_LIMIT_S
    ) -> list[Any]:
        """Do what `RankPool.run` does; skips the test if there are too few GPUs."""
        skip_without_gpus(1 if self.kind == ON_ONE_GPU else world_size)
        # NCCL has a pool for each world size: a rank cannot leave a group that others stay in.
        name = "" if self.kind == ON_ONE_GPU else f"{world_size} ranks"
        return pool(self.kind, name).run(world_size, function, *arguments, time_limit_s=time_limit_s)


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Hand out the pool of ranks on the CPU; import this fixture into a test file to use it."""
    from tests.support.sharded_model import compile_kernels

    compile_kernels()
    return pool()


@pytest.fixture(scope="session", params=[ON_ONE_GPU, ON_OWN_GPUS], ids=["one-gpu", "nccl"])
def gpu_ranks(request: pytest.FixtureRequest) -> GpuRanks:
    """Hand out ranks on GPUs, one kind after the other; import this fixture into a test file to use it."""
    return GpuRanks(request.param)
