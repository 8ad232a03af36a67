"""Copy whole rows between the store and plain tensors."""

import numpy as np
import torch
from numba import njit, prange

from dynamicemb.table.cpu.memory import (
    F16,
    F32,
    bf16_to_f32,
    f16_to_f32,
    f32_at,
    f32_to_bf16,
    f32_to_f16,
    u16_at,
)
from dynamicemb.table.cpu.threads import launcher
from dynamicemb.table.cpu.vectors import DTYPE_CODES
from dynamicemb.table.rows import RowStore


@launcher("rows")
def read_rows(store: RowStore, table: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy rows of one table out.

    Args:
        store: the group's rows.
        table: which table.
        rows: i32 ``[M]``, rows of this table that hold values.

    Returns:
        ``(weights f32[M, D], state f32[M, num_state])``.
    """
    row_format = store.formats[table]
    weights = torch.empty(rows.numel(), row_format.dim, dtype=torch.float32, device="cpu")
    state = torch.empty(rows.numel(), row_format.num_state, dtype=torch.float32, device="cpu")
    _read_kernel(*_place_of(store, table), rows.numpy(), weights.numpy(), state.numpy())
    return weights, state


@launcher("rows")
def write_rows(
    store: RowStore, table: int, rows: torch.Tensor, weights: torch.Tensor, state: torch.Tensor | None
) -> None:
    """Overwrite rows of one table; weights are rounded to nearest.

    Args:
        store: the group's rows.
        table: which table.
        rows: i32 ``[M]``, distinct.
        weights: f32 ``[M, D]``.
        state: f32 ``[M, num_state]``, or None to leave the optimizer state as it is.
    """
    if state is None:
        state = torch.empty(rows.numel(), 0, dtype=torch.float32, device="cpu")
    _write_kernel(*_place_of(store, table), rows.numpy(), weights.contiguous().numpy(), state.contiguous().numpy())


def _place_of(store: RowStore, table: int) -> tuple[np.ndarray, int, tuple[int, int], int]:
    row_format = store.formats[table]
    sizes = (row_format.num_bytes(store.dtype), row_format.state_offset(store.dtype))
    return store.chunk_bases.numpy(), store.chunk_shift, sizes, DTYPE_CODES[store.dtype]


@njit(parallel=True, cache=True, nogil=True)
def _read_kernel(bases, shift, sizes, code, rows, weights, state):
    row_bytes, state_offset = sizes
    for m in prange(rows.size):
        row = np.int64(rows[m])
        address = bases[row >> shift] + (row & ((1 << shift) - 1)) * row_bytes
        _read_row(address, address + state_offset, code, weights[m], state[m])


@njit(parallel=True, cache=True, nogil=True)
def _write_kernel(bases, shift, sizes, code, rows, weights, state):
    row_bytes, state_offset = sizes
    for m in prange(rows.size):
        row = np.int64(rows[m])
        address = bases[row >> shift] + (row & ((1 << shift) - 1)) * row_bytes
        _write_row(address, address + state_offset, code, weights[m], state[m])


# Apart from the parallel loops, whose clean-up drops stores into views of raw memory:
# test_insert_writes_what_it_is_given.
@njit(nogil=True)
def _read_row(address, state_address, code, weights, state):
    if code == F32:
        weights[:] = f32_at(address, weights.size)
    else:
        words = u16_at(address, weights.size)
        for d in range(weights.size):
            weights[d] = f16_to_f32(words[d]) if code == F16 else bf16_to_f32(words[d])
    state[:] = f32_at(state_address, state.size)


@njit(nogil=True)
def _write_row(address, state_address, code, weights, state):
    if code == F32:
        f32_at(address, weights.size)[:] = weights
    else:
        words = u16_at(address, weights.size)
        for d in range(weights.size):
            words[d] = f32_to_f16(weights[d]) if code == F16 else f32_to_bf16(weights[d])
    f32_at(state_address, state.size)[:] = state
