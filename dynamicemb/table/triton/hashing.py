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
def digest_of(h):
    """Return the digests (uint8, 2..255) of mixed ids."""
    h2 = h * 0x9E3779B97F4A7C15
    return ((((h2 >> 56) * 254) >> 8) + 2).to(tl.uint8)


@triton.jit
def group_of(h, NUM_GROUPS: tl.constexpr):
    """Return the start groups of mixed ids."""
    h2 = h * 0x9E3779B97F4A7C15
    return ((((h2 >> 24) & 0xFFFFFFFF) * NUM_GROUPS) >> 32).to(tl.int64)
