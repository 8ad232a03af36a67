"""Whose turn it is to touch a group: one thread after the other, and on a GPU one stream after the other."""

import threading
from contextlib import AbstractContextManager, ExitStack

import torch


class Turns:
    """A context in which one caller has a group to itself; ``with group.turn():``.

    A lookup is several kernels. The turn lasts from the first to the last, so that no other thread sees an id whose row
    is not written yet, or takes a row between a check and an update. The kernels of a turn run after those of the turn
    before, also on another stream. A thread that has the turn may take it again.

    Nothing is known about the streams on which captured CUDA graphs are replayed: whoever replays on several streams
    orders them.

    Host sync: none. While all turns are taken on one stream no event is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the turns of a group on ``device``."""
        self._device = device
        self._lock = threading.RLock()
        # The streams of the turns taken and not left, outermost first; None while a graph is being captured.
        self._taken: list[torch.cuda.Stream | None] = []
        # The stream of the last turn, and the end of that turn: recorded once a second stream has come.
        self._last: torch.cuda.Stream | None = None
        self._last_raw: int | None = None
        self._end: torch.cuda.Event | None = None

    def __call__(self, stream: torch.cuda.Stream | None = None) -> AbstractContextManager[None]:
        """Return the context.

        Args:
            stream: the stream that runs the kernels of the turn; None is the current one.
        """
        return self if stream is None else _OnStream(self, stream)  # type: ignore[return-value]

    def __enter__(self) -> None:
        """Wait for the turn."""
        self._lock.acquire()
        if self._device.type == "cuda":
            try:
                self._follow()
            except BaseException:
                self._lock.release()
                raise

    def __exit__(self, *error: object) -> None:
        """Give the turn to the next one."""
        try:
            if self._device.type == "cuda":
                self._leave()
        finally:
            self._lock.release()

    def _follow(self) -> None:
        """Make the current stream wait for the kernels of the last turn."""
        index = torch._C._cuda_getDevice() if self._device.index is None else self._device.index
        raw = torch._C._cuda_getCurrentRawStream(index)
        if raw != self._last_raw:
            if torch.cuda.is_current_stream_capturing():
                # A captured stream can only wait for what is captured too; capture begins with a wait for all streams.
                self._taken.append(None)
                return
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                if self._end is None or self._taken:
                    self._end = self._end or torch.cuda.Event()
                    self._end.record(self._last)
                stream.wait_event(self._end)
            self._last, self._last_raw = stream, raw
        self._taken.append(self._last)

    def _leave(self) -> None:
        """Record the end of the turn; the turn around this one goes on after it."""
        left = self._taken.pop()
        # The end of a turn that is captured is known to the graph alone.
        if left is None or self._end is None or torch.cuda.is_current_stream_capturing():
            return
        self._end.record(left)
        around = self._taken[-1] if self._taken else None
        if around is not None and around != left:
            around.wait_event(self._end)
            self._last, self._last_raw = around, around.cuda_stream


class _OnStream:
    """A turn whose kernels run on a given stream."""

    def __init__(self, turns: Turns, stream: torch.cuda.Stream) -> None:
        self._turns, self._stream = turns, stream
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(self._turns)
            self._stack = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._stack.close()
