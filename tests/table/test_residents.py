"""What the two parts of an index are good for alone: who is where suffices to look up."""

import copy
import pickle
from dataclasses import fields

import pytest
import torch

from dynamicemb.table.index import CLAMPED, Index, Residents, Touches
from dynamicemb.table.layout import POOLING_NONE, POOLING_SUM, FeatureLayout
from dynamicemb.table.scores import SCORE_COMPOUND, SCORE_STEP
from tests.support.tables import kernels_of, make_group

pytestmark = pytest.mark.usefixtures("tensors_on_device")


def residents_of(index: Index) -> Residents:
    return Residents(**{f.name: getattr(index, f.name) for f in fields(Residents)})


def layout_of(pooling: int, bags: int) -> FeatureLayout:
    return FeatureLayout(
        feature_tables=torch.tensor([0, 1], dtype=torch.int32),
        column_offsets=torch.tensor([0, 4, 8]),
        table_features=torch.tensor([0, 1, 2]),
        batch_size=bags,
        pooling=pooling,
        width=8,
    )


def filled_group(backend: str):
    """Return a group whose tables hold the ids 0 to 19 and 30 to 49."""
    group = make_group(backend, [64, 64], dims=[4, 4], strategy=[SCORE_STEP, SCORE_COMPOUND])
    ids = torch.cat([torch.arange(20), torch.arange(30, 50)])
    step = group.begin_step()
    group.kernels.place(group.index, ids, torch.tensor([0, 20, 40]))
    step.finish()
    return group


@pytest.mark.parametrize("moved", [False, True])
def test_residents_alone_find_what_the_index_finds(backend: str, moved: bool) -> None:
    group, kernels = filled_group(backend), kernels_of(backend)
    if moved:
        group.index.rows.copy_(group.index.rows.flip(0))
        group.index.entries_moved()
    residents = residents_of(group.index)
    ids, ranges = torch.tensor([3, 19, 20, 30, -7, 49, 3]), torch.tensor([0, 3, 7])
    rows = kernels.find(residents, ids, ranges, False)
    assert (rows >= 0).tolist() == [True, True, False, True, False, True, False]
    assert torch.equal(rows, kernels.find(group.index, ids, ranges, False))
    assert (group.index.rows[rows[:2].long()] == rows[:2]).all() != moved
    with pytest.raises(AssertionError):
        kernels.find(residents, ids, ranges, True)


def test_residents_alone_find_and_gather(backend: str) -> None:
    group, kernels = filled_group(backend), kernels_of(backend)
    for t, chunk in enumerate(group.store.chunks):
        chunk.copy_(torch.arange(chunk.numel()) % 50 + t)
    ids, offsets = torch.tensor([3, 19, 20, 30, -7, 49]), torch.tensor([0, 1, 3, 4, 6])
    batch = (group.store, ids, offsets, layout_of(POOLING_NONE, 2), torch.tensor([0.5, -3.0]), torch.float32)
    values = kernels.find_and_gather(residents_of(group.index), *batch)
    assert values[2].tolist() == [0.5] * 4 and values[4].tolist() == [-3.0] * 4
    assert torch.equal(values, kernels.find_and_gather(group.index, *batch))


def test_residents_alone_open_an_evaluation(backend: str) -> None:
    if backend == "cpu":
        pytest.skip("cpu: offsets are checked before")
    group, kernels = filled_group(backend), kernels_of(backend)
    offsets = torch.tensor([0, 4, 2, 12, 9])
    opened = kernels.open_batch(residents_of(group.index), offsets, layout_of(POOLING_SUM, 2), 9)
    assert opened.table_ranges.tolist() == [0, 2, 9] and opened.offsets.tolist() == [0, 2, 2, 9, 9]
    assert not group.index.tallies[:, CLAMPED].any()
    kernels.open_batch(group.index, offsets, layout_of(POOLING_SUM, 2), 9)
    assert group.index.tallies[:, CLAMPED].tolist() == [0, 3]


def test_an_index_is_both_parts_and_nothing_else(backend: str) -> None:
    index = filled_group(backend).index
    parts = [{f.name for f in fields(part)} for part in (Residents, Touches, Index)]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == parts[2]
    touches = Touches(**{f.name: getattr(index, f.name) for f in fields(Touches) if f.init})
    assert residents_of(index).num_bytes() + touches.num_bytes() == index.num_bytes()
    assert index.num_tables == residents_of(index).num_tables == touches.num_tables == 2


def test_residents_are_copied_and_pickled_apart_from_their_index(backend: str) -> None:
    index = filled_group(backend).index
    for twin in (copy.deepcopy(residents_of(index)), pickle.loads(pickle.dumps(residents_of(index)))):
        assert type(twin) is Residents and twin.bucket_capacity == index.bucket_capacity
        assert all(torch.equal(*pair) for pair in zip(twin.tensors(), residents_of(index).tensors(), strict=True))
        twin.keys.fill_(5)
        twin.entries_moved()
    assert not (index.keys == 5).all() and not index.moved
