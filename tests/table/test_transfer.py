"""Rows copied into the store and out of it."""

import pytest
import torch

from dynamicemb.table.cpu.transfer import read_rows, write_rows
from dynamicemb.table.rows import RowFormat, RowStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_insert_writes_what_it_is_given(dtype: torch.dtype, dim: int) -> None:
    store = RowStore([32, 16], [RowFormat(5, 0), RowFormat(dim, 2)], dtype, torch.device("cpu"))
    for chunk in store.chunks:
        chunk.fill_(0xFF)
    rows = torch.tensor([store.first_rows[1] + 3, store.first_rows[1] + 15, store.first_rows[1]], dtype=torch.int32)
    weights, state = torch.randn(3, dim), torch.randn(3, 2)
    write_rows(store, 1, rows, weights, state)
    got_weights, got_state = read_rows(store, 1, rows)
    assert torch.equal(got_weights, weights.to(dtype).float())
    assert torch.equal(got_state, state)
    # Without state, the old one stays; other rows and tables are untouched.
    write_rows(store, 1, rows[:1], -weights[:1], None)
    assert torch.equal(read_rows(store, 1, rows)[0][0], -weights[0].to(dtype).float())
    assert torch.equal(read_rows(store, 1, rows)[1], state)
    others = torch.arange(store.first_rows[1] + 4, store.first_rows[1] + 15, dtype=torch.int32)
    assert bool(read_rows(store, 1, others)[0].isnan().all())
    assert bool((store.chunks[0] == 0xFF).all())
