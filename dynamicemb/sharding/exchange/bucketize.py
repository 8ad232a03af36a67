"""Sort a batch by the rank that owns each occurrence, on any device."""

from typing import Any

import numpy as np
import torch
from numba import njit, prange

# Bags per parallel task: long enough to amortise a task, short enough to balance uneven features.
_BAGS_PER_TASK = 256


def bucketize(
    owners: torch.Tensor, lengths: torch.Tensor, world_size: int, with_position: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Order the occurrences by (owner, bag, position) and count them per owner and bag.

    Args:
        owners: i64 ``[N]``, rank of each occurrence; occurrences are in bag order.
        lengths: i32 or i64 ``[K]``, occurrences per bag, K bags, sum N.
        world_size: W.
        with_position: whether ``position`` is wanted; else it may be None.

    Returns:
        ``(new_lengths [W * K] of lengths' dtype, order i64[N], position i64[N])``: place ``j`` gets occurrence
        ``order[j]``, and occurrence ``i`` goes to place ``position[i]``.

    Example::

        owners [1, 0, 1, 1], lengths [3, 1], world_size 2
        -> new_lengths [1, 0, 2, 1], order [1, 0, 2, 3], position [1, 0, 2, 3]

    Host sync: none.
    """
    if owners.device.type == "cpu":
        return _bucketize_on_cpu(owners, lengths, world_size)
    return bucketize_with_torch(owners, lengths, world_size, with_position)


def bucketize_with_torch(
    owners: torch.Tensor, lengths: torch.Tensor, world_size: int, with_position: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Do what `bucketize` does with torch operators: a stable sort by owner keeps bags and positions in order."""
    num_occurrences, num_bags, device = owners.numel(), lengths.numel(), owners.device
    # A radix sort takes one pass for each 8 bits of the type.
    order = torch.sort(owners.to(torch.uint8 if world_size <= 2**8 else torch.int32), stable=True)[1]
    position = None
    if with_position:
        position = torch.empty_like(order).scatter_(0, order, torch.arange(num_occurrences, device=device))
    bags = torch.repeat_interleave(
        torch.arange(num_bags, device=device), lengths.to(torch.int64), output_size=num_occurrences
    )
    new_lengths = torch.zeros(world_size * num_bags, dtype=torch.int64, device=device)
    new_lengths.scatter_add_(0, torch.add(bags, owners, alpha=num_bags), torch.ones_like(owners))
    return new_lengths.to(lengths.dtype), order, position


def _bucketize_on_cpu(
    owners: torch.Tensor, lengths: torch.Tensor, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `bucketize` does in one counting pass and one scatter pass over the bags."""
    num_occurrences = owners.numel()
    counts = np.zeros((world_size, lengths.numel()), dtype=np.int64)
    order = torch.empty(num_occurrences, dtype=torch.int64, device="cpu")
    position = torch.empty(num_occurrences, dtype=torch.int64, device="cpu")
    if num_occurrences:
        offsets = np.zeros(lengths.numel() + 1, dtype=np.int64)
        np.cumsum(lengths.numpy(), out=offsets[1:])
        _count(owners.numpy(), offsets, counts)
        starts = np.cumsum(counts.reshape(-1)) - counts.reshape(-1)
        _scatter(owners.numpy(), offsets, starts.reshape(counts.shape), order.numpy(), position.numpy())
    return torch.from_numpy(counts.reshape(-1)).to(lengths.dtype), order, position


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _count(owners: Any, offsets: Any, counts: Any) -> None:
    """Count the occurrences of each bag per owner. A task owns whole bags, so no two tasks write one counter."""
    num_bags = offsets.size - 1
    for task in prange((num_bags + _BAGS_PER_TASK - 1) // _BAGS_PER_TASK):
        for bag in range(task * _BAGS_PER_TASK, min((task + 1) * _BAGS_PER_TASK, num_bags)):
            for i in range(offsets[bag], offsets[bag + 1]):
                counts[owners[i], bag] += 1


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _scatter(owners: Any, offsets: Any, next_place: Any, order: Any, position: Any) -> None:
    """Give every occurrence the next free place of its (owner, bag); `next_place` is used up."""
    num_bags = offsets.size - 1
    for task in prange((num_bags + _BAGS_PER_TASK - 1) // _BAGS_PER_TASK):
        for bag in range(task * _BAGS_PER_TASK, min((task + 1) * _BAGS_PER_TASK, num_bags)):
            for i in range(offsets[bag], offsets[bag + 1]):
                place = next_place[owners[i], bag]
                next_place[owners[i], bag] = place + 1
                order[place] = i
                position[i] = place
