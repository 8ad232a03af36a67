"""Erase ids."""

import numpy as np
import torch
from numba import njit

from dynamicemb.table.cpu.memory import write_u8
from dynamicemb.table.cpu.probe import expired, home, index_view, probe
from dynamicemb.table.cpu.threads import launcher
from dynamicemb.table.index import ERASED, Index


@launcher("ids")
def erase(index: Index, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
    """Remove ids; their slots keep their rows, and their tags protect them until the steps that touched them are over.

    Args:
        index: the group's index.
        ids: i64 ``[N]``, the ids of one table after those of another.
        table_ranges: i64 ``[T+1]``, the ids of each table.

    Returns:
        bool ``[N]``: whether this occurrence removed its id (of repeated ids, the first).
    """
    erased = np.zeros(ids.numel(), np.bool_)
    for t in range(index.num_tables):
        begin, end = int(table_ranges[t]), int(table_ranges[t + 1])
        if begin < end:
            _erase_kernel(index_view(index), t, ids.numpy()[begin:end], erased[begin:end])
            index.tallies[t, ERASED] += int(erased[begin:end].sum())
    return torch.from_numpy(erased)


@njit(cache=True, nogil=True)
def _erase_kernel(view, table, ids, erased):
    for i in range(ids.size):
        base, group, digest = home(view, table, ids[i])
        slot = probe(view, base, group, digest, ids[i])
        if slot >= 0 and not expired(view, table, slot):
            write_u8(view.digests, slot, 1)
            erased[i] = True
