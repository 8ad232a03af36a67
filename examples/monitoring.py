"""See what dynamic tables do while they train: scalars for TensorBoard or any other writer, and how full buckets are.

A writer is anything with ``add_scalar(tag, value, step)``, such as TensorBoard's ``SummaryWriter``::

    logger = TableLogger(model.module.tables.dynamic_embedding_modules, SummaryWriter("runs"))
    for step, batch in enumerate(batches):
        train(batch)
        logger(step)
    logger.finish(step)

Nothing here imports the example's model, so it can be copied into another project as it is.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch


class Writer(Protocol):
    """Takes numbers by name and step."""

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...


class JsonLines:
    """A writer for machines without TensorBoard: one line of JSON per number."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._file.write(json.dumps({"step": step, "tag": tag, "value": value}) + "\n")

    def close(self) -> None:
        self._file.close()


def open_writer(folder: Path) -> Any:
    """Return TensorBoard's writer where it is installed, else one of ``scalars.jsonl`` in the folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return JsonLines(folder / "scalars.jsonl")
    return SummaryWriter(str(folder))


class TableLogger:
    """Hands the statistics of dynamic tables to a writer, every so many steps, without making a GPU wait.

    The numbers of a step may be those of the step logged before it: what has arrived on the host is written. Tags are
    ``tables/<table>/<name of stats()>``; ``hit_rate`` is that of the lookups since the step logged before.
    """

    def __init__(self, modules: Iterable[Any], writer: Writer, every: int = 20) -> None:
        """Log modules that have ``stats(wait)``, this rank's ``BatchedDynamicEmbeddingTablesV2``, to a writer.

        Args:
            modules: the modules.
            writer: where the numbers go.
            every: steps from one logged step to the next.
        """
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._modules = list(modules)
        self._writer = writer
        self._every = every
        self._lookups: dict[str, tuple[float, float]] = {}

    def __call__(self, step: int) -> None:
        """Log a step if it is its turn."""
        if step % self._every == 0:
            self._write(step, wait=False)

    def finish(self, step: int) -> None:
        """Log the last step, waiting for its numbers."""
        self._write(step, wait=True)

    def _write(self, step: int, wait: bool) -> None:
        for module in self._modules:
            for table, stats in module.stats(wait=wait).items():
                for name, value in stats.items():
                    self._writer.add_scalar(f"tables/{table}/{name}", value, step)
                hits, lookups = stats["hits"], stats["hits"] + stats["misses"]
                hits_before, lookups_before = self._lookups.get(table, (0, 0))
                if lookups > lookups_before:
                    rate = (hits - hits_before) / (lookups - lookups_before)
                    self._writer.add_scalar(f"tables/{table}/hit_rate", rate, step)
                self._lookups[table] = hits, lookups


def bucket_loads(modules: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Return, per table, how many of its buckets hold 0, 1, ... ids."""
    return {name: module.bucket_loads(name) for module in modules for name in module.table_names}


def fullest(loads: torch.Tensor) -> str:
    """Describe a table by its buckets.

    Example: ``loads = [1, 0, 3, 1]`` are "5 buckets of 3 slots: 2 ids at the median, 3 at most, 1 full".
    """
    num_buckets, slots = int(loads.sum()), loads.numel() - 1
    reached = torch.cumsum(loads, 0)
    median = int((reached * 2 >= num_buckets).nonzero()[0])
    return (
        f"{num_buckets} buckets of {slots} slots: {median} ids at the median, {int(loads.nonzero()[-1])} at most, "
        f"{int(loads[-1])} full"
    )


def plot_bucket_loads(loads: dict[str, torch.Tensor], path: Path) -> bool:
    """Draw a histogram for each table; returns False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(loads), squeeze=False, figsize=(7, 0.6 + 1.1 * len(loads)), layout="constrained")
    for axes, (name, counts) in zip(grid[:, 0], loads.items(), strict=True):
        axes.bar(range(counts.numel()), counts.tolist(), width=1.0, color="#4878a8")
        axes.set_title(f"{name}: {fullest(counts)}", fontsize=8)
        axes.set_xlim(-1, counts.numel())
        axes.set_ylabel("buckets", fontsize=7)
        axes.tick_params(labelsize=7)
    grid[-1, 0].set_xlabel("ids in a bucket", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
