"""Where the parts of a table are: the routing rules, placements, and the sort by owner."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamicemb.sharding.exchange.bucketize import bucketize, bucketize_with_torch
from dynamicemb.table.ids import as_int64
from dynamicemb.table.layout import fmix64
from dynamicemb.table.placement import DIST_TYPES, Part, Placement, Rule
from tests.support.placements import owner_of

EXTREMES = [-(2**63), -(2**63) + 1, -4, -3, -2, -1, 0, 1, 2, 2**31, 2**62, 2**63 - 2, 2**63 - 1]


def python_owner(key: int, world_size: int, dist_type: str, num_embeddings: int) -> int:
    k = key % 2**64
    if dist_type == "roundrobin":
        return k % world_size
    if dist_type == "hash_roundrobin":
        return int(fmix64(np.array([k], dtype=np.uint64))[0]) % world_size
    block = -(-num_embeddings // world_size)
    return k // block if k < block * world_size else k % world_size


@pytest.mark.parametrize("dist_type", DIST_TYPES)
@pytest.mark.parametrize("num_embeddings", [1, 7, 1000, 2**62])
def test_c01_owner_of_equals_unsigned_arithmetic(dist_type: str, num_embeddings: int) -> None:
    ids = EXTREMES + list(range(-20, 20)) + [num_embeddings - 1, num_embeddings]
    for world_size in (1, 2, 3, 5, 7, 8, 1000):
        got = owner_of(torch.tensor(ids), world_size, dist_type, num_embeddings).tolist()
        assert got == [python_owner(i, world_size, dist_type, num_embeddings) for i in ids]


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30),
    world_size=st.integers(1, 4096),
    num_embeddings=st.integers(1, 2**62),
    dist_type=st.sampled_from(DIST_TYPES),
)
def test_c01_owner_of_any_id(ids: list[int], world_size: int, num_embeddings: int, dist_type: str) -> None:
    got = owner_of(torch.tensor(ids, dtype=torch.int64), world_size, dist_type, num_embeddings).tolist()
    assert got == [python_owner(i, world_size, dist_type, num_embeddings) for i in ids]


def test_owner_of_examples_of_the_docstring() -> None:
    assert owner_of(torch.tensor([-1, 0, 5]), 3).tolist() == [0, 0, 2]
    assert owner_of(torch.tensor([0, 3, 4, 9]), 3, "continuous", 7).tolist() == [0, 1, 1, 0]


def test_c01_int32_and_uint64_ids() -> None:
    assert as_int64(torch.tensor([-1, 5], dtype=torch.int32)).tolist() == [-1, 5]
    assert as_int64(torch.tensor([2**64 - 1], dtype=torch.uint64)).tolist() == [-1]
    assert owner_of(torch.tensor([2**64 - 1, 4], dtype=torch.uint64), 7).tolist() == [(2**64 - 1) % 7, 4]
    with pytest.raises(TypeError, match="float32"):
        as_int64(torch.zeros(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, "modulo"), "dist_type must be one of .*'modulo'"),
        ((0, "roundrobin"), "ranks must name a rank for each part"),
        ((2, "continuous"), "num_embeddings .* got None"),
        ((2, "continuous", 0), "num_embeddings .* got 0"),
    ],
)
def test_c04_bad_routing_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        owner_of(torch.zeros(1, dtype=torch.int64), *arguments)


def test_bucketize_example_of_the_docstring() -> None:
    new_lengths, order, position = bucketize(torch.tensor([1, 0, 1, 1]), torch.tensor([3, 1]), 2)
    assert new_lengths.tolist() == [1, 0, 2, 1]
    assert order.tolist() == [1, 0, 2, 3]
    assert position.tolist() == [1, 0, 2, 3]


@given(data=st.data(), world_size=st.integers(1, 5), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_c03_bucketize_keeps_every_occurrence(data: st.DataObject, world_size: int, dtype: torch.dtype) -> None:
    bags = data.draw(st.lists(st.lists(st.integers(0, world_size - 1), max_size=6), max_size=8))
    owners = torch.tensor([owner for bag in bags for owner in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=dtype)
    flat = [(owner, bag, i) for bag, owners_ in enumerate(bags) for i, owner in enumerate(owners_)]
    expected_order = sorted(range(len(flat)), key=lambda i: flat[i])
    for function in (bucketize, bucketize_with_torch):
        new_lengths, order, position = function(owners, lengths, world_size)
        assert order.tolist() == expected_order
        assert [order[p].item() for p in position] == list(range(len(flat)))
        assert new_lengths.dtype == dtype
        assert new_lengths.tolist() == [bag.count(rank) for rank in range(world_size) for bag in bags]


@pytest.mark.parametrize("num_bags", [0, 1, 63, 100, 2000])
def test_bucketize_with_numba_equals_torch(num_bags: int) -> None:
    generator = torch.Generator().manual_seed(num_bags)
    lengths = torch.randint(0, 9, (num_bags,), generator=generator)
    owners = torch.randint(0, 3, (int(lengths.sum()),), generator=generator)
    for got, expected in zip(bucketize(owners, lengths, 3), bucketize_with_torch(owners, lengths, 3)):
        assert torch.equal(got, expected)


# Placements


def test_a_grid_gives_each_part_of_the_rows_and_of_the_columns_to_a_rank() -> None:
    grid = Placement(Rule(), (0, 1, 4, 5), ((0, 32), (32, 64)))
    ids = torch.tensor([6, 7])
    assert (grid.num_parts, grid.dim) == (2, 64)
    assert grid.owner(ids).tolist() == [0, 1] and grid.owner(ids, 1).tolist() == [4, 5]
    assert [grid.part_of(rank) for rank in (1, 4, 2)] == [Part(1, (0, 32)), Part(0, (32, 64)), None]
    assert [grid.owns(ids, rank).tolist() for rank in (0, 5, 2)] == [[True, False], [False, True], [False, False]]
    assert not grid.is_row_wise_over(4)


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30),
    ranks=st.permutations(range(6)).flatmap(lambda order: st.integers(1, 6).map(lambda n: tuple(order[:n]))),
    dist_type=st.sampled_from(DIST_TYPES),
)
def test_c01_of_the_ranks_of_a_placement_one_owns_an_id(ids: list[int], ranks: tuple[int, ...], dist_type: str) -> None:
    placement = Placement(Rule(dist_type, 1000), ranks, ((0, 8),))
    keys = torch.tensor(ids, dtype=torch.int64)
    wanted = [ranks[python_owner(i, len(ranks), dist_type, 1000)] for i in ids]
    assert placement.owner(keys).tolist() == wanted
    for rank in range(6):
        assert placement.owns(keys, rank).tolist() == [owner == rank for owner in wanted]


@pytest.mark.parametrize(
    ("ranks", "columns", "message"),
    [
        ((), ((0, 8),), "ranks must name a rank for each part"),
        ((0, 1, 2), ((0, 4), (4, 8)), "ranks must name a rank for each part of the rows of each of 2 column shards"),
        ((0, 0), ((0, 8),), "ranks must be different"),
        ((-1,), ((0, 8),), "ranks must be different numbers from 0 on"),
        ((0,), ((1, 8),), "columns must follow each other from 0 on"),
        ((0, 1), ((0, 4), (8, 12)), "columns must follow each other"),
        ((0, 1), ((0, 6), (6, 8)), "columns must be cut at multiples of 4"),
    ],
)
def test_a_placement_that_contradicts_itself_is_refused(
    ranks: tuple[int, ...], columns: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(Rule(), ranks, columns)


def test_rules_of_tables_of_any_size_are_equal_unless_they_are_continuous() -> None:
    assert Rule("roundrobin", 5) == Rule("roundrobin", 7)
    assert Rule("continuous", 5) != Rule("continuous", 7)
