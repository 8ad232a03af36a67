"""Group the occurrences of a batch by row, and cut the groups into units of work."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.triton.launch import FULL_PROCESSOR, Launcher, cdiv
from dynamicemb.table.triton.rows import find_range, row_addresses, row_shape

# Occurrences of a segment that one program sums; a longer segment is cut into so long pieces, counted from its start.
PIECE = 32
# Units of at most so many occurrences are worked on side by side, longer ones one by one.
FEW = 4
_BLOCK = 512
_WARPS = 4

# Entries of ``Groups.counts``.
FEW_UNITS = tl.constexpr(0)
MANY_UNITS = tl.constexpr(1)

# A unit packs into an int64: begin, count, table, whether it begins a segment, and whether it is a whole one.
_COUNT_SHIFT = tl.constexpr(31)
_TABLE_SHIFT = tl.constexpr(39)
_FIRST_SHIFT = tl.constexpr(61)
_WHOLE_SHIFT = tl.constexpr(62)
_BEGIN_MASK = tl.constexpr((1 << 31) - 1)
_COUNT_MASK = tl.constexpr((1 << 8) - 1)
_TABLE_MASK = tl.constexpr((1 << 22) - 1)


@dataclass(slots=True)
class Groups:
    """Occurrences sorted by row, and the work on them. Lists have no order; their lengths are on the device.

    Of a small batch the lists are not compacted: they have a place for every unit there could be, -1 where there is
    none.

    Attributes:
        order: i64 ``[N]``, occurrences by ascending row, in their order within a row; those without a row come first.
        counts: i32 ``[2]``: whole segments of at most FEW occurrences, and other units; named FEW_UNITS and MANY_UNITS.
        words: i64 ``[3 N + N // PIECE + 1]``, four lists in one allocation, as views cost the host more than memory:

            units ``[N]``, packed; a whole segment of at most PIECE occurrences or a piece of a longer one. Segments
            of few occurrences stand at the front, the others at the back, last first.
            addresses ``[N]``, the row of each unit.
            firsts ``[N]``: of a whole segment its first occurrence; of a piece where its segment begins, and in the
            high 32 bits how many occurrences that has.
            arrivals ``[N // PIECE + 1]``: pieces that have been summed of the segment that begins in each window of
            PIECE places: of those longer than PIECE, there is at most one. All 0.
    """

    order: torch.Tensor
    counts: Any
    words: Any


def num_windows(num: int) -> int:
    """Return in how many windows of PIECE places ``num`` occurrences lie, one more where all are full."""
    return num // PIECE + 1


class Sorted(NamedTuple):
    """Where gradients are, in the order of the batch and in that of the rows; parts of scratch memory.

    Attributes:
        places: i64 ``[N]``, as in ``Gradients``.
        scales: f32 ``[N]``, or None.
        sorted_places: i64 ``[N]``, written.
        sorted_scales: f32 ``[N]``, written; or None.
    """

    places: Any
    scales: Any
    sorted_places: Any
    sorted_scales: Any


def group_by_row(
    store: RowStore, gradients: Gradients, counts: Any = None, words: Any = None, located: Sorted | None = None
) -> Groups:
    """Sort the occurrences of a batch by row, keeping their order within a row, and list the units of work.

    The sort is stable and the pieces are counted from their segment's start, so what is summed
    in which order depends on the segment alone.

    Args:
        store: the rows.
        gradients: of the occurrences; those of row -1 are in no unit.
        counts: memory for ``Groups.counts``, zeros; None allocates it, and ``words``, here.
        words: memory for ``Groups.words``.
        located: where the gradients are, to be sorted too; None: they are not.

    Example: ``rows = [7, -1, 3, 7]`` gives ``order = [1, 2, 0, 3]`` and the units (begin 1, count 1) and (2, 2).

    Host sync: none. Bytes moved: 4 N + 96 N for the sort, 20 N + 16 for each unit.
    """
    rows = gradients.rows
    num, device = rows.numel(), rows.device
    if counts is None:
        counts = torch.zeros(2, dtype=torch.int32, device=device)
        words = torch.empty(3 * num + num_windows(num), dtype=torch.int64, device=device)
    ordered, order = torch.sort(rows, stable=True)
    is_scaled = located is not None and located.scales is not None
    key = ("segments", located is not None, is_scaled)
    launcher = store.prepared.get(key) or store.prepared.setdefault(key, _prepare(store, *key[1:]))
    places: tuple[Any, ...] = (order,) * 4
    if located is not None:
        places = located if is_scaled else (located.places, order, located.sorted_places, order)
    launcher(
        cdiv(num, _BLOCK),
        (ordered, order, gradients.table_ranges, store.chunk_bases, counts, words, *places),
        (num,),
    )
    return Groups(order, counts, words)


def _prepare(store: RowStore, is_placed: bool, is_scaled: bool) -> Launcher:
    """Prepare launches for a store."""
    constants = {
        "ROW_BYTES": row_shape(store).row_bytes, "PIECE": PIECE, "FEW": FEW, "BLOCK": _BLOCK, "PLACED": is_placed,
        "SCALED": is_scaled,
    }  # fmt: skip
    stays = (store.row_bytes, store.num_tables, store.chunk_shift)
    return Launcher(store.device, _group_kernel, constants, stays, num_warps=_WARPS, maxnreg=FULL_PROCESSOR)


@triton.jit
def pack(begin, count, table, first, whole):
    """Return a unit, for ``unpack``."""
    unit = begin.to(tl.int64) | (count.to(tl.int64) << _COUNT_SHIFT) | (table.to(tl.int64) << _TABLE_SHIFT)
    return unit | (first.to(tl.int64) << _FIRST_SHIFT) | (whole.to(tl.int64) << _WHOLE_SHIFT)


@triton.jit
def segment(begin, length):
    """Return a segment, for ``unpack_segment``."""
    return begin.to(tl.int64) | (length.to(tl.int64) << 32)


@triton.jit
def unpack_segment(word):
    """Return ``(begin, length)`` of a packed segment."""
    return (word & 0xFFFFFFFF).to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit
def unpack(unit):
    """Return ``(begin, count, table, first, whole)`` of a packed unit."""
    begin = (unit & _BEGIN_MASK).to(tl.int32)
    count = ((unit >> _COUNT_SHIFT) & _COUNT_MASK).to(tl.int32)
    table = ((unit >> _TABLE_SHIFT) & _TABLE_MASK).to(tl.int32)
    return begin, count, table, ((unit >> _FIRST_SHIFT) & 1) != 0, (unit >> _WHOLE_SHIFT) != 0


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b)


@triton.jit
def _equal_from(ordered_ptr, row, position, most, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many of ``position, position + STEP, ...`` hold ``row`` without a gap; at most ``most`` exist.

    The nearest ``BLOCK`` places are read first. Equal rows lie together, so if all are equal every further read samples
    ``BLOCK`` places and narrows the rest by that factor: ``width`` at least halves, which bounds the loop.

    Example: rows ``[3, 7, 7, 7, 9]``, row 7, position 2, most 3, step -1 gives 2.
    """
    lane = tl.arange(0, BLOCK)
    near = tl.load(ordered_ptr + position + STEP * lane, mask=lane < most, other=-1)
    run = tl.sum((near == row).to(tl.int32), 0)
    width = tl.where(run == BLOCK, most - BLOCK, 0)
    while width > 0:
        stride = (width + BLOCK - 1) // BLOCK
        distance = (lane + 1) * stride
        place = position + STEP * (run + distance - 1).to(tl.int64)
        sample = tl.load(ordered_ptr + place, mask=distance <= width, other=-1)
        equal = tl.sum((sample == row).to(tl.int32), 0)
        run += equal * stride
        width = tl.minimum(stride - 1, width - equal * stride)
    return run


@triton.jit(do_not_specialize=["num", "num_tables", "chunk_shift"])
def _group_kernel(
    ordered_ptr,
    order_ptr,
    table_ranges_ptr,
    chunk_bases_ptr,
    counts_ptr,
    words_ptr,
    places_ptr,
    scales_ptr,
    sorted_places_ptr,
    sorted_scales_ptr,
    num,
    row_bytes_ptr,
    num_tables,
    chunk_shift,
    ROW_BYTES: tl.constexpr,
    PIECE: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACED: tl.constexpr,
    SCALED: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    p = first + tl.arange(0, BLOCK)
    row = tl.load(ordered_ptr + p, mask=p < num, other=-1)
    before = tl.load(ordered_ptr + p - 1, mask=(p > 0) & (p < num), other=-1)
    after = tl.load(ordered_ptr + p + 1, mask=p < num - 1, other=-1)
    valid = row >= 0
    head = valid & (row != before)
    begin = tl.associative_scan(tl.where(head, p, -1), 0, _maximum)
    end = tl.associative_scan(tl.where(valid & (row != after), p + 1, 0x7FFFFFFF), 0, _minimum, reverse=True)
    # Segments that cross an edge of the block.
    if tl.min(tl.where(valid, begin, 0), 0) < 0:
        entering = tl.load(ordered_ptr + first)
        begin = tl.where(begin < 0, first - _equal_from(ordered_ptr, entering, first - 1, first, -1, BLOCK), begin)
    if tl.max(tl.where(valid, end, 0), 0) == 0x7FFFFFFF:
        leaving = tl.load(ordered_ptr + first + BLOCK - 1)
        edge = first + BLOCK
        run = _equal_from(ordered_ptr, leaving, edge, num - edge, 1, BLOCK)
        end = tl.where(end == 0x7FFFFFFF, edge + run, end)
    length = end - begin
    whole = length <= PIECE
    unit = valid & ((p - begin) % PIECE == 0)
    i = tl.load(order_ptr + p, mask=valid if PLACED else unit, other=0)
    if PLACED:
        tl.store(sorted_places_ptr + p, tl.load(places_ptr + i, mask=valid, other=0), mask=valid)
    if SCALED:
        tl.store(sorted_scales_ptr + p, tl.load(scales_ptr + i, mask=valid, other=0.0), mask=valid)
    table = find_range(i, table_ranges_ptr, tl.zeros([BLOCK], tl.int32), num_tables)
    address = row_addresses(row, table, unit, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW_BYTES)
    word = pack(p, tl.minimum(end - p, PIECE), table, head, whole)
    few = (unit & (length <= FEW)).to(tl.int32)
    many = (unit & (length > FEW)).to(tl.int32)
    front = tl.atomic_add(counts_ptr + FEW_UNITS, tl.sum(few, 0), sem="relaxed") + tl.cumsum(few, 0) - 1
    back = num - tl.atomic_add(counts_ptr + MANY_UNITS, tl.sum(many, 0), sem="relaxed") - tl.cumsum(many, 0)
    place = tl.where(few > 0, front, back)
    lists = words_ptr + place
    tl.store(lists, word, mask=unit)
    tl.store(lists + num, address, mask=unit)
    tl.store(lists + 2 * num.to(tl.int64), tl.where(whole, i, segment(begin, length)), mask=unit)
    tl.store(words_ptr + 3 * num.to(tl.int64) + p // PIECE, 0, mask=(p % PIECE == 0) & (p < num))
