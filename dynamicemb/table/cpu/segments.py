"""Group the occurrences of a batch by row."""

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from dynamicemb.table.cpu.threads import launcher

_DIGIT_BITS = 11


@launcher("rows")
def group_by_row(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the occurrences that have a row by row, keeping their order within a row.

    A least-significant-digit radix sort of (row, occurrence). It is stable, so the result is unique: no thread count or
    batch split can change the order in which gradients are summed.

    Args:
        rows: i32 ``[N]``, -1 for an occurrence without a row, which is left out.

    Returns:
        ``(order i32[M], segment_starts i32[U+1])``: segment ``u`` is ``order[segment_starts[u]:segment_starts[u+1]]``,
        ascending occurrences of one row; segments ascend by row.

    Example: ``rows = [7, -1, 3, 7]`` gives ``order = [2, 0, 3]``, ``segment_starts = [0, 1, 3]``.

    Host sync: none (CPU). Bytes moved: 4 N + 32 N for each 11 bits of the largest row.
    """
    num = rows.numel()
    order = np.empty(num, np.int32)
    starts = np.empty(num + 1, np.int32)
    num_parts = get_num_threads()
    keys = np.empty((2, num), np.uint64)
    counts = np.empty((num_parts, 1 << _DIGIT_BITS), np.int32)
    kernel = _group_parallel if num_parts > 1 else _group_serial
    num_kept, num_segments = kernel(rows.contiguous().numpy(), keys, counts, order, starts)
    return torch.from_numpy(order[:num_kept]), torch.from_numpy(starts[: num_segments + 1])


def _group(rows, keys, counts, order, starts):
    """Sort ``keys = row << 32 | occurrence`` by digits; the first pass reads ``rows`` and drops -1."""
    num_parts = len(counts)
    limits = np.zeros((num_parts, 2), np.int64)
    for part in prange(num_parts):
        limits[part, 0] = _largest(rows, part, num_parts)
    largest = limits[:, 0].max()
    if largest < 0:
        starts[0] = 0
        return 0, 0
    source, target = keys[0], keys[1]
    shift = 32
    num_kept = 0
    while shift == 32 or (largest >> (shift - 32)) > 0:
        for part in prange(num_parts):
            if shift == 32:
                _count_rows(rows, counts[part], part, num_parts)
            else:
                _count_keys(source[:num_kept], counts[part], shift, part, num_parts)
        num_kept = _cumulate(counts)
        for part in prange(num_parts):
            if shift == 32:
                _scatter_rows(rows, target, counts[part], part, num_parts)
            else:
                _scatter_keys(source[:num_kept], target, counts[part], shift, part, num_parts)
        source, target = target, source
        shift += _DIGIT_BITS
    for part in prange(num_parts):
        limits[part, 1] = _count_segments(source[:num_kept], part, num_parts)
    for part in prange(num_parts):
        first = limits[:part, 1].sum()
        _write_segments(source[:num_kept], order, starts, first, part, num_parts)
    num_segments = limits[:, 1].sum()
    starts[num_segments] = num_kept
    return num_kept, num_segments


_group_parallel = njit(parallel=True, cache=True, nogil=True, error_model="numpy")(_group)
_group_serial = njit(cache=True, nogil=True, error_model="numpy")(_group)


@njit(error_model="numpy")
def _largest(rows, part, num_parts):
    largest = np.int64(-1)
    for i in range(len(rows) * part // num_parts, len(rows) * (part + 1) // num_parts):
        largest = max(largest, np.int64(rows[i]))
    return largest


@njit(error_model="numpy")
def _count_rows(rows, counts, part, num_parts):
    counts[:] = 0
    for i in range(len(rows) * part // num_parts, len(rows) * (part + 1) // num_parts):
        if rows[i] >= 0:
            counts[np.uint64(rows[i]) & np.uint64((1 << _DIGIT_BITS) - 1)] += 1


@njit(error_model="numpy")
def _count_keys(keys, counts, shift, part, num_parts):
    counts[:] = 0
    for i in range(len(keys) * part // num_parts, len(keys) * (part + 1) // num_parts):
        counts[(keys[i] >> np.uint64(shift)) & np.uint64((1 << _DIGIT_BITS) - 1)] += 1


@njit(error_model="numpy")
def _cumulate(counts):
    """Turn counts per (part, digit) into first positions; return the total."""
    total = 0
    for digit in range(counts.shape[1]):
        for part in range(counts.shape[0]):
            count = counts[part, digit]
            counts[part, digit] = total
            total += count
    return total


@njit(error_model="numpy")
def _scatter_rows(rows, target, positions, part, num_parts):
    for i in range(len(rows) * part // num_parts, len(rows) * (part + 1) // num_parts):
        if rows[i] >= 0:
            row = np.uint64(rows[i])
            digit = row & np.uint64((1 << _DIGIT_BITS) - 1)
            target[np.uint64(positions[digit])] = (row << np.uint64(32)) | np.uint64(i)
            positions[digit] += 1


@njit(error_model="numpy")
def _scatter_keys(keys, target, positions, shift, part, num_parts):
    for i in range(len(keys) * part // num_parts, len(keys) * (part + 1) // num_parts):
        key = keys[i]
        digit = (key >> np.uint64(shift)) & np.uint64((1 << _DIGIT_BITS) - 1)
        target[np.uint64(positions[digit])] = key
        positions[digit] += 1


@njit(error_model="numpy")
def _count_segments(keys, part, num_parts):
    count = 0
    for i in range(len(keys) * part // num_parts, len(keys) * (part + 1) // num_parts):
        count += i == 0 or (keys[i] >> np.uint64(32)) != (keys[i - 1] >> np.uint64(32))
    return count


@njit(error_model="numpy")
def _write_segments(keys, order, starts, first, part, num_parts):
    segment = first
    for i in range(len(keys) * part // num_parts, len(keys) * (part + 1) // num_parts):
        order[i] = np.int32(keys[i] & np.uint64(0xFFFFFFFF))
        if i == 0 or (keys[i] >> np.uint64(32)) != (keys[i - 1] >> np.uint64(32)):
            starts[segment] = i
            segment += 1
