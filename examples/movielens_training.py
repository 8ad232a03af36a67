"""The training loop of the MovieLens example, the same for static and dynamic tables.

Letters: N held-out samples.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from movielens_data import Batch, Ratings, Vocabulary, batches, load_ratings, num_batches, temporal_split
from movielens_model import auc
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm


@dataclass(frozen=True)
class Data:
    """Train and held-out part, and the numbers of the held-out samples whose user has ratings in the train part."""

    train: Ratings
    held_out: Ratings
    known_users: np.ndarray

    def encode(self, vocabulary: Vocabulary) -> "Data":
        return Data(vocabulary.encode(self.train), vocabulary.encode(self.held_out), self.known_users)


@dataclass(frozen=True)
class Settings:
    """What a training run needs to know beside the model. batch_size counts the samples of all ranks together."""

    epochs: int
    batch_size: int
    dense_rate: float
    seed: int
    title: str


@dataclass(frozen=True)
class Result:
    """AUC after every epoch: on all held-out samples, and on those of known users."""

    all_users: list[float]
    known_users: list[float]
    seconds: float


def load_data() -> Data:
    """Read MovieLens-100k and split it by time."""
    train, held_out = temporal_split(load_ratings())
    known = np.isin(held_out.bags["user"].values[:, 0], train.unique_ids("user"))
    return Data(train, held_out, np.flatnonzero(known))


def predict(model: DistributedModelParallel, ratings: Ratings, batch_size: int) -> torch.Tensor:
    """Return the logits of all samples, f32[N] in host memory, on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logits, samples = [], []
    model.eval()
    with torch.no_grad():
        for batch in batches(ratings, batch_size, rank, world_size):
            batch = batch.to(model.device)
            logits.append(model(batch.dense, batch.ids))
            samples.append(batch.samples)
    model.train()
    all_logits, all_samples = gather(torch.cat(logits)), gather(torch.cat(samples))
    real = all_samples >= 0
    result = torch.full((len(ratings),), torch.nan)
    result[all_samples[real]] = all_logits[real]
    return result


def gather(part: torch.Tensor) -> torch.Tensor:
    """Concatenate equally long tensors of all ranks, in host memory."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts).cpu()


def train(
    model: DistributedModelParallel, data: Data, settings: Settings, on_step: Callable[[int], None] | None = None
) -> Result:
    """Train the model and measure the AUC after every epoch; ``on_step`` is told the number of every step done."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The tables are updated in backward; the rest are the dense layers.
    dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.Adam(dense, lr=settings.dense_rate)
    labels = torch.from_numpy(data.held_out.labels)
    all_users, known_users = [], []
    numbers = itertools.count(1)
    start = time.perf_counter()
    steps = num_batches(len(data.train), settings.batch_size, training=True) * settings.epochs
    with tqdm(total=steps, desc=settings.title, disable=rank != 0, mininterval=0.5) as bar:
        for epoch in range(settings.epochs):
            shuffle = 1000 * settings.seed + epoch
            inputs = batches(data.train, settings.batch_size, rank, world_size, shuffle)
            for batch in inputs:
                train_step(model, optimizer, batch)
                bar.update()
                if on_step is not None:
                    on_step(next(numbers))
            logits = predict(model, data.held_out, settings.batch_size)
            all_users.append(auc(logits, labels))
            known_users.append(auc(logits[data.known_users], labels[data.known_users]))
            bar.set_postfix(auc=f"{all_users[-1]:.4f}")
    return Result(all_users, known_users, time.perf_counter() - start)


def train_step(model: DistributedModelParallel, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """Train on this rank's share of a batch; returns its mean loss."""
    batch = batch.to(model.device)
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
