"""Gather, pool, the gradient of pooling weights and grouping, each against a plain reference."""

import numpy as np
import pytest
import torch

from dynamicemb.table.cpu.gather import gather
from dynamicemb.table.cpu.pool import pool, pool_weights_grad
from dynamicemb.table.cpu.segments import group_by_row
from dynamicemb.table.layout import POOLING_MEAN, POOLING_NONE, POOLING_SUM, FeatureLayout
from tests.support.row_cases import DTYPES, make_batch, make_store, row_values, weights_of

DIMS = (1, 3, 4, 64, 100, 257)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def reference_pool(store, batch, weights, missing_values):
    width = int(batch.layout.column_offsets[-1])
    out = torch.zeros(batch.layout.batch_size, width)
    values = row_values(store, batch, missing_values)
    for _, sample, columns, occurrences in batch.bags():
        total = torch.zeros(columns.stop - columns.start)
        for i in occurrences:
            total = total + (values[i] if weights is None else weights[i] * values[i])
        if batch.layout.pooling == POOLING_MEAN and len(occurrences):
            total = total * (torch.ones(()) / float(len(occurrences)))
        out[sample, columns] = total
    return out


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_copies_rows_and_fills_missing_ones(dim, dtype):
    store = make_store([dim] * 3, dtype, [0, 2, 1])
    batch = make_batch(store, [1, 2, 1], 9, POOLING_NONE)
    missing_values = torch.tensor([0.0, 0.5, -3.0])
    expected = torch.stack(row_values(store, batch, missing_values))
    for output_dtype in DTYPES:
        out = gather(store, batch.rows, batch.table_ranges, missing_values, output_dtype)
        assert torch.equal(out, expected.to(output_dtype))


def test_gather_of_nothing():
    store = make_store([4, 4], torch.float32)
    out = gather(store, torch.empty(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), torch.zeros(2), DTYPES[0])
    assert out.shape == (0, 4)


def test_gather_keeps_special_values():
    for dtype in DTYPES:
        store = make_store([8], dtype)
        special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 6e-8, -6e-5, 65504.0])
        rows = torch.tensor([0], dtype=torch.int32)
        weights_of(store, 0)[0] = special.to(dtype)
        out = gather(store, rows, torch.tensor([0, 1]), torch.zeros(1), dtype)
        torch.testing.assert_close(out[0], special.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(out.signbit(), special.to(dtype).signbit()[None])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_c02_pool_sums_in_the_order_of_occurrences(dim, dtype, pooling, weighted):
    store = make_store([dim], dtype, [1])
    batch = make_batch(store, [2], 11, pooling, longest=13)
    weights = torch.randn(batch.rows.numel()) if weighted else None
    missing_values = torch.tensor([0.25])
    expected = reference_pool(store, batch, weights, missing_values)
    for output_dtype in DTYPES:
        out = pool(store, batch.rows, batch.offsets, batch.layout, weights, missing_values, output_dtype)
        assert torch.equal(out, expected.to(output_dtype))


@pytest.mark.parametrize("features", [[1, 1, 1], [2, 1, 3], [0, 3, 0]])
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_c13_pool_takes_mixed_dims(features, batch_size):
    store = make_store([5, 64, 16], torch.float32, [0, 3, 32])
    batch = make_batch(store, features, batch_size, POOLING_MEAN)
    missing_values = torch.tensor([1.0, 0.0, -1.0])
    out = pool(store, batch.rows, batch.offsets, batch.layout, None, missing_values, torch.float32)
    assert torch.equal(out, reference_pool(store, batch, None, missing_values))


@pytest.mark.parametrize("batch_size", [0, 5])
def test_c03_pool_of_empty_bags_is_zero(batch_size):
    store = make_store([4, 8], torch.float32)
    batch = make_batch(store, [1, 1], batch_size, POOLING_MEAN, longest=0)
    out = pool(store, batch.rows, batch.offsets, batch.layout, None, torch.ones(2), torch.float32)
    assert torch.equal(out, torch.zeros(batch_size, 12))


def test_pool_docstring_example():
    store = make_store([2], torch.float32)
    weights_of(store, 0)[:2] = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    rows = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    offsets = torch.tensor([0, 3, 3, 4])
    for pooling, first in ((POOLING_SUM, [12.0, 24.0]), (POOLING_MEAN, [4.0, 8.0])):
        layout = FeatureLayout(
            torch.zeros(1, dtype=torch.int32), torch.tensor([0, 2]), torch.tensor([0, 1]), 3, pooling, 2
        )
        out = pool(store, rows, offsets, layout, None, torch.zeros(1), torch.float32)
        torch.testing.assert_close(out, torch.tensor([first, [0.0, 0.0], [10.0, 20.0]]))


@pytest.mark.parametrize("dims", [[1, 3], [64, 100], [257, 4]])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN])
def test_gradient_of_pooling_weights_equals_autograd(dims, dtype, pooling):
    store = make_store(dims, dtype)
    batch = make_batch(store, [1, 2], 10, pooling)
    grad = torch.randn(10, int(batch.layout.column_offsets[-1])).to(dtype)
    weights = torch.ones(batch.rows.numel(), requires_grad=True)
    reference_pool(store, batch, weights, torch.zeros(2)).backward(grad.float())
    out = pool_weights_grad(store, batch.rows, batch.offsets, batch.layout, grad)
    torch.testing.assert_close(out, weights.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num", [0, 1, 63, 100, 2000, 20000])
@pytest.mark.parametrize("largest", [0, 12, 5000, 2**22, 2**31 - 1])
def test_group_is_a_stable_sort_without_missing_rows(num, largest):
    rows = torch.randint(-1, largest + 1, (num,)).int()
    rows[num // 2 : num // 2 + 1] = largest
    order, starts = group_by_row(rows)
    kept = np.nonzero(rows.numpy() >= 0)[0]
    expected = kept[np.argsort(rows.numpy()[kept], kind="stable")]
    assert np.array_equal(order, expected)
    ordered = rows.numpy()[expected]
    boundaries = np.nonzero(np.diff(ordered, prepend=-1))[0]
    assert np.array_equal(starts, [*boundaries, len(expected)])


def test_group_docstring_example():
    order, starts = group_by_row(torch.tensor([7, -1, 3, 7], dtype=torch.int32))
    assert order.tolist() == [2, 0, 3]
    assert starts.tolist() == [0, 1, 3]


def test_group_of_missing_rows_only():
    order, starts = group_by_row(torch.full((10,), -1, dtype=torch.int32))
    assert order.numel() == 0
    assert starts.tolist() == [0]
