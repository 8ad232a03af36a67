"""The state machine with every option that decides which ids a table holds: all strategies, growth, admission, expiry.

Time passes only where a rule says so, so the oracle knows it. After every step each table accounts for the ids that it
was offered.
"""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from dynamicemb import ProbabilityAdmissionStrategy
from dynamicemb.table.index import NOW, OLDEST, SEEN
from dynamicemb.table.initializers import table_key
from dynamicemb.table.scores import SCORE_COMPOUND, SCORE_NO_EVICTION, SCORE_STEP, SCORE_TIMESTAMP
from tests.conftest import reason_to_skip
from tests.support.machine import DIMS, IDS, SCORES, explore
from tests.support.oracle import Entry, Judge, ReferenceTable, Rejected
from tests.table.test_admission_machine import CountingMachine, drawn

pytestmark = pytest.mark.usefixtures("tensors_on_device")
EXAMPLES = {"cpu": (50, 50), "interpret": (10, 8), "cuda": (38, 50)}
# Each of a seed of its own; four on the CPU, which `make test` has time for.
PARTS = {"cpu": 4, "cuda": 8}
# Later than any clock, so that time passes only where a rule says so.
LATE = 4 * 10**18
TTL = 10**8
# Where also a score function and a time to live are possible.
EXPIRING = [[SCORE_COMPOUND, SCORE_COMPOUND], [SCORE_TIMESTAMP, SCORE_COMPOUND], [SCORE_TIMESTAMP, SCORE_TIMESTAMP]]


class OptionsMachine(CountingMachine):
    """Draws the options too."""

    load_factor = 0.75
    fixed_examples = 0
    evicting_fixed_examples = 0
    growing_examples = 0
    expiring_examples = 0

    @initialize(
        strategies=st.lists(st.sampled_from(sorted(SCORES)), min_size=2, max_size=2) | st.sampled_from(EXPIRING),
        with_function=st.booleans(),
        grows=st.tuples(st.booleans(), st.booleans()),
        expires=st.sampled_from([(True, True), (True, True), (True, False), (False, True), (False, False)]),
        limit=st.sampled_from([None, None, 2, 0.5]),
        protect_steps=st.sampled_from([0, 0, 0, 1]),
        adagrad=st.booleans(),
    )
    def construct(
        self,
        strategies: list[int],
        with_function: bool,
        grows: tuple[bool, bool],
        expires: tuple[bool, bool],
        limit: int | float | None,
        protect_steps: int,
        adagrad: bool,
    ) -> None:
        self.strategies, self.protect_steps, self.adagrad = strategies, protect_steps, adagrad
        self.grows, self.expires, self.limit = grows, expires, limit
        if isinstance(limit, int):
            self.threshold = limit
        self.counters: dict[int, Any] = {}
        self.forwards = 0
        self.build(with_function and min(strategies) == SCORE_COMPOUND)
        group = self.module.tables
        group.index.clock[[NOW, SEEN]] = LATE
        for oracle in self.oracles:
            oracle.now, oracle.oldest = LATE, 0
        # Of buckets, as ``ReferenceTable.factor_for`` takes it; None where a table does not grow.
        self.limits: list[tuple[float, int | None] | None] = [
            (self.load_factor, None if strategy == SCORE_NO_EVICTION else 2 * self.capacities[t] // 16)
            if "init_capacity" in self.table_options(t)
            else None
            for t, strategy in enumerate(strategies)
        ]
        # Of ids that are not admitted at once it takes more to fill a table.
        self.warm_up(self.most_warm_up if limit else self.most_warm_up // 2)
        if group.index.expires:
            self.pass_time(2 * TTL)
            self.warm_up(1)

    def table_options(self, table: int) -> dict[str, Any]:
        capacity = self.capacities[table]
        options: dict[str, Any] = {"max_capacity": capacity}
        if self.strategies[table] == SCORE_NO_EVICTION:
            options = {"init_capacity": capacity, "max_load_factor": self.load_factor}
        elif self.grows[table]:
            options = {"init_capacity": 16, "max_capacity": 2 * capacity, "max_load_factor": self.load_factor}
        ttl = self.ttl(table)
        return options if ttl is None else {**options, "ttl": ttl / 1e9}

    def ttl(self, table: int) -> int | None:
        timed = self.strategies[table] in (SCORE_TIMESTAMP, SCORE_COMPOUND)
        return (1 + 2 * table) * TTL if timed and self.expires[table] else None

    def admission_options(self) -> dict[str, Any]:
        if isinstance(self.limit, float):
            return {"admit_strategy": ProbabilityAdmissionStrategy(self.limit)}
        return {} if self.limit is None else super().admission_options()

    def judge(self, table: int) -> Judge | None:
        if not isinstance(self.limit, float):
            return None if self.limit is None else super().judge(table)
        key, below = table_key(3, "ab"[table]), self.limit * 2**32
        return lambda amounts, step: {i: number for i, number in amounts.items() if drawn(key, i, step) < below}

    # What comes before and after a step

    def coming_oldest(self) -> int:
        """Return what ``oldest`` will be of the next step."""
        return max(1, min([self.step + 1, *(p.number for p in self.pending)]) - self.protect_steps)

    def before_reading(self) -> None:
        for oracle in self.oracles:
            oracle.oldest = self.coming_oldest()

    def before_insert(self, keys: list[list[int]]) -> None:
        group = self.module.tables
        for t, oracle in enumerate(self.oracles):
            # An expired id that returns has its place before all others, if no other id has taken it, which depends on
            # slots. Where a bucket cannot hold all, that decides who fails: such batches find no expired ids.
            if oracle.ttl is not None and oracle.may_fail(keys[t], self.coming_oldest()):
                self.forget(t)
        self.before = group.stats()
        for t, (oracle, limits) in enumerate(zip(self.oracles, self.limits, strict=True)):
            if group.index.expires:
                assert (oracle.now, oracle.oldest) == (int(group.index.clock[SEEN]), int(group.index.clock[OLDEST]))
            if limits is not None:
                # How many expired ids are still in their places depends on which slots new ids took.
                oracle.grow(oracle.factor_for(keys[t], group.size(t), limits, self.coming_oldest()))

    def insert_into_oracles(
        self, keys: list[list[int]], frequencies: list[int] | None = None, admit_all: bool = False
    ) -> list[list[Entry | None]]:
        group = self.module.tables
        now = int(group.index.clock[NOW])
        self.forwards += not admit_all
        offered: list[set[int]] = []
        for t, oracle in enumerate(self.oracles):
            oracle.oldest = self.coming_oldest()
            oracle.now += 1
            assert oracle.now == now
            offered.append({key for key in keys[t] if oracle.get(key) is None})
            value = {SCORE_TIMESTAMP: now, SCORE_NO_EVICTION: now, SCORE_STEP: self.forwards}.get(self.strategies[t])
            assert value in (None, int(group.index.score_values[t]))
        found = super().insert_into_oracles(keys, frequencies, admit_all)
        after = group.stats()
        for t, name in enumerate("ab"):
            self.account(offered[t], keys[t], found[t], {n: after[name][n] - self.before[name][n] for n in after[name]})
        return found

    def account(self, offered: set[int], keys: list[int], found: list[Entry | None], change: dict[str, float]) -> None:
        """Check where the new ids of one table went, in ids and in occurrences."""
        read = {key: entry for key, entry in zip(keys, found, strict=True) if key in offered}
        rejected = {key for key, entry in read.items() if isinstance(entry, Rejected)}
        failed = {key for key, entry in read.items() if entry is None}
        left = change["evicted"] + change["expired"] + change["erased"]
        assert change["inserted"] == change["size"] + left
        assert len(offered) == change["size"] + left + len(rejected) + len(failed)
        for name, ids in (("misses", offered), ("non_admitted", rejected), ("failed", failed)):
            assert change[name] == sum(key in ids for key in keys), name
        assert change["hits"] + change["misses"] == len(keys)

    # Rules

    @rule(table=st.sampled_from([0, 1]), ids=st.lists(st.sampled_from(IDS), max_size=8), number=st.integers(0, 99))
    def assign(self, table: int, ids: list[int], number: int) -> None:
        weights = np.random.default_rng(number).standard_normal((len(ids), DIMS[table])).astype(np.float32)
        keys = [ids if t == table else [] for t in range(2)]
        self.before_insert(keys)
        placed = self.module.insert("ab"[table], torch.tensor(ids, dtype=torch.int64), torch.tensor(weights))
        found = self.insert_into_oracles(keys, admit_all=True)[table]
        assert placed.tolist() == [entry is not None for entry in found]
        for entry, row in zip(found, weights, strict=True):
            if entry is not None:
                entry.weights = row.copy()
        if table in self.counters:
            self.counters[table].forget(ids)

    @precondition(lambda self: self.module.tables.index.expires or self.oracles[0].rank)
    @rule(nanoseconds=st.sampled_from([10**7, TTL // 3, 2 * TTL, 4 * TTL]))
    def wait(self, nanoseconds: int) -> None:
        self.pass_time(nanoseconds)

    def pass_time(self, nanoseconds: int) -> None:
        self.module.tables.index.clock[SEEN] += nanoseconds
        for oracle in self.oracles:
            oracle.now += nanoseconds

    @precondition(lambda self: self.module.tables.index.expires)
    @rule(table=st.sampled_from([0, 1]))
    def erase_expired(self, table: int) -> None:
        self.forget(table)

    def forget(self, table: int) -> None:
        self.before_reading()
        group, oracle, name = self.module.tables, self.oracles[table], "ab"[table]
        lingering = group.size(table) - len(oracle.entries())
        assert self.module.erase_expired(name) == lingering
        oracle.erase_expired()
        assert group.stats()[name]["expired"] == oracle.counts["expired"]
        assert group.size(table) == oracle.size()

    # What holds after each

    def check_counts(self, stats: dict[str, float], oracle: ReferenceTable) -> None:
        # An expired id is counted once its place is free or taken. Which new ids took places of expired ids, and which
        # empty ones, depends on slots, of which the oracle knows nothing; ``erase_expired`` settles it.
        waiting = oracle.counts["expired"] - stats["expired"]
        assert waiting == 0 if oracle.ttl is None else waiting >= 0
        assert {n: stats[n] for n in oracle.counts} == {**oracle.counts, "expired": stats["expired"]}
        assert stats["size"] == oracle.size() + waiting
        assert stats["capacity"] == len(oracle.buckets) * 16

    @invariant()
    def nothing_is_lost_without_eviction(self) -> None:
        for strategy, oracle in zip(self.strategies, self.oracles, strict=True):
            assert strategy != SCORE_NO_EVICTION or oracle.counts["evicted"] == oracle.counts["failed"] == 0

    @invariant()
    def counters_are_equal(self) -> None:
        if self.counters:
            super().counters_are_equal()

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "limits"):
            return
        kind = type(self)
        fixed = [oracle for oracle, limits in zip(self.oracles, self.limits, strict=True) if limits is None]
        kind.fixed_examples += bool(fixed)
        kind.evicting_fixed_examples += any(oracle.counts["evicted"] for oracle in fixed)
        growing = [t for t in range(2) if self.limits[t] is not None]
        kind.growing_examples += any(len(self.oracles[t].buckets) > self.first_buckets(t) for t in growing)
        kind.expiring_examples += any(oracle.counts["expired"] for oracle in self.oracles)

    def first_buckets(self, table: int) -> int:
        return self.table_options(table)["init_capacity"] // 16


def run(backend: str, part: int = 0) -> None:
    if reason := reason_to_skip(backend):
        pytest.skip(f"{backend}: {reason}")
    small = {"capacities": (16, 16), "bag_size": 2, "batch_size": 1, "most_warm_up": 2, "load_factor": 0.25}
    sizes = small if backend == "interpret" else {"most_warm_up": 12}
    kind = type("Machine", (OptionsMachine,), {"backend": backend, "examples": 0, **sizes})
    examples, steps = EXAMPLES[backend]
    explore(kind, examples, steps, part)
    if backend != "interpret":
        assert kind.evicting_fixed_examples >= 0.9 * kind.fixed_examples
        assert min(kind.fixed_examples, kind.growing_examples, kind.expiring_examples) > 0
        assert min(kind.rejecting_examples, kind.failing_examples) > 0


@pytest.mark.parametrize(("backend", "part"), [*(("cpu", part) for part in range(PARTS["cpu"])), ("interpret", 0)])
def test_c28_state_machine_with_all_options_equals_the_oracle(backend: str, device: torch.device, part: int) -> None:
    run(backend, part)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["cuda"])
@pytest.mark.parametrize("part", range(PARTS["cuda"]))
def test_c28_state_machine_with_all_options_equals_the_oracle_on_a_gpu(
    backend: str, device: torch.device, part: int
) -> None:
    run(backend, part)
