"""Tables that are not trained for a while: their occurrences take no part in an update."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from dynamicemb.table.lookup import Lookup


def frozen_among(holders: list[nn.Module]) -> tuple[int, ...]:
    """Return which tables are frozen: those whose ``weight`` does not require a gradient.

    Args:
        holders: per table, the module that has its ``weight``. It is asked each time, for a parameter may be replaced.
    """
    weights = [holder._parameters.get("weight") for holder in holders]
    return tuple(t for t, weight in enumerate(weights) if weight is not None and not weight.requires_grad)


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


def without_tables(lookup: Lookup, tables: Collection[int]) -> Lookup:
    """Return a lookup in which no occurrence of some tables has a row, so that an update leaves them alone.

    Args:
        lookup: N occurrences of T tables.
        tables: which.

    Host sync: none; a CUDA graph captures it. Bytes moved: 30 N.

    Example::

        rows [4, 5, 6, 7], table_ranges [0, 1, 1, 4], tables {2}  ->  rows [4, -1, -1, -1]
    """
    ranges, rows = lookup.table_ranges, lookup.rows
    num_tables = ranges.numel() - 1
    # Filled on the device one by one: a list of the host would be a copy, for which the host waits.
    chosen = torch.zeros(num_tables, dtype=torch.bool, device=rows.device)
    for t in tables:
        chosen[t].fill_(True)
    positions = torch.arange(rows.numel(), device=rows.device)
    table_of = torch.searchsorted(ranges[1:], positions, right=True).clamp_(max=num_tables - 1)
    return replace(lookup, rows=torch.where(chosen[table_of], -1, rows))
