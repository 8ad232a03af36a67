"""Reading in a thread of its own."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Yields what an iterator yields, and lets a thread make the next item meanwhile. Use it as a context.

    At most two items are there at a time. An error of the iterator comes behind the items before it. When the context
    is left the thread has ended, and a generator is closed.
    """

    def __init__(self, items: Iterator[T]) -> None:
        """Take the iterator; the thread starts with the context."""
        self._items = items
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynamicemb read")
        # The next item, and None behind the last one.
        self._coming: Future[tuple[T] | None] | None = None

    def __enter__(self) -> "ReadAhead[T]":
        self._coming = self._thread.submit(self._make)
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.submit(getattr(self._items, "close", lambda: None))
        self._thread.shutdown()

    def __iter__(self) -> Iterator[T]:
        while self._coming is not None and (found := self._coming.result()) is not None:
            self._coming = self._thread.submit(self._make)
            item = found[0]
            del found
            yield item
            del item

    def _make(self) -> tuple[T] | None:
        for item in self._items:
            return (item,)
        return None
