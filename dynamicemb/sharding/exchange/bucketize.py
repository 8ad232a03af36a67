"""Sort a batch by the rank that owns each occurrence, on any device."""

import torch

from dynamicemb.table.cpu import bucketize as cpu


def bucketize(
    owners: torch.Tensor, lengths: torch.Tensor, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order the occurrences by (owner, bag, position) and count them per owner and bag.

    Args:
        owners: i64 ``[N]``, rank of each occurrence; occurrences are in bag order.
        lengths: i32 or i64 ``[K]``, occurrences per bag, K bags, sum N.
        world_size: W.

    Returns:
        ``(new_lengths [W * K] of lengths' dtype, order i64[N], position i64[N])``: place ``j`` gets occurrence
        ``order[j]``, and occurrence ``i`` goes to place ``position[i]``.

    Host sync: none.
    """
    if owners.device.type == "cpu":
        return cpu.bucketize(owners, lengths, world_size)
    return bucketize_with_torch(owners, lengths, world_size)


def bucketize_with_torch(
    owners: torch.Tensor, lengths: torch.Tensor, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `bucketize` does with torch operators: a stable sort by owner keeps bags and positions in order."""
    num_occurrences, num_bags, device = owners.numel(), lengths.numel(), owners.device
    # A radix sort takes one pass for each 8 bits of the type.
    order = torch.sort(owners.to(torch.uint8 if world_size <= 2**8 else torch.int32), stable=True)[1]
    position = torch.empty_like(order).scatter_(0, order, torch.arange(num_occurrences, device=device))
    bags = torch.repeat_interleave(
        torch.arange(num_bags, device=device), lengths.to(torch.int64), output_size=num_occurrences
    )
    new_lengths = torch.zeros(world_size * num_bags, dtype=torch.int64, device=device)
    new_lengths.scatter_add_(0, owners * num_bags + bags, torch.ones_like(owners))
    return new_lengths.to(lengths.dtype), order, position
