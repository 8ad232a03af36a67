"""Tables that are not trained for a while: their occurrences take no part in an update."""

import torch
from torch import nn


def frozen_among(holders: list[nn.Module]) -> tuple[int, ...]:
    """Return which tables are frozen: those whose ``weight`` does not require a gradient.

    Args:
        holders: per table, the module that has its ``weight``. It is asked each time, for a parameter may be replaced.
    """
    frozen: tuple[int, ...] = ()
    for t, holder in enumerate(holders):
        weight = holder._parameters.get("weight")
        if weight is not None and not weight.requires_grad:
            frozen += (t,)
    return frozen


def holders_alone(holders: list[nn.Module]) -> list[nn.Module]:
    """Return holders that say the same and are nobody else's, for a copy of a module without its collection."""
    alone = []
    for holder in holders:
        weight = holder._parameters.get("weight")
        copied = nn.Module()
        if weight is not None:
            copied.weight = nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)
        alone.append(copied)
    return alone
