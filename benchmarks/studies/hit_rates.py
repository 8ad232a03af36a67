"""Hit rates over a power-law stream: ``python -m benchmarks.studies.hit_rates [--quick]``.

A million ids from a power law over a million ids, 256 a step, in training mode. An occurrence hits if its id was there
before the step. The same stream goes through

- the real module on the CPU,
- an exact simulator of its rule (a bucket evicts the lowest (score, fmix64(id)), never an id of the step), which must
  agree in every hit, eviction and failure,
- the same simulator with one bucket, and for LRU also the textbook's: an ordered dict that moves each occurrence to its
  end and drops the first, step by step, but protecting nothing.
"""

import argparse
import heapq
import warnings
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.studies.markdown import markdown
from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode
from dynamicemb.score_strategy import ScoreStrategy
from dynamicemb.table.layout import fmix64

POPULATION = 1_000_000
LRU = ("TIMESTAMP", "STEP", "CUSTOMIZED")
# A compound table without a score function ranks by its frequencies.
LFU = ("LFU", "TIMESTAMP+LFU")
STEP = 256


@dataclass
class Counts:
    """What a million occurrences left: occurrences that hit and that failed, ids that were evicted."""

    hits: int = 0
    evicted: int = 0
    failed: int = 0


class Bucket:
    """Ids of one bucket, and a heap with a lower bound of the rank (scores only grow) of all that are not fresh."""

    def __init__(self, size: int):
        self.size = size
        self.scores: dict[int, int] = {}
        self.heap: list[tuple[int, int, int]] = []

    def evict(self, fresh: set[int], aside: list["Aside"]) -> bool:
        """Remove the lowest (score, mixed id) that is not fresh; returns whether there was one."""
        while self.heap:
            score, mixed, key = heapq.heappop(self.heap)
            if key in fresh:
                aside.append((self, mixed, key))
            elif score != self.scores[key]:
                heapq.heappush(self.heap, (self.scores[key], mixed, key))
            else:
                del self.scores[key]
                return True
        return False


# Fresh ids return to their bucket's heap when the step is over.
Aside = tuple[Bucket, int, int]


def simulate(steps: list[list[int]], mixed: dict[int, int], num_buckets: int, bucket: int, lfu: bool) -> Counts:
    """Run the rule of the tables, with another data structure."""
    buckets = [Bucket(bucket) for _ in range(num_buckets)]
    place_of = {key: buckets[(h >> 20) % num_buckets] for key, h in mixed.items()}
    counts = Counts()
    for number, ids in enumerate(steps, 1):
        fresh: set[int] = set()
        aside: list[Aside] = []
        missing = []
        for key in ids:
            scores = place_of[key].scores
            if key in scores:
                scores[key] = scores[key] + 1 if lfu else number
                fresh.add(key)
            else:
                missing.append(key)
        counts.hits += len(ids) - len(missing)
        for key in missing:
            place = place_of[key]
            if key not in place.scores:
                if len(place.scores) >= place.size:
                    if not place.evict(fresh, aside):
                        counts.failed += 1
                        continue
                    counts.evicted += 1
                place.scores[key] = 0
                fresh.add(key)
                aside.append((place, mixed[key], key))
            place.scores[key] = place.scores[key] + 1 if lfu else number
        for place, h, key in aside:
            heapq.heappush(place.heap, (place.scores[key], h, key))
    return counts


def textbook_lru(steps: list[list[int]], capacity: int) -> int:
    """Return the occurrences whose id was there before its step."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in steps:
        hits += sum(key in order for key in ids)
        for key in ids:
            order[key] = None
            order.move_to_end(key)
        while len(order) > capacity:
            order.popitem(last=False)
    return hits


def real(ids: torch.Tensor, capacity: int, bucket: int, strategy: ScoreStrategy) -> Counts:
    """Run the module."""
    options = DynamicEmbTableOptions(dim=4, max_capacity=capacity, bucket_capacity=bucket, score_strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = BatchedDynamicEmbeddingTablesV2(
            [options], table_names=["t"], pooling_mode=DynamicEmbPoolingMode.NONE, device="cpu", seed=1
        )
    with torch.no_grad():
        for number, part in enumerate(ids.split(STEP), 1):
            if strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
                module.set_score({"t": 7 * number})
            module(part, torch.arange(part.numel() + 1))
    stats = module.stats()["t"]
    assert stats["hits"] + stats["misses"] == ids.numel()
    return Counts(int(stats["hits"]), int(stats["evicted"]), int(stats["failed"]))


def power_law(count: int, alpha: float, seed: int) -> torch.Tensor:
    """Return ids below POPULATION, drawn with the inverse of the continuous CDF of rank^-alpha."""
    u = np.random.default_rng(seed).random(count)
    power = 1 - alpha
    ranks = ((((POPULATION + 1) ** power - 1) * u + 1) ** (1 / power)).astype(np.int64)
    return torch.from_numpy(np.minimum(ranks, POPULATION) - 1)


def study(count: int, alpha: float, tables: dict[int, tuple[int, ...]]) -> None:
    """Print a line per strategy, capacity and bucket."""
    ids = power_law(count, alpha, 3)
    steps = [part.tolist() for part in ids.split(STEP)]
    unique = np.unique(ids.numpy())
    mixed = dict(zip(unique.tolist(), fmix64(unique).tolist(), strict=True))

    def percent(hits: int) -> str:
        return f"{100 * hits / count:.3f}"

    rows = []
    for capacity, buckets in tables.items():
        textbook = textbook_lru(steps, capacity)
        for names in (LRU, LFU):
            lfu = names == LFU
            whole = simulate(steps, mixed, 1, capacity, lfu)
            for bucket in buckets:
                simulated = whole if bucket == capacity else simulate(steps, mixed, capacity // bucket, bucket, lfu)
                for name in names:
                    strategy = tuple(DynamicEmbScoreStrategy[part] for part in name.split("+"))
                    measured = real(ids, capacity, bucket, strategy if len(strategy) > 1 else strategy[0])
                    assert measured == simulated, (capacity, bucket, name, measured, simulated)
                against = [f"{100 * (measured.hits / other - 1):+.2f}" for other in (whole.hits, textbook)]
                cells = [percent(measured.hits), percent(whole.hits), against[0]]
                cells += ["", ""] if lfu else [percent(textbook), against[1]]
                rows.append([", ".join(names), capacity, bucket, *cells, measured.evicted, measured.failed])
    header = ["strategy", "capacity", "bucket", "module = simulator %", "one bucket %", "module relative to it %"]
    header += ["textbook LRU %", "module relative to it %", "evicted", "failed"]
    print(markdown(f"{count} ids, alpha {alpha}, {unique.size} of them different, {STEP} a step", header, rows))


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the ids, small tables only")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    tables = {1024: (128, 1024), 4096: (16, 128, 1024, 4096)}
    if not quick:
        tables[65536] = (128, 1024)
    for alpha in (1.05, 0.8):
        study(100_000 if quick else 1_000_000, alpha, tables)


if __name__ == "__main__":
    main()
