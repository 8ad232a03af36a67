"""The workloads that TorchRec shards."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.workloads import MLPERF_LENGTHS, MLPERF_ROWS


@dataclass(frozen=True)
class ShardedCase:
    """A collection under ``DistributedModelParallel``, and its batches.

    Attributes:
        name: unique.
        pooled: an ``EmbeddingBagCollection`` with SUM, else an ``EmbeddingCollection``.
        rows: rows of each table, one feature each.
        lengths: ids that a sample has of each feature.
        dim: D.
        batch_size: samples of a batch, of each rank.
        optimizer: value of an ``EmbOptimType``.
        train: forward and backward, else an evaluation forward.
        device: ``cpu`` or ``cuda``.
        alpha: exponent of the power law of id popularity; 0 is uniform.
        ranks: processes, on one host; on a GPU, as many GPUs.
    """

    name: str
    pooled: bool
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    dim: int
    batch_size: int
    optimizer: str
    train: bool = True
    device: str = "cuda"
    alpha: float = 1.05
    ranks: int = 1

    @property
    def features(self) -> list[str]:
        """The name of each feature."""
        return [f"feature_{number}" for number in range(len(self.rows))]

    @property
    def num_ids(self) -> int:
        """N: ids of a batch, of each rank."""
        return self.batch_size * sum(self.lengths)

    def shrink(self, rows: int, num_ids: int) -> "ShardedCase":
        """Return the same case with tables of at most so many rows, and about so many ids a step at most."""
        return replace(
            self,
            rows=tuple(min(rows, table) for table in self.rows),
            batch_size=min(self.batch_size, max(1, num_ids // sum(self.lengths))),
        )

    def on_ranks(self, ranks: int) -> "ShardedCase":
        """Return the same case on several ranks, each with batches of its own; its name says so."""
        return self if ranks == 1 else replace(self, ranks=ranks, name=f"{self.name}_{ranks}_ranks")


# The five largest tables of MLPerf have 40 M rows; they end here, so that three models fit a GPU beside each other.
_MOST_ROWS = 4_000_000
_A_ROWS = 1_677_721

_Fields = dict[str, Any]


def _cases(device: str, prefix: str, most_rows: int, batches: tuple[int, int, int]) -> list[ShardedCase]:
    """Return the workloads, each trained and evaluated.

    Args:
        device: where.
        prefix: of the names.
        most_rows: of a table.
        batches: samples of a batch of each workload.
    """
    mlperf = tuple(min(rows, most_rows) for rows in MLPERF_ROWS)
    # FBGEMM has no Adam on the CPU.
    rowwise, sequence_optimizer = "exact_row_wise_adagrad", "adam" if device == "cuda" else "exact_sgd"
    bags: _Fields = {"pooled": True, "rows": mlperf, "optimizer": rowwise}
    sequences: _Fields = {"pooled": False, "rows": (min(_A_ROWS, most_rows),) * 10, "optimizer": sequence_optimizer}
    workloads: dict[str, _Fields] = {
        "mlperf": {**bags, "lengths": MLPERF_LENGTHS, "dim": 128, "batch_size": batches[0]},
        "one_id": {**bags, "lengths": (1,) * len(mlperf), "dim": 64, "batch_size": batches[1]},
        "sequences": {**sequences, "lengths": (100,) * 10, "dim": 128, "batch_size": batches[2]},
    }
    return [
        ShardedCase(f"{prefix}_{name}_{'train' if train else 'eval'}", train=train, device=device, **fields)
        for name, fields in workloads.items()
        for train in (True, False)
    ]


CPU_SHARDED = _cases("cpu", "cpu_torchrec", 100_000, (256, 2048, 32))
GPU_SHARDED = _cases("cuda", "torchrec", _MOST_ROWS, (8192, 8192, 1024))
