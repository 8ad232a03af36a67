"""A hypothesis state machine: a module of two tables against the dict oracle.

Two tables share one module (three features, mixed dims), small enough that most runs evict. Forwards may stay
outstanding; their backward comes later, never, or after an erase took the row away.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.table.cpu.initialize import initial_values
from dynamicemb.table.index import NOW
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.scores import (
    SCORE_COMPOUND,
    SCORE_CUSTOMIZED,
    SCORE_LFU,
    SCORE_NO_EVICTION,
    SCORE_STEP,
    SCORE_TIMESTAMP,
)
from tests.support.oracle import Entry, Judge, ReferenceTable, Rejected
from tests.support.tables import UNIFORM, device_of, use_backend

INT64 = np.iinfo(np.int64)
IDS = [-4, -3, -2, -1, 0, INT64.min, INT64.max, *range(1, 54)]
FEATURE_TABLES = [0, 0, 1]
DIMS = [4, 3]
COLUMNS = [0, 4, 8, 11]
SCORES = {
    SCORE_TIMESTAMP: DynamicEmbScoreStrategy.TIMESTAMP,
    SCORE_STEP: DynamicEmbScoreStrategy.STEP,
    SCORE_CUSTOMIZED: DynamicEmbScoreStrategy.CUSTOMIZED,
    SCORE_NO_EVICTION: DynamicEmbScoreStrategy.NO_EVICTION,
    SCORE_LFU: DynamicEmbScoreStrategy.LFU,
    SCORE_COMPOUND: (DynamicEmbScoreStrategy.LFU, DynamicEmbScoreStrategy.TIMESTAMP),
}
# Seed and bag size, None for the largest: lists drawn element by element are too short to fill a table.
BATCHES = st.tuples(st.integers(0, 2**16), st.sampled_from([0, 1, None, None, None, None]))
EVICTING = [score for score in sorted(SCORES) if score != SCORE_NO_EVICTION]


def decayed(scores, cur_timestamp):
    """Rank by frequency and, as steps are milliseconds apart, by age about as much."""
    return math.log(max(scores[0], 1)) - (cur_timestamp - scores[1]) * 1e-7


def rank(stamp, count, now):
    return decayed((count, stamp), now)


@dataclass
class Pending:
    """A forward whose backward has not run: what each occurrence read."""

    number: int
    output: torch.Tensor
    bags: list[list[int]]
    entries: list[list[Entry | None]]


class TableMachine(RuleBasedStateMachine):
    """Subclasses choose the backend and sizes."""

    backend = "cpu"
    capacities = (32, 16)
    bag_size = 10
    batch_size = 2
    least_warm_up = 0
    most_warm_up = 4
    examples = 0
    evicting_examples = 0
    failing_examples = 0

    @initialize(
        strategies=st.lists(st.sampled_from(EVICTING), min_size=2, max_size=2) | st.just([SCORE_COMPOUND] * 2),
        with_function=st.booleans(),
        protect_steps=st.sampled_from([0, 0, 0, 1]),
        adagrad=st.booleans(),
        warm_up=st.sampled_from([4, 4, 4, 4, 4, 4, 4, 4, 4, 0]),
    )
    def construct(
        self, strategies: list[int], with_function: bool, protect_steps: int, adagrad: bool, warm_up: int
    ) -> None:
        self.strategies, self.protect_steps, self.adagrad = strategies, protect_steps, adagrad
        self.build(with_function and min(strategies) == SCORE_COMPOUND)
        self.warm_up(warm_up)

    def build(self, with_function: bool) -> None:
        options = [
            DynamicEmbTableOptions(
                dim=DIMS[t],
                bucket_capacity=16,
                score_strategy=SCORES[strategy],
                initializer_args=UNIFORM,
                protect_steps=self.protect_steps,
                score_function=decayed if with_function else None,
                **self.table_options(t),
                **self.admission_options(),
            )
            for t, strategy in enumerate(self.strategies)
        ]
        self.learning_rate = 0.5
        self.module = BatchedDynamicEmbeddingTablesV2(
            options,
            ["a", "b"],
            FEATURE_TABLES,
            optimizer="exact_adagrad" if self.adagrad else "sgd",
            learning_rate=self.learning_rate,
            eps=1e-3 if self.adagrad else 1e-8,
            seed=3,
            device=device_of(self.backend),
        )
        group = self.module.tables
        use_backend(group, self.backend)
        self.initializers = InitializerTable.create([UNIFORM] * 2, ["a", "b"], 3, torch.device("cpu"))
        self.oracles = [
            ReferenceTable(
                capacity // 16,
                16,
                self.strategies[t],
                lambda key, t=t: self.new_row(t, key),
                rank if with_function else None,
                self.ttl(t),
                self.judge(t),
            )
            for t, capacity in enumerate(group.capacities)
        ]
        self.customized = ["ab"[t] for t in range(2) if self.strategies[t] == SCORE_CUSTOMIZED]
        self.module.set_score(dict.fromkeys(self.customized, 3))
        self.step = 0
        self.pending: list[Pending] = []
        self.dropped = [0, 0]

    def warm_up(self, batches: int) -> None:
        for number in range(min(max(batches, self.least_warm_up), self.most_warm_up)):
            self.backward(self.forward(self.bags(number, self.bag_size)))

    # For subclasses whose tables grow, forget ids, or do not admit every one

    def table_options(self, table: int) -> dict[str, Any]:
        return {"max_capacity": self.capacities[table]}

    def ttl(self, table: int) -> int | None:
        return None

    def before_insert(self, keys: list[list[int]]) -> None:
        """Do with the oracles what comes before a step on ids of each table."""

    def before_reading(self) -> None:
        """Do with the oracles what comes before reading without a step."""

    def admission_options(self) -> dict[str, Any]:
        return {}

    def judge(self, table: int) -> Judge | None:
        return None

    def new_row(self, table: int, key: int) -> tuple[np.ndarray, np.ndarray]:
        values = initial_values(self.initializers, table, torch.tensor([key], device="cpu"), DIMS[table])
        return values[0].numpy().copy(), np.zeros(DIMS[table] if self.adagrad else 0, np.float32)

    # Batches

    def bags_of(self, batch: tuple[int, int | None]) -> list[list[int]]:
        """Return what one of BATCHES stands for."""
        seed, bag_size = batch
        return self.bags(seed, self.bag_size if bag_size is None else bag_size)

    def bags(self, seed: int, bag_size: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(0, bag_size + 1, len(FEATURE_TABLES) * self.batch_size)
        return [[IDS[i] for i in rng.integers(0, len(IDS), size)] for size in sizes]

    def tensors(self, bags: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
        return ids, torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)

    def table_of_bag(self, k: int) -> int:
        return FEATURE_TABLES[k // self.batch_size]

    def cells(self, matrix: torch.Tensor, k: int) -> np.ndarray:
        """Return the columns of bag ``k`` in a ``[B, total_D]`` matrix."""
        feature, sample = divmod(k, self.batch_size)
        return matrix.detach().cpu().numpy()[sample, COLUMNS[feature] : COLUMNS[feature + 1]]

    def check_output(self, output: torch.Tensor, entries: list[list[Entry | None]]) -> None:
        for k, bag in enumerate(entries):
            expected = np.zeros(DIMS[self.table_of_bag(k)], np.float32)
            for entry in bag:
                if entry is not None:
                    expected += entry.weights
            self.check_floats(self.cells(output, k), expected)

    def check_floats(self, got: np.ndarray, expected: np.ndarray) -> None:
        if self.backend == "cuda":
            # Compiled kernels contract multiply-adds: each step rounds once where the oracle rounds twice.
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        elif not np.array_equal(got, expected):
            # Takes longer, and knows that NaN equals NaN.
            np.testing.assert_array_equal(got, expected)

    # Training

    def forward(self, bags: list[list[int]], frequencies: list[int] | None = None) -> Pending:
        ids, offsets = self.tensors(bags)
        counts = None if frequencies is None else torch.tensor(frequencies[: ids.numel()], dtype=torch.int64)
        owners = [self.table_of_bag(k) for k in range(len(bags))]
        keys = [[key for bag, owner in zip(bags, owners, strict=True) if owner == t for key in bag] for t in range(2)]
        self.before_insert(keys)
        output = self.module(ids, offsets, frequency_counters=counts)
        read = iter([entry for found in self.insert_into_oracles(keys, frequencies) for entry in found])
        entries = [[next(read) for _ in bag] for bag in bags]
        self.check_output(output, entries)
        return Pending(self.step, output, bags, entries)

    def oldest(self) -> int:
        """Return the oldest protected step of the step that began last."""
        return max(1, min([self.step, *(p.number for p in self.pending)]) - self.protect_steps)

    def insert_into_oracles(
        self, keys: list[list[int]], frequencies: list[int] | None = None, admit_all: bool = False
    ) -> list[list[Entry | None]]:
        """Do with the oracles what the module has just done with ids of each table; returns what each one reads."""
        self.step += 1
        values = self.module.tables.index.score_values.tolist()
        now = int(self.module.tables.index.clock[NOW])
        parts = [None, None] if frequencies is None else [frequencies[: len(keys[0])], frequencies[len(keys[0]) :]]
        if admit_all:
            # An import has the number of the training forward to come.
            values = [
                value + (strategy == SCORE_STEP)
                for value, strategy in zip(values, self.module.tables.options.strategies, strict=True)
            ]
        return [
            oracle.lookup(keys[t], parts[t], values[t], self.step, self.oldest(), now, admit_all)[0]
            for t, oracle in enumerate(self.oracles)
        ]

    def backward(self, pending: Pending) -> None:
        rng = np.random.default_rng(pending.number)
        grad = torch.tensor(rng.integers(-8, 9, pending.output.shape).astype(np.float32) / 4)
        pending.output.backward(grad)
        sums: dict[int, tuple[Entry, np.ndarray]] = {}
        for k, (bag, entries) in enumerate(zip(pending.bags, pending.entries, strict=True)):
            table = self.table_of_bag(k)
            for key, entry in zip(bag, entries, strict=True):
                if entry is None or isinstance(entry, Rejected):
                    continue
                if self.oracles[table].get(key) is not entry:
                    self.dropped[table] += 1
                    continue
                _, total = sums.setdefault(id(entry), (entry, np.zeros(DIMS[table], np.float32)))
                total += self.cells(grad, k)
        for entry, total in sums.values():
            self.apply(entry, total)

    def apply(self, entry: Entry, grad: np.ndarray) -> None:
        rate = np.float32(self.learning_rate)
        if self.adagrad:
            entry.state += grad * grad
            entry.weights -= rate * grad / (np.sqrt(entry.state) + np.float32(1e-3))
        else:
            entry.weights -= rate * grad

    @rule(batch=BATCHES)
    def train(self, batch: tuple[int, int | None]) -> None:
        self.backward(self.forward(self.bags_of(batch)))

    @precondition(lambda self: max(self.strategies) >= SCORE_LFU)
    @rule(batch=BATCHES, seed=st.integers(0, 999))
    def train_with_frequencies(self, batch: tuple[int, int | None], seed: int) -> None:
        bags = self.bags_of(batch)
        frequencies = np.random.default_rng(seed).integers(1, 9, sum(len(bag) for bag in bags)).tolist()
        self.backward(self.forward(bags, frequencies))

    @precondition(lambda self: len(self.pending) < 2)
    @rule(batch=BATCHES)
    def forward_and_wait(self, batch: tuple[int, int | None]) -> None:
        self.pending.append(self.forward(self.bags_of(batch)))

    @precondition(lambda self: self.pending)
    @rule(newest=st.booleans())
    def backward_of_waiting(self, newest: bool) -> None:
        self.backward(self.pending.pop(-1 if newest else 0))

    @precondition(lambda self: self.pending)
    @rule()
    def drop_waiting(self) -> None:
        self.pending.pop()

    @rule(batch=BATCHES)
    def forward_without_grad(self, batch: tuple[int, int | None]) -> None:
        with torch.no_grad():
            self.forward(self.bags_of(batch))

    # Everything else

    @rule(batch=BATCHES)
    def evaluate(self, batch: tuple[int, int | None]) -> None:
        bags = self.bags_of(batch)
        self.before_reading()
        before = [tensor.clone() for tensor in self.module.tables.index.tensors()]
        self.module.eval()
        output = self.module(*self.tensors(bags))
        self.module.train()
        self.check_output(output, [[self.oracles[self.table_of_bag(k)].get(i) for i in b] for k, b in enumerate(bags)])
        for old, new in zip(before, self.module.tables.index.tensors(), strict=True):
            assert torch.equal(old, new)

    @rule(table=st.sampled_from([0, 1]), ids=st.lists(st.sampled_from(IDS), max_size=8))
    def erase(self, table: int, ids: list[int]) -> None:
        self.before_reading()
        count = self.module.erase("ab"[table], torch.tensor(ids, dtype=torch.int64))
        assert count == self.oracles[table].erase(ids)

    @precondition(lambda self: self.customized)
    @rule(a=st.integers(1, 9), b=st.integers(1, 9))
    def set_score(self, a: int, b: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.module.set_score({name: score for name, score in (("a", a), ("b", b)) if name in self.customized})

    @rule(rate=st.sampled_from([0.25, 0.5, 1.0]))
    def set_learning_rate(self, rate: float) -> None:
        self.module.set_learning_rate(rate)
        self.learning_rate = rate

    @invariant()
    def contents_are_equal(self) -> None:
        group = self.module.tables
        group.check_invariants()
        self.before_reading()
        stats = self.module.stats()
        for t, (name, oracle) in enumerate(zip("ab", self.oracles, strict=True)):
            slots = group.scan(t)
            ids = group.index.keys[slots].tolist()
            entries = oracle.entries()
            assert sorted(ids) == sorted(entries)
            weights, state = group.read(t, group.index.rows[slots])
            exported, scores = self.module.export_scores(name, "cpu")
            assert exported.tolist() == ids
            expected = [entries[key] for key in ids]
            compound = self.strategies[t] == SCORE_COMPOUND
            assert scores.tolist() == [[e.score, e.stamp] if compound else e.score for e in expected], ids
            if expected:
                self.check_floats(weights.cpu().numpy(), np.stack([entry.weights for entry in expected]))
                self.check_floats(state.cpu().numpy(), np.stack([entry.state for entry in expected]))
            self.check_counts(stats[name], oracle)
            assert stats[name]["dropped_gradients"] == self.dropped[t]

    def check_counts(self, stats: dict[str, float], oracle: ReferenceTable) -> None:
        assert {n: stats[n] for n in oracle.counts} == oracle.counts

    def teardown(self) -> None:
        if hasattr(self, "oracles"):
            kind = type(self)
            kind.examples += 1
            kind.evicting_examples += any(oracle.counts["evicted"] for oracle in self.oracles)
            kind.failing_examples += any(oracle.counts["failed"] for oracle in self.oracles)


def explore(machine: type[TableMachine], examples: int, steps: int, part: int = 0) -> None:
    """Run a machine of its own class: it counts examples there."""
    run_state_machine_as_test(
        seed(part)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=False,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.examples >= examples
