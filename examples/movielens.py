"""Train a ranking model on MovieLens-100k, with dynamic tables (raw 64-bit ids) or static ones (a vocabulary).

    torchrun --nproc_per_node 2 examples/movielens.py                  # dynamic, tables smaller than the id space
    torchrun --nproc_per_node 2 examples/movielens.py --full-capacity  # dynamic, room for every id
    torchrun --nproc_per_node 2 examples/movielens.py --static         # TorchRec's own tables
    torchrun --nproc_per_node 2 examples/movielens.py --compare        # both, three seeds, mean AUC

Train and held-out part are divided by one moment in time. 85 % of the held-out ratings come from users that joined
after it, so the AUC mostly measures what was learned about films, attributes and their crosses; the AUC on the known
users is printed beside it.
"""

import argparse
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from movielens_data import NUM_DENSE, Ratings, Vocabulary, batches, load_ratings, num_batches, temporal_split
from movielens_model import Optimizers, Table, auc, build_model, distribute_static
from rich.console import Console
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

# A dynamic table may be this much worse than a static one before --compare fails.
MAX_AUC_LOSS = 0.005


@dataclass(frozen=True)
class Data:
    """Train and held-out part, and the numbers of the held-out samples whose user is in the train part."""

    train: Ratings
    held_out: Ratings
    known_user: np.ndarray


@dataclass(frozen=True)
class Result:
    """AUC after every epoch, on all held-out samples and on those of known users."""

    all_users: list[float]
    known_users: list[float]
    seconds: float


def load_data() -> Data:
    train, held_out = temporal_split(load_ratings())
    known = np.isin(held_out.bags["user"].values[:, 0], train.unique_ids("user"))
    return Data(train, held_out, np.flatnonzero(known))


def encode(data: Data, vocabulary: Vocabulary) -> Data:
    return Data(vocabulary.encode(data.train), vocabulary.encode(data.held_out), data.known_user)


def start_processes() -> torch.device:
    """Join the process group of torchrun, or form one of a single process. Returns this process's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    return device


def predict(model: nn.Module, ratings: Ratings, batch_size: int, device: torch.device) -> torch.Tensor:
    """Return the logits of all samples on every rank, f32[N] on the CPU."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.eval()
    logits, samples = [], []
    with torch.no_grad():
        for batch in batches(ratings, batch_size, rank, world_size):
            batch = batch.to(device)
            logits.append(model(batch.dense, batch.ids))
            samples.append(batch.samples)
    model.train()
    gathered = []
    for part in (torch.cat(logits), torch.cat(samples)):
        parts = [torch.empty_like(part) for _ in range(world_size)]
        dist.all_gather(parts, part)
        gathered.append(torch.cat(parts).cpu())
    real = gathered[1] >= 0
    result = torch.empty(len(ratings))
    result[gathered[1][real]] = gathered[0][real]
    return result


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterable, device: torch.device) -> None:
    """Run one pass. The tables are updated in backward, optimizer holds the dense layers."""
    for batch in inputs:
        batch = batch.to(device)
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(model: DistributedModelParallel, data: Data, args: argparse.Namespace, seed: int, label: str) -> Result:
    """Train for args.epochs passes and measure the AUC after each."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), model.device
    dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.AdamW(dense, lr=args.dense_rate, weight_decay=args.weight_decay)
    result = Result([], [], 0.0)
    start = time.perf_counter()
    steps = num_batches(len(data.train), args.batch_size, training=True)
    labels = torch.from_numpy(data.held_out.labels)
    with tqdm(total=steps * args.epochs, desc=f"{label} seed {seed}", disable=rank != 0, mininterval=0.5) as bar:
        for epoch in range(args.epochs):
            inputs = batches(data.train, args.batch_size, rank, world_size, seed * 1000 + epoch)
            train_epoch(model, optimizer, advance(inputs, bar), device)
            logits = predict(model, data.held_out, args.batch_size, device)
            result.all_users.append(auc(logits, labels))
            result.known_users.append(auc(logits[data.known_user], labels[data.known_user]))
            bar.set_postfix(auc=f"{result.all_users[-1]:.4f}")
    return Result(result.all_users, result.known_users, time.perf_counter() - start)


def advance(inputs: Iterable, bar: tqdm) -> Iterable:
    for batch in inputs:
        yield batch
        bar.update()


def run_static(data: Data, args: argparse.Namespace, device: torch.device, seed: int) -> Result:
    """Train with TorchRec's static tables over the vocabulary of the train part."""
    vocabulary = Vocabulary(data.train)
    sizes = {feature: vocabulary.size(feature) for feature in data.train.bags}
    tables = [Table(feature, size, size**-0.5) for feature, size in sizes.items()]
    torch.manual_seed(seed)
    model = distribute_static(build_model(tables, NUM_DENSE, args.dim), optimizers(args), device)
    return train(model, encode(data, vocabulary), args, seed, "static")


def optimizers(args: argparse.Namespace) -> Optimizers:
    return Optimizers(args.table_rate, args.dense_rate, args.weight_decay)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ranking on MovieLens-100k", allow_abbrev=False)
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512, help="samples of all processes together")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--table-rate", type=float, default=0.02)
    parser.add_argument("--dense-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-2)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    logging.getLogger().setLevel(logging.WARNING)
    device = start_processes()
    console = Console(quiet=dist.get_rank() != 0)
    data = load_data()
    for seed in args.seeds:
        r = run_static(data, args, device, seed)
        console.print(seed, r)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
