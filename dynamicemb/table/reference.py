"""The oracle: tables as plain dicts, one step at a time, with the rules of the contract and nothing else.

Slow and obvious on purpose. It knows buckets (an id competes only with ids of its bucket) but no slots, digests or
hashes beyond which bucket an id belongs to and how ties are broken.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dynamicemb.table.scores import SCORE_COMPOUND, SCORE_LFU, SCORE_NO_EVICTION


@functools.lru_cache(maxsize=1 << 16)
def mixed(key: int) -> int:
    """Return murmur3's fmix64 of an id, in plain integers."""
    mask = 2**64 - 1
    h = key & mask
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD & mask
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 & mask
    return h ^ h >> 33


@dataclass
class Entry:
    """One resident id: its row (weights f32 ``[D]``, state f32 ``[num_state]``), score, last step, and its time."""

    weights: np.ndarray
    state: np.ndarray
    score: int
    tag: int
    stamp: int = 0


@dataclass
class Bucket:
    """Resident ids, and the last steps of erased ids, whose slots stay taken while those steps are outstanding."""

    entries: dict[int, Entry] = field(default_factory=dict)
    ghosts: list[int] = field(default_factory=list)


class ReferenceTable:
    """One table as a dict per bucket."""

    def __init__(
        self,
        num_buckets: int,
        bucket_capacity: int,
        strategy: int,
        new_row: Callable[[int], tuple[np.ndarray, np.ndarray]],
        rank: Callable[[float, float, float], float] | None = None,
        ttl: int | None = None,
    ):
        """Make an empty table.

        Args:
            num_buckets: buckets.
            bucket_capacity: ids a bucket can hold.
            strategy: SCORE_*.
            new_row: initial ``(weights, state)`` of an id.
            rank: of (stamp, score, now), ranks instead of the score.
            ttl: time without a touch after which an id is forgotten; None: it never is.
        """
        self.bucket_capacity = bucket_capacity
        self.counts_occurrences = strategy in (SCORE_LFU, SCORE_COMPOUND)
        self.keeps_scores = strategy == SCORE_NO_EVICTION
        self.new_row = new_row
        self.rank = rank
        self.ttl = ttl
        self.oldest = 1
        self.now = 0
        self.buckets = [Bucket() for _ in range(num_buckets)]
        self.counts = dict.fromkeys(("hits", "misses", "inserted", "evicted", "failed", "erased", "expired"), 0)

    def bucket(self, key: int) -> Bucket:
        """Return the bucket of an id."""
        return self.buckets[(mixed(key) >> 20) % len(self.buckets)]

    def get(self, key: int) -> Entry | None:
        """Return what the table holds of an id."""
        entry = self.bucket(key).entries.get(key)
        return None if entry is None or self._expired(entry) else entry

    def entries(self) -> dict[int, Entry]:
        """Return everything resident that is not forgotten."""
        every = {key: entry for bucket in self.buckets for key, entry in bucket.entries.items()}
        return {key: entry for key, entry in every.items() if not self._expired(entry)}

    def size(self) -> int:
        """Return how many places are taken."""
        return sum(len(bucket.entries) for bucket in self.buckets)

    def _expired(self, entry: Entry) -> bool:
        return self.ttl is not None and entry.stamp < self.now - self.ttl and entry.tag < self.oldest

    def _forget(self, bucket: Bucket, key: int) -> None:
        del bucket.entries[key]
        self.counts["expired"] += 1

    def erase_expired(self) -> int:
        """Remove the forgotten ids; returns how many there were."""
        gone = [(bucket, key) for bucket in self.buckets for key, e in bucket.entries.items() if self._expired(e)]
        for bucket, key in gone:
            # Nothing protects the slot.
            self._forget(bucket, key)
        return len(gone)

    def lookup(
        self, keys: list[int], frequencies: list[int] | None, value: int, tag: int, oldest: int, now: int = 0
    ) -> tuple[list[Entry | None], list[tuple[int, Entry]]]:
        """Look up and insert a batch as one training step.

        Args:
            keys: the ids, with repetitions.
            frequencies: how often each counts, where the score counts; None is once.
            value: score that touches leave, where it does not.
            tag: number of this step.
            oldest: ids touched by this step or later ones are protected.
            now: time of this step.

        Returns:
            The entry of every occurrence (None where it failed) and what was evicted, in batch order.
        """
        self.oldest, self.now = oldest, max(self.now, now)
        amounts = frequencies if frequencies is not None else [1] * len(keys)
        found = [self.get(key) for key in keys]
        for entry, amount in zip(found, amounts, strict=True):
            self.counts["hits" if entry is not None else "misses"] += 1
            if entry is not None:
                self._touch(entry, self._next_score(entry, amount, value), tag, now)
        for key in {key for key, entry in zip(keys, found, strict=True) if entry is None}:
            # An expired id that returns has its own slot still, which is free for it and for no other.
            if key in self.bucket(key).entries:
                self._forget(self.bucket(key), key)
                self.bucket(key).entries[key] = self._new(key, tag)
        self.erase_expired()
        evicted: list[tuple[int, Entry]] = []
        for i, key in enumerate(keys):
            if found[i] is not None:
                continue
            entry = self.get(key)
            if entry is not None:
                self._touch(entry, self._next_score(entry, amounts[i], value), tag, now)
            else:
                entry = self._place(key, oldest, now, evicted)
                if entry is not None:
                    self._touch(entry, amounts[i] if self.counts_occurrences else value, tag, now)
            found[i] = entry
        return found, evicted

    def _next_score(self, entry: Entry, amount: int, value: int) -> int:
        if self.keeps_scores:
            return entry.score
        return entry.score + amount if self.counts_occurrences else value

    def _touch(self, entry: Entry, score: int, tag: int, now: int) -> None:
        entry.score, entry.tag, entry.stamp = score, tag, now

    def _ranked(self, entry: Entry, now: int) -> tuple[bool, float]:
        """Return what orders entries: not a number comes first."""
        if self.rank is None:
            return True, entry.score
        value = self.rank(float(entry.stamp), float(entry.score), float(now))
        return (False, 0.0) if math.isnan(value) else (True, value)

    def _place(self, key: int, oldest: int, now: int, evicted: list[tuple[int, Entry]]) -> Entry | None:
        bucket = self.bucket(key)
        # Erased slots whose steps are over are as good as empty.
        bucket.ghosts = [tag for tag in bucket.ghosts if tag >= oldest]
        if len(bucket.entries) + len(bucket.ghosts) >= self.bucket_capacity:
            candidates = [(self._ranked(e, now), mixed(k), k) for k, e in bucket.entries.items() if e.tag < oldest]
            if not candidates:
                self.counts["failed"] += 1
                return None
            _, _, victim = min(candidates)
            evicted.append((victim, bucket.entries.pop(victim)))
            self.counts["evicted"] += 1
        bucket.entries[key] = self._new(key, 0)
        return bucket.entries[key]

    def _new(self, key: int, tag: int) -> Entry:
        weights, state = self.new_row(key)
        self.counts["inserted"] += 1
        return Entry(weights, state, 0, tag)

    def erase(self, keys: list[int]) -> int:
        """Remove ids; returns how many were there."""
        count = 0
        for key in keys:
            bucket = self.bucket(key)
            entry = self.get(key)
            if entry is not None:
                del bucket.entries[key]
                bucket.ghosts.append(entry.tag)
                count += 1
        self.counts["erased"] += count
        return count
