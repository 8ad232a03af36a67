"""Reading of a dump's files."""

import numpy as np

from dynamicemb.checkpoint.disk.io import FileSystem
from dynamicemb.errors import CheckpointCorruptError


class FileReader:
    """A file of rows of equal size. Use it as a context."""

    def __init__(self, disk: FileSystem, path: str, dtype: type[np.generic], width: int) -> None:
        """Open the file.

        Args:
            disk: the file system.
            path: of the file.
            dtype: of the values.
            width: values of a row.
        """
        self._disk = disk
        self._path = path
        self._dtype = np.dtype(dtype)
        self._width = width
        self._file = disk.open(path)

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._disk.close(self._file)

    def read(self, begin: int, count: int) -> np.ndarray:
        """Return the rows ``begin..begin + count``, ``[count, width]``.

        Raises:
            CheckpointCorruptError: the file ends before.
        """
        values = np.empty((count, self._width), self._dtype)
        if values.size:
            row_bytes = self._width * self._dtype.itemsize
            number = self._disk.read(self._file, values.view(np.uint8).reshape(-1).data, begin * row_bytes)
            if number != values.nbytes:
                raise CheckpointCorruptError(
                    self._path, f"{(begin + count) * row_bytes} bytes", f"{begin * row_bytes + number} bytes"
                )
        return values


def read_file(path: str, disk: FileSystem) -> bytes:
    """Return the contents of a small file."""
    data = bytearray(max(0, disk.size(path)))
    file = disk.open(path)
    try:
        number = disk.read(file, memoryview(data), 0)
    finally:
        disk.close(file)
    return bytes(data[:number])
