"""Which rows are looked at: all, or so many of them spread evenly over the files."""

from collections.abc import Iterator
from typing import NamedTuple

# Parts of a sample. Rows stand in the order of a hash, so that any part is as good as another.
_NUM_PIECES = 64


class Block(NamedTuple):
    """Rows ``begin..begin + num_rows`` of a rank's files."""

    rank: int
    begin: int
    num_rows: int


def blocks(counts: list[int], limit: int | None, size: int) -> Iterator[Block]:
    """Yield the rows to look at, in blocks of at most ``size``.

    Args:
        counts: rows of each rank.
        limit: rows at most, None for all.
        size: rows of a block at most.

    Example::

        blocks([5, 3], None, 4)   # (0, 0, 4), (0, 4, 1), (1, 0, 3)
        blocks([100, 100], 2, 9)  # (0, 0, 1), (1, 0, 1)
    """
    total = sum(counts)
    pieces, length = 1, total
    if limit is not None and limit < total:
        pieces = min(_NUM_PIECES, limit)
        length = limit // pieces
    for piece in range(pieces):
        begin = piece * total // pieces
        yield from _split(counts, begin, begin + length, size)


def num_looked_at(counts: list[int], limit: int | None) -> int:
    """Return how many rows ``blocks`` yields."""
    total = sum(counts)
    if limit is None or limit >= total:
        return total
    pieces = min(_NUM_PIECES, limit)
    return limit // pieces * pieces


def _split(counts: list[int], begin: int, end: int, size: int) -> Iterator[Block]:
    """Divide rows, numbered through all ranks, at the ends of ranks and blocks."""
    first = 0
    for rank, count in enumerate(counts):
        position = max(begin, first)
        while position < min(end, first + count):
            number = min(size, end - position, first + count - position)
            yield Block(rank, position - first, number)
            position += number
        first += count
