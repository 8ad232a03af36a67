"""Find new slots for ids whose table gets more buckets, or loses its erased slots."""

import torch
from numba import njit, prange

from dynamicemb.table.cpu.hashing import bucket_of, group_of, mix
from dynamicemb.table.cpu.threads import launcher


@launcher("keys")
def relocate(
    keys: torch.Tensor, digests: torch.Tensor, kept: torch.Tensor, new_digests: torch.Tensor, bucket_capacity: int
) -> torch.Tensor:
    """Find a slot in a table of as many or more buckets for every slot that is kept, and write its digest there.

    An id goes into the first empty slot of its new bucket, in its probe order. The number of buckets is multiplied by a
    whole number f, so bucket b of n is divided among b, b + n, ..., b + (f - 1) n, and no other bucket's ids go there.

    Args:
        keys: i64 ``[S]`` of the table.
        digests: u8 ``[S]``.
        kept: bool ``[S]``, which slots are kept: those of ids, and erased ones that are still protected.
        new_digests: u8 ``[f * S]``, zeros; changed in place.
        bucket_capacity: slots of a bucket.

    Returns:
        i64 ``[S]``, the new slot of each one that is kept, else -1.
    """
    slots = torch.empty(keys.numel(), dtype=torch.int64, device="cpu")
    arrays = (keys.numpy(), digests.numpy(), kept.numpy(), new_digests.numpy(), slots.numpy())
    _relocate_kernel(*arrays, bucket_capacity)
    return slots


@njit(parallel=True, cache=True, nogil=True)
def _relocate_kernel(keys, digests, kept, new_digests, slots, bucket_capacity):
    num_buckets = new_digests.size // bucket_capacity
    for bucket in prange(keys.size // bucket_capacity):
        for old in range(bucket * bucket_capacity, (bucket + 1) * bucket_capacity):
            slots[old] = -1
            if kept[old]:
                h = mix(keys[old])
                base = bucket_of(h, num_buckets) * bucket_capacity
                place = group_of(h, bucket_capacity // 16) * 16
                while new_digests[base + place] != 0:
                    place = place + 1 if place + 1 < bucket_capacity else 0
                new_digests[base + place] = digests[old]
                slots[old] = base + place
