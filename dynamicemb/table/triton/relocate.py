"""Find new slots for ids whose table gets more buckets, or loses its erased slots."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.triton.hashing import bucket_of, group_of, mix
from dynamicemb.table.triton.launch import power_of_two

_TILE = 512


def relocate(
    keys: torch.Tensor, digests: torch.Tensor, kept: torch.Tensor, new_digests: torch.Tensor, bucket_capacity: int
) -> torch.Tensor:
    """Find a new slot for every slot that is kept, and write its digest there; see the CPU twin.

    Args:
        keys: i64 ``[S]`` of the table.
        digests: u8 ``[S]``.
        kept: bool ``[S]``, which slots are kept.
        new_digests: u8 ``[f * S]``, zeros; changed in place.
        bucket_capacity: slots of a bucket.

    Returns:
        i64 ``[S]``, the new slot of each one that is kept, else -1.

    Concurrency: one program per old bucket, which owns all new buckets that its ids can go to. Host sync: none. Not on
    the path of an ordinary training step.
    """
    slots = torch.empty(keys.numel(), dtype=torch.int64, device=keys.device)
    # Plain launch: a table's part of an array may begin anywhere.
    _relocate_kernel[(keys.numel() // bucket_capacity,)](
        keys,
        digests,
        kept.to(torch.uint8),
        new_digests,
        slots,
        new_digests.numel() // bucket_capacity,
        BUCKET=bucket_capacity,
        TILE=min(_TILE, power_of_two(bucket_capacity)),
        num_warps=1,
    )
    return slots


@triton.jit(do_not_specialize=["num_buckets"])
def _relocate_kernel(
    keys_ptr,
    digests_ptr,
    kept_ptr,
    new_digests_ptr,
    slots_ptr,
    num_buckets,
    BUCKET: tl.constexpr,
    TILE: tl.constexpr,
):
    first_slot = tl.program_id(0).to(tl.int64) * BUCKET
    for i in range(0, BUCKET):
        old = first_slot + i
        slot = tl.full([], -1, tl.int64)
        if tl.load(kept_ptr + old) != 0:
            h = mix(tl.load(keys_ptr + old))
            base = bucket_of(h, tl.full([], 0, tl.int64) + num_buckets) * BUCKET
            start = group_of(h, BUCKET // 16) * 16
            first = tl.full([], BUCKET, tl.int64)
            begin = 0
            while (begin < BUCKET) & (first == BUCKET):
                order = begin + tl.arange(0, TILE)
                place = start + order
                place = tl.where(place >= BUCKET, place - BUCKET, place)
                digest = tl.load(new_digests_ptr + base + place, mask=order < BUCKET, other=2)
                first = tl.min(tl.where(digest == 0, order, BUCKET), 0).to(tl.int64)
                begin += TILE
            place = start + first
            slot = base + tl.where(place >= BUCKET, place - BUCKET, place)
            # All threads have looked for an empty slot before one of them takes it, and see it taken after.
            tl.debug_barrier()
            tl.store(new_digests_ptr + slot, tl.load(digests_ptr + old))
            tl.debug_barrier()
        tl.store(slots_ptr + old, slot)
