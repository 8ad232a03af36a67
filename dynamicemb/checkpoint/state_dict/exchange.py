"""Send rows to the ranks that own their ids, in batches."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.tables import Table

# What a rank receives at a time, if all send it all they have.
_BATCH_BYTES = 2**24


class Exchange:
    """Brings the rows of a table, spread over ranks at random, to their owners; a collective.

    Every rank must take all batches to the end, whatever becomes of them, for the others to get theirs.

    Attributes:
        num_owned: rows that this rank will receive.
    """

    def __init__(self, table: Table, columns: list[torch.Tensor], complete: bool, ranks: Ranks) -> None:
        """Count what goes where.

        Args:
            table: whose rows they are.
            columns: ids i64 ``[n]``, and tensors ``[n, ...]`` that belong to them, in host memory.
            complete: whether this rank has all rows already; all ranks must say the same.
            ranks: the ranks.
        """
        self._columns = columns
        self._ranks = ranks
        self._exchanges = not complete and ranks.world_size > 1
        self._size = _rows_per_batch(columns, ranks.world_size if self._exchanges else 1)
        self._owners = table.placement(ranks.world_size).owner(columns[0])
        sent = torch.bincount(self._owners, minlength=ranks.world_size).tolist()
        counts = ranks.gather(sent) if self._exchanges else [sent]
        self.num_owned = sum(of_rank[ranks.rank] for of_rank in counts)
        self._num_batches = -(-max(map(sum, counts)) // self._size)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Yield columns of rows that this rank owns."""
        for batch in range(self._num_batches):
            part = slice(batch * self._size, (batch + 1) * self._size)
            columns, owners = [column[part] for column in self._columns], self._owners[part]
            if self._exchanges:
                order = torch.argsort(owners, stable=True)
                counts = torch.bincount(owners, minlength=self._ranks.world_size)
                yield _exchanged([column[order] for column in columns], counts, self._ranks)
            else:
                own = (owners == self._ranks.rank).nonzero().flatten()
                yield columns if own.numel() == owners.numel() else [column[own] for column in columns]


def _rows_per_batch(columns: list[torch.Tensor], num_senders: int) -> int:
    row_bytes = sum(column.element_size() * column.shape[1:].numel() for column in columns)
    return max(1, _BATCH_BYTES // (row_bytes * num_senders))


def _exchanged(columns: list[torch.Tensor], counts: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """Send ``counts[r]`` rows to rank r, in order; returns what came for this rank, in host memory."""
    # Not every backend knows every dtype.
    device = ranks.device
    coming = torch.empty_like(counts, device=device)
    dist.all_to_all_single(coming, counts.to(device), group=ranks.group)
    received, sent = coming.tolist(), counts.tolist()
    parts = []
    for column in columns:
        row_bytes = column.element_size() * column.shape[1:].numel()
        data = column.contiguous().view(torch.uint8).reshape(column.shape[0], row_bytes).to(device)
        result = torch.empty(sum(received), row_bytes, dtype=torch.uint8, device=device)
        dist.all_to_all_single(result, data, received, sent, group=ranks.group)
        parts.append(result.cpu().view(column.dtype).reshape(sum(received), *column.shape[1:]))
    return parts
