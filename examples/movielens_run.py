"""The runs of the MovieLens example: set up the processes, train once per seed, print what came out."""

import argparse
import logging
import math
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from monitoring import TableLogger, bucket_loads, fullest, open_writer, plot_bucket_loads
from movielens_data import NUM_DENSE, Ratings, Vocabulary, num_batches
from movielens_model import (
    Rates,
    Table,
    build_model,
    compile_kernels,
    distribute_dynamic,
    distribute_static,
    table_stats,
)
from movielens_training import Data, Result, Settings, load_data, train
from rich.console import Console
from rich.table import Table as Grid
from torchrec.distributed.model_parallel import DistributedModelParallel

# --compare fails when the dynamic tables are worse than the static ones by more than this.
MAX_AUC_LOSS = 0.005


def choose_device(wanted: str | None) -> str:
    """Return "cuda" or "cpu": what is wanted, or what this machine has for each of its processes.

    Args:
        wanted: "cpu", "cuda" or None.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted == "cuda" and num_gpus == 0:
        sys.exit("--device cuda: torch sees no CUDA device")
    if wanted == "cuda" and num_gpus < num_processes:
        sys.exit(f"--device cuda: {num_processes} processes need a GPU each, torch sees {num_gpus}; start fewer")
    return wanted or ("cuda" if num_gpus >= num_processes else "cpu")


def start_processes(kind: str) -> torch.device:
    """Join the process group of torchrun, or form one of this process alone. Returns this process's device.

    Args:
        kind: "cpu" or "cuda".
    """
    cuda = kind == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        # The layers are too small to gain from threads, and waiting for them is slow when cores are shared.
        torch.set_num_threads(1)
    backend, bound = ("nccl", device) if cuda else ("gloo", None)
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=bound)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), device_id=bound)
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
    if static or args.stats is None:
        result = train(sharded, data, settings)
    else:
        result = train_and_log(sharded, data, settings, args.stats / f"seed{seed}-rank{dist.get_rank()}")
    return result, {} if static else table_stats(sharded)


def train_and_log(model: DistributedModelParallel, data: Data, settings: Settings, folder: Path) -> Result:
    """Train, and write what this rank's tables do into a folder."""
    tables = model.module.tables.dynamic_embedding_modules
    writer = open_writer(folder)
    logger = TableLogger(tables, writer)
    result = train(model, data, settings, logger)
    logger.finish(num_batches(len(data.train), settings.batch_size, training=True) * settings.epochs)
    writer.close()
    loads = bucket_loads(tables)
    lines = [f"{name}: {fullest(of_table)}\n" for name, of_table in loads.items()]
    (folder / "bucket_loads.txt").write_text("".join(lines))
    plot_bucket_loads(loads, folder / "bucket_loads.png")
    return result


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
    seeds = f"seed {seeds}" if len(args.seeds) == 1 else f"seeds {seeds}"
    console.print(f"{kind}: AUC {mean:.4f} ({seeds}; {seconds:.0f} s per seed)")
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


def silence_libraries() -> None:
    """Drop notes of torch and torchrec about their own code."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")
    warnings.filterwarnings("ignore", category=UserWarning, message="`_get_pg_default_device`")
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def warm_up(dim: int, device: torch.device, console: Console) -> None:
    """Compile the kernels on rank 0 into a cache on disk, from which the other ranks then load them."""
    start = time.perf_counter()
    name = "GPU" if device.type == "cuda" else "CPU"
    if dist.get_rank() == 0:
        console.print(f"compiling {name} kernels, once (up to 2 minutes)")
        compile_kernels(dim, device)
    dist.barrier()
    if dist.get_rank() != 0:
        compile_kernels(dim, device)
    dist.barrier()
    console.print(f"{name} kernels ready after {time.perf_counter() - start:.0f} s")


def run_all(args: argparse.Namespace) -> int:
    """Do what the command line asks for. Returns the exit status."""
    silence_libraries()
    device = start_processes(choose_device(args.device))
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    try:
        if device.type == "cpu" and args.device is None and torch.cuda.is_available():
            console.print(f"on the CPU: {torch.cuda.device_count()} GPUs are too few for the processes of this machine")
        if not args.static:
            warm_up(args.dim, device, console)
        data = load_data()
        if args.compare:
            return 0 if compare(args, data, device, console) else 1
        run_seeds(args, "static" if args.static else "dynamic", data, device, console)
        if not args.static and args.capacity_fraction < 1:
            console.print(
                f"The tables have rows for {args.capacity_fraction:.0%} of all ids, so rows were evicted, which costs "
                "AUC against --full-capacity; --compare sets static tables beside dynamic ones with room for all.",
                soft_wrap=True,
            )
        return 0
    finally:
        dist.destroy_process_group()
