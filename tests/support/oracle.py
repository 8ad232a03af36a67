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
    """Resident ids, and erased ids with their last steps: their slots stay taken while those steps are outstanding."""

    entries: dict[int, Entry] = field(default_factory=dict)
    ghosts: list[tuple[int, int]] = field(default_factory=list)


class Rejected(Entry):
    """What an id reads that was not admitted; nobody keeps it."""


class ReferenceCounter:
    """Counts of the ids of one table that have no row, as a dict per bucket."""

    def __init__(self, num_buckets: int, bucket_capacity: int):
        """Make an empty counter of ``num_buckets`` buckets, each of which holds ``bucket_capacity`` ids."""
        self.bucket_capacity = bucket_capacity
        self.buckets: list[dict[int, int]] = [{} for _ in range(num_buckets)]
        self.counts = dict.fromkeys(("evicted", "failed"), 0)

    def counted(self) -> dict[int, int]:
        """Return all counts."""
        return {key: count for bucket in self.buckets for key, count in bucket.items()}

    def judge(self, amounts: dict[int, int], limit: int) -> dict[int, int]:
        """Count the missing ids of a lookup; return those that reach the limit, with all their occurrences.

        Args:
            amounts: occurrences of each id, in batch order.
            limit: what admits.
        """
        admitted, new = {}, []
        for key, amount in amounts.items():
            bucket = self._bucket(key)
            total = bucket.get(key, 0) + amount
            if total >= limit:
                admitted[key] = total
                bucket.pop(key, None)
            elif key in bucket:
                bucket[key] = total
            else:
                new.append(key)
        for key in new:
            bucket = self._bucket(key)
            if len(bucket) >= self.bucket_capacity:
                others = [(count, mixed(k), k) for k, count in bucket.items() if k not in amounts]
                if not others:
                    self.counts["failed"] += 1
                    continue
                del bucket[min(others)[2]]
                self.counts["evicted"] += 1
            bucket[key] = amounts[key]
        return admitted

    def forget(self, keys: list[int]) -> None:
        """Forget ids that got their row without being asked about."""
        for key in keys:
            self._bucket(key).pop(key, None)

    def _bucket(self, key: int) -> dict[int, int]:
        return self.buckets[(mixed(key) >> 20) % len(self.buckets)]


# Of (occurrences of the missing ids in batch order, step): those that get a row, and all their occurrences so far.
Judge = Callable[[dict[int, int], int], dict[int, int]]


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
        judge: Judge | None = None,
    ):
        """Make an empty table.

        Args:
            num_buckets: buckets.
            bucket_capacity: ids a bucket can hold.
            strategy: SCORE_*.
            new_row: initial ``(weights, state)`` of an id.
            rank: of (stamp, score, now), ranks instead of the score.
            ttl: time without a touch after which an id is forgotten; None: it never is.
            judge: decides which new ids get a row; None: all do.
        """
        self.judge = judge
        self.bucket_capacity = bucket_capacity
        self.counts_occurrences = strategy in (SCORE_LFU, SCORE_COMPOUND)
        self.keeps_scores = strategy == SCORE_NO_EVICTION
        self.new_row = new_row
        self.rank = rank
        self.ttl = ttl
        self.oldest = 1
        self.now = 0
        self.buckets = [Bucket() for _ in range(num_buckets)]
        names = ("hits", "misses", "inserted", "evicted", "failed", "erased", "expired", "non_admitted")
        self.counts = dict.fromkeys(names, 0)

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
        self,
        keys: list[int],
        frequencies: list[int] | None,
        value: int,
        tag: int,
        oldest: int,
        now: int = 0,
        admit_all: bool = False,
    ) -> tuple[list[Entry | None], list[tuple[int, Entry]]]:
        """Look up and insert a batch as one training step.

        Args:
            keys: the ids, with repetitions.
            frequencies: how often each counts, where the score counts; None is once.
            value: score that touches leave, where it does not.
            tag: number of this step.
            oldest: ids touched by this step or later ones are protected.
            now: time of this step.
            admit_all: an import, which gives every new id a row.

        Returns:
            The entry of every occurrence (None where it failed, ``Rejected`` where it was not admitted) and what was
            evicted, in batch order.
        """
        self.oldest, self.now = oldest, max(self.now, now)
        amounts = frequencies if frequencies is not None else [1] * len(keys)
        found = [self.get(key) for key in keys]
        for entry, amount in zip(found, amounts, strict=True):
            self.counts["hits" if entry is not None else "misses"] += 1
            if entry is not None:
                self._touch(entry, self._next_score(entry, amount, value), tag, now)
        evicted: list[tuple[int, Entry]] = []
        missing = [(key, amount) for key, amount, entry in zip(keys, amounts, found, strict=True) if entry is None]
        before = self._admit(missing, tag, admit_all)
        for key in before:
            # An expired id that returns has its own slot still, which is free for it and for no other.
            if key in self.bucket(key).entries:
                self._forget(self.bucket(key), key)
                self.bucket(key).entries[key] = self._new(key, tag)
                self.bucket(key).entries[key].score = before[key]
        self.erase_expired()
        for i, key in enumerate(keys):
            if found[i] is not None:
                continue
            if key not in before:
                found[i] = Rejected(*self.new_row(key), 0, 0)
                self.counts["non_admitted"] += 1
                continue
            entry = self.get(key)
            if entry is not None:
                self._touch(entry, self._next_score(entry, amounts[i], value), tag, now)
            else:
                entry = self._place(key, oldest, now, evicted)
                if entry is not None:
                    score = before[key] + amounts[i] if self.counts_occurrences else value
                    self._touch(entry, score, tag, now)
            found[i] = entry
        return found, evicted

    def may_fail(self, keys: list[int], oldest: int) -> bool:
        """Return whether ids of a batch may find no place, if those of step ``oldest`` and later ones are protected."""
        for bucket in self.buckets:
            wanted = {key for key in keys if self.bucket(key) is bucket}
            wanted |= {key for key, entry in bucket.entries.items() if entry.tag >= oldest}
            if len(wanted) + sum(tag >= oldest for _, tag in bucket.ghosts) > self.bucket_capacity:
                return True
        return False

    def factor_for(self, keys: list[int], places: int, limits: tuple[float, int | None], oldest: int) -> int:
        """Return by which power of two the table must grow before a batch.

        Args:
            keys: the ids, with repetitions.
            places: how many places are taken.
            limits: share of taken places beyond which it grows, and how many buckets it may have; None is no limit, and
                then it also grows rather than fill a bucket.
            oldest: ids touched by this step or later ones are protected.
        """
        load_factor, most = limits
        new = {key for key in keys if self.get(key) is None}
        factor = 1
        while most is None or factor * len(self.buckets) < most:
            number = factor * len(self.buckets)
            full = places + len(new) > load_factor * number * self.bucket_capacity
            if not full and (most is not None or self._all_fit(new, number, oldest)):
                break
            factor *= 2
        return factor

    def _all_fit(self, new: set[int], number: int, oldest: int) -> bool:
        taken = [*new, *(key for bucket in self.buckets for key in bucket.entries)]
        taken += [key for bucket in self.buckets for key, tag in bucket.ghosts if tag >= oldest]
        wanted = [0] * number
        for key in taken:
            wanted[(mixed(key) >> 20) % number] += 1
        return max(wanted) <= self.bucket_capacity

    def grow(self, factor: int) -> None:
        """Multiply the number of buckets; nothing is lost."""
        old = self.buckets
        self.buckets = [Bucket() for _ in range(factor * len(old))]
        for bucket in old:
            for key, entry in bucket.entries.items():
                self.bucket(key).entries[key] = entry
            for key, tag in bucket.ghosts:
                self.bucket(key).ghosts.append((key, tag))

    def _next_score(self, entry: Entry, amount: int, value: int) -> int:
        if self.keeps_scores:
            return entry.score
        return entry.score + amount if self.counts_occurrences else value

    def _admit(self, missing: list[tuple[int, int]], tag: int, admit_all: bool) -> dict[int, int]:
        """Return the missing ids that get a row, and how often each occurred before this lookup."""
        if self.judge is None or admit_all:
            return dict.fromkeys((key for key, _ in missing), 0)
        sums: dict[int, int] = {}
        for key, amount in missing:
            sums[key] = sums.get(key, 0) + amount
        return {key: total - sums[key] for key, total in self.judge(sums, tag).items()}

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
        bucket.ghosts = [(k, tag) for k, tag in bucket.ghosts if tag >= oldest]
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
                bucket.ghosts.append((key, entry.tag))
                count += 1
        self.counts["erased"] += count
        return count
