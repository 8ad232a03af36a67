"""Who owns an id where a part of the rows is on each rank."""

import torch

from dynamicemb.table.placement import Placement, Rule


def owner_of(
    ids: torch.Tensor, world_size: int, dist_type: str = "roundrobin", num_embeddings: int | None = None
) -> torch.Tensor:
    """Return the rank of each id, i64 of the same shape."""
    return Placement.row_wise(Rule(dist_type, num_embeddings), world_size, 4).owner(ids)
