"""A disk whose reading somebody watches."""

from collections.abc import Callable

from dynamicemb.checkpoint.disk.io import FileSystem


class WatchedDisk(FileSystem):
    """Another disk, for reading only, that tells how many bytes were read."""

    def __init__(self, disk: FileSystem, tell: Callable[[int], object]) -> None:
        """Watch a disk; ``tell`` is called after every read."""
        self._disk = disk
        self._tell = tell

    def real_path(self, path: str) -> str:
        return self._disk.real_path(path)

    def entries(self, folder: str) -> dict[str, bool] | None:
        return self._disk.entries(folder)

    def size(self, path: str) -> int:
        return self._disk.size(path)

    def open(self, path: str) -> int:
        return self._disk.open(path)

    def close(self, file: int) -> None:
        self._disk.close(file)

    def read(self, file: int, buffer: memoryview, offset: int) -> int:
        number = self._disk.read(file, buffer, offset)
        self._tell(number)
        return number
