"""What an import of rows and one of counts share."""

from typing import TypeVar

import torch

from dynamicemb.table.group import TableGroup
from dynamicemb.table.importing.room import Room
from dynamicemb.table.index import HITS, MISSES, Index
from dynamicemb.table.steps import Step

_Import = TypeVar("_Import", bound="ImportStep")


class ImportStep:
    """A context in which one table of a group is filled: the group is locked, and a step of its own has begun.

    What the import itself looks up is not counted.

    Attributes:
        num_lost: ids that did not fit, or had to go.
    """

    _room: Room

    def __init__(self, group: TableGroup, index: Index, table: int) -> None:
        """Prepare an import into a table of ``index``, which is the group's or that of its admission counter."""
        self.num_lost = 0
        self._group = group
        self._index = index
        self._table = table
        self._step: Step | None = None
        self._looked_up = torch.empty(0)

    def _empty(self) -> None:
        """Remove what shall not stay; before the step."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Do what the step wants, and set ``_room``."""
        raise NotImplementedError

    def _close(self) -> None:
        """Tell the others what has changed; while the step is outstanding."""
        raise NotImplementedError

    def __enter__(self: _Import) -> _Import:
        group = self._group
        group.lock.acquire()
        try:
            self._empty()
            # Erased slots of a group without any step would pass for protected.
            self._step = group.begin_step(training=False)
            self._prepare()
            self._looked_up = self._index.counters[self._table, [HITS, MISSES]].clone()
        except BaseException:
            if self._step is not None:
                self._step.finish()
            group.lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._index.counters[self._table, [HITS, MISSES]] = self._looked_up
            self._close()
            assert self._step is not None
            self._step.finish()
        finally:
            # It holds 4 bytes for each slot of the group.
            del self._room
            self._group.lock.release()
