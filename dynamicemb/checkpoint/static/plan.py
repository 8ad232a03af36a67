"""What an import of static tables will do, checked before a table is touched."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.static.entries import Described, Entries
from dynamicemb.checkpoint.static.fill import check_scored
from dynamicemb.checkpoint.static.match import Match
from dynamicemb.checkpoint.static.matrix import Box, Matrix, column_blocks, matrix_of
from dynamicemb.checkpoint.static.optimizer_state import STEPS, Assembly, Stored, recognise, shares_of
from dynamicemb.checkpoint.static.row_ids import RowIds, row_ids_of_collisions, row_ids_of_map
from dynamicemb.checkpoint.tables import Table
from dynamicemb.optimizer import OptimizerKind
from dynamicemb.warn import warn

# Rows that a rank sends the others at a time.
_SENT_ROWS = 2**20
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class TablePlan:
    """How a dynamic table is filled.

    Attributes:
        table: the table.
        source: key of the weights in the checkpoint.
        weights: the weights.
        state: tensors of optimizer state, none where rows begin with the initial one.
        assembly: makes a row's state of them.
        row_ids: ids of the rows.
        steps: how many steps the optimizer made, where the checkpoint tells.
    """

    table: Table
    source: str
    weights: Matrix
    state: tuple[Matrix, ...]
    assembly: Assembly
    row_ids: RowIds
    steps: int | None


class Planner:
    """Makes plans; all ranks call its methods alike."""

    def __init__(self, checkpoint: Entries, optimizer: Entries | None, ranks: Ranks) -> None:
        """Take the entries of this rank; None for the optimizer means that its state is not wanted."""
        self._checkpoint = checkpoint
        self._optimizer = optimizer
        self._ranks = ranks

    def plan(self, match: Match, id_map: tuple[str, Any] | None) -> TablePlan:
        """Plan the import of a table; a collective.

        Args:
            match: what the checkpoint has of it.
            id_map: ids that the user gave, behind the name by which he gave them.

        Raises:
            ValueError: dim, dtype, optimizer, sizes or ids do not fit.
            DynamicEmbError: the table cannot be filled at present.
        """
        table, key = match.table, str(match.weights)
        described = self._described(self._checkpoint, key)
        sizes = self._ranks.each(lambda: _check_weights(table, key, described))
        num_rows = sizes[0]
        weights = self._matrix(self._checkpoint, key, described, num_rows)
        items = dict(match.state) if self._optimizer is not None and table.num_state > 0 else {}
        if self._optimizer is not None and table.num_state == 0 and table.options.training:
            items = dict(match.state)
        of_items = {item: self._described(self._optimizer, str(k)) for item, k in items.items()}
        stored = self._ranks.each(lambda: self._recognise(match, of_items, num_rows))
        state = []
        for item in stored.items if table.num_state > 0 else ():
            state.append(self._matrix(self._optimizer, str(items[item]), of_items[item], num_rows))
        columns = column_blocks(described)
        assembly = self._ranks.each(lambda: _assembly(table, stored, state, columns, items))
        row_ids = self._row_ids(match, id_map, num_rows)
        steps = self._steps(items, of_items) if state else None
        return TablePlan(table, key, weights, tuple(state), assembly, row_ids, steps)

    def _described(self, entries: Entries | None, key: str) -> list[Described | None]:
        entry = None if entries is None else entries.by_key.get(key)
        return self._ranks.gather(None if entry is None else entry.described)

    def _matrix(self, entries: Entries | None, key: str, described: list[Described | None], num_rows: int) -> Matrix:
        def make() -> Matrix:
            assert entries is not None
            matrix = matrix_of(entries.by_key.get(key), described, num_rows, self._ranks, key)
            matrix.check(self._ranks.rank)
            return matrix

        return self._ranks.each(make)

    def _recognise(self, match: Match, of_items: Mapping[str, list[Described | None]], num_rows: int) -> Stored:
        """Return the optimizer of the checkpoint; refuse another one than the table's.

        Raises:
            ValueError: as said.
        """
        table = match.table
        sizes = {item: next(d.size for d in of_ranks if d is not None) for item, of_ranks in of_items.items()}
        stored = recognise(sizes, num_rows, table.dim)
        is_known = bool(stored.items) or stored.kind is None or match.has_sgd
        trains = table.options.training and self._optimizer is not None
        if trains and is_known and stored.kind is not table.module.optimizer.kind:
            raise ValueError(
                f"table {table} trains with {table.optimizer_name}, the checkpoint has the state of {stored.name} for "
                f"{match.weights}; make the model with that optimizer, or pass optimizer=False for rows to begin with "
                "the initial state"
            )
        if self._ranks.rank == 0:
            self._warn(table, stored)
        return stored

    def _warn(self, table: Table, stored: Stored) -> None:
        if stored.idle:
            warn(
                f"table {table}: {', '.join(stored.idle)} of the checkpoint's {stored.name} are not imported; the "
                "table has no such option"
            )
        if table.num_state > 0 and not stored.items and self._optimizer is not None:
            warn(
                f"table {table}: the checkpoint has no optimizer state; rows begin with the initial state of "
                f"{table.optimizer_name}. Pass optimizer=fused_optimizer.state_dict(), or False if that is intended"
            )

    def _row_ids(self, match: Match, id_map: tuple[str, Any] | None, num_rows: int) -> RowIds:
        if id_map is not None:
            name, value = id_map
            row_ids = self._ranks.each(lambda: row_ids_of_map(value, num_rows, name))
        elif match.raw_ids:
            whole = {str(key): self._whole(str(key)) for key in match.raw_ids.values()}
            row_ids = self._ranks.each(lambda: row_ids_of_collisions(match.raw_ids, num_rows, whole.__getitem__))
        else:
            self._ranks.each(lambda: _check_unmanaged(match))
            return RowIds(num_rows)
        if len(set(self._ranks.gather(row_ids.described()))) > 1:
            raise ValueError(f"id_maps: the ranks gave table {match.table} different ids; all must give the same")
        return row_ids

    def _whole(self, key: str) -> torch.Tensor:
        """Return an i64 tensor, flat, all of it on all ranks; a collective."""
        described = self._described(self._checkpoint, key)
        num_rows = next(d.size[0] for d in described if d is not None)
        matrix = self._matrix(self._checkpoint, key, described, num_rows)
        result = torch.empty(num_rows, matrix.num_columns, dtype=torch.int64)
        for rank, boxes in enumerate(matrix.boxes):
            for box in boxes:
                columns = slice(box.column, box.column + box.num_columns)
                for begin in range(box.row, box.row + box.num_rows, _SENT_ROWS):
                    end = min(begin + _SENT_ROWS, box.row + box.num_rows)
                    result[begin:end, columns] = self._sent(matrix, rank, box, (begin, end))
        return result.flatten()

    def _sent(self, matrix: Matrix, rank: int, box: Box, rows: tuple[int, int]) -> torch.Tensor:
        """Return rows of a box that a rank has, i64, on all ranks; a collective."""
        ranks = self._ranks
        values = torch.empty(rows[1] - rows[0], box.num_columns, dtype=torch.int64)
        read = ranks.each(lambda: matrix.read(box, *rows) if rank == ranks.rank else None)
        if read is not None:
            values.copy_(read)
        if ranks.world_size == 1:
            return values
        sent = values.to(ranks.device)
        dist.broadcast(sent, group_src=rank, group=ranks.group)
        return sent.cpu()

    def _steps(self, items: Mapping[str, Any], of_items: Mapping[str, list[Described | None]]) -> int | None:
        """Return how many steps the checkpoint says there were, None if it does not; a collective."""
        keys = [str(key) for item, key in items.items() if item in STEPS]

        def read() -> int | None:
            assert self._optimizer is not None
            found = [self._optimizer.by_key[key] for key in keys if key in self._optimizer.by_key]
            pieces = [piece for entry in found for piece in entry.pieces]
            numbers = [piece.read(piece.offsets[0] if piece.offsets else 0, _end(piece)).max() for piece in pieces]
            return max((int(number) for number in numbers), default=None)

        return max((n for n in self._ranks.together(read) if n is not None), default=None)


def _check_unmanaged(match: Match) -> None:
    """Refuse to take rows for ids where a module gave ids to rows, and the checkpoint does not say which.

    Raises:
        ValueError: as said.
    """
    if match.weights.is_managed:
        raise ValueError(
            f"checkpoint: {match.weights} is a table of a managed-collision collection, but its raw ids are missing; "
            "pass the state_dict of the whole collection, or id_maps for the table"
        )


def _end(piece: Any) -> int:
    return int(piece.offsets[0] + piece.sizes[0]) if piece.sizes else 1


def _check_weights(table: Table, key: str, described: list[Described | None]) -> tuple[int, ...]:
    """Refuse weights that do not fit a table, and a table that cannot be filled now; returns their size.

    Raises:
        ValueError, DynamicEmbError: as said.
    """
    there = [d for d in described if d is not None]
    size, dtype = there[0].size, there[0].dtype
    if dtype not in _FLOATS:
        raise ValueError(
            f"checkpoint: {key} has the dtype {dtype}; weights must be one of {', '.join(map(str, _FLOATS))}. "
            "Dequantise the table first"
        )
    if len(size) == 2 and not size[0]:
        raise ValueError(f"checkpoint: {key} has no rows; leave table {table} out of table_names")
    if len(size) != 2 or size[1] != table.dim:
        raise ValueError(
            f"table {table} has dim {table.dim}, {key} of the checkpoint the size {list(size)}; make the table with "
            f"embedding_dim={size[-1] if size else 0}"
        )
    check_scored(table)
    return size


def _assembly(
    table: Table, stored: Stored, state: list[Matrix], columns: list[tuple[int, int]], items: Mapping[str, Any]
) -> Assembly:
    if stored.kind is not OptimizerKind.ROWWISE_ADAGRAD or not state:
        return Assembly()
    return Assembly(shares_of(columns, state[0].num_columns, table.dim, str(items[stored.items[0]])))
