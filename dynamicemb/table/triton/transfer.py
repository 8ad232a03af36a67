"""Copy whole rows between the store and plain tensors."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.rows import load_float, num_warps, row_shape, store_float

_TILE = 1024


def read_rows(store: RowStore, table: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy rows of one table out.

    Args:
        store: the group's rows.
        table: which table.
        rows: i32 ``[M]``, rows of this table that hold values.

    Returns:
        ``(weights f32[M, D], state f32[M, num_state])``.

    Host sync: none. Bytes moved: M * (row size + 4 * (D + num_state) + 4).
    """
    row_format = store.formats[table]
    weights = torch.empty(rows.numel(), row_format.dim, device=rows.device)
    state = torch.empty(rows.numel(), row_format.num_state, device=rows.device)
    _transfer(store, table, rows, (weights, state), write=False)
    return weights, state


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

    Host sync: none. Bytes moved: as ``read_rows``.
    """
    _transfer(store, table, rows, (weights, state), write=True)


def _transfer(
    store: RowStore, table: int, rows: torch.Tensor, values: tuple[torch.Tensor, torch.Tensor | None], write: bool
) -> None:
    """Copy the weights, then the state: two launches of one kernel, as their widths and dtypes differ."""
    row_format = store.formats[table]
    rows = rows.contiguous()
    parts = ((0, row_shape(store).weight), (row_format.state_offset(store.dtype), tl.float32))
    for plain, (offset, dtype) in zip(values, parts, strict=True):
        if plain is None or plain.numel() == 0:
            continue
        dim = plain.shape[1]
        block_dim = min(_TILE, triton.next_power_of_2(dim))
        block = _TILE // block_dim
        _transfer_kernel[(triton.cdiv(rows.numel(), block), triton.cdiv(dim, block_dim))](
            rows,
            plain.contiguous() if write else plain,
            store.chunk_bases,
            rows.numel(),
            dim,
            offset,
            row_format.num_bytes(store.dtype),
            store.chunk_shift,
            BLOCK_DIM=block_dim,
            VALUE=dtype,
            WRITE=write,
            BLOCK=block,
            num_warps=num_warps(2 * _TILE),
        )


@triton.jit(do_not_specialize=["num_rows", "row_bytes", "chunk_shift"])
def _transfer_kernel(
    rows_ptr,
    plain_ptr,
    chunk_bases_ptr,
    num_rows,
    dim,
    offset,
    row_bytes,
    chunk_shift,
    BLOCK_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = m < num_rows
    rows = tl.load(rows_ptr + m, mask=inside, other=0)
    base = tl.load(chunk_bases_ptr + (rows >> chunk_shift), mask=inside, other=0)
    within = (rows & ((1 << chunk_shift) - 1)).to(tl.int64)
    address = base + within * row_bytes + offset
    mask = inside[:, None] & (column < dim)[None, :]
    stored = address.to(tl.pointer_type(VALUE))[:, None] + column[None, :]
    plain = plain_ptr + m[:, None] * dim + column[None, :]
    if WRITE:
        store_float(stored, load_float(plain, mask), mask, "")
    else:
        store_float(plain, load_float(stored, mask), mask, "")
