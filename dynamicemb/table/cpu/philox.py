"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) for numba.

A counter-based generator: 128 random bits are a pure function of a 64-bit key and a 128-bit counter, so a value needs
no state, no order, and no memory of earlier values. ``docs/random.md`` says which keys and counters we use.
"""

import numpy as np
from numba import njit

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
NUM_ROUNDS = 10

_M0 = np.uint64(MULTIPLIER_0)
_M1 = np.uint64(MULTIPLIER_1)
_W0 = np.uint32(WEYL_0)
_W1 = np.uint32(WEYL_1)
_32 = np.uint64(32)


@njit(inline="always")
def philox4x32(k0, k1, c0, c1, c2, c3):
    """Return four random 32-bit words for a key and a counter.

    Args:
        k0: uint32, low word of the key.
        k1: uint32, high word of the key.
        c0: uint32, counter word 0.
        c1: uint32, counter word 1.
        c2: uint32, counter word 2.
        c3: uint32, counter word 3.

    Returns:
        Four uint32.

    Example:
        All-zero key and counter give ``6627e8d5 e169c58d bc57ac4c 9b00dbd8``.
    """
    # Every product is 32 x 32 -> 64 bits. The casts stop numba from widening uint32 sums to 64 bits.
    for _ in range(NUM_ROUNDS):
        p0 = np.uint64(c0) * _M0
        p1 = np.uint64(c2) * _M1
        c0 = np.uint32(np.uint32(p1 >> _32) ^ c1 ^ k0)
        c1 = np.uint32(p1)
        c2 = np.uint32(np.uint32(p0 >> _32) ^ c3 ^ k1)
        c3 = np.uint32(p0)
        k0 = np.uint32(k0 + _W0)
        k1 = np.uint32(k1 + _W1)
    return c0, c1, c2, c3


def philox4x32_reference(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the same four words in plain Python; the oracle for every twin.

    Args:
        key: two 32-bit words, low word first.
        counter: four 32-bit words.
    """
    mask = 0xFFFFFFFF
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + WEYL_0) & mask, (k1 + WEYL_1) & mask
    return c0, c1, c2, c3
