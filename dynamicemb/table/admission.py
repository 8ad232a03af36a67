"""Admission of new ids: the counters, an index without rows, and what decides.

A counter is an ``Index`` like that of the tables, with the strategy of LFU: scores are counts, the lowest is evicted
first, and a slot is its own row. An id is in it from its first occurrence until it is admitted. Only the ids of the
present lookup are protected from eviction.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from dynamicemb.table.index import EVICTED, FAILED, OLDEST, STEP, Index, Touches
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.invariants import check_invariants
from dynamicemb.table.rows import RowStore
from dynamicemb.table.scores import SCORE_LFU
from dynamicemb.table.stats import size_of
from dynamicemb.table.stepping.staging import Stage

# How the ids of a lookup that have no row are judged.
ADMIT_BY_COUNT = 0
ADMIT_BY_CHANCE = 1
ADMIT_BY_CALL = 2

# Word 2 of Philox's counter for a draw: columns of rows end long before.
CHANCE_WORD = 0xFFFFFFFF


class Judge(Protocol):
    """A user's strategy, and counters of the user's own; called with tensors, which waits for a GPU."""

    def count(self, ids: torch.Tensor, tables: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
        """Add to the user's counters, and return the occurrences so far, i64 ``[U]``; without counters the amounts."""

    def admit(self, ids: torch.Tensor, tables: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
        """Return bool ``[U]``, which ids get a row."""

    def forget(self, ids: torch.Tensor, tables: torch.Tensor) -> None:
        """Erase admitted ids from the user's counters."""

    def fill(self, table: int, values: torch.Tensor) -> bool:
        """Overwrite values f32 ``[M, D]`` that rejected ids of a table will read; False if nothing was written."""


@dataclass
class Admission:
    """How a group admits new ids; all tables in the same way.

    Attributes:
        kind: ADMIT_BY_COUNT, ADMIT_BY_CHANCE or ADMIT_BY_CALL.
        limits: i64 ``[T]``: the count that admits, or how many of the 2^32 values of a random word do.
        initializers: what ids read that are not admitted.
        counter: the counters, or None. Its tables are those of the group.
        judge: for ADMIT_BY_CALL.
    """

    kind: int
    limits: torch.Tensor
    initializers: InitializerTable
    counter: Index | None = None
    judge: Judge | None = None

    @property
    def needs_amounts(self) -> bool:
        """Whether it matters how often an id occurs."""
        return self.kind != ADMIT_BY_CHANCE

    def check_invariants(self) -> None:
        """Check the structural invariants of the counters; for tests."""
        if self.counter is not None:
            counter = self.counter
            starts = [begin * counter.bucket_capacity for begin in counter.bucket_offsets.tolist()]
            check_invariants(
                counter, cast(RowStore, _Slots(starts)), [end - begin for begin, end in itertools.pairwise(starts)]
            )


@dataclass
class _Slots:
    """Rows of a counter, as ``check_invariants`` asks for them: slots are their own."""

    starts: list[int]

    def row_ids(self, table: int) -> torch.Tensor:
        return torch.arange(self.starts[table], self.starts[table + 1], device="cpu")


@dataclass(frozen=True)
class Newcomers:
    """What becomes of ids that a training lookup does not find.

    Attributes:
        initializers: how the weights of new rows are filled, per table.
        state_values: f32 ``[T]``, what optimizer state starts at.
        admission: which of them get a row; None: all.
    """

    initializers: InitializerTable
    state_values: torch.Tensor
    admission: Admission | None = None


def create_counter(num_buckets: Sequence[int], bucket_capacity: int, device: torch.device) -> Index:
    """Make empty counters, ``num_buckets`` for each table."""
    first_rows = [sum(num_buckets[:t]) * bucket_capacity for t in range(len(num_buckets))]
    strategies = [SCORE_LFU] * len(num_buckets)
    return Index.create(list(num_buckets), bucket_capacity, first_rows, strategies, device)


def describe_counter(counts: list[int]) -> dict[str, float]:
    """Return the statistics of one table's counter by name, from its tallies."""
    return {
        "counter_size": size_of(counts),
        "counter_evicted": counts[EVICTED],
        "counter_failed": counts[FAILED],
    }


def begin_counting(counter: Touches, clock: torch.Tensor) -> None:
    """Begin the step of the tables' ``clock`` in a counter: it alone is protected."""
    counter.clock[STEP : OLDEST + 1] = clock[STEP]


Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Candidates:
    """The distinct ids of a lookup that have no row, in batch order.

    Attributes:
        ids: i64 ``[U]``.
        tables: i64 ``[U]``, ascending.
        ranges: i64 ``[T+1]``, where those of each table begin.
        amounts: i64 ``[U]``, occurrences in the lookup.
    """

    ids: torch.Tensor
    tables: torch.Tensor
    ranges: torch.Tensor
    amounts: torch.Tensor


def ask_judge(
    admission: Admission, kernels: tuple[Kernel, Kernel], clock: torch.Tensor, candidates: Candidates
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the user's strategy decide.

    Args:
        admission: of ADMIT_BY_CALL.
        kernels: ``add_counts`` and ``erase`` of the device.
        clock: of the tables' index.
        candidates: whom it is about.

    Returns:
        ``(admitted bool[U], totals i64[U])``.

    Host sync: what the user's code does, and that of erasing.
    """
    judge, counter, c = admission.judge, admission.counter, candidates
    add_counts, erase = kernels
    assert judge is not None
    if counter is None:
        totals = judge.count(c.ids, c.tables, c.amounts)
    else:
        begin_counting(counter, clock)
        totals = add_counts(counter, c.ids, c.ranges, c.amounts)
    admitted = judge.admit(c.ids, c.tables, totals)
    ids, tables = c.ids[admitted], c.tables[admitted]
    if counter is None:
        judge.forget(ids, tables)
    elif ids.numel():
        erase(counter, ids, torch.searchsorted(tables, torch.arange(len(c.ranges), device=tables.device)))
    return admitted, totals


def fill_by_judge(
    judge: Judge, kernels: tuple[Kernel, Kernel], stage: Stage, ranges: torch.Tensor, rows: torch.Tensor
) -> None:
    """Let the user's strategy overwrite staged rows.

    Args:
        judge: the strategy.
        kernels: ``read_rows`` and ``write_rows`` of the device.
        stage: initialised rows.
        ranges: i64 ``[T+1]``, the rows of each table.
        rows: i32 ``[M]``.

    Host sync: one, and what the user's code does.
    """
    read_rows, write_rows = kernels
    for t, (begin, end) in enumerate(itertools.pairwise(ranges.tolist())):
        if begin < end:
            values, _ = read_rows(stage.store, t, rows[begin:end])
            if judge.fill(t, values):
                write_rows(stage.store, t, rows[begin:end], values, None)


def will_be_rejected(
    admission: Admission,
    find: Kernel,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    frequencies: torch.Tensor | None,
) -> torch.Tensor:
    """Foresee which occurrences a lookup would not admit; changes nothing.

    Args:
        admission: only ADMIT_BY_COUNT is foreseen.
        find: of the device.
        batch: ``(ids i64[N], table_ranges i64[T+1], rows i32[N])`` of ``find``.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once.

    Returns:
        bool ``[N]``; False for all ids that are there, and wherever a strategy is not foreseen.

    Host sync: several.
    """
    ids, table_ranges, rows = batch
    rejected = torch.zeros_like(rows, dtype=torch.bool)
    positions = (rows < 0).nonzero().flatten()
    counter = admission.counter
    if admission.kind != ADMIT_BY_COUNT or counter is None or not positions.numel():
        return rejected
    # By table, and within it by id.
    positions = positions[ids[positions].argsort(stable=True)]
    owners = torch.searchsorted(table_ranges, positions, right=True) - 1
    by_table = owners.argsort(stable=True)
    positions, owners = positions[by_table], owners[by_table]
    keys = ids[positions]
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
    segments = first.cumsum(0) - 1
    amounts = torch.ones_like(keys) if frequencies is None else frequencies[positions]
    keys, owners = keys[first], owners[first]
    totals = torch.zeros_like(keys).index_add_(0, segments, amounts)
    slots = find(counter, keys, torch.searchsorted(owners, torch.arange(len(table_ranges), device=ids.device)), False)
    totals += torch.where(slots >= 0, counter.scores[slots.clamp(min=0).long()], 0)
    rejected[positions] = (totals < admission.limits[owners])[segments]
    return rejected
