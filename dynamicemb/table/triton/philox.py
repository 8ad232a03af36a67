"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) for Triton kernels; ``docs/random.md`` is the specification.

Our own ten lines instead of ``tl.philox``: the stream is part of our file format, so it must not move with a library.
"""

import triton
import triton.language as tl


@triton.jit
def philox4x32(k0, k1, c0, c1, c2, c3):
    """Return four random uint32 words for a key and a counter, all uint32 tensors of one shape.

    Example: all-zero key and counter give ``6627e8d5 e169c58d bc57ac4c 9b00dbd8``.
    """
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        low0 = c0 * tl.full(c0.shape, 0xD2511F53, tl.uint32)
        high1 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        low1 = c2 * tl.full(c2.shape, 0xCD9E8D57, tl.uint32)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.full(k0.shape, 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full(k1.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words_of(values):
    """Return the low and the high 32 bits of int64 values, as uint32."""
    bits = values.to(tl.uint64, bitcast=True)
    return (bits & 0xFFFFFFFF).to(tl.uint32), (bits >> 32).to(tl.uint32)
