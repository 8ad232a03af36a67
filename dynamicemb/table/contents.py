"""What is in the tables of a group: sizes, rows, scores; imports and erasures outside of lookups."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynamicemb.table.admission import Admission, Newcomers
from dynamicemb.table.backends import Kernels
from dynamicemb.table.growing.growth import Growth
from dynamicemb.table.growing.relocation import rebuild
from dynamicemb.table.index import EXPIRED, NOW, SEEN, Index
from dynamicemb.table.layout import DIGEST_ERASED
from dynamicemb.table.rows import RowStore
from dynamicemb.table.scores import MAX_SCORE, SCORE_COMPOUND, SCORE_CUSTOMIZED, SCORE_LFU, SCORE_STEP
from dynamicemb.table.stepping.results import InsertEvents
from dynamicemb.table.stepping.tracker import Step, StepTracker
from dynamicemb.table.turns import Turns

# Erased slots lengthen probes; a table is rebuilt when they exceed this share.
_REBUILD_SHARE = 4


@dataclass(frozen=True)
class GroupOptions:
    """What holds for all tables of a group.

    Attributes:
        bucket_capacity: slots of a bucket, a multiple of 16.
        dtype: dtype of the weights.
        strategies: SCORE_* of each table, which score a touch leaves.
        seed: seed of the initial values.
        state_value: what optimizer state starts at.
        protect_steps: finished steps whose ids are still not evicted.
        score_function: what ranks instead of compound scores, as ``score_function.translate`` returned it.
        ttls: nanoseconds without a touch after which the ids of a table are forgotten, or NEVER; empty if none are.
            Only a table with a timestamp has one.
    """

    bucket_capacity: int
    dtype: torch.dtype
    strategies: tuple[int, ...]
    seed: int
    state_value: float = 0.0
    protect_steps: int = 0
    score_function: str | None = None
    ttls: tuple[int, ...] = ()


class GroupContents:
    """The part of a group that reads and changes its contents outside of lookups."""

    kernels: Kernels
    names: list[str]
    options: GroupOptions
    device: torch.device
    index: Index
    store: RowStore
    growth: Growth | None
    admission: Admission | None
    steps: StepTracker
    epoch: int
    turn: Turns
    _newcomers: Newcomers

    # What the group itself provides

    def begin_step(self, training: bool = True) -> Step:
        raise NotImplementedError

    def observe_time(self) -> None:
        raise NotImplementedError

    def make_room_for(self, ids: torch.Tensor, ranges_of: Callable[[], torch.Tensor]) -> None:
        raise NotImplementedError

    def find(self, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def find_or_insert(
        self,
        ids: torch.Tensor,
        table_ranges: torch.Tensor,
        frequencies: torch.Tensor | None = None,
        scratch: Any = None,
        admit_all: bool = True,
    ) -> tuple[torch.Tensor, InsertEvents]:
        raise NotImplementedError

    # Names, sizes and places

    def number_of(self, table_name: str) -> int:
        """Return the number of a table.

        Raises:
            ValueError: there is no such table.
        """
        if table_name not in self.names:
            raise ValueError(f"table_name {table_name!r} is unknown; this module has {', '.join(self.names)}")
        return self.names.index(table_name)

    def size(self, table: int) -> int:
        """Return how many places of a table are taken, those of ids that have expired since included."""
        return int((self.index.digests[self.index.slots_of(table)] >= 2).sum())

    def ranges_of(self, table: int, count: int) -> torch.Tensor:
        """Return the ``table_ranges`` of a batch whose ids all belong to one table."""
        ranges = torch.zeros(len(self.names) + 1, dtype=torch.int64, device=self.device)
        ranges[table + 1 :] = count
        return ranges

    # Rows

    def scan(self, table: int, min_score: int = 0) -> torch.Tensor:
        """Return the occupied slots of a table with at least this score or, compound, stamp; i64 ``[M]``, ascending.

        Ids that have expired are not there.
        """
        slots = self.kernels.scan(self.index, table, min_score)
        if not self.index.expires:
            return slots
        self.observe_time()
        return slots[~self.index.expired(table, slots)]

    def scores(self, table: int, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return the score of slots i64 ``[M]``, each i64 ``[M]``; compound: the stamp and then the frequency."""
        score = self.index.scores[slots]
        return [self.index.stamps[slots], score] if self.options.strategies[table] == SCORE_COMPOUND else [score]

    def read(self, table: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(weights f32[M, D], state f32[M, num_state])`` of rows i32 ``[M]``."""
        return self.kernels.read_rows(self.store, table, rows)

    def contains(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return bool ``[N]``: which ids the table holds."""
        with self.turn():
            self.observe_time()
            return self.find(ids, self.ranges_of(table, ids.numel())) >= 0

    def erase(self, table: int, ids: torch.Tensor) -> int:
        """Remove ids of a table; returns how many were there. They start fresh when they return."""
        with self.turn():
            self.observe_time()
            erased = self.kernels.erase(self.index, ids, self.ranges_of(table, ids.numel()))
            count = int(erased.sum())
            if count and self.growth is not None:
                self.growth.erased(table, count, self.steps.current)
            self._erased(table, count)
        return count

    def erase_expired(self, table: int) -> int:
        """Give the places of ids that have expired free; returns how many there were."""
        if not self.index.expires:
            return 0
        with self.turn():
            self.observe_time()
            # No score is lower: every occupied slot.
            slots = self.kernels.scan(self.index, table, 0)
            gone = slots[self.index.expired(table, slots)]
            self.index.digests[gone] = DIGEST_ERASED
            self.index.tallies[table, EXPIRED] += gone.numel()
            self._erased(table, gone.numel())
        return gone.numel()

    def _erased(self, table: int, count: int) -> None:
        """Note that ids are gone; rebuild a table in which too many slots are erased."""
        self.epoch += 1
        if count:
            digests = self.index.digests[self.index.slots_of(table)]
            if int((digests == DIGEST_ERASED).sum()) * _REBUILD_SHARE > digests.numel():
                rebuild(self.index, self.kernels, table)

    def assign(self, table: int, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Insert or overwrite ids with given weights; optimizer state of new ids starts at its initial value.

        Args:
            table: which table.
            ids: i64 ``[N]``; of repeated ids the last counts.
            weights: f32 ``[N, D]``.

        Returns:
            bool ``[N]``: False where the bucket was full of protected ids.
        """
        with self.turn():
            if self.growth is not None:
                self.make_room_for(ids, lambda: self.ranges_of(table, ids.numel()))
            rows = self.insert_without_growing(table, ids)
            last = _last_occurrences(rows)
            keep = last[rows[last] >= 0]
            self.kernels.write_rows(self.store, table, rows[keep], weights[keep].float(), None)
        return rows >= 0

    def insert_without_growing(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Touch or insert ids i64 ``[N]`` of a table outside of a lookup; return their rows i32 ``[N]``.

        New ids are admitted, and start as in a lookup. The caller has the turn.
        """
        step = self.begin_step(training=False)
        # STEP does not count an import, but a threshold asked for before must find it: it has the next number.
        ahead = int(self.options.strategies[table] == SCORE_STEP)
        self.index.score_values[table] += ahead
        try:
            rows, _ = self.find_or_insert(ids, self.ranges_of(table, ids.numel()))
        finally:
            self.index.score_values[table] -= ahead
            step.finish()
        self.forget_counts(table, ids)
        return rows

    def forget_counts(self, table: int, ids: torch.Tensor) -> None:
        """Erase ids that have got a row, although nobody admitted them, from the admission counter."""
        if self.admission is None:
            return
        if self.admission.counter is not None:
            self.kernels.erase(self.admission.counter, ids, self.ranges_of(table, ids.numel()))
        elif self.admission.judge is not None and ids.numel():
            distinct = torch.unique(ids)
            self.admission.judge.forget(distinct, torch.full_like(distinct, table))

    # Scores and time

    def set_score(self, table: int, value: int) -> None:
        """Set the score that touches leave from now on (CUSTOMIZED)."""
        assert self.options.strategies[table] == SCORE_CUSTOMIZED and 0 < value <= MAX_SCORE
        with self.turn():
            self.index.score_values[table] = value

    def get_score(self, table: int) -> int:
        """Return the score that the next step writes (STEP), or the last one written (others).

        LFU: 1. Compound: the time of the last step, which is what it is asked by.
        """
        strategy = self.options.strategies[table]
        if strategy == SCORE_LFU:
            return 1
        if strategy == SCORE_COMPOUND:
            return int(self.index.clock[NOW])
        value = int(self.index.score_values[table])
        return value + 1 if strategy == SCORE_STEP else value

    def now(self) -> int:
        """Return Unix nanoseconds, later than any step so far and not later than any step to come."""
        with self.turn():
            now = max(int(self.index.clock[SEEN]) + 1, time.time_ns())
            # The system's clock may be set back; the next step is at ``now`` or later all the same.
            self.index.clock[[NOW, SEEN]] = now - 1
        return now

    def set_state_value(self, value: float) -> None:
        """Start the optimizer state of ids to come at ``value``."""
        self.options = replace(self.options, state_value=value)
        self._newcomers.state_values.fill_(value)


def _last_occurrences(rows: torch.Tensor) -> torch.Tensor:
    """Return the position of the last occurrence of every distinct value, i64 ``[U]``."""
    values, inverse = torch.unique(rows, return_inverse=True)
    positions = torch.arange(rows.numel(), device=rows.device)
    last = torch.zeros(values.numel(), dtype=torch.int64, device=rows.device)
    return last.scatter_reduce_(0, inverse, positions, reduce="amax", include_self=False)
