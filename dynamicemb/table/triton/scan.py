"""List the occupied slots of a table."""

import torch

from dynamicemb.table.index import Index
from dynamicemb.table.layout import FIRST_DIGEST
from dynamicemb.table.scores import SCORE_COMPOUND


def scan(index: Index, table: int, min_score: int = 0) -> torch.Tensor:
    """Return the occupied slots of a table whose score, or of a compound table the stamp, is at least ``min_score``.

    Args:
        index: the group's index.
        table: which table.
        min_score: lowest score or stamp wanted.

    Returns:
        i64 ``[M]`` slots, ascending.

    Host sync: for the table's range and for M. Plain torch: it is bound by the 9 bytes it reads per slot.
    """
    begin, end = (index.bucket_offsets[table : table + 2] * index.bucket_capacity).tolist()
    stamped = index.has_stamps and int(index.strategies[table]) == SCORE_COMPOUND
    column = index.stamps if stamped else index.scores
    wanted = (index.digests[begin:end] >= FIRST_DIGEST) & (column[begin:end] >= min_score)
    return wanted.nonzero().flatten() + begin
