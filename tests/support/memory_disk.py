"""A disk in memory that can fail or stop at any operation, and forget what was not synced."""

import errno
import itertools
import os
from collections.abc import Callable
from typing import Any

from dynamicemb.checkpoint.disk.io import FileSystem

# Which names and whether data survive a crash that were not synced. "below" is all but those in a folder of the root,
# where dumps are: what happened inside a dump survives, and who has which name does not.
IMAGES: dict[str, tuple[bool | str, bool]] = {
    "all of it": (True, True),
    "only what was synced": (False, False),
    "names without data": (True, False),
    "names below": ("below", True),
}


class Killed(BaseException):
    """The process is gone: from here on the disk does nothing any more."""


class File:
    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytes(data)


class Folder:
    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}
        self.synced: dict[str, Node] = {}


Node = File | Folder


class MemoryDisk(FileSystem):
    """Paths are absolute; `can_exchange` False is a system without that call.

    Attributes:
        count: operations that change something, or read a file, so far.
        fail: called with (number of the operation, its name), may raise.
    """

    def __init__(self, can_exchange: bool = True) -> None:
        self.root = Folder()
        self.can_exchange = can_exchange
        self.files: dict[int, File] = {}
        self.handles = itertools.count(3)
        self.count = 0
        self.log: list[str] = []
        self.fail: Callable[[int, str], None] = lambda number, name: None
        self.dead = False

    def image(self, names: bool | str, data: bool) -> "MemoryDisk":
        """Return the disk after a crash, see IMAGES."""

        def copy(node: Node, depth: int) -> Node:
            if isinstance(node, File):
                return File(bytes(node.data) if data else node.synced)
            folder = Folder()
            survive = depth != 1 if names == "below" else names
            children = node.entries if survive else node.synced
            folder.entries = {name: copy(child, depth + 1) for name, child in children.items()}
            folder.synced = dict(folder.entries)
            return folder

        disk = MemoryDisk(self.can_exchange)
        root = copy(self.root, 0)
        assert isinstance(root, Folder)
        disk.root = root
        return disk

    def all_files(self, folder: str = "/") -> dict[str, bytes]:
        """Return every file below a folder, by path."""
        found = {}
        for name, node in self._folder(folder).entries.items():
            path = os.path.join(folder, name)
            found |= {path: bytes(node.data)} if isinstance(node, File) else self.all_files(path)
        return found

    def _operation(self, name: str) -> None:
        if self.dead:
            raise Killed
        self.count += 1
        self.log.append(name)
        try:
            self.fail(self.count, name)
        except Killed:
            self.dead = True
            raise

    def node(self, path: str) -> Node | None:
        """Return the file or folder at a path, None if there is none."""
        node: Node | None = self.root
        for part in path.strip("/").split("/") if path.strip("/") else []:
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
            node = node.entries.get(part) if node is not None else None
        return node

    def _folder(self, path: str) -> Folder:
        node = self.node(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "there is nothing", path)
        if isinstance(node, File):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
        return node

    def _place(self, path: str) -> tuple[dict[str, Node], str]:
        return self._folder(os.path.dirname(path)).entries, os.path.basename(path)

    def real_path(self, path: str) -> str:
        return os.path.normpath(path)

    def entries(self, folder: str) -> dict[str, bool] | None:
        if self.dead:
            raise Killed
        if self.node(folder) is None:
            return None
        return {name: isinstance(node, Folder) for name, node in self._folder(folder).entries.items()}

    def size(self, path: str) -> int:
        node = self.node(path)
        return len(node.data) if isinstance(node, File) else -1

    def make_folder(self, path: str) -> None:
        self._operation("make_folder")
        entries, name = self._place(path)
        if name in entries:
            raise FileExistsError(errno.EEXIST, "exists", path)
        entries[name] = Folder()

    def create(self, path: str) -> int:
        self._operation("create")
        entries, name = self._place(path)
        if name in entries:
            raise FileExistsError(errno.EEXIST, "exists", path)
        entries[name] = File()
        return self._handle(entries[name])

    def open(self, path: str) -> int:
        self._operation("open")
        node = self.node(path)
        if not isinstance(node, File):
            raise FileNotFoundError(errno.ENOENT, "no file", path)
        return self._handle(node)

    def _handle(self, node: Any) -> int:
        handle = next(self.handles)
        self.files[handle] = node
        return handle

    def write(self, file: int, data: memoryview) -> None:
        # A write that fails may have written a part.
        self.files[file].data += data[: len(data) // 2]
        self._operation("write")
        self.files[file].data += data[len(data) // 2 :]

    def read(self, file: int, buffer: memoryview, offset: int) -> int:
        self._operation("read")
        part = self.files[file].data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def sync(self, file: int) -> None:
        self._operation("sync")
        self.files[file].synced = bytes(self.files[file].data)

    def close(self, file: int) -> None:
        del self.files[file]
        self._operation("close")

    def sync_folder(self, folder: str) -> None:
        self._operation("sync_folder")
        node = self._folder(folder)
        node.synced = dict(node.entries)

    def rename(self, old: str, new: str) -> None:
        self._operation("rename")
        source, name = self._place(old)
        target, new_name = self._place(new)
        there = target.get(new_name)
        if there is not None and (isinstance(there, File) or there.entries):
            raise OSError(errno.ENOTEMPTY, "not empty", new)
        target[new_name] = source.pop(name)

    def exchange(self, first: str, second: str) -> bool:
        self._operation("exchange")
        if not self.can_exchange:
            return False
        (a, a_name), (b, b_name) = self._place(first), self._place(second)
        a[a_name], b[b_name] = b[b_name], a[a_name]
        return True

    def remove_file(self, path: str) -> None:
        self._operation("remove_file")
        entries, name = self._place(path)
        assert isinstance(entries[name], File)
        del entries[name]

    def remove_folder(self, path: str) -> None:
        self._operation("remove_folder")
        entries, name = self._place(path)
        if self._folder(path).entries:
            raise OSError(errno.ENOTEMPTY, "not empty", path)
        del entries[name]


def killing_at(number: int) -> Callable[[int, str], None]:
    """Return a `fail` that stops everything before an operation."""

    def fail(count: int, name: str) -> None:
        if count == number:
            raise Killed

    return fail


def failing_at(number: int, code: int, for_good: bool = False) -> Callable[[int, str], None]:
    """Return a `fail` that lets an operation fail, or all from it on."""

    def fail(count: int, name: str) -> None:
        if count == number or (for_good and count > number):
            raise OSError(code, os.strerror(code), name)

    return fail
