"""Train a ranking model on MovieLens-100k with dynamic tables (raw 64-bit ids) or static ones (a vocabulary).

    torchrun --nproc_per_node 2 examples/movielens.py                  # dynamic, tables smaller than the id space
    torchrun --nproc_per_node 2 examples/movielens.py --full-capacity  # dynamic, room for every id
    torchrun --nproc_per_node 2 examples/movielens.py --static         # TorchRec's own tables
    torchrun --nproc_per_node 2 examples/movielens.py --compare        # both, three seeds, mean AUC

One moment in time divides train and held-out part. 85 % of the held-out ratings come from users that joined later, so
the AUC mostly measures what was learned about films, attributes and their crosses; the AUC on the users that the train
part knows is printed beside it.
"""

import argparse
import logging
import math
import os
import statistics
import sys
import warnings

import torch
import torch.distributed as dist
from movielens_data import NUM_DENSE, Ratings, Vocabulary
from movielens_model import Rates, Table, build_model, distribute_dynamic, distribute_static, table_stats
from movielens_training import Data, Result, Settings, load_data, train
from rich.console import Console
from rich.table import Table as Grid

# --compare fails when the dynamic tables are worse than the static ones by more than this.
MAX_AUC_LOSS = 0.005
# A bucket of 128 slots overflows practically never when half of all slots are used.
FULL_CAPACITY = 2.0


def start_processes() -> torch.device:
    """Join the process group of torchrun, or form one of this process alone. Returns this process's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        # The layers are too small to gain from threads, and waiting for them is slow when cores are shared.
        torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    return device


def make_tables(data: Data, vocabulary: Vocabulary, capacity_fraction: float | None) -> list[Table]:
    """Return the tables: one row per word of the vocabulary, or a fraction of all ids if one is given.

    The initial values depend on the vocabulary in both cases, so that runs can be compared.
    """
    tables = []
    for feature in data.train.bags:
        rows = vocabulary.size(feature)
        bound = rows**-0.5
        if capacity_fraction is not None:
            rows = math.ceil(capacity_fraction * num_ids(feature, data.train, data.held_out))
        tables.append(Table(feature, rows, bound))
    return tables


def num_ids(feature: str, *parts: Ratings) -> int:
    return len(set().union(*(part.unique_ids(feature).tolist() for part in parts)))


def run(args: argparse.Namespace, kind: str, data: Data, seed: int, device: torch.device) -> tuple[Result, dict]:
    """Build and train one model. Returns the AUC by epoch and the statistics of the dynamic tables."""
    static = kind == "static"
    vocabulary = Vocabulary(data.train)
    tables = make_tables(data, vocabulary, None if static else args.capacity_fraction)
    rates = Rates(args.table_rate, args.eps)
    torch.manual_seed(seed)
    model = build_model(tables, NUM_DENSE, args.dim)
    if static:
        sharded = distribute_static(model, rates, device)
        data = data.encode(vocabulary)
    else:
        sharded = distribute_dynamic(model, tables, rates, device, seed)
    settings = Settings(args.epochs, args.batch_size, args.dense_rate, seed, f"{kind}, seed {seed}")
    result = train(sharded, data, settings)
    return result, {} if static else table_stats(sharded)


def run_seeds(args: argparse.Namespace, kind: str, data: Data, device: torch.device, console: Console) -> float:
    """Train once per seed, print what came out. Returns the mean AUC after the last epoch."""
    results = []
    for seed in args.seeds:
        result, stats = run(args, kind, data, seed, device)
        results.append(result)
        for epoch, (everyone, known) in enumerate(zip(result.all_users, result.known_users), start=1):
            console.print(f"{kind}, seed {seed}, epoch {epoch}: AUC {everyone:.4f}, known users {known:.4f}")
        if stats:
            console.print(stats_grid(stats))
    mean = statistics.mean(result.all_users[-1] for result in results)
    seconds = statistics.mean(result.seconds for result in results)
    seeds = ", ".join(str(seed) for seed in args.seeds)
    console.print(f"{kind}: AUC {mean:.4f} (seeds {seeds}; {seconds:.0f} s per seed)")
    return mean


def stats_grid(stats: dict[str, dict[str, float]]) -> Grid:
    """Lay the statistics of the tables out in a grid."""
    columns = ("size", "capacity", "load", "inserted", "evicted", "failed")
    grid = Grid("table", title="dynamic tables, all ranks")
    for column in columns:
        grid.add_column(column, justify="right")
    for name, values in stats.items():
        shown = {key: f"{value:,}" for key, value in values.items()}
        shown["load"] = f"{values['size'] / values['capacity']:.0%}"
        grid.add_row(name, *(shown[column] for column in columns))
    return grid


def compare(args: argparse.Namespace, data: Data, device: torch.device, console: Console) -> bool:
    """Train with static and dynamic tables. Returns whether the dynamic ones are good enough."""
    static, dynamic = (run_seeds(args, kind, data, device, console) for kind in ("static", "dynamic"))
    good = dynamic >= static - MAX_AUC_LOSS
    verdict = "ok" if good else f"more than {MAX_AUC_LOSS} below"
    console.print(f"AUC static {static:.4f}, dynamic {dynamic:.4f}, difference {dynamic - static:+.4f}: {verdict}")
    return good


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ranking on MovieLens-100k",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--static", action="store_true", help="TorchRec's static tables over a vocabulary")
    kind.add_argument("--compare", action="store_true", help="static and dynamic tables of full capacity")
    capacity = parser.add_mutually_exclusive_group()
    capacity.add_argument("--capacity-fraction", type=float, default=0.5, help="rows per distinct id")
    capacity.add_argument("--full-capacity", action="store_true", help="room for every id")
    parser.add_argument("--seeds", help="comma-separated; None is 0, or 0,1,2 with --compare")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the train part")
    parser.add_argument("--batch-size", type=int, default=512, help="samples of all processes together")
    parser.add_argument("--dim", type=int, default=16, help="columns of every table")
    parser.add_argument("--table-rate", type=float, default=0.05, help="learning rate of row-wise Adagrad")
    parser.add_argument("--eps", type=float, default=3e-3, help="eps of row-wise Adagrad")
    parser.add_argument("--dense-rate", type=float, default=1e-3, help="learning rate of Adam")
    args = parser.parse_args(words)
    args.seeds = [int(seed) for seed in (args.seeds or ("0,1,2" if args.compare else "0")).split(",")]
    if args.full_capacity or args.compare:
        args.capacity_fraction = FULL_CAPACITY
    return args


def silence_libraries() -> None:
    """Drop notes of torch and torchrec about their own code."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> int:
    args = parse_arguments()
    silence_libraries()
    device = start_processes()
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    try:
        data = load_data()
        if args.compare:
            return 0 if compare(args, data, device, console) else 1
        run_seeds(args, "static" if args.static else "dynamic", data, device, console)
        return 0
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
