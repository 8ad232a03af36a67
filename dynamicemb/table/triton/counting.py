"""Counters of what kernels did, per table."""

import triton
import triton.language as tl

# A frequency is a count of one batch; the bound keeps sums of scores far from the end of int64.
MAX_FREQUENCY = 2**31 - 1

_MAX_FREQUENCY = tl.constexpr(MAX_FREQUENCY)


@triton.jit
def clamp_frequencies(frequencies):
    """Return frequencies as they count, in 1..2^31-1, and which of them were not."""
    legal = tl.minimum(tl.maximum(frequencies, 1), _MAX_FREQUENCY)
    return legal, legal != frequencies


@triton.jit
def count_by_table(column_ptr, table, counted, NUM_COLUMNS: tl.constexpr):
    """Add to a column of ``Index.tallies`` how many ``counted`` lanes each table has.

    Args:
        column_ptr: table 0's entry of the column.
        table: int32, the table of each lane.
        counted: which lanes count.
        NUM_COLUMNS: columns of the tallies.

    A block seldom straddles tables: one pass, one atomic.
    """
    lowest = tl.min(tl.where(counted, table, 0x7FFFFFFF), 0)
    highest = tl.max(tl.where(counted, table, -1), 0)
    for t in range(lowest, highest + 1):
        number = tl.sum((counted & (table == t)).to(tl.int64), 0)
        if number > 0:
            tl.atomic_add(column_ptr + t * NUM_COLUMNS, number, sem="relaxed")
