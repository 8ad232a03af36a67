"""The real disk with an operation that fails."""

import os
from typing import Any

from dynamicemb.checkpoint.disk.io import FileSystem


class FailingDisk(FileSystem):
    """Lets its `number`-th operation fail; -1 is none.

    Attributes:
        count: operations so far.
    """

    def __init__(self, number: int, code: int) -> None:
        self.count = 0
        self._number = number
        self._code = code

    def _count(self, name: str) -> None:
        self.count += 1
        if self.count == self._number:
            raise OSError(self._code, os.strerror(self._code), name)


def _counted(name: str) -> Any:
    def call(self: FailingDisk, *args: Any) -> Any:
        if name == "close":
            # The file must not stay open.
            FileSystem.close(self, *args)
            return self._count(name)
        self._count(name)
        return getattr(FileSystem, name)(self, *args)

    return call


for _name in [name for name in vars(FileSystem) if not name.startswith("_")]:
    setattr(FailingDisk, _name, _counted(_name))
