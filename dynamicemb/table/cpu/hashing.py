"""Hash and digest arithmetic for numba kernels; the rule is stated in ``table/layout.py``."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LOW_BITS = np.uint64(0x0101010101010101)
HIGH_BITS = np.uint64(0x8080808080808080)


@intrinsic
def _trailing_zeros(typingctx, word):
    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@njit(inline="always")
def lowest_byte(mask):
    """Return the index (0..7) of the lowest byte marked in a mask of high bits."""
    return _trailing_zeros(mask) >> 3


@njit(inline="always")
def bytes_equal(word, byte):
    """Mark the bytes of a word equal to ``byte``; the lowest mark is right, those above it may be wrong."""
    x = word ^ (LOW_BITS * np.uint64(byte))
    return (x - LOW_BITS) & ~x & HIGH_BITS


@njit(inline="always")
def mix(id_):
    """Return fmix64 of an int64 as uint64."""
    h = np.uint64(id_)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


@njit(inline="always")
def bucket_of(h, num_buckets):
    """Return the bucket, counted from the table's first, of a mixed id."""
    return np.int64((h >> np.uint64(20)) % np.uint64(num_buckets))


@njit(inline="always")
def digest_of(h):
    """Return the digest (2..255, as int64) of a mixed id."""
    h2 = h * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(np.uint64(2) + (((h2 >> np.uint64(56)) * np.uint64(254)) >> np.uint64(8)))


@njit(inline="always")
def group_of(h, num_groups):
    """Return the start group of a mixed id."""
    h2 = h * np.uint64(0x9E3779B97F4A7C15)
    low = (h2 >> np.uint64(24)) & np.uint64(0xFFFFFFFF)
    return np.int64((low * np.uint64(num_groups)) >> np.uint64(32))
