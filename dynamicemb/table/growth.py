"""Tables that grow: when, how far, and the move of their index entries.

A table grows by a power of two. Bucket b of n is divided among b, b + n, ...; index entries move, rows stay with their
ids, and so do the row numbers that a step in flight has saved. Left-over rows and new ones go to the empty slots.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.index import OLDEST, Index
from dynamicemb.table.layout import DIGEST_EMPTY, DIGEST_ERASED
from dynamicemb.table.memory import allocate
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stats import CounterReader, occurrences_of, size_of

# Arrays with an entry for each slot.
_COLUMNS = ("keys", "digests", "scores", "stamps", "rows", "tags")


@dataclass(frozen=True)
class GrowthLimits:
    """How far tables may grow.

    Attributes:
        max_capacities: rows of each table at most, its first capacity times a power of two.
        max_load_factors: share of used slots, per table, above which it grows.
    """

    max_capacities: list[int]
    max_load_factors: list[float]


class Growth:
    """Decides before each insert whether tables must grow first.

    The host does not know how many ids a table on a GPU holds. It knows a bound: the size that arrived last, and all
    occurrences that have been offered to the tables since. Only where the bound crosses the threshold is the device
    asked, for the true size and for the distinct new ids of the batch.
    """

    def __init__(self, names: list[str], limits: GrowthLimits, reader: CounterReader):
        """Begin with the tables as ``reader`` knows them."""
        self._names = names
        self._limits = limits
        self._max_capacities = list(limits.max_capacities)
        self._offered = sum(map(occurrences_of, reader.latest()))
        self._reader = reader

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        del state["_reader"]
        return state

    def resume(self, reader: CounterReader) -> None:
        """Go on in a copy, whose counters ``reader`` reads."""
        self._reader = reader
        self._offered = sum(map(occurrences_of, reader.latest()))

    def growable(self, capacities: list[int]) -> list[int]:
        """Return the tables that may still grow."""
        return [t for t, capacity in enumerate(capacities) if capacity < self._max_capacities[t]]

    def may_cross(self, capacities: list[int], num_ids: int) -> list[int]:
        """Return the tables that ``num_ids`` more occurrences could fill beyond their threshold. Host sync: none.

        Raises:
            DynamicEmbError: a table may still grow, and a CUDA graph is being captured.
        """
        tables = self.growable(capacities)
        if not tables:
            return []
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise DynamicEmbError(
                f"table {self._names[tables[0]]!r} may still grow, which a CUDA graph cannot; construct it with "
                "init_capacity = max_capacity, or capture once it has grown"
            )
        counts = self._reader.latest()
        # Those of all tables: the host does not know whose they are.
        since = max(0, self._offered - sum(map(occurrences_of, counts)))
        return [t for t in tables if size_of(counts[t]) + since + num_ids > self._threshold(t, capacities[t])]

    def _threshold(self, table: int, capacity: int) -> float:
        return self._limits.max_load_factors[table] * capacity

    def factor(self, table: int, capacity: int, num_ids: int) -> int:
        """Return by which power of two a table must grow to hold ``num_ids`` ids; as far as it may."""
        factor = 1
        while num_ids > self._threshold(table, factor * capacity) and factor * capacity < self._max_capacities[table]:
            factor *= 2
        return factor

    def inserted(self, num_ids: int) -> None:
        """Note an insert of ``num_ids`` occurrences; the sizes after it come to the host when they are ready."""
        self._offered += num_ids
        self._reader.send()

    def ask(self) -> list[int]:
        """Return the true sizes. Host sync: one."""
        return [size_of(counts) for counts in self._reader.wait()]

    def stop(self, table: int, capacity: int, error: Exception) -> None:
        """Leave a table as large as it is for good: there is no memory."""
        self._max_capacities[table] = capacity
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"table {self._names[table]!r} cannot grow beyond {capacity} rows ({message}); from now on it evicts ids. "
            "Lower max_capacity, use a smaller embedding_dtype, or more ranks",
            UserWarning,
            stacklevel=2,
        )


def grow(index: Index, store: RowStore, kernels: ModuleType, table: int, factor: int) -> None:
    """Multiply the buckets of a table; ids, rows, scores and tags stay, erased slots that nothing protects go.

    Args:
        index: the group's index; its arrays are replaced.
        store: the group's rows; gets a chunk for the new ones.
        kernels: of the device.
        table: which table.
        factor: a power of two.

    Raises:
        MemoryError, torch.OutOfMemoryError: nothing has changed.

    Host sync: yes. Moves about 50 bytes of index for each slot of the group.
    """
    capacity = index.bucket_capacity
    begin, end = (int(b) * capacity for b in index.bucket_offsets[table : table + 2])
    added = (factor - 1) * (end - begin)
    # Stamps have no entries where nothing needs them.
    names = [name for name in _COLUMNS if getattr(index, name).numel()]
    grown = {name: _enlarged(getattr(index, name), begin, end, added) for name in names}
    chunk = store.allocate_chunk(table, added)
    old = {name: getattr(index, name)[begin:end] for name in names}
    new = {name: grown[name][begin : end + added] for name in names}
    protected = (old["digests"] == DIGEST_ERASED) & (old["tags"] >= index.clock[OLDEST])
    kept = (old["digests"] > DIGEST_ERASED) | protected
    slots = kernels.relocate(old["keys"], old["digests"], kept, new["digests"], capacity)
    targets = slots[kept]
    for name in names:
        if name != "digests":
            new[name][targets] = old[name][kept]
    first_row = store.next_row
    fresh = torch.arange(first_row, first_row + added, dtype=torch.int32, device=store.device)
    new["rows"][new["digests"] == DIGEST_EMPTY] = torch.cat([old["rows"][~kept], fresh])
    # Only now does anything change: all memory has been found.
    store.add_chunk(table, chunk)
    for name, column in grown.items():
        setattr(index, name, column)
    index.bucket_offsets[table + 1 :] += added // capacity
    index.entries_moved()


def _enlarged(column: torch.Tensor, begin: int, end: int, added: int) -> torch.Tensor:
    """Return a copy of an array in which the entries ``begin..end`` are zero and followed by ``added`` zeros."""
    out = allocate(column.numel() + added, column.dtype, column.device, zero=True)
    out[:begin] = column[:begin]
    out[end + added :] = column[end:]
    return out


CountNew = Callable[[list[int]], list[int]]


def make_room(
    growth: Growth,
    index: Index,
    store: RowStore,
    kernels: ModuleType,
    capacities: list[int],
    num_ids: int,
    new: CountNew,
) -> None:
    """Grow the tables that an insert would fill beyond their threshold.

    Args:
        growth: the tables' bounds.
        index: the group's index.
        store: the group's rows.
        kernels: of the device.
        capacities: rows of each table; changed in place.
        num_ids: occurrences of the batch.
        new: called with tables, returns how many distinct ids of the batch each of them does not hold.

    Host sync: none while no table can come near its threshold.
    """
    tables = growth.may_cross(capacities, num_ids)
    if not tables:
        return
    sizes = growth.ask()
    for table, number in zip(tables, new(tables), strict=True):
        factor = growth.factor(table, capacities[table], sizes[table] + number)
        if factor == 1:
            continue
        try:
            grow(index, store, kernels, table, factor)
        except (MemoryError, torch.OutOfMemoryError) as error:
            growth.stop(table, capacities[table], error)
        else:
            capacities[table] *= factor
