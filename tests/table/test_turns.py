"""Turns: one thread at a time has a group, and on a GPU the kernels of one turn run after those of the turn before."""

import threading

import pytest
import torch

from dynamicemb.table.group import TableGroup
from dynamicemb.table.turns import Turns
from tests.support.tables import make_group

# Clock cycles of a GPU: about 50 ms.
LONG = 100_000_000


def is_free(turn: Turns) -> bool:
    """Say whether another thread would get the turn at once."""
    got: list[bool] = []

    def take() -> None:
        got.append(turn._lock.acquire(blocking=False))
        if got[0]:
            turn._lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return got[0]


def test_no_other_thread_has_a_turn_meanwhile() -> None:
    turn = Turns(torch.device("cpu"))
    assert is_free(turn)
    with turn():
        assert not is_free(turn)
        # The thread that has the turn may take it again, and leaving the inner one does not end the outer one.
        with turn():
            assert not is_free(turn)
        assert not is_free(turn)
    assert is_free(turn)


def test_a_turn_ends_with_an_exception() -> None:
    turn = Turns(torch.device("cpu"))
    with pytest.raises(KeyError), turn():
        raise KeyError
    assert is_free(turn)


def insert(group: TableGroup, ids: torch.Tensor) -> None:
    step = group.begin_step()
    group.find_or_insert(ids, group.ranges_of(0, ids.numel()))
    step.finish()


def found(group: TableGroup, ids: torch.Tensor) -> torch.Tensor:
    return group.find(ids, group.ranges_of(0, ids.numel())) >= 0


@pytest.fixture
def group() -> TableGroup:
    group = make_group("cuda", [1024])
    # Compiles the kernels, so that nothing but LONG takes time below.
    insert(group, torch.tensor([1], device="cuda"))
    assert found(group, torch.tensor([1], device="cuda")).all()
    torch.cuda.synchronize()
    return group


@pytest.mark.cuda
def test_a_turn_on_another_stream_sees_the_turn_before(group: TableGroup) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    ids = torch.arange(10, 60, device="cuda")
    torch.cuda.synchronize()
    # The second round begins where events are recorded already.
    for stream in [*streams, *streams]:
        with group.turn(stream):
            torch.cuda._sleep(LONG)
            insert(group, ids)
        with group.turn():
            seen = found(group, ids)
        assert seen.all()
        ids = ids + 100


@pytest.mark.cuda
def test_a_turn_inside_another_one_stands_between_its_halves(group: TableGroup) -> None:
    side = torch.cuda.Stream()
    before, inside = torch.arange(100, 150, device="cuda"), torch.arange(200, 250, device="cuda")
    torch.cuda.synchronize()
    for shift in (0, 1000):
        with group.turn():
            torch.cuda._sleep(LONG)
            insert(group, before + shift)
            with group.turn(side):
                seen = found(group, before + shift)
                torch.cuda._sleep(LONG)
                insert(group, inside + shift)
            after = found(group, inside + shift)
        torch.cuda.synchronize()
        assert seen.all() and after.all()


@pytest.mark.cuda
def test_turns_are_captured_after_several_streams_had_one(group: TableGroup) -> None:
    ids = torch.tensor([1, 777], device="cuda")
    # The stream of the capture is one of those that had a turn.
    side = torch.cuda.Stream()
    with group.turn(side):
        found(group, ids)
    with group.turn():
        found(group, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side), group.turn():
        seen = found(group, ids)
    with group.turn():
        insert(group, torch.tensor([777], device="cuda"))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert seen.tolist() == [True, True]
