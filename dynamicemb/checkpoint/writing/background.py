"""Dumps that a thread writes while training goes on."""

import atexit
import threading
import traceback
from collections.abc import Callable, Iterable

from dynamicemb.checkpoint.disk.io import FileSystem, parent_of
from dynamicemb.warn import warn


class DumpHandle:
    """A dump that is being written in the background.

    A process has one at a time: the next dump waits for it. Interpreter exit does, too. A thread does the work, and no
    executor of ``concurrent.futures``: a forked child can join a thread that it does not have, but would wait for ever
    for its future.
    """

    def __init__(self, path: str, disk: FileSystem, num_rows: int) -> None:
        """Describe the dump, which ``start`` starts.

        Args:
            path: its place, absolute and behind links.
            disk: the file system.
            num_rows: how many rows this rank will write.
        """
        self._path = path
        self._disk = disk
        self._num_rows = num_rows
        self._num_written = 0
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = False

    def __repr__(self) -> str:
        state = "being written" if not self.done() else "failed" if self._error is not None else "complete"
        return f"DumpHandle({self._path!r}, {self._num_written} of {self._num_rows} rows of this rank, {state})"

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the dump has its place on the disk, on all ranks.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: it was not there in time; it goes on.
            TypeError, ValueError: ``timeout`` is no number of seconds.
            Exception: what the dump raised, as ``DynamicEmbDump`` says; the same on all ranks. The dump before is still
                there.
        """
        if timeout is not None and not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
        if timeout is not None and not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout must be from 0 to {threading.TIMEOUT_MAX} seconds or None, got {timeout}")
        if not self._finished.wait(timeout):
            raise TimeoutError(
                f"the dump to {self._path!r} was not complete after {timeout} s: {self._num_written} of "
                f"{self._num_rows} rows of this rank are written; it goes on"
            )
        self._told = True
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return whether ``wait`` would return, or raise, at once."""
        return self._finished.is_set()

    def progress(self) -> tuple[int, int]:
        """Return how many rows of this rank are written, and how many there are in all."""
        return self._num_written, self._num_rows

    def _advance(self, num_rows: int) -> None:
        self._num_written += num_rows

    def _run(self, work: Callable[[Callable[[int], None]], None]) -> None:
        try:
            work(self._advance)
        except BaseException as error:
            # Its traceback would keep rows in memory for as long as the handle.
            traceback.clear_frames(error.__traceback__)
            self._error = error
        finally:
            self._finished.set()

    def _tell(self) -> None:
        """Warn of an error that nobody has heard of."""
        if self._error is not None and not self._told:
            self._told = True
            message = f"the dump to {self._path!r} failed in the background, and nobody waited for it: {self._error!r}"
            warn(message, RuntimeWarning)


# Of which nobody knows yet that they are over; more than one only where several threads dump.
_unsettled: list[DumpHandle] = []


def start(path: str, disk: FileSystem, num_rows: int, work: Callable[[Callable[[int], None]], None]) -> DumpHandle:
    """Do the work of a dump in a thread; no other one may be going on.

    Args:
        path: of the dump, absolute and behind links.
        disk: the file system.
        num_rows: how many rows it will write.
        work: is given a function that counts rows.

    Returns:
        Its handle.

    Raises:
        RuntimeError: there are no more threads.
    """
    handle = DumpHandle(path, disk, num_rows)
    # Not a daemon: the interpreter waits for it before it exits.
    handle._thread = threading.Thread(target=handle._run, args=(work,), name="dynamicemb dump")
    handle._thread.start()
    _unsettled.append(handle)
    return handle


def settle() -> None:
    """Wait for the dump that is going on in the background, if there is one, and warn if it failed unheard."""
    for handle in _unsettled.copy():
        assert handle._thread is not None
        # Not for the event: a forked child has no such thread, and would wait for ever when it exits.
        handle._thread.join()
        if handle in _unsettled:
            _unsettled.remove(handle)
        handle._tell()


def settle_at(paths: Iterable[str], disk: FileSystem) -> None:
    """Wait for the dump that is going on in the background if it is at one of some places, or one is in it.

    Raises:
        Exception: what the dump raised, unless somebody has heard of it.
    """
    places = [disk.real_path(path) for path in paths]
    for handle in _unsettled.copy():
        if handle._disk is disk and handle._path in (*places, *map(parent_of, places)):
            handle._finished.wait()
            if not handle._told:
                handle.wait()


# Runs after the interpreter has waited for all threads.
atexit.register(settle)
