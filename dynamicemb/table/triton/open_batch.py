"""Begin a lookup: make its offsets safe, find the occurrences of each table, and begin the training step."""

import time

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import Index, Residents
from dynamicemb.table.layout import POOLING_NONE, FeatureLayout
from dynamicemb.table.stepping.results import OpenBatch
from dynamicemb.table.triton.advance import advance_clock
from dynamicemb.table.triton.constants import CLAMPED, NUM_TALLIES
from dynamicemb.table.triton.counting import count_by_table
from dynamicemb.table.triton.launch import Launcher, cdiv, padded_tables
from dynamicemb.table.triton.missing import Missing

# Offsets of a program times tables, and words of scratch memory that it fills at a time.
_TILE = 4096
_FILL = 1024


def open_batch(
    index: Residents,
    offsets: torch.Tensor,
    layout: FeatureLayout,
    num_ids: int,
    lag: int | None = None,
    deterministic: bool | None = None,
) -> OpenBatch:
    """Begin a lookup, for training with the step that it is; one launch for what would be eight.

    On a GPU nobody waits to see whether offsets are legal, so they are made so: a bag boundary is moved into the range
    of its table's occurrences, the tables share all occurrences in their order, and a bag that then ends before it
    begins is empty. Boundaries that are outside of ``0..N``, decrease, or do not span all ids are counted, per table.

    Args:
        index: who is where. A whole index for a step: its clock advances, see ``advance``. The tallies of a whole
            index change by illegal offsets.
        offsets: i64 ``[F*B+1]`` as the caller gave them; not kept, so that he may refill them.
        layout: tables of the features.
        num_ids: N.
        lag: of ``advance``; None for evaluation.
        deterministic: whether ids are placed in batch order; None asks
            ``torch.are_deterministic_algorithms_enabled()``.

    Returns:
        Safe offsets (without pooling nobody reads them: the ranges), ``table_ranges`` i64 ``[T+1]``, and for a step
        the scratch memory of ``find_or_insert``, filled.

    Example: N = 9, two tables of one feature, B = 2, ``offsets = [0, 4, 2, 12, 9]``: the ranges are ``[0, 2, 9]``, the
    offsets ``[0, 2, 2, 9, 9]``, and three boundaries of table 1 are counted: 2 and 9 because they are less than those
    before them, 12 because it is beyond the ids.

    Host sync: none. Bytes moved: 16 for each offset, and 4 for each of 4 N + (lists) words of scratch memory.
    """
    num_tables, num_offsets, device = index.num_tables, offsets.numel(), offsets.device
    pooled = layout.pooling != POOLING_NONE
    ranges = torch.empty(num_tables + 1, dtype=torch.int64, device=device)
    safe = torch.empty_like(offsets) if pooled else ranges
    missing = None
    if lag is not None:
        assert isinstance(index, Index)
        missing = Missing.allocate(index, num_ids, deterministic)
    num_zeros, num_words = (0, 0) if missing is None else (missing.num_zeros, missing.num_filled)
    key = ("open_batch", pooled, missing is None)
    launcher = index.prepared.get(key) or index.prepared.setdefault(key, _prepare(index, pooled, missing is not None))
    block = max(32, _TILE // padded_tables(num_tables + 1))
    launcher(
        max(cdiv(num_offsets, block), cdiv(num_words, _FILL)),
        (offsets, layout.table_features, ranges, safe, ranges if missing is None else missing.scratch),
        (num_offsets, num_ids, layout.batch_size, lag or 0, 0 if device.type == "cuda" else time.time_ns(), num_zeros,
         num_words),
    )  # fmt: skip
    return OpenBatch(safe, ranges, missing)


def _prepare(index: Residents, pooled: bool, is_step: bool) -> Launcher:
    """Prepare launches for an index, with and without pooling, for a step or an evaluation."""
    touches, num_tables, device = (index.bucket_offsets,) * 4, index.num_tables, index.keys.device
    if isinstance(index, Index):
        touches = (index.tallies, index.clock, index.score_values, index.strategies)
    tables = padded_tables(num_tables + 1)
    constants = {
        "POOLED": pooled,
        "TALLIES": isinstance(index, Index),
        "STRATEGY": index.strategy if is_step and isinstance(index, Index) else -1,
        "DEVICE_TIME": device.type == "cuda",
        "TABLES": tables,
        "BLOCK": max(32, _TILE // tables),
        "FILL": _FILL,
    }
    return Launcher(device, _open_kernel, constants, (*touches, num_tables), num_warps=4)


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def count_wrong(
    offsets_ptr, k, value, inside, num_offsets, num_ids, table_features_ptr, batch_size, num_tables, tallies_ptr
):  # fmt: skip
    """Count the illegal ones among boundaries ``k``, which have these values, for their tables."""
    before = tl.load(offsets_ptr + k - 1, mask=inside & (k > 0), other=0)
    wrong = (value < before) | (value < 0) | (value > num_ids) | ((k == 0) & (value != 0))
    wrong = inside & (wrong | ((k == num_offsets - 1) & (value != num_ids)))
    if tl.max(wrong.to(tl.int32), 0) > 0:
        # One table at a time: what happens seldom must not take registers from what happens always.
        table = tl.zeros(k.shape, tl.int32)
        for t in range(1, num_tables):
            table += (k >= tl.load(table_features_ptr + t) * batch_size).to(tl.int32)
        count_by_table(tallies_ptr + CLAMPED, table, wrong, NUM_TALLIES)


@triton.jit(
    do_not_specialize=[
        "num_offsets", "num_ids", "batch_size", "num_tables", "lag", "host_time", "num_zeros", "num_words",
    ]
)  # fmt: skip
def _open_kernel(
    offsets_ptr,
    table_features_ptr,
    ranges_ptr,
    safe_ptr,
    scratch_ptr,
    num_offsets,
    num_ids,
    batch_size,
    lag,
    host_time,
    num_zeros,
    num_words,
    tallies_ptr,
    clock_ptr,
    score_values_ptr,
    strategies_ptr,
    num_tables,
    POOLED: tl.constexpr,
    TALLIES: tl.constexpr,
    STRATEGY: tl.constexpr,
    DEVICE_TIME: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
):
    filled = tl.program_id(0) * FILL
    if filled < num_words:
        j = filled + tl.arange(0, FILL)
        tl.store(scratch_ptr + j, tl.where(j < num_zeros, 0, -1), mask=j < num_words)
    t = tl.arange(0, TABLES)
    first_bag = tl.load(table_features_ptr + t, mask=t <= num_tables, other=0) * batch_size
    boundary = tl.load(offsets_ptr + first_bag, mask=(t > 0) & (t < num_tables), other=0)
    boundary = tl.minimum(tl.maximum(boundary, 0), num_ids)
    boundary = tl.where(t == num_tables, num_ids, boundary)
    if tl.program_id(0) == 0:
        tl.store(ranges_ptr + t, tl.associative_scan(boundary, 0, _maximum), mask=t <= num_tables)
        if STRATEGY >= 0:
            advance_clock(
                clock_ptr, score_values_ptr, strategies_ptr, lag, host_time, num_tables, DEVICE_TIME, STRATEGY, True,
                TABLES,
            )  # fmt: skip
    first = tl.program_id(0) * BLOCK
    if first < num_offsets:
        k = first + tl.arange(0, BLOCK)
        inside = k < num_offsets
        value = tl.load(offsets_ptr + k, mask=inside, other=0)
        if TALLIES:
            count_wrong(
                offsets_ptr, k, value, inside, num_offsets, num_ids, table_features_ptr, batch_size, num_tables,
                tallies_ptr,
            )  # fmt: skip
        if POOLED:
            # The range of an offset's table: the greatest boundary up to its own, and up to the next.
            previous = tl.load(table_features_ptr + t - 1, mask=(t > 0) & (t <= num_tables), other=0) * batch_size
            low = tl.max(tl.where(first >= first_bag, boundary, 0), 0)
            high = tl.max(tl.where(first >= previous, boundary, 0), 0)
            lows = tl.zeros([BLOCK], tl.int64) + low
            highs = tl.zeros([BLOCK], tl.int64) + high
            # Few blocks straddle tables.
            if tl.max(((first_bag > first) & (first_bag < first + BLOCK)).to(tl.int32), 0) > 0:
                lows = tl.max(tl.where(k[:, None] >= first_bag[None, :], boundary[None, :], 0), 1)
                highs = tl.max(tl.where(k[:, None] >= previous[None, :], boundary[None, :], 0), 1)
            tl.store(safe_ptr + k, tl.minimum(tl.maximum(value, lows), highs), mask=inside)
