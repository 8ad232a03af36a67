"""Tables that grow: when, and how far. ``relocation`` moves their index entries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dynamicemb.capacity import MAX_GROUP_SLOTS
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.backends import Kernels
from dynamicemb.table.growing.crowding import roomy_factor, safe_load
from dynamicemb.table.growing.plan import taken_slots
from dynamicemb.table.growing.relocation import grow
from dynamicemb.table.index import EVICTED, FAILED, Index
from dynamicemb.table.memory import is_out_of_memory
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stats import TallyReader, occurrences_of, size_of
from dynamicemb.table.stepping.tracker import StepTracker
from dynamicemb.warn import warn


@dataclass(frozen=True)
class GrowthLimits:
    """How far tables may grow.

    Attributes:
        max_capacities: rows of each table at most, its first capacity times a power of two. None: the table grows until
            memory ends, and then alone evicts.
        max_load_factors: share of used slots, per table, above which it grows.
    """

    max_capacities: list[int | None]
    max_load_factors: list[float]


class Growth:
    """Decides before each insert whether tables must grow first.

    The host does not know how many ids a table on a GPU holds. It knows a bound: the size that arrived last, and all
    occurrences that have been offered to the tables since. Only where the bound crosses the threshold is the device
    asked, for the true size and for the distinct new ids of the batch. Tables without a limit must not evict either
    where a bucket is full before the table is: theirs is the load below which that is out of the question.
    """

    def __init__(self, names: list[str], limits: GrowthLimits, bucket_capacity: int, reader: TallyReader):
        """Begin with the tables as ``reader`` knows them."""
        self._names = names
        self._load_factors = limits.max_load_factors
        self._unlimited = [most is None for most in limits.max_capacities]
        # Where memory does not end first, the number of slots of a group does.
        self._max_capacities = [MAX_GROUP_SLOTS if most is None else most for most in limits.max_capacities]
        self._safe_load = safe_load(bucket_capacity)
        self._offered = sum(map(occurrences_of, reader.latest()))
        self._reader = reader
        # Erased ids whose slots steps may still protect: table, number, last step that had begun.
        self._erased: list[tuple[int, int, int]] = []
        self._warned_of_crowding: set[int] = set()

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        del state["_reader"]
        return state

    def resume(self, reader: TallyReader) -> None:
        """Go on in a copy, whose tallies ``reader`` reads."""
        self._reader = reader
        self._offered = sum(map(occurrences_of, reader.latest()))

    def growable(self, capacities: list[int]) -> list[int]:
        """Return the tables that may still grow."""
        return [t for t, capacity in enumerate(capacities) if capacity < self._max_capacities[t]]

    def may_cross(self, capacities: list[int], num_ids: int, oldest_step: int) -> list[int]:
        """Return the tables that ``num_ids`` more occurrences could fill beyond their threshold. Host sync: none.

        Raises:
            DynamicEmbError: a table may still grow, and a CUDA graph is being captured.
        """
        tables = self.growable(capacities)
        if not tables:
            return []
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._refuse_capture(tables[0])
        counts = self._reader.latest()
        for t in tables:
            if self._unlimited[t] and counts[t][EVICTED] + counts[t][FAILED]:
                self.warn_of_crowding(t)
        self._erased = [entry for entry in self._erased if entry[2] >= oldest_step]
        # Those of all tables: the host does not know whose they are.
        since = max(0, self._offered - sum(map(occurrences_of, counts)))
        return [t for t in tables if self.crosses(t, capacities[t], size_of(counts[t]) + since + num_ids)]

    def _refuse_capture(self, table: int) -> None:
        remedy = "construct it with init_capacity = max_capacity, or capture once it has grown"
        if self._unlimited[table]:
            remedy = "choose another score_strategy than NO_EVICTION, with a max_capacity"
        raise DynamicEmbError(f"table {self._names[table]!r} may still grow, which a CUDA graph cannot; {remedy}")

    def crosses(self, table: int, capacity: int, num_ids: int) -> bool:
        """Return whether so many ids are more than a table takes without a look at its buckets."""
        return num_ids > self._load_factors[table] * capacity or self.may_crowd(table, capacity, num_ids)

    def may_crowd(self, table: int, capacity: int, num_ids: int) -> bool:
        """Return whether so many ids may fill a bucket of a table that must not evict."""
        return self._unlimited[table] and num_ids + self._num_erased(table) > self._safe_load * capacity

    def _num_erased(self, table: int) -> int:
        """Return how many slots of erased ids may not be free yet."""
        return sum(number for t, number, _ in self._erased if t == table)

    def factor(self, table: int, capacity: int, num_ids: int) -> int:
        """Return by which power of two a table must grow to hold ``num_ids`` ids; as far as it may."""
        return self._factor(table, capacity, num_ids, self._load_factors[table])

    def last_factor(self, table: int, capacity: int, num_ids: int) -> int:
        """Return beyond which factor growth is no remedy for full buckets: they are not full by chance any more."""
        return self._factor(table, capacity, num_ids + self._num_erased(table), self._safe_load)

    def _factor(self, table: int, capacity: int, num_ids: int, load: float) -> int:
        factor = 1
        while num_ids > load * factor * capacity and factor * capacity < self._max_capacities[table]:
            factor *= 2
        return factor

    def inserted(self, num_ids: int) -> None:
        """Note an insert of ``num_ids`` occurrences; the sizes after it come to the host when they are ready."""
        self._offered += num_ids
        self._reader.send()

    def erased(self, table: int, num_ids: int, step: int) -> None:
        """Note ids that were erased after ``step`` began: their slots may be protected until it is over."""
        self._erased.append((table, num_ids, step))
        self._reader.send()

    def ask(self) -> list[int]:
        """Return the true sizes. Host sync: one."""
        return [size_of(counts) for counts in self._reader.wait()]

    def stop(self, table: int, capacity: int, error: Exception) -> None:
        """Leave a table as large as it is for good: there is no memory."""
        self._max_capacities[table] = capacity
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "Use more ranks, a smaller embedding_dtype, or an optimizer with less state"
        if not self._unlimited[table]:
            remedy = "Lower max_capacity, use a smaller embedding_dtype, or more ranks"
        warn(
            f"table {self._names[table]!r} cannot grow beyond {capacity} rows ({message}); from now on it evicts ids. "
            f"{remedy}",
        )

    def warn_of_crowding(self, table: int) -> None:
        """Say, once, that ids lose their places to others although there is memory."""
        if table in self._warned_of_crowding:
            return
        self._warned_of_crowding.add(table)
        warn(
            f"table {self._names[table]!r}: so many ids share a bucket that growth does not part them, which does not "
            "happen by chance; in such buckets new ids replace the oldest. Where do these ids come from? Another "
            "bucket_capacity does not help against ids that were chosen to collide",
        )


class Growable(Protocol):
    """Tables that grow together: what of their group growth reads and changes.

    Attributes:
        growth: the tables' bounds.
        index: the group's index.
        store: the group's rows.
        kernels: of the device.
        capacities: rows of each table.
        steps: which steps protect their ids.
    """

    growth: Growth
    index: Index
    store: RowStore
    kernels: Kernels
    capacities: list[int]
    steps: StepTracker


def make_room(group: Growable, num_ids: int, new: Callable[[list[int]], list[torch.Tensor]]) -> None:
    """Grow the tables that an insert would fill beyond their threshold.

    Args:
        group: the tables.
        num_ids: occurrences of the batch.
        new: called with tables, returns which distinct ids of the batch each of them does not hold, i64.

    Host sync: none while no table can come near its threshold.
    """
    growth, index, capacities = group.growth, group.index, group.capacities
    tables = growth.may_cross(capacities, num_ids, group.steps.oldest())
    if not tables:
        return
    sizes = growth.ask()
    tables = [t for t in tables if growth.crosses(t, capacities[t], sizes[t] + num_ids)]
    if not tables:
        return
    for table, ids in zip(tables, new(tables), strict=True):
        size, capacity = sizes[table] + ids.numel(), capacities[table]
        factor = growth.factor(table, capacity, size)
        if growth.may_crowd(table, capacity * factor, size):
            most = growth.last_factor(table, capacity, size)
            taken = taken_slots(index, group.steps.next_lag(), None)
            roomy = roomy_factor(index, table, ids, taken, factor, most)
            if roomy is None:
                growth.warn_of_crowding(table)
            factor = roomy or factor
        grow_by(group, table, factor)


def grow_by(group: Growable, table: int, factor: int) -> None:
    """Grow a table by ``factor``, or where memory does not suffice by less and for the last time."""
    failure: Exception | None = None
    while factor > 1:
        try:
            grow(group.index, group.store, group.kernels, table, factor)
            break
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)
        factor //= 2
    capacity = factor * group.capacities[table]
    if failure is not None:
        group.growth.stop(table, capacity, failure)
    group.capacities[table] = capacity
