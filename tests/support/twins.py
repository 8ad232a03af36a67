"""The same tables on the CPU's kernels and on Triton's, so that every call can be compared."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from dynamicemb.table import cpu
from dynamicemb.table import triton as gpu
from dynamicemb.table.admission import Newcomers
from dynamicemb.table.index import NOW, SEEN, Index
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.invariants import check_invariants
from dynamicemb.table.rows import RowFormat, RowStore
from dynamicemb.table.stepping.results import InsertResult
from dynamicemb.table.triton.missing import Missing
from dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode

INT64 = np.iinfo(np.int64)
EXTREME = np.array([-4, -3, -2, -1, 0, 1, INT64.min, INT64.min + 1, INT64.max, INT64.max - 1])
UNIFORM = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM, lower=-1.0, upper=1.0)
CPU = torch.device("cpu")
TENSORS = [f.name for f in fields(Index) if f.type is torch.Tensor]


def strategies_of(strategy: int | Sequence[int], tables: int) -> list[int]:
    """Return the strategy of each table: one for all, or some in turn."""
    several = [strategy] if isinstance(strategy, int) else strategy
    return [several[t % len(several)] for t in range(tables)]


class Side:
    """An index and its rows on one device, with the kernels for it."""

    def __init__(
        self, kernels, device: torch.device, capacities: list[int], bucket_capacity: int, strategy: int | Sequence[int]
    ):
        formats = [RowFormat(4 + t % 3, t % 2) for t in range(len(capacities))]
        names = [f"t{t}" for t in range(len(capacities))]
        self.kernels = kernels
        self.device = device
        self.capacities = capacities
        self.store = RowStore(capacities, formats, torch.float32, device)
        for chunk in self.store.chunks:
            chunk.fill_(0xA5)
        self.initializers = InitializerTable.create([UNIFORM] * len(names), names, 7, device)
        self.index = Index.create(
            [c // bucket_capacity for c in capacities],
            bucket_capacity,
            self.store.first_rows,
            strategies_of(strategy, len(capacities)),
            device,
        )
        self.state_values = torch.arange(len(names), dtype=torch.float32, device=device)

    def lookup(
        self, ids, table_ranges, frequencies, deterministic: bool | None = None
    ) -> tuple[torch.Tensor, InsertResult]:
        batch = [None if x is None else x.to(self.device) for x in (ids, table_ranges, frequencies)]
        options = {}
        if deterministic is not None:
            options["scratch"] = Missing.allocate(self.index, ids.numel(), deterministic).filled()
        rows, events = self.kernels.find_or_insert(
            self.index, self.store, Newcomers(self.initializers, self.state_values), *batch, **options
        )
        return rows.cpu(), InsertResult(*(x.cpu() for x in events.result()))

    def call(self, name: str, *args):
        """Call a kernel of the index; tensors go to the device and come back."""
        out = getattr(self.kernels, name)(
            self.index, *(x.to(self.device) if isinstance(x, torch.Tensor) else x for x in args)
        )
        return out.cpu() if isinstance(out, torch.Tensor) else out

    def resident(self, table: int) -> dict[int, int]:
        slots = self.call("scan", table).to(self.device)
        return dict(zip(self.index.keys[slots].tolist(), self.index.scores[slots].tolist(), strict=True))

    def check(self) -> None:
        check_invariants(self.index, self.store, self.capacities)


class Twins:
    """One side per backend, stepped together; the CPU's clock counts for both."""

    def __init__(
        self, device: torch.device, capacities: list[int], bucket_capacity: int, strategy: int | Sequence[int]
    ):
        self.cpu = Side(cpu, CPU, capacities, bucket_capacity, strategy)
        self.gpu = Side(gpu, device, capacities, bucket_capacity, strategy)

    def advance(self, lag: int = 0) -> None:
        self.cpu.kernels.advance(self.cpu.index, lag)
        self.gpu.kernels.advance(self.gpu.index, lag)
        # Two clocks: whatever else an advance does must agree, the times are made to.
        ours = self.gpu.index.clock.cpu()
        ours[[NOW, SEEN]] = self.cpu.index.clock[[NOW, SEEN]]
        assert torch.equal(ours, self.cpu.index.clock)
        self.gpu.index.clock.copy_(self.cpu.index.clock)
        self.gpu.index.score_values.copy_(self.cpu.index.score_values)

    def set_scores(self, tables: torch.Tensor, values: torch.Tensor) -> None:
        for side in (self.cpu, self.gpu):
            side.index.score_values.copy_(torch.where(tables, values, side.index.score_values.cpu()))

    def copy_to_gpu(self) -> None:
        """Make the GPU's index and rows those of the CPU again."""
        for name in TENSORS:
            getattr(self.gpu.index, name).copy_(getattr(self.cpu.index, name))

    def assert_equal(self) -> None:
        """Every byte of index and rows."""
        for name in TENSORS:
            assert torch.equal(getattr(self.gpu.index, name).cpu(), getattr(self.cpu.index, name)), name
        for ours, theirs in zip(self.gpu.store.chunks, self.cpu.store.chunks, strict=True):
            assert torch.equal(ours.cpu(), theirs)


def draw(rng: np.random.Generator, sizes: list[int], universe: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random ids, repeated and extreme ones among them, and their ``table_ranges``."""
    ids = rng.integers(0, universe, sum(sizes)) ** 2 // universe
    ids = np.where(rng.random(ids.size) < 0.1, rng.choice(EXTREME, ids.size), ids)
    return torch.from_numpy(ids.astype(np.int64)), torch.tensor([0, *sizes]).cumsum(0)
