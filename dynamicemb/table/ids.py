"""Ids as tensors of 64-bit patterns: one dtype for all, their hash, and their remainder as unsigned numbers."""

import torch

# The constants of murmur3's finaliser, as the int64 with the same bits.
_MIX_1 = 0xFF51AFD7ED558CCD - 2**64
_MIX_2 = 0xC4CEB9FE1A85EC53 - 2**64


def as_int64(ids: torch.Tensor) -> torch.Tensor:
    """Return ids as int64: int32 is widened with its sign, uint64 keeps its bits.

    Args:
        ids: int32, int64 or uint64, any shape.

    Raises:
        TypeError: another dtype.
    """
    if ids.dtype == torch.int64:
        return ids
    if ids.dtype == torch.uint64:
        return ids.view(torch.int64)
    if ids.dtype == torch.int32:
        return ids.to(torch.int64)
    raise TypeError(f"ids must be int64, int32 or uint64, got {ids.dtype}; convert them with ids.to(torch.int64)")


def fmix64(keys: torch.Tensor) -> torch.Tensor:
    """Mix int64 keys, as 64-bit patterns; ``layout.fmix64`` on any device."""
    h = keys ^ _shift_33(keys)
    h = h * _MIX_1
    h = h ^ _shift_33(h)
    h = h * _MIX_2
    return h ^ _shift_33(h)


def _shift_33(keys: torch.Tensor) -> torch.Tensor:
    # int64 shifts are arithmetic: clear the copies of the sign.
    return (keys >> 33) & (2**31 - 1)


def unsigned_remainder(keys: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return the remainders of int64 keys as unsigned numbers."""
    # torch.remainder has the sign of the divisor, so it is exact for k - 2^64 up to the remainder of 2^64.
    remainder = torch.remainder(keys, divisor)
    wrapped = torch.remainder(remainder + 2**64 % divisor, divisor)
    return torch.where(keys < 0, wrapped, remainder)
