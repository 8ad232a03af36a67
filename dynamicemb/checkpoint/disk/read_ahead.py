"""Reading in a thread of its own."""

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Yields what an iterator yields, and lets a thread make the next item meanwhile. Use it as a context.

    At most three items are there at a time. An error of the iterator comes behind the items before it. When the context
    is left the thread has ended, and a generator is closed.
    """

    def __init__(self, items: Iterator[T]) -> None:
        """Take the iterator; the thread starts with the context."""
        self._items = items
        # Each item, and at the end None.
        self._waiting: queue.Queue[tuple[T] | None] = queue.Queue(1)
        self._error: BaseException | None = None
        self._is_over = self._is_left = False
        self._thread = threading.Thread(target=self._work, name="dynamicemb read")

    def __enter__(self) -> "ReadAhead[T]":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_left = True
        while not self._is_over:
            self._next()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        while (found := self._next()) is not None:
            yield found[0]
        if self._error is not None:
            raise self._error

    def _next(self) -> tuple[T] | None:
        found = None if self._is_over else self._waiting.get()
        self._is_over = found is None
        return found

    def _work(self) -> None:
        try:
            for item in self._items:
                self._waiting.put((item,))
                del item
                if self._is_left:
                    break
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            self._error = error
        finally:
            self._waiting.put(None)
