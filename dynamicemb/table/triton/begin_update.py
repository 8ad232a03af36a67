"""Begin an update: count it, find the gradient of every occurrence, and group the occurrences of a small batch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dynamicemb.table.layout import POOLING_MEAN
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.triton.constants import UPDATES
from dynamicemb.table.triton.launch import Launcher, carve, cdiv
from dynamicemb.table.triton.pool import bag_table_and_place
from dynamicemb.table.triton.rows import find_range, row_addresses, row_shape
from dynamicemb.table.triton.segments import FEW_UNITS, MANY_UNITS, PIECE, num_windows, pack, segment

# Occurrences of a batch that are sorted by comparing each with all others: one kernel in the place of torch's sort,
# whose launches alone take the host 50 us and more.
MOST_RANKED = 8192
# Occurrences of a program, with and without ranking, and how many it compares them with at a time.
_RANKED = 32
_LOCATED = 256
_COMPARED = tl.constexpr(128)
_PIECE = tl.constexpr(PIECE)


class _BagShape(NamedTuple):
    """What locating gradients is compiled for: whether they are to be located, and what makes their factors."""

    pooled: bool
    mean: bool
    weighted: bool
    scaled: bool


@dataclass(slots=True)
class Scratch:
    """What an update works in: one allocation, its parts as ``launch.carve`` returns them.

    Attributes:
        memory: i32, all of it.
        counts: i32 ``[2]``, of ``Groups``.
        words: i64 ``[3 N + N // PIECE + 1]``, of ``Groups``.
        order: i64 ``[N]``, of ``Groups``, for a small batch.
        partials: f32 ``[2, N // PIECE + 1, block_dim]``, the sums of first pieces, then of all others: two pieces of
            either kind begin at least PIECE occurrences apart.
        places: i64 ``[N]``, where an occurrence's gradient starts, as in ``Gradients``; None: one after the other.
        scales: f32 ``[N]``, its factor; None where all are 1.
        sorted_places: i64 ``[N]``, of a large batch of bags: ``places`` in the order of ``Groups.order``; else None.
        sorted_scales: f32 ``[N]``, likewise.
    """

    memory: torch.Tensor
    counts: Any
    words: Any
    order: Any
    partials: Any
    places: Any
    scales: Any
    sorted_places: Any
    sorted_scales: Any

    @classmethod
    def allocate(cls, gradients: Gradients, block_dim: int) -> "Scratch":
        """Allocate for a batch."""
        num, bags = gradients.rows.numel(), gradients.bags
        pooled, scaled = False, False
        if bags is not None:
            pooled, scaled = True, bags.layout.pooling == POOLING_MEAN or bags.per_sample_weights is not None
        windows = num_windows(num)
        num_words = 3 * num + windows
        # Where the parts begin: each at a multiple of four words.
        words = 4
        order = words + 2 * (num_words + num_words % 2)
        partials = order + (2 * (num + num % 2) if num <= MOST_RANKED else 0)
        places = partials + 2 * windows * block_dim
        scales = places + (2 * (num + num % 2) if pooled else 0)
        sorted_places = scales + (4 * cdiv(num, 4) if scaled else 0)
        sorts = pooled and num > MOST_RANKED
        sorted_scales = sorted_places + (2 * (num + num % 2) if sorts else 0)
        end = sorted_scales + (num if sorts and scaled else 0)
        memory = torch.empty(end, dtype=torch.int32, device=gradients.rows.device)
        return cls(
            memory,
            carve(memory, 0, 2, torch.int32),
            carve(memory, words, num_words, torch.int64),
            carve(memory, order, num if num <= MOST_RANKED else 0, torch.int64),
            carve(memory, partials, 2 * windows * block_dim, torch.float32),
            carve(memory, places, num, torch.int64) if pooled else gradients.places,
            carve(memory, scales, num, torch.float32) if scaled else gradients.scales,
            carve(memory, sorted_places, num, torch.int64) if sorts else None,
            carve(memory, sorted_scales, num, torch.float32) if sorts and scaled else None,
        )


def begin_update(store: RowStore, gradients: Gradients, clock: torch.Tensor, scratch: Scratch, ranked: bool) -> None:
    """Count the application, and find the gradient of every occurrence of a bag.

    Args:
        store: the rows.
        gradients: of the occurrences.
        clock: i64 ``[CLOCK_SIZE]``; UPDATES counts.
        scratch: ``counts`` become 0; for bags ``places`` and ``scales`` are written.
        ranked: also write what ``group_by_row`` returns to ``scratch``; for at most MOST_RANKED occurrences.

    Host sync: none. Bytes moved: pooling writes 8 N, 12 N with factors; ranking reads 4 N for every _RANKED
    occurrences, from the cache, and writes 32 N.
    """
    rows, bags = gradients.rows, gradients.bags
    num, block = rows.numel(), _RANKED if ranked else _LOCATED
    order, words = (scratch.order, scratch.words) if ranked else (clock, clock)
    if bags is None:
        shape = _BagShape(False, False, False, False)
        of_bags: tuple[Any, ...] = (clock,) * 6
        integers = (num, 0, 0, 0)
    else:
        layout, weights, scaled = bags.layout, bags.per_sample_weights, scratch.scales is not None
        shape = _BagShape(True, layout.pooling == POOLING_MEAN, weights is not None, scaled)
        of_bags = (
            bags.offsets, layout.feature_tables, layout.column_offsets,
            clock if weights is None else weights.contiguous(), scratch.places, scratch.scales if scaled else clock,
        )  # fmt: skip
        integers = (num, bags.offsets.numel() - 1, layout.batch_size, layout.width)
    key = ("begin_update", shape, ranked)
    launcher = store.prepared.get(key) or store.prepared.setdefault(key, _prepare(store, shape, ranked))
    launcher(
        max(1, cdiv(num, block)) if shape.pooled or ranked else 1,
        (clock, scratch.counts, *of_bags, rows, order, words, gradients.table_ranges, store.chunk_bases),
        integers,
    )


def _prepare(store: RowStore, shape: _BagShape, ranked: bool) -> Launcher:
    """Prepare launches for a store."""
    block = _RANKED if ranked else _LOCATED
    constants = {"BAGS": shape, "RANKED": ranked, "ROW": row_shape(store), "BLOCK": block}
    stays = (store.row_bytes, store.num_tables, store.chunk_shift)
    return Launcher(store.device, _begin_kernel, constants, stays, num_warps=4 if ranked else 2)


@triton.jit(do_not_specialize=["num", "num_bags", "batch_size", "width", "num_tables", "chunk_shift"])
def _begin_kernel(
    clock_ptr,
    counts_ptr,
    offsets_ptr,
    feature_tables_ptr,
    column_offsets_ptr,
    weights_ptr,
    places_ptr,
    scales_ptr,
    rows_ptr,
    order_ptr,
    words_ptr,
    table_ranges_ptr,
    chunk_bases_ptr,
    num,
    num_bags,
    batch_size,
    width,
    row_bytes_ptr,
    num_tables,
    chunk_shift,
    BAGS: tl.constexpr,
    RANKED: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        tl.store(clock_ptr + UPDATES, tl.load(clock_ptr + UPDATES) + 1)
        tl.store(counts_ptr + FEW_UNITS, 0)
        if RANKED:
            tl.store(counts_ptr + MANY_UNITS, num)
        else:
            tl.store(counts_ptr + MANY_UNITS, 0)
    # An empty batch may have no bags.
    if BAGS.pooled & (tl.program_id(0) * BLOCK < num):
        _locate(
            offsets_ptr, feature_tables_ptr, column_offsets_ptr, weights_ptr, places_ptr, scales_ptr, num, num_bags,
            batch_size, width, BAGS, BLOCK,
        )  # fmt: skip
    if RANKED:
        _rank(
            rows_ptr, order_ptr, words_ptr, table_ranges_ptr, chunk_bases_ptr, row_bytes_ptr, num, num_tables,
            chunk_shift, ROW, BLOCK,
        )  # fmt: skip


@triton.jit
def _rank(
    rows_ptr, order_ptr, words_ptr, table_ranges_ptr, chunk_bases_ptr, row_bytes_ptr, num, num_tables, chunk_shift,
    ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the place of each occurrence in the order by row by comparing it with all others; write order and units.

    Example: ``rows = [7, -1, 3, 7]``: nothing is less than -1, so occurrence 1 comes first; one row is less than 3; two
    are less than 7, and of the 7s occurrence 0 is the earlier: ``order = [1, 2, 0, 3]``.

    A unit stands at the place where it begins.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num
    row = tl.load(rows_ptr + i, mask=inside, other=-1)
    # How many are less, and how many equal (in the high half): all below 2^15.
    counted = tl.zeros([BLOCK], tl.int32)
    earlier = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num, _COMPARED):
        j = first + tl.arange(0, _COMPARED)
        other = tl.load(rows_ptr + j, mask=j < num, other=0x7FFFFFFF)[None, :]
        equal = (other == row[:, None]) & (j < num)[None, :]
        counted += tl.sum((other < row[:, None]).to(tl.int32) + (equal.to(tl.int32) << 16), 1)
        earlier += tl.sum((equal & (j[None, :] < i[:, None])).to(tl.int32), 1)
    begin = counted & 0xFFFF
    length = counted >> 16
    p = begin + earlier
    tl.store(order_ptr + p, i.to(tl.int64), mask=inside)
    valid = inside & (row >= 0)
    table = find_range(i, table_ranges_ptr, tl.zeros([BLOCK], tl.int32), num_tables)
    address = row_addresses(row, table, valid, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW.row_bytes)
    whole = length <= _PIECE
    starts = valid & (earlier % _PIECE == 0)
    unit = pack(p, tl.minimum(length - earlier, _PIECE), table, earlier == 0, whole)
    tl.store(words_ptr + p, tl.where(starts, unit, -1), mask=inside)
    tl.store(words_ptr + num + p, address, mask=starts)
    first = tl.where(whole, i.to(tl.int64), segment(begin, length))
    tl.store(words_ptr + 2 * num + p, first, mask=starts)
    tl.store(words_ptr + 3 * num + p // _PIECE, 0, mask=inside & (p % _PIECE == 0))


@triton.jit
def _locate(
    offsets_ptr, feature_tables_ptr, column_offsets_ptr, weights_ptr, places_ptr, scales_ptr, num, num_bags, batch_size,
    width, BAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write where in ``[B, total_D]`` the gradient of each occurrence starts, and its factor.

    A block of occurrences touches few bags, so the bags of its first and last one bound the search for the others.
    """
    first = tl.program_id(0) * BLOCK
    last = tl.minimum(first + BLOCK, num) - 1
    zero = tl.full((), 0, tl.int32)
    lowest = find_range(first, offsets_ptr, zero, num_bags)
    highest = find_range(last, offsets_ptr, zero, num_bags)
    i = first + tl.arange(0, BLOCK)
    inside = i < num
    bag = find_range(i, offsets_ptr, tl.zeros([BLOCK], tl.int32) + lowest, highest - lowest + 1)
    _, place = bag_table_and_place(bag, feature_tables_ptr, column_offsets_ptr, batch_size, width, 1)
    tl.store(places_ptr + i, place, mask=inside)
    if BAGS.scaled:
        scale = tl.full([BLOCK], 1.0, tl.float32)
        if BAGS.mean:
            length = tl.load(offsets_ptr + bag + 1) - tl.load(offsets_ptr + bag)
            scale = tl.div_rn(scale, tl.maximum(length, 1).to(tl.float32))
        if BAGS.weighted:
            scale *= tl.load(weights_ptr + i, mask=inside, other=0.0)
        tl.store(scales_ptr + i, scale, mask=inside)
