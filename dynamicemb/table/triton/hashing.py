"""Hash and digest arithmetic for Triton kernels; the rule is stated in ``table/layout.py``."""

import triton
import triton.language as tl


@triton.jit
def mix(ids):
    """Return fmix64 of int64 values as uint64."""
    h = ids.to(tl.uint64, bitcast=True)
    h = h ^ (h >> 33)
    h = h * 0xFF51AFD7ED558CCD
    h = h ^ (h >> 33)
    h = h * 0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)


@triton.jit
def bucket_of(h, num_buckets):
    """Return the bucket, counted from the table's first, of mixed ids."""
    return ((h >> 20) % num_buckets.to(tl.uint64)).to(tl.int64)


@triton.jit
def home_bucket(bucket_offsets_ptr, table, h):
    """Return the bucket (int64), counted from the index's first, of mixed ids of tables."""
    first_bucket = tl.load(bucket_offsets_ptr + table)
    return first_bucket + bucket_of(h, tl.load(bucket_offsets_ptr + table + 1) - first_bucket)


@triton.jit
def digest_of(h):
    """Return the digests (uint8, 2..255) of mixed ids."""
    h2 = h * 0x9E3779B97F4A7C15
    return ((((h2 >> 56) * 254) >> 8) + 2).to(tl.uint8)


@triton.jit
def group_of(h, NUM_GROUPS: tl.constexpr):
    """Return the start groups of mixed ids."""
    h2 = h * 0x9E3779B97F4A7C15
    return ((((h2 >> 24) & 0xFFFFFFFF) * NUM_GROUPS) >> 32).to(tl.int64)


@triton.jit
def bytes_equal(words, pattern):
    """Mark, by their high bits, the bytes of uint64 words that equal those of ``pattern``; exact.

    Example: ``bytes_equal(0x0005000000050000, 0x0505050505050505) == 0x0080000000800000``.
    """
    x = words ^ pattern
    return ~(((x & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | x | 0x7F7F7F7F7F7F7F7F)


@triton.jit
def lowest_byte(marks):
    """Return the index (0..7, int64) of the lowest marked byte of uint64 words; 7 where none is.

    The bits below the lowest mark cover its byte's lowest bit and those of all bytes before it: they are counted.
    """
    below = (marks & (0 - marks)) - 1
    counted = ((below & 0x0101010101010101) * 0x0101010101010101) >> 56
    return (counted - 1).to(tl.int64)


@triton.jit
def table_of(i, begin, end, table_ranges_ptr, num_tables, TABLES: tl.constexpr):
    """Return the table (int32) of each position in ``begin..end``.

    Args:
        i: positions, all within the span.
        begin: first position of the span.
        end: position after the span's last.
        table_ranges_ptr: i64 ``[T+1]``.
        num_tables: T.
        TABLES: T rounded up to a power of two.

    Example: ``table_ranges = [0, 3, 3, 9]``: positions 2, 3, 4 are in tables 0, 2, 2. Few spans straddle tables, so the
    loop seldom runs.
    """
    t = tl.arange(0, TABLES)
    starts = tl.load(table_ranges_ptr + t, mask=(t > 0) & (t < num_tables), other=0x7FFFFFFFFFFFFFFF)
    first = tl.sum((starts <= begin).to(tl.int32), 0)
    last = tl.sum((starts < end).to(tl.int32), 0)
    table = tl.zeros(i.shape, tl.int32) + first
    for t in range(first + 1, last + 1):
        table += (i >= tl.load(table_ranges_ptr + t)).to(tl.int32)
    return table
