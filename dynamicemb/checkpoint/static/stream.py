"""Rows of a static table, block by block, read where they are and sent to the ranks that own their ids."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.static.matrix import Box, Matrix, lane
from dynamicemb.checkpoint.static.row_ids import RowIds
from dynamicemb.errors import DynamicEmbError

# Rows and bytes of a block over all ranks.
_BLOCK_ROWS = 2**16
_BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class Block:
    """Rows of a table, some of the lane of each rank.

    Attributes:
        ranges: first row and end of each part.
    """

    ranges: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return sum(end - begin for begin, end in self.ranges)

    @property
    def rows(self) -> torch.Tensor:
        """Their numbers, i64."""
        return torch.cat([torch.arange(begin, end) for begin, end in self.ranges])


class _Cut(NamedTuple):
    """What a block has of a box that a rank reads: rows from ``begin``, at ``position`` in the block."""

    matrix: int
    box: Box
    begin: int
    end: int
    position: int


class Received(NamedTuple):
    """Rows that have reached the owner of their ids.

    Attributes:
        rows: their numbers in the static table, i64 ``[n]``.
        ids: i64 ``[n]``.
        columns: of each matrix, f32 ``[n, columns]``.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    columns: list[torch.Tensor]


class Stream:
    """Brings the rows of a table to the ranks that own their ids; all ranks go through the same blocks.

    Each block is first read and then exchanged, so that a rank that cannot read can say so in between.
    """

    def __init__(
        self, matrices: list[Matrix], row_ids: RowIds, owners: Callable[[torch.Tensor], torch.Tensor], ranks: Ranks
    ) -> None:
        """Prepare.

        Args:
            matrices: what is read of each row.
            row_ids: ids of the rows.
            owners: returns the rank of each id.
            ranks: the ranks.
        """
        self._matrices = matrices
        self._row_ids = row_ids
        self._owners = owners
        self._ranks = ranks

    def blocks(self) -> list[Block]:
        """Return the blocks, which have each row once."""
        world_size, num_rows = self._ranks.world_size, self._matrices[0].num_rows
        row_bytes = 4 * sum(matrix.num_columns for matrix in self._matrices)
        size = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // row_bytes) // world_size)
        lanes = [lane(num_rows, rank, world_size) for rank in range(world_size)]
        longest = max(end - begin for begin, end in lanes)
        found = []
        for first in range(0, longest, size):
            parts = [(begin + first, min(begin + first + size, end)) for begin, end in lanes]
            found.append(Block(tuple(part for part in parts if part[0] < part[1])))
        return found

    def read(self, block: Block) -> list[torch.Tensor]:
        """Return what this rank reads for a block, f32, in the order of its cuts.

        Raises:
            DynamicEmbError: a number is too large for float32.
        """
        return [self._float32(cut) for cut in self._cuts(block, self._ranks.rank)]

    def _float32(self, cut: _Cut) -> torch.Tensor:
        matrix = self._matrices[cut.matrix]
        values = matrix.read(cut.box, cut.begin, cut.end)
        narrow = values.float()
        if values.dtype is not torch.float64:
            return narrow
        rows = torch.arange(cut.begin, cut.end)
        _, has = self._row_ids.of(rows)
        too_large = (torch.isinf(narrow) & ~torch.isinf(values)).any(1)
        # A row that is not imported may hold anything.
        rows = rows[too_large if has is None else too_large & has]
        if rows.numel():
            raise DynamicEmbError(
                f"checkpoint: {matrix.name}: {rows.numel()} rows, row {int(rows[0])} the first, have numbers beyond "
                "the range of torch.float32, in which tables compute; all tables of the call are empty. Clamp them in "
                "the checkpoint, or leave the rows out with id_maps"
            )
        return narrow

    def exchange(self, block: Block, values: list[torch.Tensor]) -> Received:
        """Send what was read to its owners; a collective.

        Args:
            block: the block.
            values: what ``read`` returned for it.

        Returns:
            The rows whose ids this rank owns.
        """
        rank, world_size = self._ranks.rank, self._ranks.world_size
        block_rows = block.rows
        ids, has = self._row_ids.of(block_rows)
        owners = self._owners(ids)
        if has is not None:
            owners = torch.where(has, owners, -1)
        own = owners == rank
        if world_size == 1:
            # It has read whole rows.
            assert len(values) == len(self._matrices)
            if has is None:
                return Received(block_rows, ids, values)
            return Received(block_rows[own], ids[own], [column[own] for column in values])
        # Of each row of the block that is ours: which of them it is.
        place = own.cumsum(0) - 1
        cuts = [self._cuts(block, r) for r in range(world_size)]
        received = self._sent(owners, cuts, values)
        result = [torch.empty(int(own.sum()), matrix.num_columns) for matrix in self._matrices]
        for of_rank, data in zip(cuts, received, strict=True):
            begin = 0
            for cut in of_rank:
                part = slice(cut.position, cut.position + cut.end - cut.begin)
                rows, width = place[part][own[part]], cut.box.num_columns
                found = data[begin : begin + rows.numel() * width].view(-1, width)
                result[cut.matrix][rows, cut.box.column : cut.box.column + width] = found
                begin += rows.numel() * width
        return Received(block_rows[own], ids[own], result)

    def _cuts(self, block: Block, rank: int) -> list[_Cut]:
        """Return what a rank reads for a block, in an order that all ranks know."""
        found = []
        for m, matrix in enumerate(self._matrices):
            for box in matrix.boxes[rank]:
                position = 0
                for begin, end in block.ranges:
                    first, last = max(begin, box.row), min(end, box.row + box.num_rows)
                    if first < last:
                        found.append(_Cut(m, box, first, last, position + first - begin))
                    position += end - begin
        return found

    def _sent(self, owners: torch.Tensor, cuts: list[list[_Cut]], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send each rank its rows of what this one has read; returns what came from each, flat."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        parts = [(owners[cut.position : cut.position + cut.end - cut.begin]) for cut in cuts[rank]]
        leaving = [
            torch.cat([data[part == r].flatten() for part, data in zip(parts, values, strict=True)] or [torch.empty(0)])
            for r in range(world_size)
        ]
        coming = [
            sum(
                int((owners[cut.position : cut.position + cut.end - cut.begin] == rank).sum()) * cut.box.num_columns
                for cut in of_rank
            )
            for of_rank in cuts
        ]
        device = self._ranks.device
        result = torch.empty(sum(coming), device=device)
        sizes = [data.numel() for data in leaving]
        dist.all_to_all_single(result, torch.cat(leaving).to(device), coming, sizes, group=self._ranks.group)
        return list(result.cpu().split(coming))
