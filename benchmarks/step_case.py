"""A step of tables on their own: its workload, who runs it, and what the comparison should give."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.engines import Build, dynamic, static


@dataclass(frozen=True)
class Case:
    """One workload, who runs it, and what the comparison should give.

    Attributes:
        name: unique.
        tables: T, one feature each.
        rows: rows of each table.
        dim: D.
        num_ids: N wanted; the batch size is the nearest that fits.
        bag_length: ids of a bag; 1 without pooling.
        bag_lengths: ids of a bag of each table, where the tables differ; then ``bag_length`` says nothing.
        optimizer: value of an ``EmbOptimType``.
        pooling: SUM, MEAN or NONE.
        train: forward and backward, else an evaluation forward.
        new_share: share of the ids of a batch that no table has seen; with full tables each evicts one.
        alpha: exponent of the power law of id popularity; 0 is uniform.
        baseline: builds what the time is compared with.
        ours: builds what is measured.
        target: the ratio to the baseline to reach, or None; on a GPU that of the replayed graph.
        device: ``cpu`` or ``cuda``.
        note: what the ratio compares, if not the same work.
        capacity: most rows of each of our tables; 0 is ``rows``, and then they are full.
        population: ids of each table, more than it has rows; 0 is ``rows``, and then nothing is ever missing.
        cold: every repetition is the first step of an empty table.
        dtype: ``fp32`` or ``bf16``, of weights, outputs and gradients.
        eager_target: on a GPU, the ratio that eager steps have to reach, or None.
        policy: how our tables decide what they hold, see ``policies.table_options``.
        grows: in every repetition all tables, of ``rows`` ids each, double; the report has the time per id held.
        loop: time steps by the wall clock of a loop with one wait at the end, for steps that the host bounds.
    """

    name: str
    tables: int = 10
    rows: int = 200_000
    dim: int = 64
    num_ids: int = 65_536
    bag_length: int = 10
    optimizer: str = "exact_sgd"
    pooling: str = "SUM"
    train: bool = True
    new_share: float = 0.0
    alpha: float = 0.0
    baseline: Build = static
    ours: Build = dynamic
    target: float | None = None
    device: str = "cpu"
    note: str = ""
    capacity: int = 0
    population: int = 0
    cold: bool = False
    dtype: str = "fp32"
    eager_target: float | None = None
    loop: bool = False
    grows: bool = False
    policy: str = "lru"
    bag_lengths: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ids of a bag, for each table."""
        return self.bag_lengths or (self.bag_length,) * self.tables

    @property
    def batch_size(self) -> int:
        """B: samples of a batch, each with one bag of every table."""
        return max(1, round(self.num_ids / sum(self.lengths)))

    @property
    def full(self) -> bool:
        """Whether our tables have no more slots than rows, so that every new id evicts another."""
        return self.capacity <= self.rows

    @property
    def changes(self) -> bool:
        """Whether a step meets ids that only it makes known, so that a batch serves one engine alone."""
        return self.new_share > 0 or self.population > 0

    def shrink(self, rows: int, num_ids: int) -> "Case":
        """Return the same case with at most so many rows and ids; capacity and population in proportion."""
        scale = min(rows, self.rows) / self.rows
        return replace(
            self,
            rows=min(rows, self.rows),
            num_ids=min(num_ids, self.num_ids),
            capacity=round(self.capacity * scale),
            population=round(self.population * scale),
        )


# Ids of a step, over all tables.
_A_IDS = 1_048_570
A_ROWS = 16_777_210


def workload_a(name: str, tables: int = 10, **changes: Any) -> Case:
    """Return a GPU case like workload A: 16.8 M rows, 1.05 M ids a step by a power law, D = 128, one id per bag.

    A quarter more slots than rows: every id keeps its row, and a step with known ids inserts and evicts nothing.
    """
    rows = A_ROWS // tables
    base = Case(
        name,
        tables,
        rows,
        128,
        _A_IDS,
        1,
        pooling="NONE",
        alpha=1.05,
        capacity=rows + rows // 4,
        device="cuda",
    )
    return replace(base, **changes)
