"""Import the counts of ids that are not admitted yet, as a load does."""

import numpy as np
import torch

from dynamicemb.table.admission import begin_counting
from dynamicemb.table.group import TableGroup
from dynamicemb.table.importing.room import Room, last_of_each
from dynamicemb.table.importing.rows import clear_counts
from dynamicemb.table.importing.step import ImportStep
from dynamicemb.table.scores import MAX_IMPORTED_COUNT


class CountImport(ImportStep):
    """Fills the counter of one table of a group, batch after batch. Use it as a context, which has the turn.

    Where more ids come than a bucket of the counter holds, those with the highest counts stay, as in ``RowImport``. Ids
    that have a row are passed over: what is in the table is not counted.

    Host sync: yes.
    """

    def __init__(self, group: TableGroup, table: int, keep: bool) -> None:
        """Prepare an import.

        Args:
            group: the tables; their admission must have a counter.
            table: which table.
            keep: whether counts that are there already stay; those of ids that come are added to them.
        """
        admission = group.admission
        assert admission is not None and admission.counter is not None
        super().__init__(group, admission.counter, table)
        self._keep = keep

    def _empty(self) -> None:
        if not self._keep:
            clear_counts(self._group, self._table)

    def _prepare(self) -> None:
        counter = self._index
        # What the lookups before have erased is free.
        begin_counting(counter, self._group.index.clock)
        self._room = Room(counter, self._table, lambda slots: [counter.scores[slots]], _ranks)

    def _close(self) -> None:
        assert self._group.admission_reader is not None
        self._group.admission_reader.wait()

    def add(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Take in ids.

        Args:
            ids: i64 ``[M]``; of repeated ones the last counts.
            counts: i64 ``[M]``, occurrences; an id without any is passed over, and more than 2**62 become that.
        """
        group, counter = self._group, self._index
        last = last_of_each(ids)
        ids, counts = ids[last], counts[last].clamp(max=MAX_IMPORTED_COUNT)
        wanted = (counts > 0) & (group.find(ids, group.ranges_of(self._table, ids.numel())) < 0)
        ids, counts = ids[wanted], counts[wanted]
        slots = self._find(ids)
        there = slots >= 0
        held = counter.scores[slots[there]]
        new = counts[there]
        # First those that are there: new ids compete with their sums.
        self._write(slots[there], held + torch.minimum(new, MAX_IMPORTED_COUNT - held) if self._keep else new)
        missing = (~there).nonzero().flatten()
        placed = missing[self._room.take(ids[missing], [counts[missing]])]
        self.num_lost = self._room.num_lost
        if placed.numel():
            new_ids, new = ids[placed], counts[placed]
            group.kernels.add_counts(counter, new_ids, group.ranges_of(self._table, placed.numel()), new)
            slots = self._find(new_ids)
            assert bool((slots >= 0).all()), "an import made room and did not find it"
            self._write(slots, new)

    def _write(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        self._index.scores[slots] = counts
        # Nothing of a step: they may be forgotten at once.
        self._index.tags[slots] = 0

    def _find(self, ids: torch.Tensor) -> torch.Tensor:
        group = self._group
        # A slot of a counter is its own row.
        return group.kernels.find(self._index, ids, group.ranges_of(self._table, ids.numel()), False).long()


def _ranks(scores: list[torch.Tensor]) -> np.ndarray:
    return scores[0].cpu().numpy()
