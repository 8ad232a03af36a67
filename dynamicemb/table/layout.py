"""Where an id may live: hash, bucket, start group and digest, and how features map to tables.

The rule, for an id whose table has ``num_buckets`` buckets of ``num_groups`` groups of 16 slots::

    h      = fmix64(id)                                  # murmur3 finaliser, id as unsigned 64 bit
    bucket = (h >> 20) % num_buckets                     # doubling num_buckets splits b into b and b + n
    h2     = h * 0x9E3779B97F4A7C15                      # keeps digest and group independent of routing by h % R
    digest = 2 + ((h2 >> 56) * 254 >> 8)                 # 0 is an empty slot, 1 an erased one
    group  = ((h2 >> 24 & 0xFFFFFFFF) * num_groups) >> 32

This file states the rule for the host (NumPy); each backend has its own copy of the arithmetic and the tests compare
them.
"""

from dataclasses import dataclass

import numpy as np
import torch

GROUP_SIZE = 16
DIGEST_EMPTY = 0
DIGEST_ERASED = 1
FIRST_DIGEST = 2

POOLING_SUM = 0
POOLING_MEAN = 1
POOLING_NONE = 2

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def fmix64(ids: np.ndarray) -> np.ndarray:
    """Mix 64-bit integers with murmur3's finaliser (Appleby, public domain).

    Args:
        ids: int64 or uint64, any shape; the bit pattern counts.

    Returns:
        uint64, same shape. A bijection.
    """
    h = np.atleast_1d(np.asarray(ids)).view(np.uint64).copy()
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h.reshape(np.shape(ids))


def locate(ids: np.ndarray, num_buckets: int, num_groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bucket (in its table), start group (in its bucket) and digest of each id.

    Args:
        ids: int64 ``[N]``.
        num_buckets: buckets of the table.
        num_groups: groups of 16 slots in a bucket.

    Returns:
        ``(bucket i64[N], group i64[N], digest u8[N])``.
    """
    h = fmix64(ids)
    h2 = h * _GOLDEN
    bucket = ((h >> np.uint64(20)) % np.uint64(num_buckets)).astype(np.int64)
    digest = (np.uint64(FIRST_DIGEST) + (((h2 >> np.uint64(56)) * np.uint64(254)) >> np.uint64(8))).astype(np.uint8)
    low = (h2 >> np.uint64(24)) & np.uint64(0xFFFFFFFF)
    group = ((low * np.uint64(num_groups)) >> np.uint64(32)).astype(np.int64)
    return bucket, group, digest


@dataclass(frozen=True)
class FeatureLayout:
    """How the bags of a batch map to tables and to output columns.

    Bags are feature-major: bag ``k = f * batch_size + b`` holds the occurrences ``offsets[k]..offsets[k+1]``.

    Attributes:
        feature_tables: i32 ``[F]``, the table of a feature, non-decreasing.
        column_offsets: i64 ``[F+1]``, where a feature's columns start in the pooled output; unused without pooling.
        table_features: i64 ``[T+1]``, the first feature of a table.
        batch_size: B, bags per feature.
        pooling: POOLING_SUM, POOLING_MEAN or POOLING_NONE.
        width: total_D, columns of the pooled output.
    """

    feature_tables: torch.Tensor
    column_offsets: torch.Tensor
    table_features: torch.Tensor
    batch_size: int
    pooling: int
    width: int

    def table_ranges(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return i64 ``[T+1]``: table ``t`` owns the occurrences ``ranges[t]..ranges[t+1]``."""
        return offsets[self.table_features * self.batch_size]
