"""What stands in a sharded collection where the unsharded one has the weights of dynamic tables.

A dynamic table has no dense weight. It shows an empty one, under the same name, so that code which freezes, counts or
lists the parameters of a model finds the table.
"""

from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import KeyedOptimizer

from dynamicemb.checkpoint.state_dict.entries import ENTRIES


class TableStandIn(nn.Module):
    """Holds the ``weight`` of a dynamic table: no elements, ``(0, D)``. Its ``requires_grad`` freezes the table.

    The state_dict leaves the weight out: the collection adds the rows.

    Args:
        weight: the parameter.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        for entry in ENTRIES:
            # get_model_state_dict looks up what a key names, attribute by attribute.
            setattr(self, entry, None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add nothing."""

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take nothing; the collection has removed what it knows."""
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix)]


def make_weight(
    dim: int, dtype: torch.dtype, device: torch.device, trained: bool, optimizer: KeyedOptimizer | None
) -> nn.Parameter:
    """Return the empty weight of a table.

    Args:
        dim: D.
        dtype: of the table's rows.
        device: of the table.
        trained: whether it requires a gradient, which it never gets.
        optimizer: where schedulers that ask parameters for their optimizers find the table's; None if another table
            of its group shows it.
    """
    with torch.inference_mode(False):
        weight = nn.Parameter(torch.empty(0, dim, dtype=dtype, device=device), requires_grad=trained)
    # By this attribute dense optimizers know what is not theirs.
    weight._in_backward_optimizers = [optimizer or EmptyFusedOptimizer()]  # type: ignore[attr-defined]
    return weight
