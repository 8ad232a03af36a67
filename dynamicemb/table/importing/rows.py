"""Import rows with given scores and optimizer state, as a load does."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from dynamicemb.table.group import TableGroup
from dynamicemb.table.importing.room import Room, last_of_each
from dynamicemb.table.importing.step import ImportStep
from dynamicemb.table.index import ERASED, NOW, SEEN, UPDATES
from dynamicemb.table.initializers import table_key
from dynamicemb.table.layout import DIGEST_EMPTY, DIGEST_ERASED, FIRST_DIGEST
from dynamicemb.table.scores import MAX_IMPORTED_COUNT, SCORE_COMPOUND, SCORE_LFU


class RowImport(ImportStep):
    """Fills one table of a group, batch after batch. Use it as a context, which has the turn.

    Gradients of steps that began before are dropped, whether an id stays or not: its row may be another one.

    Where more ids come than a bucket holds, those with the highest scores stay, as ``Room`` says. A compound table
    compares frequencies, or what its score function returns. Ids that have expired by the time at which the import
    began are passed over, and those in the table make room.

    Attributes:
        num_lost: ids that did not fit, or had to go.
        num_repeated: ids that were there already.
        num_expired: ids that came and were too old.

    Takes 4 bytes for each slot of the group meanwhile. Host sync: yes.
    """

    def __init__(self, group: TableGroup, table: int, keep: bool, num_ids: int, initial_state: float) -> None:
        """Prepare an import.

        Args:
            group: the tables.
            table: which table.
            keep: whether ids that are there already stay.
            num_ids: about how many ids will come, for the table to grow before ids lose their places to others.
            initial_state: optimizer state of rows that come without.
        """
        super().__init__(group, group.index, table)
        self.num_repeated = 0
        self.num_expired = 0
        self._keep = keep
        self._num_ids = num_ids
        self._initial = initial_state
        self._counts = group.options.strategies[table] in (SCORE_LFU, SCORE_COMPOUND)

    def _empty(self) -> None:
        # What comes has no tags: no increment would find it.
        self._group.marks.pop(self._table, None)
        self._group.steps.replace_rows(self._table)
        if not self._keep:
            clear(self._group, self._table)

    def _prepare(self) -> None:
        group = self._group
        group.erase_expired(self._table)
        self._free_erased()
        self._grow()
        self._look()
        self._room = Room(group.index, self._table, lambda slots: group.scores(self._table, slots), self._ranks)

    def _close(self) -> None:
        del self._slot_index
        self._group.epoch += 1
        _read_tallies(self._group)

    def _look(self) -> None:
        """Take in where the table's slots are, and what time it is."""
        group, index = self._group, self._group.index
        # With slots in the place of rows, a find tells slots.
        slots = torch.arange(index.num_slots, dtype=torch.int32, device=group.device)
        self._slot_index = replace(index, rows=slots, clock=index.clock.clone())

    def _free_erased(self) -> None:
        """End the protection of erased slots, whose rows no backward will ask for."""
        index = self._group.index
        slots = index.slots_of(self._table)
        index.tags[slots].masked_fill_(index.digests[slots] == DIGEST_ERASED, 0)

    def _grow(self) -> None:
        """Let the table grow for all ids that will come, if it may."""
        group, t = self._group, self._table
        if group.growth is None:
            return
        factor = group.growth.factor(t, group.capacities[t], group.size(t) + self._num_ids)
        group.grow(t, factor)

    def _make_room(self, ids: torch.Tensor) -> None:
        """Let the table grow for a batch, if it may and more came than was said."""
        group = self._group
        if group.growth is None:
            return
        _read_tallies(group)
        before = group.index.num_slots
        group.make_room_for(ids, lambda: group.ranges_of(self._table, ids.numel()))
        if group.index.num_slots != before:
            self._look()
            self._room.look()

    def add(
        self, ids: torch.Tensor, weights: torch.Tensor, state: torch.Tensor | None, scores: list[torch.Tensor]
    ) -> None:
        """Insert or overwrite ids.

        Args:
            ids: i64 ``[M]``; of repeated ones the last counts.
            weights: f32 ``[M, D]``.
            state: f32 ``[M, num_state]``, or None for the initial state.
            scores: what ``TableGroup.scores`` returns, each i64 ``[M]``; counts beyond 2**62 become that.
        """
        if self._counts:
            scores = [*scores[:-1], scores[-1].clamp(max=MAX_IMPORTED_COUNT)]
        rows = _Rows(ids, weights, self._initial_state(ids.numel()) if state is None else state, scores)
        rows = rows.at(self._young(scores[0]))
        last = last_of_each(rows.ids)
        self.num_repeated += rows.ids.numel() - last.numel()
        rows = rows.at(last)
        self._make_room(rows.ids)
        slots = self._find(rows.ids)
        held = (slots >= 0).nonzero().flatten()
        self.num_repeated += held.numel()
        # First those that are there: new ids compete with the scores that come.
        self._write(slots[held].long(), rows.at(held))
        missing = (slots < 0).nonzero().flatten()
        placed = missing[self._room.take(rows.ids[missing], [column[missing] for column in rows.scores])]
        self.num_lost = self._room.num_lost
        if placed.numel():
            new = rows.at(placed)
            self._insert(new.ids)
            self._write(self._find(new.ids).long(), new)
            # A counter of ours was emptied with its table.
            if self._keep or self._group.admission_reader is None:
                self._group.forget_counts(self._table, new.ids)

    def _young(self, times: torch.Tensor) -> torch.Tensor:
        """Return the positions of ids that have not expired, from the first column of their scores."""
        index = self._slot_index
        if not index.expires:
            return torch.arange(times.numel(), device=times.device)
        young = (times >= index.clock[SEEN] - index.ttls[self._table]).nonzero().flatten()
        self.num_expired += times.numel() - young.numel()
        return young

    def _initial_state(self, number: int) -> torch.Tensor:
        group = self._group
        num_state = group.store.formats[self._table].num_state
        return torch.full((number, num_state), self._initial, dtype=torch.float32, device=group.device)

    def _find(self, ids: torch.Tensor) -> torch.Tensor:
        group = self._group
        return group.kernels.find(self._slot_index, ids, group.ranges_of(self._table, ids.numel()), False)

    def _insert(self, ids: torch.Tensor) -> None:
        group = self._group
        # The rows are about to be written, so nobody needs their first values.
        rows = group.kernels.place(group.index, ids, group.ranges_of(self._table, ids.numel()))
        assert bool((rows >= 0).all()), "an import made room and did not find it"

    def _write(self, slots: torch.Tensor, rows: "_Rows") -> None:
        group, index = self._group, self._group.index
        if group.options.strategies[self._table] == SCORE_COMPOUND:
            index.stamps[slots], index.scores[slots] = rows.scores
        else:
            (index.scores[slots],) = rows.scores
        # Nothing of a step: they may be evicted at once.
        index.tags[slots] = 0
        group.kernels.write_rows(group.store, self._table, index.rows[slots], rows.weights, rows.state)

    def _ranks(self, scores: list[torch.Tensor]) -> np.ndarray:
        """Return what evictions compare, i64."""
        *stamps, counts = (column.cpu().numpy() for column in scores)
        source = self._group.options.score_function
        if source is None or not stamps:
            return counts
        from dynamicemb.table.cpu.score_function import ranks_of

        return ranks_of(source, stamps[0], counts, int(self._group.index.clock[NOW]))


class _Rows(NamedTuple):
    """Arguments of ``RowImport.add``."""

    ids: torch.Tensor
    weights: torch.Tensor
    state: torch.Tensor
    scores: list[torch.Tensor]

    def at(self, positions: torch.Tensor) -> "_Rows":
        """Return the rows at ascending positions; the same ones, not copied, if that is all."""
        if positions.numel() == self.ids.numel():
            return self
        scores = [column[positions] for column in self.scores]
        return _Rows(self.ids[positions], self.weights[positions], self.state[positions], scores)


def clear(group: TableGroup, table: int) -> None:
    """Remove all ids of a table; gradients of steps so far are dropped, also of ids that return."""
    with group.turn():
        group.steps.replace_rows(table)
        index = group.index
        slots = index.slots_of(table)
        index.tallies[table, ERASED] += group.size(table)
        index.digests[slots] = DIGEST_EMPTY
        index.tags[slots] = 0
        group.marks.pop(table, None)
        group.epoch += 1
        _read_tallies(group)
        clear_counts(group, table)


def clear_counts(group: TableGroup, table: int) -> None:
    """Empty a table's admission counter, if it is one of ours."""
    if group.admission is None or group.admission.counter is None:
        return
    counter, reader = group.admission.counter, group.admission_reader
    assert reader is not None
    slots = counter.slots_of(table)
    counter.tallies[table, ERASED] += (counter.digests[slots] >= FIRST_DIGEST).sum()
    counter.digests[slots] = DIGEST_EMPTY
    counter.tags[slots] = 0
    reader.wait()


def _read_tallies(group: TableGroup) -> None:
    """Tell growth and statistics the new sizes: test_c19_a_table_that_was_loaded_grows_in_time."""
    group.tally_reader.wait()
    if group.growth is not None:
        group.growth.resume(group.tally_reader)


def adopt_clock(group: TableGroup, now: int) -> None:
    """Make the next step later than ``now``, Unix nanoseconds."""
    with group.turn():
        group.index.clock[[NOW, SEEN]] = max(int(group.index.clock[SEEN]), now)


def adopt_score(group: TableGroup, table: int, value: int, keep: bool) -> None:
    """Make a STEP table go on after step ``value``; with ``keep``, unless it is further already."""
    with group.turn():
        values = group.index.score_values
        values[table] = max(int(values[table]), value) if keep else value


def adopt_seed(group: TableGroup, table: int, seed: int) -> None:
    """Give ids to come the first values that ``seed`` makes."""
    with group.turn():
        group.seeds[table] = seed
        key = int(np.array([table_key(seed, group.names[table])], dtype=np.uint64).view(np.int64)[0])
        group.initializers.keys[table] = key
        if group.admission is not None:
            # What is not admitted reads its first value, and chances are drawn from the seed.
            group.admission.initializers.keys[table] = key


def adopt_initial_state(group: TableGroup, value: float) -> None:
    """Start the optimizer state of ids to come at ``value``."""
    with group.turn():
        group.set_state_value(value)


def adopt_updates(group: TableGroup, updates: int, keep: bool) -> None:
    """Count optimizer applications on from ``updates``; with ``keep``, unless there were more."""
    with group.turn():
        clock = group.index.clock
        clock[UPDATES] = max(int(clock[UPDATES]), updates) if keep else updates
