"""Which rank owns an id: the one routing rule, asked by the input dist, dump, load, the planner and the counters.

An id is read as an unsigned 64-bit number ``k``; ``W`` is the world size::

    roundrobin       k % W
    hash_roundrobin  fmix64(k) % W
    continuous       block = ceil(num_embeddings / W):  k // block if k < block * W, else k % W

Ids keep their value on every routing: a rank stores the id that the user gave, so files hold it too.
"""

import torch

ROUNDROBIN = "roundrobin"
HASH_ROUNDROBIN = "hash_roundrobin"
CONTINUOUS = "continuous"
DIST_TYPES = (CONTINUOUS, ROUNDROBIN, HASH_ROUNDROBIN)

# Keeps block * W below 2^63, so that ids with the top bit set are always outside.
_MAX_CONTINUOUS = 2**62
# The constants of murmur3's finaliser, as the int64 with the same bits.
_MIX_1 = 0xFF51AFD7ED558CCD - 2**64
_MIX_2 = 0xC4CEB9FE1A85EC53 - 2**64


def owner_of(
    ids: torch.Tensor, world_size: int, dist_type: str = ROUNDROBIN, num_embeddings: int | None = None
) -> torch.Tensor:
    """Return the rank that owns each id.

    Args:
        ids: int64 (or uint64, the bit pattern counts) of any shape, on any device.
        world_size: W, number of ranks.
        dist_type: ``roundrobin``, ``hash_roundrobin`` or ``continuous``.
        num_embeddings: rows of the table over all ranks; ``continuous`` over several ranks needs it, the others ignore
            it.

    Returns:
        int64, same shape and device, values 0..W-1.

    Raises:
        TypeError: ids are not 64-bit integers.
        ValueError: an argument is out of range.

    Example::

        owner_of(tensor([-1, 0, 5]), 3)                     # [0, 0, 2]: 2^64 - 1 is divisible by 3
        owner_of(tensor([0, 3, 4, 9]), 3, "continuous", 7)  # block 3: [0, 1, 1, 0]: 9 is outside, 9 % 3

    Host sync: none.
    """
    check_routing(world_size, dist_type, num_embeddings)
    keys = as_int64(ids)
    if world_size == 1:
        return torch.zeros_like(keys)
    if dist_type == HASH_ROUNDROBIN:
        return _unsigned_remainder(fmix64(keys), world_size)
    remainder = _unsigned_remainder(keys, world_size)
    if dist_type == ROUNDROBIN:
        return remainder
    block = -(-num_embeddings // world_size)  # type: ignore[operator]  # checked above
    inside = (keys >= 0) & (keys < block * world_size)
    return torch.where(inside, torch.div(keys, block, rounding_mode="floor"), remainder)


def check_routing(world_size: int, dist_type: str, num_embeddings: int | None) -> None:
    """Check the arguments of a routing rule.

    Raises:
        ValueError: naming the argument, its value and the remedy.
    """
    if dist_type not in DIST_TYPES:
        raise ValueError(f"dist_type must be one of {', '.join(DIST_TYPES)}, got {dist_type!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if dist_type != CONTINUOUS or (world_size == 1 and num_embeddings is None):
        return
    if num_embeddings is None or not 1 <= num_embeddings <= _MAX_CONTINUOUS:
        raise ValueError(
            f"num_embeddings must be 1..2^62 for dist_type 'continuous', got {num_embeddings}; "
            "give the table's number of rows or use 'roundrobin'"
        )


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


def _unsigned_remainder(keys: torch.Tensor, divisor: int) -> torch.Tensor:
    # torch.remainder has the sign of the divisor, so it is exact for k - 2^64 up to the remainder of 2^64.
    remainder = torch.remainder(keys, divisor)
    wrapped = torch.remainder(remainder + 2**64 % divisor, divisor)
    return torch.where(keys < 0, wrapped, remainder)


def _shift_33(keys: torch.Tensor) -> torch.Tensor:
    # int64 shifts are arithmetic: clear the copies of the sign.
    return (keys >> 33) & (2**31 - 1)


def fmix64(keys: torch.Tensor) -> torch.Tensor:
    """Mix int64 keys, as 64-bit patterns; ``layout.fmix64`` on any device."""
    h = keys ^ _shift_33(keys)
    h = h * _MIX_1
    h = h ^ _shift_33(h)
    h = h * _MIX_2
    return h ^ _shift_33(h)
