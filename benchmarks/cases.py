"""What is measured: one ``Case`` per line of the report."""

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from benchmarks.engines import Build, counting, dynamic, dynamic_sgd, growing, grown, plain, static


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

    @property
    def batch_size(self) -> int:
        """B: samples of a batch, each with one bag of every table."""
        return max(1, round(self.num_ids / (self.tables * self.bag_length)))

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


_GROWTH: dict[str, Any] = {
    "grows": True,
    "ours": growing,
    "baseline": grown,
    "note": "to the same step in tables that are large already",
}


def _policies(prefix: str, workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of cases that compare the policies, in full tables, with the plain one."""
    cases: list[dict[str, Any]] = [
        {"policy": policy, "baseline": plain, "note": "to the plain LRU step"}
        for policy in ("lfu", "compound", "ttl", "admission", "chance", "deterministic")
    ]
    cases.append({"policy": "score_function", "baseline": counting, "note": "to the LFU step", "target": 1.3})
    for case in cases:
        if case["policy"] == "deterministic":
            case["target"] = 1.5
        case |= {"name": f"{prefix}_{case['policy']}", **workload}
    return cases


CPU_CASES = [
    Case("sgd_train", target=1.5),
    Case("eval", train=False, target=2.5),
    Case("adagrad_train", optimizer="exact_adagrad", target=0.5),
    Case("rowwise_adagrad_train", optimizer="exact_row_wise_adagrad"),
    Case(
        "adam_train", optimizer="adam", baseline=dynamic_sgd, target=2.0, note="to our SGD: FBGEMM has no Adam on CPU"
    ),
    Case("new_ids_train", new_share=0.1, note="baseline trains known ids only"),
    Case("sequence_train", pooling="NONE", bag_length=1),
    Case("sequence_eval", pooling="NONE", bag_length=1, train=False),
    Case("batch_4096_train", num_ids=4096),
    Case("batch_4096_eval", num_ids=4096, train=False),
    Case("batch_64_train", num_ids=60, bag_length=3),
    Case("batch_64_eval", num_ids=60, bag_length=3, train=False),
    # The CPU is always deterministic.
    *(Case(**case) for case in _policies("full", {"new_share": 0.1}) if case["policy"] != "deterministic"),
    Case("growth", tables=1, rows=1 << 19, new_share=0.1, num_ids=4096, capacity=1 << 21, **_GROWTH),
]

# Ids of a step, over all tables.
_A_IDS = 1_048_570
_A_ROWS = 16_777_210


def workload_a(name: str, tables: int = 10, **changes: Any) -> Case:
    """Return a GPU case like workload A: 16.8 M rows, 1.05 M ids a step by a power law, D = 128, one id per bag.

    A quarter more slots than rows: every id keeps its row, and a step with known ids inserts and evicts nothing.
    """
    rows = _A_ROWS // tables
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


_SUM: dict[str, Any] = {"pooling": "SUM", "bag_length": 10}
_EVAL: dict[str, Any] = {"train": False}
_BF16: dict[str, Any] = {"dtype": "bf16", "note": "FBGEMM has no bf16 rows on a GPU: its rows are fp16, outputs bf16"}
_SMALL: dict[str, Any] = {"num_ids": 4096, "loop": True, "target": 0.5, "eager_target": 1.0}
_KNOWN = "baseline trains known ids only"

GPU_CASES = [
    workload_a("a_sgd_train", target=0.60),
    workload_a("a_adam_train", optimizer="adam", target=0.62),
    workload_a("a_adagrad_train", optimizer="exact_adagrad"),
    workload_a("a_rowwise_adagrad_train", optimizer="exact_row_wise_adagrad"),
    workload_a("a_eval", **_EVAL, target=0.35),
    # The first step of an empty table, a tenth of the ids new, and full tables that evict about 180,000 ids a step: the
    # power law over 40 M ids for each table of 1.7 M rows.
    workload_a("a_first_step", capacity=0, cold=True, target=1.5, note=f"ours: empty tables; {_KNOWN}"),
    workload_a("a_new_ids_train", capacity=_A_ROWS // 5, new_share=0.1, target=0.75, note=_KNOWN),
    workload_a("a_full_train", capacity=0, population=40_000_000, target=0.75, note="baseline: ids modulo rows"),
    workload_a("a_sum_sgd_train", **_SUM),
    workload_a("a_sum_adam_train", **_SUM, optimizer="adam"),
    workload_a("a_sum_adagrad_train", **_SUM, optimizer="exact_adagrad"),
    workload_a("a_sum_rowwise_adagrad_train", **_SUM, optimizer="exact_row_wise_adagrad"),
    workload_a("a_sum_eval", **_SUM, **_EVAL),
    workload_a("a_growth", tables=1, rows=1 << 22, capacity=1 << 24, new_share=0.1, num_ids=4096, **_GROWTH),
    *(workload_a(**case) for case in _policies("a_full", {"capacity": 0, "population": 40_000_000})),
    workload_a("small_train", **_SMALL),
    workload_a("small_eval", **_SMALL, **_EVAL),
    workload_a("small_sum_train", **_SMALL, **_SUM),
    workload_a("a_dim_16_train", dim=16, target=1.0),
    workload_a("a_dim_16_eval", dim=16, **_EVAL, target=1.0),
    workload_a("a_dim_64_train", dim=64),
    workload_a("a_dim_64_eval", dim=64, **_EVAL),
    workload_a("a_dim_256_train", dim=256),
    workload_a("a_dim_256_eval", dim=256, **_EVAL),
    workload_a("a_tables_1_train", tables=1),
    workload_a("a_tables_1_eval", tables=1, **_EVAL),
    workload_a("a_tables_100_train", tables=100, target=1.0),
    workload_a("a_tables_100_eval", tables=100, **_EVAL, target=1.0),
    workload_a("a_bf16_sgd_train", **_BF16),
    workload_a(
        "a_bf16_adam_train",
        dtype="bf16",
        optimizer="adam",
        note="FBGEMM's Adam has no rows of 16 bits: its rows are fp32, outputs bf16",
    ),
    workload_a("a_bf16_eval", **_BF16, **_EVAL),
    workload_a("a_bf16_sum_train", **_BF16, **_SUM),
]

CASES = {"cpu": CPU_CASES, "cuda": GPU_CASES}


def select(patterns: list[str], device: str) -> list[Case]:
    """Return the cases of a device whose name matches one of the patterns (``*`` for anything); all for none.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    cases = CASES[device]
    for pattern in patterns:
        if not any(fnmatch(case.name, pattern) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise ValueError(f"no case of {device} matches {pattern!r}; there are {names}")
    return [case for case in cases if not patterns or any(fnmatch(case.name, pattern) for pattern in patterns)]
