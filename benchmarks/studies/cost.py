"""What larger buckets cost on the CPU: ``python -m benchmarks.studies.cost [--quick]``.

Times are those of one thread, through ``BatchedDynamicEmbeddingTablesV2`` with D = 4, so that the index is what is
measured; the fastest of some rounds of eight short turns, which a busy machine disturbs least, in nanoseconds per id.
Set ``OMP_WAIT_POLICY=passive``. Groups are counted in the index that the same steps left behind: how many groups of 16
digests a probe reads. They hold for every backend.

filled: 0.9 * C ids in an empty table. full: many more ids have come, so that a newcomer takes the slot of the victim,
which is anywhere in its bucket. The last line of the small table has one and a half times the slots for the same ids.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.studies.markdown import markdown
from dynamicemb import DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode
from dynamicemb.table.index import Index
from dynamicemb.table.layout import locate

BUCKETS = (128, 256, 512, 1024, 4096)
MOST_STEP = 16384
_TURNS = 8


class Study:
    """One table, filled, probed, filled up, probed again."""

    def __init__(self, capacity: int, bucket: int, seed: int):
        options = DynamicEmbTableOptions(dim=4, max_capacity=capacity, bucket_capacity=bucket)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.module = BatchedDynamicEmbeddingTablesV2(
                [options], table_names=["t"], pooling_mode=DynamicEmbPoolingMode.NONE, device="cpu", seed=1
            )
        self.capacity = capacity
        self.bucket = bucket
        # A step protects its own ids, so it may not bring a large share of the table.
        self.step = min(capacity // 16, MOST_STEP)
        # Evaluation protects nothing; more ids make a call's fixed costs small.
        self.batch = 16384
        self.random = np.random.default_rng(seed)

    def new(self, count: int) -> torch.Tensor:
        """Return ids that never came before (but for one chance in 2^40)."""
        return torch.from_numpy(self.random.integers(-(2**63), 2**63 - 1, count))

    def insert(self, ids: torch.Tensor) -> None:
        with torch.no_grad():
            for part in ids.split(self.step):
                self.module.train()(part, torch.arange(part.numel() + 1))

    def residents(self) -> torch.Tensor:
        index: Index = self.module.tables.index
        return index.keys[index.digests >= 2]

    def nanoseconds(self, call: Callable[[torch.Tensor], object], make: Callable[[], torch.Tensor]) -> float:
        """Return the least time per id of ``call`` on fresh ids."""
        times = []
        for _ in range(_TURNS):
            ids = make()
            begin = time.perf_counter_ns()
            call(ids)
            times.append((time.perf_counter_ns() - begin) / ids.numel())
        return min(times)

    def sample(self) -> torch.Tensor:
        residents = self.residents()
        return residents[torch.from_numpy(self.random.integers(0, residents.numel(), self.batch))]

    def look_up(self, ids: torch.Tensor) -> None:
        self.module.eval()
        offsets = torch.arange(ids.numel() + 1)
        with torch.no_grad():
            self.module(ids, offsets)

    def train(self, ids: torch.Tensor) -> None:
        self.module.train()(ids, torch.arange(ids.numel() + 1)).sum().backward()

    def groups_read(self) -> tuple[float, float]:
        """Return the mean number of digest groups that a hit and a miss read."""
        index: Index = self.module.tables.index
        num_groups = self.bucket // 16
        digests = index.digests.numpy().reshape(-1, num_groups, 16)
        slots = np.flatnonzero(index.digests.numpy() >= 2)
        _, start, _ = locate(index.keys.numpy()[slots], digests.shape[0], num_groups)
        hits = (slots % self.bucket // 16 - start) % num_groups + 1
        buckets, start, _ = locate(self.new(10000).numpy(), digests.shape[0], num_groups)
        empty = (digests == 0).any(2)
        walk = (start[:, None] + np.arange(num_groups)) % num_groups
        found = empty[buckets[:, None], walk]
        misses = np.where(found.any(1), found.argmax(1) + 1, num_groups)
        return float(hits.mean()), float(misses.mean())

    def row(self, num_ids: int) -> list[float]:
        """Run, with so many ids for a start; returns one line of the table."""
        probes, groups = [], []
        self.insert(self.new(num_ids))
        for _ in ("filled", "full"):
            ids = self.sample()
            probes += [self.nanoseconds(self.look_up, lambda ids=ids: ids)]
            probes += [self.nanoseconds(self.look_up, lambda: self.new(self.batch))]
            groups += self.groups_read()
            self.insert(self.new(2 * self.capacity))
        ids = self.sample()
        probes += [self.nanoseconds(self.train, lambda: ids)]
        probes += [self.nanoseconds(self.insert, lambda: self.new(self.step))]
        stats = self.module.stats()["t"]
        assert stats["evicted"] > 2 * self.capacity and stats["failed"] == 0, stats
        return [*groups, *probes]


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tables only")
    parser.add_argument("--rounds", type=int, default=5, help="the fastest of so many counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for capacity in (4096,) if args.quick else (4096, 1 << 20):
        num_ids = round(0.9 * capacity)
        tables = [(capacity, bucket) for bucket in BUCKETS] + [(6144, 128)] * (capacity == 4096)
        # The first round compiles the kernels, too.
        rounds = [[Study(*table, seed).row(num_ids) for table in tables] for seed in range(args.rounds)]
        groups, times = np.array(rounds)[:, :, :4].mean(0), np.array(rounds)[:, :, 4:].min(0)
        rows = [
            [*table, *(f"{count:.1f}" for count in groups[k]), *(f"{ns:.0f}" for ns in times[k])]
            for k, table in enumerate(tables)
        ]
        header = ["slots", "bucket", "groups: hit, filled", "miss, filled", "hit, full", "miss, full"]
        header += ["ns: eval hit, filled", "eval miss, filled", "eval hit, full", "eval miss, full"]
        header += ["train hit, full", "insert with eviction"]
        print(markdown(f"{num_ids} ids, then insert steps of {min(capacity // 16, MOST_STEP)}", header, rows))


if __name__ == "__main__":
    main()
