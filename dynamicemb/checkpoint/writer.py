"""Writing of a dump's files."""

import zlib

import numpy as np

from dynamicemb.checkpoint.format import FileEntry
from dynamicemb.checkpoint.io import FileSystem, join


class FileWriter:
    """A new file that knows its size and checksum. Use it as a context, and ``finish`` it."""

    def __init__(self, disk: FileSystem, root: str, path: str) -> None:
        """Make the file.

        Args:
            disk: the file system.
            root: folder of the dump.
            path: of the file inside it.
        """
        self.path = path
        self._disk = disk
        self._size = 0
        self._crc = 0
        self._file: int | None = disk.create(join(root, path))

    def __enter__(self) -> "FileWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._disk.close(self._file)

    def write(self, values: np.ndarray) -> None:
        """Append an array."""
        if not values.size:
            return
        data = values.view(np.uint8).reshape(-1).data
        assert self._file is not None
        self._disk.write(self._file, data)
        self._size += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def finish(self) -> FileEntry:
        """Wait until the file is on the disk."""
        file = self._file
        assert file is not None
        self._disk.sync(file)
        self._file = None
        self._disk.close(file)
        return FileEntry(self._size, self._crc)
