"""Move a model in the middle of its training from static tables to dynamic ones, and show that nothing is lost.

    python examples/warm_start.py                             # one process
    torchrun --nproc_per_node 2 examples/warm_start.py        # two, with the tables spread over them

The model of ``movielens.py`` trains for one epoch on static tables, whose rows a vocabulary numbers. A checkpoint of
``torch.distributed.checkpoint`` is written. A second model, with dynamic tables and raw 64-bit ids, takes the rows and
the state of their optimizer from the checkpoint. Then both models train on the same batches, and their losses are
compared step by step.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from movielens_data import NUM_DENSE, Batch, Ratings, Vocabulary, batches
from movielens_model import Rates, build_model, distribute_dynamic, distribute_static
from movielens_run import choose_device, make_tables, silence_libraries, start_processes, warm_up
from movielens_training import Data, load_data, train_step
from rich.console import Console
from rich.table import Table as Grid
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

from dynamicemb import import_static, state_dict_without_rows

T = TypeVar("T")

RATES = Rates(learning_rate=0.05, eps=3e-3)
DIM = 16
BATCH_SIZE = 512
# Room for every id.
CAPACITY_FRACTION = 2.0
MAX_DIFFERENCE = 1e-5


class Trained:
    """A model and the Adam of its dense layers; the tables have their own optimizer, in backward."""

    def __init__(self, model: DistributedModelParallel) -> None:
        self.model = model
        dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
        self.optimizer = torch.optim.Adam(dense, lr=1e-3)

    def step(self, batch: Batch) -> float:
        """Train on a batch; returns its mean loss over all ranks."""
        loss = train_step(self.model, self.optimizer, batch)
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    def dense_state(self) -> dict[str, torch.Tensor]:
        """Return the weights of the dense layers."""
        return {name: value for name, value in self.model.state_dict().items() if not name.startswith("tables.")}


def shares(ratings: Ratings, epoch: int) -> Iterator[Batch]:
    """Yield this rank's share of every batch of an epoch; raw ids and those of a vocabulary come in the same order."""
    return batches(ratings, BATCH_SIZE, dist.get_rank(), dist.get_world_size(), epoch)


def watched(steps: Iterator[T], total: int, title: str) -> Iterator[T]:
    """Yield the same behind a bar on rank 0."""
    return iter(tqdm(steps, desc=title, total=total, disable=dist.get_rank() != 0, mininterval=0.5))


def folder_of_rank_0(folder: str) -> Path:
    """Return rank 0's folder on all ranks."""
    path = [folder]
    dist.broadcast_object_list(path)
    return Path(path[0])


def train_static(data: Data, vocabulary: Vocabulary, device: torch.device) -> Trained:
    """Train a model with static tables for one epoch."""
    torch.manual_seed(0)
    model = build_model(make_tables(data, vocabulary, None), NUM_DENSE, DIM)
    static = Trained(distribute_static(model, RATES, device))
    ratings = vocabulary.encode(data.train)
    for batch in watched(shares(ratings, epoch=0), len(ratings) // BATCH_SIZE, "static tables"):
        static.step(batch)
    return static


def move(static: Trained, data: Data, vocabulary: Vocabulary, folder: Path, device: torch.device) -> Trained:
    """Make a model with dynamic tables that continues where the static one is, by way of a checkpoint."""
    dcp.save(
        {"model": static.model.state_dict(), "fused_optimizer": static.model.fused_optimizer.state_dict()},
        checkpoint_id=folder,
    )
    tables = make_tables(data, vocabulary, CAPACITY_FRACTION)
    dynamic = Trained(distribute_dynamic(build_model(tables, NUM_DENSE, DIM), tables, RATES, device, seed=0))
    import_static(dynamic.model, folder, id_maps={feature: vocabulary.rows(feature) for feature in data.train.bags})
    # Everything that is no table moves as between any two models.
    with state_dict_without_rows():
        dynamic.model.load_state_dict(static.dense_state(), strict=False)
    # The static model goes on training here, so it keeps its own copy.
    dynamic.optimizer.load_state_dict(copy.deepcopy(static.optimizer.state_dict()))
    return dynamic


def compare(static: Trained, dynamic: Trained, data: Data, vocabulary: Vocabulary, steps: int) -> list[list[float]]:
    """Train both models on the same batches; returns the losses of every step, static and dynamic."""
    pairs = zip(shares(vocabulary.encode(data.train), epoch=1), shares(data.train, epoch=1), strict=True)
    chosen = watched(islice(pairs, steps), min(steps, len(data.train) // BATCH_SIZE), "both")
    return [[static.step(encoded), dynamic.step(raw)] for encoded, raw in chosen]


def report(losses: list[list[float]], console: Console) -> bool:
    """Print the losses; returns whether they agree."""
    grid = Grid("step", title="loss after the move")
    for column in ("static", "dynamic", "difference"):
        grid.add_column(column, justify="right")
    for step in sorted({0, 1, 9, 49, len(losses) - 1} & set(range(len(losses)))):
        ours = losses[step]
        grid.add_row(str(step + 1), *(f"{loss:.7f}" for loss in ours), f"{ours[1] - ours[0]:+.1e}")
    console.print(grid)
    largest = max(abs(dynamic - static) for static, dynamic in losses)
    good = largest <= MAX_DIFFERENCE
    verdict = "ok" if good else f"more than {MAX_DIFFERENCE:.0e}"
    console.print(f"largest difference of {len(losses)} steps: {largest:.1e}: {verdict}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="From static tables to dynamic ones", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=100, help="steps after the move (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU for each process")
    args = parser.parse_args()
    silence_libraries()
    device = start_processes(choose_device(args.device))
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    try:
        warm_up(DIM, device, console)
        data = load_data()
        vocabulary = Vocabulary(data.train)
        static = train_static(data, vocabulary, device)
        with TemporaryDirectory() as own:
            dynamic = move(static, data, vocabulary, folder_of_rank_0(own), device)
            dist.barrier()
        return 0 if report(compare(static, dynamic, data, vocabulary, args.steps), console) else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
