"""Which steps protect their ids, and the rebasing of step numbers."""

import copy

import torch

from dynamicemb.table.index import OLDEST, STEP
from dynamicemb.table.stepping.tracker import REBASE_AT, StepTracker
from tests.support.tables import make_group, ranges


def test_oldest_is_the_oldest_outstanding_step() -> None:
    tracker = StepTracker()
    first, second, third = tracker.begin(), tracker.begin(), tracker.begin()
    assert (tracker.oldest(), tracker.lag()) == (1, 2)
    second.finish()
    assert tracker.oldest() == 1
    first.finish()
    assert tracker.oldest() == 3
    third.finish()
    third.finish()
    assert (tracker.oldest(), tracker.num_outstanding) == (3, 0)


def test_c14_a_step_ends_when_nobody_holds_it() -> None:
    tracker = StepTracker()
    step = tracker.begin()
    tracker.begin().finish()
    assert tracker.oldest() == 1
    del step
    assert tracker.oldest() == 2


def test_c07_protect_steps_reach_back() -> None:
    tracker = StepTracker(protect_steps=2)
    for expected in (1, 1, 1, 2, 3):
        tracker.begin().finish()
        assert tracker.oldest() == expected


def test_a_copy_has_no_outstanding_steps() -> None:
    tracker = StepTracker(1)
    step = tracker.begin()
    tracker.begin().finish()
    other = copy.deepcopy(tracker)
    assert (other.current, other.num_outstanding, other.oldest()) == (2, 0, 1)
    assert not step.finished


def test_c14_steps_whose_rows_are_gone_from_all_tables_are_over() -> None:
    tracker = StepTracker(num_tables=2)
    first, second = tracker.begin(), tracker.begin()
    second.finish()
    tracker.replace_rows(0)
    third = tracker.begin()
    assert [tracker.replaced_since(n) for n in (1, 2, 3)] == [(0,), (0,), ()]
    assert (tracker.num_awaited(0), tracker.num_awaited(1), tracker.oldest()) == (1, 2, 1)
    tracker.replace_rows(1)
    # The third step may still change table 0.
    assert (first.finished, third.finished) == (True, False)
    assert (tracker.num_awaited(0), tracker.num_awaited(1), tracker.oldest()) == (1, 0, 3)
    other = copy.deepcopy(tracker)
    other.replace_rows(0)
    assert [one.replaced_since(3) for one in (tracker, other)] == [(1,), (0, 1)]
    assert [one.replaced_since(2) for one in (tracker, other)] == [(0, 1), (0, 1)]
    assert not third.finished and third.number == other.current


def test_c07_protection_survives_rebasing(backend: str, tensors_on_device: None) -> None:
    group = make_group(backend, [16])
    # As if 2^30 steps had passed; the last two are outstanding.
    group.steps.current = REBASE_AT - 2
    group.index.clock[STEP] = REBASE_AT - 2
    group.begin_step().finish()
    group.find_or_insert(torch.arange(8), ranges(8))
    outstanding = group.begin_step()
    group.find_or_insert(torch.arange(8, 12), ranges(4))
    assert int(group.index.tags.max()) == REBASE_AT

    group.begin_step()
    assert int(group.index.clock[STEP]) == 2 and int(group.index.clock[OLDEST]) == 1
    assert sorted(set(group.index.tags.tolist())) == [0, 1]
    rows, _ = group.find_or_insert(torch.arange(100, 116), ranges(16))
    # Four slots were free and eight held unprotected ids; those of the outstanding step stayed.
    assert int((rows >= 0).sum()) == 12
    assert bool((group.find(torch.arange(8, 12), ranges(4)) >= 0).all())
    assert not outstanding.finished
