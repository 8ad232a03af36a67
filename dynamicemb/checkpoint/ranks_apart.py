"""Ranks with connections of their own, for a thread that writes a dump while training goes on.

The connections are a ``ProcessGroupGloo`` over torch's default store, made by hand, for two reasons. The name that
``new_group`` gives a group of some of the ranks depends on how many other groups each of them has, and where that
differs they wait for each other in vain. And ``destroy_process_group`` would take the group away from a thread that
uses it.
"""

import atexit
import pickle
import uuid
import weakref
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dynamicemb.checkpoint.ranks import Ranks

T = TypeVar("T")

# How long ranks may take to reach each other, and how long one may wait for the slowest disk. ``DumpHandle.wait`` takes
# a shorter time; a rank that is gone is noticed at once.
_CONNECT = timedelta(minutes=5)
_LONGEST = timedelta(days=7)

# By the process group whose ranks they connect.
_APART: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
# Not when the interpreter is half gone.
atexit.register(_APART.clear)


def apart(ranks: Ranks) -> Ranks:
    """Return the same ranks with connections of their own, for another thread; a collective.

    They are made by the first call for a process group, and last as long as it does or somebody uses them.

    Raises:
        RuntimeError: torch has no gloo, or ranks do not reach each other.
    """
    if ranks.world_size == 1:
        return ranks
    if ranks.group not in _APART:
        name = ranks.gather(uuid.uuid4().hex)[0]
        store = dist.PrefixStore(f"dynamicemb/{name}", default_store())
        _APART[ranks.group] = ranks.each(lambda: _connected(store, ranks.rank, ranks.world_size))
    return RanksApart(ranks.rank, ranks.world_size, _APART[ranks.group])


def default_store() -> Any:
    """Return the store over which torch's ranks found each other; torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


class RanksApart(Ranks):
    """Ranks that talk over connections which no other thread uses."""

    def __init__(self, rank: int, world_size: int, connections: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self._connections = connections

    def gather(self, value: T) -> list[T]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._exchanged(torch.tensor([data.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = self._exchanged(padded)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def of_first(self, value: T) -> T:
        return self.gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _exchanged(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = _LONGEST
        self._connections.allgather([parts], [values], options).wait(_LONGEST)
        return parts


def _connected(store: Any, rank: int, world_size: int) -> Any:
    if not dist.is_gloo_available():
        raise RuntimeError("blocking=False over several ranks needs torch with gloo, which this one lacks")
    return dist.ProcessGroupGloo(store, rank, world_size, _CONNECT)
