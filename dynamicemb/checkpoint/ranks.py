"""Ranks that do things together: each does its part, and a failure of one is an error on all."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dynamicemb.errors import DynamicEmbError

T = TypeVar("T")


class Ranks:
    """The processes that dump or load together.

    Attributes:
        group: the process group; None for a process alone, and where the group of one rank was destroyed.
        rank: of this process.
        world_size: how many there are.
    """

    def __init__(self, group: Any = None) -> None:
        """Take the ranks of a process group; None is all of them, or this process alone without torch.distributed.

        Raises:
            DynamicEmbError: the process group was destroyed, and had several ranks.
            ValueError: torch.distributed was not initialised, or this process is not in the group.
        """
        initialized = dist.is_available() and dist.is_initialized()
        self.group = group if group is not None or not initialized else dist.group.WORLD
        destroyed = _size_if_destroyed(self.group)
        if destroyed:
            check_reachable(destroyed)
            self.group = None
        if self.group is not None and not initialized:
            raise ValueError("pg: torch.distributed is not initialised; call init_process_group() first, or use None")
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        if self.rank < 0:
            raise ValueError("pg: this process is not in the process group; call this on its ranks only")

    @property
    def global_ranks(self) -> list[int]:
        """Which ranks of all processes they are, in order."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def device(self) -> torch.device:
        """Where tensors that the ranks send each other must be: in host memory, unless the group knows GPUs alone."""
        pairs = [] if self.group is None else dist.get_backend_config(self.group).split(",")
        if pairs and all(pair.split(":")[0] != "cpu" for pair in pairs):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank; return all results in rank order.

        Raises:
            Exception: what ``work`` raised on the first of the ranks where it raised, on all ranks.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        outcomes = self.gather((result, None if error is None else _sendable(error, self.rank)))
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise error if rank == self.rank and error is not None else failure from error
        return [value for value, _ in outcomes]  # type: ignore[misc]

    def each(self, work: Callable[[], T]) -> T:
        """Call ``work`` on every rank; return this rank's result, which does not travel. Raises as ``together``."""
        results: list[T] = []
        self.together(lambda: results.append(work()))
        return results[0]

    def on_first(self, work: Callable[[], T]) -> T:
        """Call ``work`` on rank 0; return its result, or raise its error, on all."""
        result: T | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                result = work()
            except Exception as caught:
                error = caught
        result, failure = self.of_first((result, None if error is None else _sendable(error, self.rank)))
        if failure is not None:
            raise failure if error is None else error
        return result  # type: ignore[return-value]

    def of_first(self, value: T) -> T:
        """Return the value of rank 0; those of the others do not travel."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.global_ranks[0], group=self.group)
        return values[0]


def check_reachable(world_size: int) -> None:
    """Refuse to go on alone where the process group of several ranks was destroyed.

    Raises:
        DynamicEmbError: there were several.
    """
    if world_size > 1:
        raise DynamicEmbError(
            f"dynamic tables are spread over {world_size} ranks, whose process group was destroyed: each rank holds a "
            "part of the rows and reaches no other; call state_dict(), load_state_dict(), DynamicEmbDump and "
            "DynamicEmbLoad before destroy_process_group()"
        )


def _size_if_destroyed(group: Any) -> int:
    """Return how many ranks a process group had, whose object still tells; 0 if nobody destroyed it."""
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        return 0
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return group.size()
    return 0


def _sendable(error: Exception, rank: int) -> Exception:
    """Return an error that survives pickling: the same one, or one with its text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error)
        return error
    except Exception:
        return DynamicEmbError(f"rank {rank}: {type(error).__name__}: {error}")
