"""The only file of the package that touches the operating system."""

import ctypes
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

AnyPath = str | os.PathLike[str]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# What a file system says that cannot exchange two names.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def as_string(path: AnyPath) -> str:
    """Return a path as a string.

    Raises:
        TypeError: it is not a path.
        ValueError: it is one that no file system has: empty, a URL, or of a shell.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a string or a path, got {type(path).__name__}")
    found = str(os.fspath(path))
    if not found:
        raise ValueError("path is empty; the current folder is '.'")
    # A Path has one slash where a URL has two.
    if _URL.match(found):
        raise ValueError(f"path must be a folder of a file system, got the URL {found!r}; mount it, or copy the folder")
    if found.startswith("~"):
        raise ValueError(f"path {found!r} begins with '~', which only a shell knows; use os.path.expanduser")
    return found


def as_paths(paths: AnyPath | Sequence[AnyPath]) -> tuple[str, ...]:
    """Return one or several paths as strings; raises as ``as_string``."""
    return tuple(map(as_string, paths if isinstance(paths, list | tuple) else (paths,)))


def as_chain(base: AnyPath | Sequence[AnyPath] | None) -> tuple[str, ...]:
    """Return the paths of a chain of dumps, none for None; raises as ``as_string``."""
    return () if base is None else as_paths(base)


def join(*parts: str) -> str:
    """Return the path of something in a folder."""
    return os.path.join(*parts)


def parent_of(path: str) -> str:
    """Return the folder that something is in."""
    return os.path.dirname(path)


def base_name(path: str) -> str:
    """Return the last part of a path."""
    return os.path.basename(path)


def temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a context with the path of an empty folder, which is removed with what is in it."""
    return tempfile.TemporaryDirectory(prefix="dynamicemb-")


@contextmanager
def _named(file: int) -> Iterator[None]:
    """Give an error the name of the open file, where the system tells it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            with suppress(OSError):
                error.filename = os.readlink(f"/proc/self/fd/{file}")
        raise


class FileSystem:
    """The operations that dumps are made of, each of which may fail; tests put their own in the place of this one.

    Files are integers between ``create`` or ``open`` and ``close``. All methods raise OSError.
    """

    def real_path(self, path: str) -> str:
        """Return the absolute path behind links."""
        return os.path.realpath(path)

    def entries(self, folder: str) -> dict[str, bool] | None:
        """Return the names in a folder and whether each is a folder itself; None if there is nothing at ``folder``."""
        try:
            with os.scandir(folder) as found:
                return {entry.name: entry.is_dir(follow_symlinks=False) for entry in found}
        except FileNotFoundError:
            return None

    def size(self, path: str) -> int:
        """Return the bytes of a file, -1 if there is none."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return -1
        return status.st_size if stat.S_ISREG(status.st_mode) else -1

    def make_folder(self, path: str) -> None:
        """Make a folder, whose parent exists."""
        os.mkdir(path)

    def create(self, path: str) -> int:
        """Make a new file for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, data: memoryview) -> None:
        """Append all of ``data``."""
        with _named(file):
            while data:
                data = data[os.write(file, data) :]

    def sync(self, file: int) -> None:
        """Wait until a file's data is on the disk."""
        with _named(file):
            os.fsync(file)

    def close(self, file: int) -> None:
        """End the use of a file."""
        os.close(file)

    def open(self, path: str) -> int:
        """Open a file for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, file: int, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from a file; returns fewer bytes than its size only where the file ends."""
        begin = offset
        with _named(file):
            while buffer:
                number = os.preadv(file, [buffer], offset)
                if number == 0:
                    break
                buffer, offset = buffer[number:], offset + number
        return offset - begin

    def sync_folder(self, folder: str) -> None:
        """Wait until the names in a folder are on the disk."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _named(file):
                os.fsync(file)
        finally:
            os.close(file)

    def rename(self, old: str, new: str) -> None:
        """Give a folder another name; an empty folder of that name is replaced."""
        os.rename(old, new)

    def exchange(self, first: str, second: str) -> bool:
        """Swap two folders in one step; False, and nothing done, where the system cannot."""
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            return False
        paths = os.fsencode(first), os.fsencode(second)
        if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NO_EXCHANGE:
            return False
        raise OSError(code, os.strerror(code), first, None, second)

    def remove_file(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


DISK = FileSystem()
