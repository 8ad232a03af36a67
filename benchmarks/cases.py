"""What is measured: one ``Case`` per line of the report."""

from dataclasses import dataclass, replace
from fnmatch import fnmatch

from benchmarks.engines import Build, dynamic, dynamic_sgd, static


@dataclass(frozen=True)
class Case:
    """One workload, who runs it, and what the comparison should give.

    Attributes:
        name: unique.
        tables: T, one feature each.
        rows: rows of each table.
        dim: D, fp32.
        num_ids: N wanted; the batch size is the nearest that fits.
        bag_length: ids of a bag; 1 without pooling.
        optimizer: value of an ``EmbOptimType``.
        pooling: SUM, MEAN or NONE.
        train: forward and backward, else an evaluation forward.
        new_share: share of the ids of a batch that no table has seen; with full tables each evicts one.
        alpha: exponent of the power law of id popularity; 0 is uniform.
        baseline: builds what the time is compared with.
        ours: builds what is measured.
        target: the ratio to the baseline to reach, or None.
        device: key of ``timing.TIMERS``.
        note: what the ratio compares, if not the same work.
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

    @property
    def batch_size(self) -> int:
        """B: samples of a batch, each with one bag of every table."""
        return max(1, round(self.num_ids / (self.tables * self.bag_length)))

    def shrink(self, rows: int, num_ids: int) -> "Case":
        """Return the same case with at most so many rows and ids."""
        return replace(self, rows=min(rows, self.rows), num_ids=min(num_ids, self.num_ids))


CASES = [
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
]


def select(patterns: list[str]) -> list[Case]:
    """Return the cases whose name matches one of the patterns (``*`` for anything); all for none.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatch(case.name, pattern) for case in CASES):
            raise ValueError(f"no case matches {pattern!r}; there are {', '.join(case.name for case in CASES)}")
    return [case for case in CASES if not patterns or any(fnmatch(case.name, pattern) for pattern in patterns)]
