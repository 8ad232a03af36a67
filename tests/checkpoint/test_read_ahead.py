"""Reading in a thread while something else is done with what was read."""

import threading
from collections.abc import Iterator

import pytest

from dynamicemb.checkpoint.disk.read_ahead import ReadAhead


class Source:
    """Counts up to ``number``, then fails if there is an ``error``."""

    def __init__(self, number: int, error: BaseException | None = None) -> None:
        self.made, self.closed, self.threads = 0, False, set()
        self.ready = threading.Event()
        self.number, self.error = number, error

    def items(self) -> Iterator[int]:
        try:
            while self.made < self.number:
                self.threads.add(threading.get_ident())
                self.made += 1
                if self.made == 2:
                    self.ready.set()
                yield self.made
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def num_threads() -> int:
    return sum(thread.name.startswith("dynamicemb read") for thread in threading.enumerate())


def test_the_next_item_is_made_meanwhile_and_no_more() -> None:
    source = Source(9)
    seen = []
    with ReadAhead(source.items()) as items:
        for item in items:
            # Nobody has asked for the second one.
            assert item > 1 or source.ready.wait(30)
            assert source.made <= item + 1
            seen.append(item)
    assert seen == [*range(1, 10)] and source.closed and num_threads() == 0
    assert source.threads and threading.get_ident() not in source.threads


@pytest.mark.parametrize("error", [OSError("the disk"), KeyboardInterrupt()])
def test_an_error_comes_behind_what_was_before_it(error: BaseException) -> None:
    source, seen = Source(4, error), []
    with pytest.raises(type(error)) as caught, ReadAhead(source.items()) as items:
        for item in items:
            seen.append(item)
    assert seen == [1, 2, 3, 4]
    assert caught.value is error and source.closed and num_threads() == 0


@pytest.mark.parametrize("number", [0, 1, 2, 50])
def test_leaving_early_closes_the_source_and_ends_the_thread(number: int) -> None:
    source = Source(number)
    with pytest.raises(ZeroDivisionError), ReadAhead(source.items()) as items:
        for item in items:
            assert item == 1
            raise ZeroDivisionError
        raise ZeroDivisionError
    assert source.closed and num_threads() == 0 and source.made <= 2
    with ReadAhead(Source(number).items()):
        pass
    assert num_threads() == 0
