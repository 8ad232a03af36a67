"""Batches of ids, the same for everyone who is compared, and the bytes a step has to move."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from benchmarks.step_case import Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# The multi-hot features of MLPerf's DLRM-v2: ids of a bag, and rows of its table.
MLPERF_LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MLPERF_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)

# Ids from here on are new to every table.
_FIRST_NEW_ID = 1 << 40


@dataclass(frozen=True)
class Batch:
    """One step's input.

    Attributes:
        ids: i64 ``[N]``, table-major, the form of both APIs.
        known_ids: i64 ``[N]``, ``ids`` with ids below ``rows`` in the place of others, for static tables.
        offsets: i64 ``[T*B+1]``.
        grad: ``[B, T*D]``, or ``[N, D]`` without pooling, in the dtype of the output.
        num_tables: T.
    """

    ids: torch.Tensor
    known_ids: torch.Tensor
    offsets: torch.Tensor
    grad: torch.Tensor
    num_tables: int

    @property
    def num_unique(self) -> int:
        """Distinct (table, id) pairs, U; counted anew at each call."""
        batch_size = (self.offsets.numel() - 1) // self.num_tables
        ends = self.offsets[::batch_size].tolist()
        return sum(self.ids[begin:end].unique().numel() for begin, end in pairwise(ends))


def batches(case: "Case", residents: list[torch.Tensor], seed: int) -> Iterator[Batch]:
    """Yield random batches without end, on the case's device.

    Args:
        case: their shape.
        residents: per table, the ids that every engine holds. With new ids for full tables only the first half is
            drawn: those are touched often enough to stay, while the rest and the new ids make room for each other.
            With a population, static tables read the residents in the place of all of its ids.
        seed: of the generator.
    """
    random = torch.Generator(case.device).manual_seed(seed)
    lengths = torch.tensor(case.lengths, device=case.device).repeat_interleave(case.batch_size)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    width = (case.batch_size * sum(case.lengths), case.dim)
    shape = width if case.pooling == "NONE" else (case.batch_size, case.tables * case.dim)
    grad = torch.randn(shape, generator=random, device=case.device).to(DTYPES[case.dtype])
    next_new = _FIRST_NEW_ID
    while True:
        drawn = [
            _draw(case, case.population or ids.numel(), case.batch_size * length, random)
            for length, ids in zip(case.lengths, residents, strict=True)
        ]
        known_ids = torch.cat([ids[ranks % ids.numel()] for ids, ranks in zip(residents, drawn, strict=True)])
        ids = torch.cat(drawn) if case.population else known_ids
        if case.new_share:
            new = torch.rand(ids.numel(), generator=random, device=case.device) < case.new_share
            count = int(new.sum())
            ids = ids.clone()
            ids[new] = torch.arange(next_new, next_new + count, device=case.device)
            next_new += count
        yield Batch(ids, known_ids, offsets, grad, case.tables)


def _draw(case: "Case", population: int, count: int, random: torch.Generator) -> torch.Tensor:
    """Return ``count`` ranks below ``population``, or below its first half if the rest makes room."""
    if case.new_share and case.full:
        population //= 2
    return draw_ranks(case.alpha, population, count, random)


def draw_ranks(alpha: float, population: int, count: int, random: torch.Generator) -> torch.Tensor:
    """Return i64 ``[count]`` ranks below ``population``.

    Args:
        alpha: exponent of a power law, by the inverse of its continuous CDF; 0 is uniform.
        population: ids to draw from.
        count: how many.
        random: where they come from; the ranks are on its device.
    """
    u = torch.rand(count, generator=random, dtype=torch.float64, device=random.device)
    if alpha:
        power = 1 - alpha
        u = (((population + 1) ** power - 1) * u + 1) ** (1 / power) - 1
    else:
        u = u * population
    return u.long().clamp_(max=population - 1)


def bytes_moved(case: "Case", batch: Batch, state_bytes: int) -> int:
    """Return the bytes that a step cannot avoid to move between memory and cores, whoever runs it.

    Ids and offsets are read; every distinct row is read and every output value written. Training reads every gradient
    value, and reads and writes every distinct row with its optimizer state. The index of dynamic tables and all
    intermediates are not counted: they are overhead, and a smaller overhead shows as more GB/s.

    Args:
        case: the case.
        batch: one of its batches.
        state_bytes: optimizer state of a row.
    """
    row_bytes = case.dim * DTYPES[case.dtype].itemsize
    output_bytes = batch.grad.numel() * batch.grad.element_size()
    total = 8 * (batch.ids.numel() + batch.offsets.numel()) + batch.num_unique * row_bytes + output_bytes
    if case.train:
        total += output_bytes + 2 * batch.num_unique * (row_bytes + state_bytes)
    return total


def state_bytes(case: "Case") -> int:
    """Return the bytes of optimizer state that a row of the case has; it is fp32 whatever the weights are."""
    floats = {"exact_sgd": 0, "adam": 2 * case.dim, "exact_adagrad": case.dim, "exact_row_wise_adagrad": 1}
    return 4 * floats[case.optimizer]
