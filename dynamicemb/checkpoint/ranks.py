"""Ranks that do things together: each does its part, and a failure of one is an error on all."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dynamicemb.errors import DynamicEmbError

T = TypeVar("T")


class Ranks:
    """The processes that dump or load together.

    Attributes:
        group: the process group, None for a process alone.
        rank: of this process.
        world_size: how many there are.
    """

    def __init__(self, group: Any = None) -> None:
        """Take the ranks of a process group; None is all of them, or this process alone without torch.distributed."""
        initialized = dist.is_available() and dist.is_initialized()
        self.group = group if group is not None or not initialized else dist.group.WORLD
        if self.group is not None and not initialized:
            raise ValueError("pg: torch.distributed is not initialised; call init_process_group() first, or use None")
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        if self.rank < 0:
            raise ValueError("pg: this process is not in the process group; call this on its ranks only")

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
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def _sendable(error: Exception, rank: int) -> Exception:
    """Return an error that survives pickling: the same one, or one with its text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error)
        return error
    except Exception:
        return DynamicEmbError(f"rank {rank}: {type(error).__name__}: {error}")
