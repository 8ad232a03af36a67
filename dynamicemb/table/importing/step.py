"""What an import of rows and one of counts share."""

from contextlib import ExitStack
from typing import TypeVar

import torch

from dynamicemb.table.group import TableGroup
from dynamicemb.table.importing.room import Room
from dynamicemb.table.index import HITS, MISSES, Index
from dynamicemb.table.stepping.tracker import Step

_Import = TypeVar("_Import", bound="ImportStep")


class ImportStep:
    """A context in which one table of a group is filled: the group has its turn, and a step of its own has begun.

    What the import itself looks up is not counted.

    Attributes:
        num_lost: ids that did not fit, or had to go.
    """

    _room: Room
    _step: Step
    _stack: ExitStack

    def __init__(self, group: TableGroup, index: Index, table: int) -> None:
        """Prepare an import into a table of ``index``, which is the group's or that of its admission counter."""
        self.num_lost = 0
        self._group = group
        self._index = index
        self._table = table
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
        with ExitStack() as stack:
            stack.enter_context(group.turn())
            self._empty()
            # Erased slots of a group without any step would pass for protected.
            self._step = group.begin_step(training=False)
            stack.callback(self._step.finish)
            self._prepare()
            self._looked_up = self._index.tallies[self._table, [HITS, MISSES]].clone()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            # It holds 4 bytes for each slot of the group.
            self._stack.callback(delattr, self, "_room")
            self._index.tallies[self._table, [HITS, MISSES]] = self._looked_up
            self._close()
