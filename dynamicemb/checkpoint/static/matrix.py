"""A tensor of a static table as a matrix with a row for each row of the table, spread over ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.static.entries import Described, Entry, Piece


class Box(NamedTuple):
    """A part of a matrix."""

    row: int
    column: int
    num_rows: int
    num_columns: int

    @property
    def area(self) -> int:
        """How many elements it has."""
        return self.num_rows * self.num_columns


class Part(NamedTuple):
    """A box of which this rank can read rows; they may be a flat tensor, with ``shift`` elements before row 0."""

    box: Box
    piece: Piece
    shift: int = 0

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return rows as a matrix."""
        rows = self.piece.read(begin + self.shift, end + self.shift)
        return rows.reshape(end - begin, self.box.num_columns)


@dataclass(frozen=True)
class Matrix:
    """A matrix of which each rank reads some boxes, all together each element once.

    Attributes:
        num_rows: N.
        num_columns: C.
        boxes: of each rank.
        parts: what this rank can read; its boxes are made of them.
        name: its key in the checkpoint, for messages.
    """

    num_rows: int
    num_columns: int
    boxes: list[list[Box]]
    parts: list[Part]
    name: str = ""

    def read(self, box: Box, begin: int, end: int) -> torch.Tensor:
        """Return rows of a box of this rank, ``[end - begin, columns of the box]``, in the dtype of the checkpoint."""
        found = []
        for part in self._touching(box):
            first, last = max(begin, part.box.row), min(end, part.box.row + part.box.num_rows)
            if first < last:
                found.append((first - begin, part.box.column - box.column, part.read(first, last)))
        if len(found) == 1 and found[0][2].shape == (end - begin, box.num_columns):
            return found[0][2]
        dtype = found[0][2].dtype if found else torch.float32
        result = torch.empty(end - begin, box.num_columns, dtype=dtype)
        for row, column, values in found:
            result[row : row + values.shape[0], column : column + values.shape[1]] = values
        return result

    def check(self, rank: int) -> None:
        """Check that what this rank will read can be read; raises as the pieces do."""
        for box in self.boxes[rank]:
            for part in self._touching(box):
                part.piece.check()

    def _touching(self, box: Box) -> list[Part]:
        return [part for part in self.parts if _overlap(part.box, box)]


def lane(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the rows that a rank reads of what all could read.

    Example::

        [lane(7, r, 3) for r in range(3)]  # [(0, 3), (3, 6), (6, 7)]
    """
    length = -(-num_rows // world_size)
    return min(rank * length, num_rows), min((rank + 1) * length, num_rows)


def matrix_of(entry: Entry | None, described: list[Described | None], num_rows: int, ranks: Ranks, name: str) -> Matrix:
    """Return a tensor as a matrix.

    A flat tensor of C times N elements, as row-wise state of a table with C blocks of columns, has C columns.

    Args:
        entry: what this rank has of it.
        described: what each rank has of it.
        num_rows: N, rows of the table.
        ranks: the ranks.
        name: for messages.

    Raises:
        ValueError: the size does not fit, or the ranks do not hold each element once.
    """
    size = next(d.size for d in described if d is not None)
    if any(d is not None and d.size != size for d in described):
        raise ValueError(
            f"checkpoint: the ranks disagree about the size of {name}: {[d and d.size for d in described]}"
        )
    num_columns = _num_columns(size, num_rows, name)
    boxes = [_boxes(d, num_rows) for d in described]
    parts = [] if entry is None else _parts(entry, num_rows)
    if all(sum(box.area for box in of_rank) == num_rows * num_columns for of_rank in boxes):
        for of_rank in boxes:
            _check_cover(of_rank, num_rows, num_columns, name)
        # All have everything: share the work.
        lanes = [lane(num_rows, rank, ranks.world_size) for rank in range(ranks.world_size)]
        boxes = [[Box(begin, 0, end - begin, num_columns)] for begin, end in lanes]
    else:
        boxes = _once(boxes)
        _check_cover([box for of_rank in boxes for box in of_rank], num_rows, num_columns, name)
    return Matrix(num_rows, num_columns, boxes, parts, name)


def column_blocks(described: Iterable[Described | None]) -> list[tuple[int, int]]:
    """Return the first column and the width of the blocks of columns that a matrix is cut into, in order."""
    found = {
        (offsets[1], sizes[1])
        for d in described
        if d is not None
        for offsets, sizes in d.boxes
        if sizes[0] and sizes[1]
    }
    return sorted(found)


def _num_columns(size: tuple[int, ...], num_rows: int, name: str) -> int:
    if len(size) == 2 and size[0] == num_rows:
        return size[1]
    if len(size) == 1 and size[0] and size[0] % num_rows == 0:
        return size[0] // num_rows
    raise ValueError(
        f"checkpoint: {name} has the size {list(size)}, which does not fit the {num_rows} rows of its table"
    )


def _boxes(described: Described | None, num_rows: int) -> list[Box]:
    if described is None:
        return []
    return [box for offsets, sizes in described.boxes for box, _ in _cut(offsets, sizes, num_rows)]


def _parts(entry: Entry, num_rows: int) -> list[Part]:
    cuts = [(piece, cut) for piece in entry.pieces for cut in _cut(piece.offsets, piece.sizes, num_rows)]
    return [Part(box, piece, shift) for piece, (box, shift) in cuts]


def _cut(offsets: tuple[int, ...], sizes: tuple[int, ...], num_rows: int) -> list[tuple[Box, int]]:
    """Return the boxes of a piece, and how many elements stand before row 0 of each in a flat tensor.

    Example::

        _cut((2,), (4,), 3)  # elements 2 to 5 of a flat tensor: row 2 of column 0, rows 0 to 2 of column 1
    """
    if len(sizes) == 2:
        box = Box(offsets[0], offsets[1], sizes[0], sizes[1])
        return [(box, 0)] if box.area else []
    found, begin, end = [], offsets[0], offsets[0] + sizes[0]
    while begin < end:
        column, row = divmod(begin, num_rows)
        length = min(end - begin, num_rows - row)
        found.append((Box(row, column, length, 1), column * num_rows))
        begin += length
    return found


def _once(boxes: list[list[Box]]) -> list[list[Box]]:
    """Leave each box to the first rank that has it."""
    seen: set[Box] = set()
    result = []
    for of_rank in boxes:
        result.append([box for box in dict.fromkeys(of_rank) if box not in seen])
        seen.update(of_rank)
    return result


def _overlap(a: Box, b: Box) -> bool:
    rows = a.row < b.row + b.num_rows and b.row < a.row + a.num_rows
    return rows and a.column < b.column + b.num_columns and b.column < a.column + a.num_columns


def _check_cover(boxes: list[Box], num_rows: int, num_columns: int, name: str) -> None:
    """Refuse boxes that leave something out, or have something twice."""
    area = sum(box.area for box in boxes)
    begins = np.array([box[:2] for box in boxes], np.int64).reshape(-1, 2)
    ends = begins + np.array([box[2:] for box in boxes], np.int64).reshape(-1, 2)
    inside = (begins >= 0).all() and (ends <= [num_rows, num_columns]).all()
    if area != num_rows * num_columns or not inside or _any_overlap(begins, ends):
        raise ValueError(
            f"checkpoint: the pieces of {name} that the ranks hold do not make up its {num_rows} x {num_columns} "
            f"elements, each once (they have {area}). A state_dict of several ranks is passed by as many ranks, each "
            "its own; for another number of ranks save a folder with torch.distributed.checkpoint and pass its path"
        )


def _any_overlap(begins: np.ndarray, ends: np.ndarray) -> bool:
    for i in range(len(begins)):
        both = (begins[i + 1 :] < ends[i]) & (begins[i] < ends[i + 1 :])
        if both.all(1).any():
            return True
    return False
