"""The tables of one module, fused in one index: find, insert, erase, export, statistics."""

from collections.abc import Callable
from typing import Any, cast

import torch

from dynamicemb.capacity import MAX_GROUP_SLOTS
from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.admission import Admission, Newcomers, describe_counter, will_be_rejected
from dynamicemb.table.backends import kernels_for
from dynamicemb.table.contents import GroupContents, GroupOptions
from dynamicemb.table.growing.crowding import roomy_factor
from dynamicemb.table.growing.growth import Growable, Growth, GrowthLimits, grow_by, make_room
from dynamicemb.table.growing.plan import InsertPlan, plan_inserts, taken_slots
from dynamicemb.table.index import DROPPED, Index
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.invariants import check_invariants
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.table.rows import RowFormat, RowStore
from dynamicemb.table.scores import COUNT_NONE
from dynamicemb.table.stats import TallyReader, bucket_loads, describe, size_of
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.stepping.lookup import Lookup, rows_without
from dynamicemb.table.stepping.results import InsertEvents, OpenBatch
from dynamicemb.table.stepping.tracker import Step, StepTracker
from dynamicemb.table.touched import Mark
from dynamicemb.table.turns import Turns


class TableGroup(GroupContents):
    """Dynamic embedding tables that share one index.

    Batches hold the ids of one table after those of another: ``table_ranges`` i64 ``[T+1]`` says which occurrences
    belong to which table.
    """

    def __init__(
        self,
        names: list[str],
        capacities: list[int],
        formats: list[RowFormat],
        initializers: InitializerTable,
        options: GroupOptions,
        device: torch.device,
        growth: GrowthLimits | None = None,
        admission: Admission | None = None,
    ):
        """Allocate empty tables.

        Args:
            names: one name per table; the initial values depend on it.
            capacities: rows of each table, multiples of ``options.bucket_capacity``.
            formats: row format of each table.
            initializers: how new rows are filled, per table.
            options: what holds for all of them.
            device: where index and rows live.
            growth: how far tables may grow; None: none does.
            admission: which new ids of a lookup get a row; None: all.

        Raises:
            ValueError: the group has more slots than a 32-bit row id can name.
        """
        most: list[int | None] = [*capacities] if growth is None else growth.max_capacities
        slots = sum(now if last is None else last for now, last in zip(capacities, most, strict=True))
        if slots > MAX_GROUP_SLOTS:
            raise ValueError(
                f"max_capacity: the tables {names} have {slots} slots together, more than {MAX_GROUP_SLOTS}; "
                "lower the capacities or give the tables to several modules"
            )
        self.kernels = kernels_for(device)
        self.names = names
        self.capacities = list(capacities)
        self.options = options
        self.device = device
        self.initializers = initializers
        # A load changes those of the tables it fills.
        self.seeds = [options.seed] * len(names)
        # Per table, the dump that increments may continue; see ``table/touched.py``.
        self.marks: dict[int, Mark] = {}
        self.store = RowStore(capacities, formats, options.dtype, device, most)
        self.index = Index.create(
            [c // options.bucket_capacity for c in capacities],
            options.bucket_capacity,
            self.store.first_rows,
            options.strategies,
            device,
            options.score_function,
            options.ttls,
        )
        self.tally_reader = TallyReader(self.index)
        self.growth = None if growth is None else Growth(names, growth, options.bucket_capacity, self.tally_reader)
        self.admission = admission
        self.admission_reader = self._read_counter()
        self.steps = StepTracker(options.protect_steps, len(names))
        # Counts events that take rows away from ids outside of a step: a backward that began before must look again.
        self.epoch = 0
        # Whoever touches the tables has the turn.
        self.turn = Turns(device)
        # On the device, so that a captured step sees it change.
        self.learning_rate = torch.zeros(1, dtype=torch.float32, device=device)
        state_values = torch.full((len(names),), options.state_value, dtype=torch.float32, device=device)
        self._newcomers = Newcomers(initializers, state_values)
        self._candidates = Newcomers(initializers, state_values, admission)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["kernels"], state["turn"], state["tally_reader"], state["admission_reader"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.kernels = kernels_for(self.device)
        self.turn = Turns(self.device)
        self.tally_reader = TallyReader(self.index, self.index.tallies.tolist())
        self.admission_reader = self._read_counter()
        if self.growth is not None:
            self.growth.resume(self.tally_reader)

    def _read_counter(self) -> TallyReader | None:
        counter = None if self.admission is None else self.admission.counter
        return None if counter is None else TallyReader(counter, counter.tallies.tolist())

    # Steps

    def begin_step(self, training: bool = True) -> Step:
        """Start a step that inserts: advance the clock, protect what it will touch.

        Args:
            training: whether it is a training forward, which STEP scores count.
        """
        step, lag = self.next_step()
        self.kernels.advance(self.index, lag, training)
        return step

    def next_step(self) -> tuple[Step, int]:
        """Give the next step its number; returns how many steps before it the oldest protected one is.

        Launches nothing, but for a rebase every 2^30 steps. The clock advances when a kernel gets the lag.
        """
        shift = self.steps.rebase()
        if shift:
            self.kernels.rebase(self.index, shift)
            if self.admission is not None and self.admission.counter is not None:
                self.kernels.rebase(self.admission.counter, shift)
        return self.steps.begin(), self.steps.lag()

    # Growth

    def make_room(self, ids: torch.Tensor, offsets: torch.Tensor, layout: FeatureLayout) -> None:
        """Grow the tables that a batch would fill beyond their load factor; before its step begins."""
        if self.growth is not None:
            self.make_room_for(ids, lambda: layout.table_ranges(offsets))

    def make_room_for(self, ids: torch.Tensor, ranges_of: Callable[[], torch.Tensor]) -> None:
        """Grow the tables that ids i64 ``[N]`` would fill; ``ranges_of`` returns their ``table_ranges`` if needed."""

        def new(tables: list[int]) -> list[torch.Tensor]:
            ranges = ranges_of()
            missing = self.find(ids, ranges) < 0
            bounds = ranges.tolist()
            parts = [slice(bounds[t], bounds[t + 1]) for t in tables]
            return [torch.unique(ids[part][missing[part]]) for part in parts]

        make_room(self._growable(), ids.numel(), new)

    def grow(self, table: int, factor: int) -> None:
        """Multiply the rows of a table by ``factor``, a power of two, as far as memory suffices."""
        grow_by(self._growable(), table, factor)

    def _growable(self) -> Growable:
        assert self.growth is not None
        return cast(Growable, self)

    # Lookups

    def open_batch(
        self, offsets: torch.Tensor, layout: FeatureLayout, num_ids: int, lag: int | None = None
    ) -> OpenBatch:
        """Begin a lookup: find the occurrences of each table.

        Args:
            offsets: i64 ``[F*B+1]``.
            layout: tables and columns of the features.
            num_ids: N.
            lag: of a training forward, as ``next_step`` returns it: its step begins. None is an evaluation.
        """
        if lag is None:
            self.observe_time()
        return self.kernels.open_batch(self.index, offsets, layout, num_ids, lag)

    def observe_time(self) -> None:
        """Let ids expire by the present time, not only by that of the last step. Host sync: none."""
        if self.index.expires:
            self.kernels.observe_time(self.index, self.steps.next_lag())

    @property
    def counts_occurrences(self) -> bool:
        """Whether it matters, for a score or for admission, how often an id occurs."""
        return self.index.counting != COUNT_NONE or (self.admission is not None and self.admission.needs_amounts)

    def find(self, ids: torch.Tensor, table_ranges: torch.Tensor) -> torch.Tensor:
        """Return i32 ``[N]`` rows, -1 where absent by the time last observed; changes nothing."""
        return self.kernels.find(self.index, ids, table_ranges, False)

    def find_or_insert(
        self,
        ids: torch.Tensor,
        table_ranges: torch.Tensor,
        frequencies: torch.Tensor | None = None,
        scratch: Any = None,
        admit_all: bool = True,
    ) -> tuple[torch.Tensor, InsertEvents]:
        """Look ids up for training: touch what is there, insert and initialise what is not and may have a row.

        Call it inside a step (``begin_step``).

        Args:
            ids: i64 ``[N]``.
            table_ranges: i64 ``[T+1]``.
            frequencies: i64 ``[N]``, how often each occurrence counts; None is once. Only tables that count read it.
            scratch: of the ``OpenBatch``, if there is one.
            admit_all: whether all new ids get a row, also where ``admission`` would choose.

        Returns:
            ``(rows i32[N], events)``; rows are -1 for ids that found their bucket full of protected ids, and for those
            that were not admitted: ``events.staged`` has what they read.
        """
        newcomers = self._newcomers if admit_all else self._candidates
        args = (self.index, self.store, newcomers, ids, table_ranges, frequencies)
        rows, events = self.kernels.find_or_insert(*args, scratch)
        if self.growth is not None and self.growth.growable(self.capacities):
            self.growth.inserted(ids.numel())
        return rows, events

    def plan_inserts(
        self,
        ids: torch.Tensor,
        table_ranges: torch.Tensor,
        tables: list[int],
        frequencies: torch.Tensor | None = None,
        admit_all: bool = True,
    ) -> list[InsertPlan]:
        """Count, for each of ``tables``, the inserts of a batch that would fail; waits.

        Changes no id, score or row; but tables that may grow get the room that the batch wants, and grow also rather
        than let an id fail. Admission by count is foreseen; by chance, or by the user's own strategy, the plan takes
        every new id for admitted.
        """
        if self.growth is not None:
            self.make_room_for(ids, lambda: table_ranges)
        self.observe_time()
        rows = self.find(ids, table_ranges)
        if self.admission is not None and not admit_all:
            keep = ~will_be_rejected(self.admission, self.kernels.find, (ids, table_ranges, rows), frequencies)
            table_ranges = torch.nn.functional.pad(keep.cumsum(0), (1, 0))[table_ranges]
            ids, rows = ids[keep], rows[keep]
        lag = self.steps.next_lag()
        plans = plan_inserts(self.index, ids, table_ranges, rows, lag, tables)
        growable = [] if self.growth is None else self.growth.growable(self.capacities)
        failing = [plan.table for plan in plans if plan.failed and plan.table in growable]
        for table in failing:
            self._grow_to_place(table, ids, table_ranges, rows)
        return plan_inserts(self.index, ids, table_ranges, rows, lag, tables) if failing else plans

    def _grow_to_place(self, table: int, ids: torch.Tensor, table_ranges: torch.Tensor, rows: torch.Tensor) -> None:
        """Grow a table so far that all ids of a batch find slots in it, if that is possible; waits."""
        growth, capacity = self.growth, self.capacities[table]
        assert growth is not None
        begin, end = table_ranges[table : table + 2].tolist()
        missing = torch.unique(ids[begin:end][rows[begin:end] < 0])
        most = growth.last_factor(table, capacity, growth.ask()[table] + missing.numel())
        taken = taken_slots(self.index, self.steps.next_lag(), rows[rows >= 0])
        factor = roomy_factor(self.index, table, missing, taken, 1, most)
        if factor is not None:
            self.grow(table, factor)

    def plan_import(self, table: int, ids: torch.Tensor) -> InsertPlan:
        """Do what ``plan_inserts`` does, for ids of one table."""
        return self.plan_inserts(ids, self.ranges_of(table, ids.numel()), [table])[0]

    def still_owned(self, lookup: Lookup, step: int) -> Lookup:
        """Return an earlier lookup with row -1 where the id has lost its row since, or a load replaced the row.

        Args:
            lookup: N occurrences.
            step: the last step that had begun at the time of the lookup.
        """
        found = self.find(lookup.ids, lookup.table_ranges)
        present = lookup._replace(rows=torch.where(found == lookup.rows, lookup.rows, -1))
        replaced = self.steps.replaced_since(step)
        return present._replace(rows=rows_without(present.rows, lookup.table_ranges, replaced)) if replaced else present

    def count_dropped(self, lookup: Lookup, present: Lookup) -> None:
        """Count the occurrences of a lookup that have no row in ``present``, which ``still_owned`` returned for it."""
        gone = (lookup.rows >= 0) & (present.rows < 0)
        tables = torch.searchsorted(lookup.table_ranges, gone.nonzero().flatten(), right=True) - 1
        self.index.tallies[:, DROPPED] += torch.bincount(tables, minlength=len(self.names))

    def update(self, spec: OptimizerSpec, gradients: Gradients) -> None:
        """Sum gradients by row and apply one optimizer step to each row.

        Args:
            spec: the optimizer; its learning rate is that of ``self.learning_rate``.
            gradients: of occurrences whose rows still belong to their ids, or are -1.
        """
        clock = self.index.clock
        keys = self.initializers.keys
        self.kernels.update(self.store, spec, gradients, clock, self.learning_rate, keys)

    # Reports

    def stats(self, wait: bool = True) -> dict[str, dict[str, float]]:
        """Return counts since construction and the present size and load, per table name.

        Args:
            wait: False returns the last values that have arrived from the device and sends for newer ones.
        """
        if not isinstance(wait, bool):
            raise TypeError(f"wait must be a bool, got {wait!r}; the statistics of one table are stats()['<table>']")
        with self.turn():
            if wait:
                counts = self.tally_reader.wait()
                sizes = [self.size(t) for t in range(len(self.names))]
            else:
                self.tally_reader.send()
                counts = self.tally_reader.latest()
                sizes = [size_of(of_table) for of_table in counts]
            described = [describe(*numbers) for numbers in zip(sizes, self.capacities, counts, strict=True)]
            if self.admission_reader is not None:
                if not wait:
                    self.admission_reader.send()
                counted = self.admission_reader.wait() if wait else self.admission_reader.latest()
                described = [d | describe_counter(of_table) for d, of_table in zip(described, counted, strict=True)]
        return dict(zip(self.names, described, strict=True))

    def bucket_loads(self, table: int) -> torch.Tensor:
        """Return how many buckets of a table hold 0, 1, ... ids, i64 ``[bucket_capacity + 1]``; waits."""
        with self.turn():
            return bucket_loads(self.index, table)

    def memory_usage(self) -> dict[str, int]:
        """Return bytes allocated for ``rows`` and ``index``, and for the admission ``counter`` if there is one."""
        usage = {"rows": self.store.num_bytes(), "index": self.index.num_bytes()}
        if self.admission is not None and self.admission.counter is not None:
            usage["counter"] = self.admission.counter.num_bytes()
        return usage

    def check_invariants(self) -> None:
        """Check the structural invariants; for tests."""
        check_invariants(self.index, self.store, self.capacities)
        if self.admission is not None:
            self.admission.check_invariants()
