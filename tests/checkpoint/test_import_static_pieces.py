"""Pieces of tensors, of all shapes and on all ranks, make up the rows of a table."""

from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.static.entries import Entry, Piece
from dynamicemb.checkpoint.static.matrix import column_blocks, lane, matrix_of
from dynamicemb.checkpoint.static.optimizer_state import Assembly, shares_of
from tests.checkpoint.test_import_static_tables import rows_of


def pieces_of(tensor: torch.Tensor, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Entry:
    found = []
    for offsets, sizes in boxes:
        part = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone()
        found.append(Piece(offsets, sizes, lambda b, e, part=part, first=offsets[0]: part[b - first : e - first]))
    return Entry(tuple(tensor.shape), tensor.dtype, tuple(found))


def cuts(draw: Any, length: int) -> list[tuple[int, int]]:
    """Return ``(begin, length)`` of parts of a length."""
    inner = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
    edges = [0, *sorted(inner), length]
    return [(a, b - a) for a, b in zip(edges, edges[1:])]


class SomeRanks(Ranks):
    """A rank among others that exist only as what they hold."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = None, rank, world_size


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pieces_of_any_shape_on_any_rank_make_up_the_rows(data: st.DataObject) -> None:
    draw = data.draw
    num_rows, dim, world_size = draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    weights = rows_of(num_rows, dim)
    columns = cuts(draw, dim)
    rows = cuts(draw, num_rows)
    boxes = [((row, column), (n, d)) for column, d in columns for row, n in rows]
    # Row-wise state: a block of columns after the other.
    flat = torch.rand(num_rows * len(columns))
    flat_boxes = [((i * num_rows + row,), (n,)) for i in range(len(columns)) for row, n in rows]
    holders = [draw(st.integers(0, world_size - 1)) for _ in boxes]
    replicas = [draw(st.booleans()) for _ in boxes]

    def held_by(rank: int, all_boxes: list[Any]) -> list[Any]:
        # Boxes that more than one rank holds, as groups of replicas do.
        return [b for b, h, r in zip(all_boxes, holders, replicas, strict=True) if h == rank or (r and rank == 0)]

    entries = [pieces_of(weights, held_by(rank, boxes)) for rank in range(world_size)]
    flats = [pieces_of(flat, held_by(rank, flat_boxes)) for rank in range(world_size)]
    found, state = torch.full_like(weights, torch.nan), torch.full((num_rows, len(columns)), torch.nan)
    for rank in range(world_size):
        me = SomeRanks(rank, world_size)
        for of_ranks, result in ((entries, found), (flats, state)):
            matrix = matrix_of(of_ranks[rank], [e.described for e in of_ranks], num_rows, me, "t")
            for box in matrix.boxes[rank]:
                part = result[box.row : box.row + box.num_rows, box.column : box.column + box.num_columns]
                assert part.isnan().all(), "an element is read twice"
                part.copy_(matrix.read(box, box.row, box.row + box.num_rows))
    assert torch.equal(found, weights) and torch.equal(state, flat.view(len(columns), num_rows).T)
    blocks = column_blocks([e.described for e in entries])
    assert blocks == columns
    shares = shares_of(blocks, len(columns), dim, "t")
    whole = Assembly(shares).state([state])
    expected = (state.double() * torch.tensor([d / dim for _, d in columns]).double()).sum(1, keepdim=True)
    torch.testing.assert_close(whole, expected.float())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_missing_or_twice_is_refused(data: st.DataObject) -> None:
    draw = data.draw
    num_rows, dim = draw(st.integers(2, 9)), draw(st.integers(1, 6))
    boxes = [((row, column), (n, d)) for column, d in cuts(draw, dim) for row, n in cuts(draw, num_rows)]
    wrong = draw(st.integers(0, len(boxes) - 1))
    damage = draw(st.sampled_from(["missing", "moved"]))
    entry = pieces_of(rows_of(num_rows, dim), boxes)
    parts = list(entry.pieces)
    if damage == "missing":
        del parts[wrong]
    else:
        offsets = parts[wrong].offsets
        parts[wrong] = parts[wrong]._replace(offsets=(offsets[0] + 1, offsets[1]))
    broken = Entry(entry.size, entry.dtype, tuple(parts))
    with pytest.raises(ValueError, match="do not make up its"):
        matrix_of(broken, [broken.described], num_rows, Ranks(), "t")


def test_lanes_share_the_rows() -> None:
    assert [lane(7, rank, 3) for rank in range(3)] == [(0, 3), (3, 6), (6, 7)]
    assert [lane(2, rank, 4) for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_the_mean_of_squares_of_a_row_is_that_of_its_blocks_by_their_share() -> None:
    gradients = torch.rand(5, 6)
    blocks = torch.stack([gradients[:, :2].square().mean(1), gradients[:, 2:].square().mean(1)], 1)
    found = Assembly(shares_of([(0, 2), (2, 4)], 2, 6, "t")).state([blocks])
    torch.testing.assert_close(found[:, 0], gradients.square().mean(1))
