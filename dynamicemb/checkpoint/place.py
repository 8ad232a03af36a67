"""Where a dump goes: a fresh folder beside its place, which takes the place only when it is complete.

For a dump at ``/a/b``::

    /a/.b.dynamicemb-writing     what is being written; after an exchange, the dump before, until it is removed
    /a/.b.dynamicemb-previous    the dump before, on a file system that cannot exchange two folders

A dump that was killed leaves one of them; the next dump to the same place removes it, and a load of ``/a/b`` that finds
nothing there reads the previous one.
"""

import contextlib

from dynamicemb.checkpoint.disk.io import FileSystem, base_name, join, parent_of
from dynamicemb.checkpoint.disk.reader import read_file
from dynamicemb.checkpoint.format import MANIFEST, Manifest, inside, is_collection, is_ours

_WRITING_END = ".dynamicemb-writing"
_PREVIOUS_END = ".dynamicemb-previous"


def is_unfinished(folder: str) -> bool:
    """Return whether a folder has the name of one that a dump is being written into."""
    return base_name(folder).endswith(_WRITING_END)


class Target:
    """The place of a dump. Its methods are for one rank.

    Attributes:
        path: the place.
        writing: the folder that is written into.
    """

    def __init__(self, path: str, disk: FileSystem) -> None:
        """Name the folders; nothing is touched."""
        self._disk = disk
        self.path = disk.real_path(path)
        self._parent, name = parent_of(self.path), base_name(self.path)
        if not name:
            raise ValueError(f"path {path!r} is the root of the file system; name a folder in it")
        self.writing = join(self._parent, f".{name}{_WRITING_END}")
        self.previous = join(self._parent, f".{name}{_PREVIOUS_END}")
        # From here on left-overs may be all there is on the disk of one of the two dumps.
        self._committing = False

    def prepare(self, folders: list[str], allow_overwrite: bool) -> bool:
        """Clear away what a killed dump left and make the folders to write into.

        Args:
            folders: the folders inside the dump.
            allow_overwrite: whether there may be a dump at the place already.

        Returns:
            Whether there is one.

        Raises:
            FileExistsError: there is something at the place that must not be replaced.
            ValueError: the place is inside another dump, or has the name of what a killed dump leaves.
        """
        if base_name(self.path).endswith((_WRITING_END, _PREVIOUS_END)):
            raise ValueError(
                f"path {self.path!r} ends like a folder of an unfinished dump, which others remove; rename it"
            )
        if self._is_dump(self._parent):
            raise ValueError(
                f"path {self.path!r} is inside the dump {self._parent!r}, which could not be loaded any more then; "
                "dump into a folder beside it"
            )
        self._make_parents(self._parent)
        # What a killed dump renamed must be on the disk before what it left is removed.
        self._disk.sync_folder(self._parent)
        self._recover()
        present = self._disk.entries(self.path)
        if present and not allow_overwrite:
            raise FileExistsError(
                f"path {self.path!r} is not empty ({len(present)} entries); dump into a new folder, or pass "
                "allow_overwrite=True to replace a dump"
            )
        if present:
            self._files_to_remove(self.path)
            if MANIFEST in present and not self._is_dump(self.path):
                raise FileExistsError(_not_ours(self.path, MANIFEST))
        self._remove(self.writing)
        self._disk.make_folder(self.writing)
        for folder in folders:
            if folder:
                self._disk.make_folder(join(self.writing, folder))
        return bool(present)

    def commit(self, manifest: Manifest) -> None:
        """Finish a dump whose files are written and synced, and give it its place."""
        for folder in manifest.collections:
            if folder:
                self._disk.sync_folder(join(self.writing, folder))
        self.write_file(inside("", MANIFEST), manifest.to_bytes())
        self._disk.sync_folder(self.writing)
        self._committing = True
        if not self._disk.entries(self.path):
            self._disk.rename(self.writing, self.path)
            self._disk.sync_folder(self._parent)
        elif self._disk.exchange(self.writing, self.path):
            self._disk.sync_folder(self._parent)
            self._remove(self.writing)
        else:
            self._disk.rename(self.path, self.previous)
            self._disk.sync_folder(self._parent)
            self._disk.rename(self.writing, self.path)
            self._disk.sync_folder(self._parent)
            self._remove(self.previous)

    def abort(self) -> None:
        """Remove what was written of a dump that failed, as far as the disk lets us.

        What fails once names change is left to the next dump, which puts things right.
        """
        if not self._committing:
            with contextlib.suppress(OSError):
                self._remove(self.writing)

    def write_file(self, path: str, data: bytes) -> None:
        """Write and sync a small file of the dump."""
        file = self._disk.create(join(self.writing, path))
        try:
            self._disk.write(file, memoryview(data))
            self._disk.sync(file)
        finally:
            self._disk.close(file)

    def _make_parents(self, folder: str) -> None:
        if self._disk.entries(folder) is not None:
            return
        parent = parent_of(folder)
        self._make_parents(parent)
        self._disk.make_folder(folder)
        self._disk.sync_folder(parent)

    def _recover(self) -> None:
        """Put the dump before back in its place if a dump was stopped between two renames; else it is a left-over."""
        if self._disk.entries(self.previous) is None:
            return
        present = self._disk.entries(self.path)
        if not present:
            self._disk.rename(self.previous, self.path)
            self._disk.sync_folder(self._parent)
        elif self._is_dump(self.path):
            self._remove(self.previous)
        else:
            raise FileExistsError(
                f"{self.path!r} holds {min(present)!r}, which came there after a dump was stopped while it replaced "
                f"the one before, which is now {self.previous!r}; move either of them away"
            )

    def _is_dump(self, folder: str) -> bool:
        """Return whether there is a manifest of ours in a folder, perhaps with a damaged spot."""
        path = join(folder, MANIFEST)
        return self._disk.size(path) >= 0 and Manifest.is_one(read_file(path, self._disk))

    def _files_to_remove(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the files and folders that a dump consists of.

        Raises:
            FileExistsError: something in it is not part of a dump.
        """
        files: list[str] = []
        folders: list[str] = []
        for name, is_folder in (self._disk.entries(folder) or {}).items():
            path = join(folder, name)
            if is_folder:
                folders.append(path)
                inner = self._disk.entries(path) or {}
                files += [join(path, n) for n in inner]
                # A manifest in there is that of another dump.
                foreign = [
                    join(name, n) for n, is_inner in inner.items() if is_inner or n == MANIFEST or not is_ours(n)
                ]
                foreign += [] if is_collection(name) else [name]
            else:
                files.append(path)
                foreign = [] if is_ours(name) else [name]
            if foreign:
                raise FileExistsError(_not_ours(folder, foreign[0]))
        return files, folders

    def _remove(self, folder: str) -> None:
        if self._disk.entries(folder) is None:
            return
        files, folders = self._files_to_remove(folder)
        for path in files:
            self._disk.remove_file(path)
        for path in folders:
            self._disk.remove_folder(path)
        self._disk.remove_folder(folder)


def _not_ours(folder: str, name: str) -> str:
    return f"{folder!r} holds {name!r}, which is no part of a dump and would be lost; move it away, or dump elsewhere"
