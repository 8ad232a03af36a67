"""The ops agree with their schemas and fakes, and with the kernels they wrap."""

import pytest
import torch

from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table import ops
from dynamicemb.table.layout import POOLING_MEAN, FeatureLayout
from tests.tables import make_group, ranges

CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture
def group():
    group = make_group("cpu", [32, 32], dims=[4, 4])
    group.begin_step()
    group.find_or_insert(torch.tensor([1, 2, 3, 4, 5]), ranges(3, 2))
    return group


def layout() -> FeatureLayout:
    return FeatureLayout(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 4, 8]), torch.tensor([0, 1, 2]), 2, POOLING_MEAN, 8
    )


def test_index_ops(group) -> None:
    library = torch.ops.dynamicemb
    ids, table_ranges = torch.tensor([1, 9, 3, 4, 9]), ranges(3, 2)
    index = ops.index_arguments(group.index)
    torch.library.opcheck(library.find, (*index, ids, table_ranges), test_utils=CHECKS)
    torch.library.opcheck(library.find_and_touch, (*index, ids, table_ranges, None), test_utils=CHECKS)
    torch.library.opcheck(library.scan, (*index, 1, 0), test_utils=CHECKS)
    rows = library.find(*index, ids, table_ranges)
    assert torch.equal(rows, group.find(ids, table_ranges))
    torch.library.opcheck(library.insert, (*index, ids, table_ranges, rows.clone(), None), test_utils=CHECKS)
    torch.library.opcheck(library.erase, (*index, ids, table_ranges), test_utils=CHECKS)
    new, *_ = library.insert(*index, ids, table_ranges, rows, None)
    assert new.tolist() == [1, 4] and bool((rows >= 0).all())
    assert library.erase(*index, ids, table_ranges).all()
    assert not group.find(ids, table_ranges).ge(0).any()


def test_row_ops(group) -> None:
    library = torch.ops.dynamicemb
    ids, table_ranges = torch.tensor([1, 9, 3, 4, 9]), ranges(3, 2)
    offsets = torch.tensor([0, 2, 3, 3, 5])
    store, rows, zeros = ops.store_arguments(group.store), group.find(ids, table_ranges), torch.zeros(2)
    args = (*store, rows, table_ranges, zeros, torch.bfloat16)
    torch.library.opcheck(library.gather, args, test_utils=CHECKS)
    expected = group.kernels.gather(group.store, rows, table_ranges, zeros, torch.bfloat16)
    assert torch.equal(library.gather(*args), expected)
    weights = torch.rand(5)
    args = (*store, rows, offsets, *ops.layout_arguments(layout()), weights, zeros, torch.float32)
    torch.library.opcheck(library.pool, args, test_utils=CHECKS)
    expected = group.kernels.pool(group.store, rows, offsets, layout(), weights, zeros, torch.float32)
    assert torch.equal(library.pool(*args), expected)
    args = (*store, rows, offsets, *ops.layout_arguments(layout()), torch.rand(2, 8))
    torch.library.opcheck(library.pool_weights_grad, args, test_utils=CHECKS)


def test_initialize_op(group) -> None:
    library = torch.ops.dynamicemb
    ids, tables = torch.tensor([1, 4]), torch.tensor([0, 1], dtype=torch.int32)
    rows = group.find(ids, ranges(1, 1))
    before, _ = group.read(0, rows[:1])
    group.kernels.write_rows(group.store, 0, rows[:1], torch.full((1, 4), 9.0), None)
    initializers = group.initializers
    args = (*ops.store_arguments(group.store), initializers.modes, initializers.params, initializers.keys)
    args = (*args, rows, ids, tables, torch.zeros(2))
    torch.library.opcheck(library.initialize, args, test_utils=CHECKS)
    library.initialize(*args)
    assert torch.equal(group.read(0, rows[:1])[0], before)


def test_update_op(group) -> None:
    library = torch.ops.dynamicemb
    ids, table_ranges, offsets = torch.tensor([1, 9, 3, 4, 9]), ranges(3, 2), torch.tensor([0, 2, 3, 3, 5])
    rows = group.find(ids, table_ranges)
    before, _ = group.read(0, rows[:1])
    spec = OptimizerSpec.create("sgd", learning_rate=0.5)
    args = (*ops.store_arguments(group.store), ids, table_ranges, rows, offsets, *ops.layout_arguments(layout()), None)
    args = (
        *args,
        torch.ones(2, 8),
        torch.ones(4, dtype=torch.int64),
        torch.tensor([0.5]),
        group.initializers.keys,
        *ops.optimizer_arguments(spec),
    )
    torch.library.opcheck(library.update, args, test_utils=CHECKS)
    group.kernels.write_rows(group.store, 0, rows[:1], before, None)
    library.update(*args)
    # The bag has two ids, so each gets half of the gradient.
    assert torch.equal(group.read(0, rows[:1])[0], before - 0.25)


def test_find_or_insert_op(group) -> None:
    library = torch.ops.dynamicemb
    ids, table_ranges, initializers = torch.tensor([1, 9, 3, 4, 9]), ranges(3, 2), group.initializers
    args = (*ops.index_arguments(group.index), *ops.store_arguments(group.store))
    args = (*args, initializers.modes, initializers.params, initializers.keys, ids, table_ranges, None, torch.zeros(2))
    torch.library.opcheck(library.find_or_insert, args, test_utils=CHECKS)
    group.erase(0, torch.tensor([9]))
    rows, new, *_ = library.find_or_insert(*args)
    assert torch.equal(rows, group.find(ids, table_ranges)) and new.tolist() == [1, 4]
