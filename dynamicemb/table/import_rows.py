"""Import rows with given scores and optimizer state, as a load does."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.group import TableGroup
from dynamicemb.table.growth import grow_by
from dynamicemb.table.index import ERASED, EVICTED, HITS, MISSES, NOW, SEEN, UPDATES
from dynamicemb.table.initializers import table_key
from dynamicemb.table.layout import DIGEST_EMPTY, DIGEST_ERASED, FIRST_DIGEST
from dynamicemb.table.layout import fmix64 as fmix64_of_array
from dynamicemb.table.ownership import fmix64
from dynamicemb.table.scores import SCORE_COMPOUND

# Slots of overfull buckets that are ranked at a time.
_RANKED_SLOTS = 2**20


def check_importable(group: TableGroup) -> None:
    """Refuse to replace rows that a backward may still write.

    Raises:
        DynamicEmbError: a step is outstanding.
    """
    if group.steps.num_outstanding:
        raise DynamicEmbError(
            f"tables {group.names} have {group.steps.num_outstanding} forwards whose backward has not run; "
            "run it, or drop their outputs and losses, before loading"
        )


class RowImport:
    """Fills one table of a group, batch after batch. Use it as a context: the group is locked meanwhile.

    Where more ids come than a bucket holds, those with the highest scores stay, whatever their order; of equal scores
    the larger unsigned fmix64(id). That is who would survive if they were evicted one by one. A compound table compares
    frequencies, or what its score function returns.

    Attributes:
        num_lost: ids that did not fit, or had to go.
        num_repeated: ids that were there already.

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
        self.num_lost = 0
        self.num_repeated = 0
        self._group = group
        self._table = table
        self._keep = keep
        self._num_ids = num_ids
        self._initial = initial_state

    def __enter__(self) -> "RowImport":
        group = self._group
        group.lock.acquire()
        try:
            check_importable(group)
            # What comes has no tags: no increment would find it.
            group.marks.pop(self._table, None)
            if not self._keep:
                clear(group, self._table)
            self._grow()
            # Erased slots of a group without any step would pass for protected.
            self._step = group.begin_step(training=False)
            self._look()
            self._counts = group.index.counters[self._table, [HITS, MISSES]].clone()
        except BaseException:
            group.lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        group = self._group
        try:
            # Nobody looked these ids up.
            group.index.counters[self._table, [HITS, MISSES]] = self._counts
            group.epoch += 1
            _read_counters(group)
            self._step.finish()
        finally:
            del self._slot_index
            group.lock.release()

    def _look(self) -> None:
        """Take in where the table's slots are and how full its buckets."""
        group, index = self._group, self._group.index
        # With slots in the place of rows, a find tells slots.
        slots = torch.arange(index.num_slots, dtype=torch.int32, device=group.device)
        self._slot_index = replace(index, rows=slots, clock=index.clock.clone())
        self._begin, end = index.bucket_offsets[self._table : self._table + 2].tolist()
        self._num_buckets = end - self._begin
        digests = index.digests.view(-1, index.bucket_capacity)[self._begin : end]
        self._loads = (digests >= FIRST_DIGEST).sum(1)

    def _grow(self) -> None:
        """Let the table grow for all ids that will come, if it may."""
        group, t = self._group, self._table
        if group.growth is None:
            return
        factor = group.growth.factor(t, group.capacities[t], group.size(t) + self._num_ids)
        args = (group.growth, group.index, group.store, group.kernels)
        group.capacities[t] *= grow_by(*args, t, group.capacities[t], factor)

    def _make_room(self, ids: torch.Tensor) -> None:
        """Let the table grow for a batch, if it may and more came than was said."""
        group = self._group
        if group.growth is None:
            return
        _read_counters(group)
        before = group.index.num_slots
        group._make_room(ids, lambda: group._ranges_of(self._table, ids.numel()))
        if group.index.num_slots != before:
            self._look()

    def add(
        self, ids: torch.Tensor, weights: torch.Tensor, state: torch.Tensor | None, scores: list[torch.Tensor]
    ) -> None:
        """Insert or overwrite ids.

        Args:
            ids: i64 ``[M]``; of repeated ones the last counts.
            weights: f32 ``[M, D]``.
            state: f32 ``[M, num_state]``, or None for the initial state.
            scores: what ``TableGroup.scores`` returns, each i64 ``[M]``.
        """
        rows = _Rows(ids, weights, self._initial_state(ids.numel()) if state is None else state, scores)
        last = _last_of_each(ids)
        self.num_repeated += ids.numel() - last.numel()
        rows = rows.at(last)
        self._make_room(rows.ids)
        slots = self._find(rows.ids)
        self.num_repeated += int((slots >= 0).sum())
        missing = (slots < 0).nonzero().flatten()
        placed = missing[self._admit(rows.ids[missing], [column[missing] for column in rows.scores])]
        if placed.numel():
            self._insert(rows.ids[placed])
            slots[placed] = self._find(rows.ids[placed])
        there = (slots >= 0).nonzero().flatten()
        self._write(slots[there].long(), rows.at(there))

    def _initial_state(self, number: int) -> torch.Tensor:
        group = self._group
        num_state = group.store.formats[self._table].num_state
        return torch.full((number, num_state), self._initial, dtype=torch.float32, device=group.device)

    def _find(self, ids: torch.Tensor) -> torch.Tensor:
        group = self._group
        return group.kernels.find(self._slot_index, ids, group._ranges_of(self._table, ids.numel()), False)

    def _insert(self, ids: torch.Tensor) -> None:
        group = self._group
        if hasattr(group.kernels, "insert"):
            # The rows are about to be written, so nobody needs their first values.
            rows = torch.full((ids.numel(),), -1, dtype=torch.int32, device=group.device)
            group.kernels.insert(group.index, ids, group._ranges_of(self._table, ids.numel()), rows)
        else:
            rows, _ = group.find_or_insert(ids, group._ranges_of(self._table, ids.numel()))
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

    def _admit(self, ids: torch.Tensor, scores: list[torch.Tensor]) -> torch.Tensor:
        """Return the positions of the new ids that get a place, and take it from the ids that must go."""
        capacity = self._group.index.bucket_capacity
        buckets = _bucket_of(ids, self._num_buckets)
        distinct, inverse, counts = torch.unique(buckets, return_inverse=True, return_counts=True)
        total = self._loads[distinct] + counts
        overfull = (total > capacity).nonzero().flatten()
        self._loads[distinct] = total.clamp(max=capacity)
        admitted = torch.ones(ids.numel(), dtype=torch.bool, device=ids.device)
        for part in torch.split(overfull, max(1, _RANKED_SLOTS // capacity)):
            here = torch.isin(inverse, part).nonzero().flatten()
            lost, gone = self._weakest(buckets[here], distinct[part], ids[here], [column[here] for column in scores])
            admitted[here[lost]] = False
            self._drop(gone)
            self.num_lost += lost.numel() + gone.numel()
        return admitted.nonzero().flatten()

    def _weakest(
        self, owners: torch.Tensor, buckets: torch.Tensor, ids: torch.Tensor, scores: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the new ids, and which slots of overfull buckets, must go.

        Args:
            owners: i64 ``[M]``, the bucket of each new id.
            buckets: i64 ``[B]``, the distinct ones.
            ids: i64 ``[M]``.
            scores: each i64 ``[M]``.
        """
        index, capacity = self._group.index, self._group.index.bucket_capacity
        slots = ((self._begin + buckets)[:, None] * capacity + torch.arange(capacity, device=buckets.device)).flatten()
        slots = slots[index.digests[slots] >= FIRST_DIGEST]
        held = self._group.scores(self._table, slots)
        ranks = self._ranks([torch.cat(pair) for pair in zip(scores, held, strict=True)])
        hashes = fmix64_of_array(torch.cat([ids, index.keys[slots]]).cpu().numpy())
        owner = torch.cat([owners, slots // capacity - self._begin]).cpu().numpy()
        order = np.lexsort((hashes, ranks, owner))
        _, begins, counts = np.unique(owner[order], return_index=True, return_counts=True)
        place = np.arange(order.size) - np.repeat(begins, counts)
        weakest = torch.from_numpy(order[place < np.repeat(counts - capacity, counts)]).to(ids.device)
        return weakest[weakest < ids.numel()], slots[weakest[weakest >= ids.numel()] - ids.numel()]

    def _ranks(self, scores: list[torch.Tensor]) -> np.ndarray:
        """Return what evictions compare, i64."""
        *stamps, counts = (column.cpu().numpy() for column in scores)
        source = self._group.options.score_function
        if source is None or not stamps:
            return counts
        from dynamicemb.table.cpu.score_function import ranks_of

        return ranks_of(source, stamps[0], counts, int(self._group.index.clock[NOW]))

    def _drop(self, slots: torch.Tensor) -> None:
        index = self._group.index
        index.digests[slots] = DIGEST_ERASED
        index.tags[slots] = 0
        index.counters[self._table, EVICTED] += slots.numel()


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
    """Remove all ids of a table."""
    with group.lock:
        index, capacity = group.index, group.index.bucket_capacity
        begin, end = (int(bucket) * capacity for bucket in index.bucket_offsets[table : table + 2])
        index.counters[table, ERASED] += group.size(table)
        index.digests[begin:end] = DIGEST_EMPTY
        index.tags[begin:end] = 0
        group.marks.pop(table, None)
        group.epoch += 1
        _read_counters(group)


def _read_counters(group: TableGroup) -> None:
    """Tell growth and statistics the new sizes: test_c19_a_table_that_was_loaded_grows_in_time."""
    # The first call waits, so that copies from before are there; the second takes them away.
    group.counter_reader.wait()
    group.counter_reader.latest()
    group.counter_reader.wait()
    if group.growth is not None:
        group.growth.resume(group.counter_reader)


def _bucket_of(ids: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Return the bucket of each id in its table, i64; as ``layout.locate``."""
    return ((fmix64(ids) >> 20) & (2**44 - 1)) % num_buckets


def _last_of_each(ids: torch.Tensor) -> torch.Tensor:
    """Return the position of the last occurrence of every distinct id, i64, ascending."""
    values, inverse = torch.unique(ids, return_inverse=True)
    if values.numel() == ids.numel():
        return torch.arange(ids.numel(), device=ids.device)
    positions = torch.arange(ids.numel(), device=ids.device)
    last = torch.zeros_like(values).scatter_reduce_(0, inverse, positions, reduce="amax", include_self=False)
    return last.sort().values


def adopt_clock(group: TableGroup, now: int) -> None:
    """Make the next step later than ``now``, Unix nanoseconds."""
    with group.lock:
        group.index.clock[[NOW, SEEN]] = max(int(group.index.clock[SEEN]), now)


def adopt_score(group: TableGroup, table: int, value: int, keep: bool) -> None:
    """Make a STEP table go on after step ``value``; with ``keep``, unless it is further already."""
    with group.lock:
        values = group.index.score_values
        values[table] = max(int(values[table]), value) if keep else value


def adopt_seed(group: TableGroup, table: int, seed: int) -> None:
    """Give ids to come the first values that ``seed`` makes."""
    with group.lock:
        group.seeds[table] = seed
        key = np.array([table_key(seed, group.names[table])], dtype=np.uint64).view(np.int64)
        group.initializers.keys[table] = int(key[0])


def adopt_initial_state(group: TableGroup, value: float) -> None:
    """Start the optimizer state of ids to come at ``value``."""
    with group.lock:
        group.set_state_value(value)


def adopt_updates(group: TableGroup, updates: int, keep: bool) -> None:
    """Count optimizer applications on from ``updates``; with ``keep``, unless there were more."""
    with group.lock:
        clock = group.index.clock
        clock[UPDATES] = max(int(clock[UPDATES]), updates) if keep else updates
