"""Writing of a dump's files."""

import queue
import threading
from collections.abc import Callable

import numpy as np

from dynamicemb.checkpoint.checksum import crc32
from dynamicemb.checkpoint.disk.io import FileSystem, join
from dynamicemb.checkpoint.format import FileEntry

# How much may wait for the disk: the arrays of a batch.
_DEPTH = 4


class WriteBehind:
    """Writes in a thread of its own, in the order of the calls, while the next rows are read and their checksums taken.

    Use it as a context. It is no executor of ``concurrent.futures``, which would go on with the calls behind one that
    failed.
    """

    def __init__(self, disk: FileSystem) -> None:
        """Take the file system; the thread starts with the context."""
        self._disk = disk
        self._waiting: queue.Queue[Callable[[], object] | None] = queue.Queue(_DEPTH)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="dynamicemb write")

    def __enter__(self) -> "WriteBehind":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def write(self, file: int, data: memoryview) -> None:
        """Append to a file; raises what a write before raised."""
        self.then(lambda: self._disk.write(file, data))

    def then(self, work: Callable[[], object]) -> None:
        """Call something when everything so far is written; raises what a write before raised."""
        self._raise()
        self._waiting.put(work)

    def flush(self) -> None:
        """Wait until everything is written; raises what a write raised."""
        self._waiting.join()
        self._raise()

    def settle(self) -> None:
        """Wait until nothing is being written any more; files may be closed then."""
        self._waiting.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                # Behind an error nothing is written, but whoever waits must not wait for ever.
                if self._error is None:
                    work()
            except BaseException as error:
                self._error = error
            finally:
                del work
                self._waiting.task_done()


class FileWriter:
    """A new file that knows its size and checksum. Use it as a context, and ``finish`` it."""

    def __init__(self, disk: FileSystem, root: str, path: str, behind: WriteBehind | None = None) -> None:
        """Make the file.

        Args:
            disk: the file system.
            root: folder of the dump.
            path: of the file inside it.
            behind: what writes; None: ``write`` itself.
        """
        self.path = path
        self._disk = disk
        self._behind = behind
        self._size = 0
        self._crc = 0
        self._file: int | None = disk.create(join(root, path))

    def __enter__(self) -> "FileWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._disk.close(self._file)

    def write(self, values: np.ndarray) -> None:
        """Append an array, which must not change any more."""
        if not values.size:
            return
        data = values.view(np.uint8).reshape(-1).data
        assert self._file is not None
        if self._behind is None:
            self._disk.write(self._file, data)
        else:
            self._behind.write(self._file, data)
        self._size += len(data)
        self._crc = crc32(data, self._crc)

    def finish(self) -> FileEntry:
        """Wait until the file is on the disk."""
        file = self._file
        assert file is not None
        if self._behind is not None:
            self._behind.flush()
        self._disk.sync(file)
        self._file = None
        self._disk.close(file)
        return FileEntry(self._size, self._crc)
