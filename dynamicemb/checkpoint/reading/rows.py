"""Stream the rows of a dump that belong to a rank."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from dynamicemb.checkpoint.disk.io import FileSystem
from dynamicemb.checkpoint.disk.reader import FileReader
from dynamicemb.checkpoint.format import (
    COUNTER_FREQUENCIES,
    COUNTER_KEYS,
    KEYS,
    OPT_VALUES,
    SCORES,
    TOMBSTONES,
    VALUES,
)
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reading.opened import Stored
from dynamicemb.checkpoint.tables import Table
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.score_strategy import DynamicEmbScoreStrategy, score_load_permutation
from dynamicemb.table.scores import MAX_SCORE

_BATCH_BYTES = 2**24

# Which rows of a batch: all, or positions.
Kept: TypeAlias = slice | np.ndarray


class Rows(NamedTuple):
    """Rows as ``RowImport.add`` takes them."""

    ids: torch.Tensor
    weights: torch.Tensor
    state: torch.Tensor | None
    scores: list[torch.Tensor]

    def without(self, ids: np.ndarray) -> "Rows":
        """Return the rows of all ids but these, i64 ``[M]``, ascending."""
        if not ids.size:
            return self
        keep = torch.from_numpy(~np.isin(self.ids.numpy(), ids, assume_unique=False))
        state = None if self.state is None else self.state[keep]
        return Rows(self.ids[keep], self.weights[keep], state, [column[keep] for column in self.scores])

    def on(self, device: torch.device) -> "Rows":
        """Return the rows on a device."""
        state = None if self.state is None else self.state.to(device)
        return Rows(self.ids.to(device), self.weights.to(device), state, [column.to(device) for column in self.scores])


@dataclass(frozen=True)
class Conversion:
    """What becomes of scores and state on their way into a table.

    Attributes:
        now: the time of the load, equal on all ranks.
        with_state: whether optimizer state is read.
        fresh_scores: whether scores are made up instead of read.
        newest: of dumps without a clock, the newest time in the scores of a table, by the table's name in messages.
        file_names: names of the score columns in the files.
        offset: what is added to a time of the files, or from what an age is taken.
    """

    now: int
    with_state: bool
    fresh_scores: bool
    newest: dict[str, int]
    file_names: tuple[str, ...] = ()
    offset: int = 0

    def of(self, table: Table, stored: Stored, last: Stored) -> "Conversion":
        """Return the conversion for one table of one dump, ``last`` being the last dump of its chain."""
        names = tuple(stored.entry.score_strategy)
        if table.strategy is DynamicEmbScoreStrategy.NO_EVICTION:
            # Without a clock there is only an order.
            offset = self.now - last.clock if last.clock else 0
        elif isinstance(table.strategy, tuple):
            offset = self.now - (last.clock or self.newest.get(str(table), self.now))
        else:
            offset = self.now - (last.clock - stored.clock)
        return Conversion(self.now, self.with_state, self.fresh_scores, self.newest, names, offset)

    def scores(self, table: Table, stored: Stored, columns: np.ndarray) -> list[torch.Tensor]:
        """Return scores i64 ``[M]`` as memory has them, from those in files i64 ``[M, columns]``."""
        if self.fresh_scores or stored.num_columns == 0:
            return self._fresh(table, len(columns))
        raw = torch.from_numpy(columns)
        # Unsigned numbers; ours end before the sign.
        raw = torch.where(raw < 0, MAX_SCORE, raw)
        if isinstance(table.strategy, tuple):
            strategies = tuple(DynamicEmbScoreStrategy[name] for name in self.file_names)
            stamps, counts = raw[:, score_load_permutation(strategies)].unbind(1)
            return [_moved(stamps, self.offset, self.now), counts.contiguous()]
        if table.strategy is DynamicEmbScoreStrategy.TIMESTAMP:
            return [(self.offset - raw[:, 0].clamp(max=self.offset)).clamp(min=0)]
        if table.strategy is DynamicEmbScoreStrategy.NO_EVICTION:
            return [_moved(raw[:, 0], self.offset, self.now)]
        return [raw[:, 0].contiguous()]

    def _fresh(self, table: Table, count: int) -> list[torch.Tensor]:
        strategy = table.strategy
        if isinstance(strategy, tuple):
            return [torch.full((count,), self.now), torch.ones(count, dtype=torch.int64)]
        if strategy in (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.NO_EVICTION):
            return [torch.full((count,), self.now)]
        if strategy is DynamicEmbScoreStrategy.LFU:
            return [torch.ones(count, dtype=torch.int64)]
        return [torch.full((count,), int(table.group.index.score_values[table.index]))]


def _moved(times: torch.Tensor, offset: int, latest: int) -> torch.Tensor:
    """Return times by so much later, from 0 to ``latest``."""
    # Clamped first: a sum beyond 2^63 would be negative.
    return (times.clamp(max=latest - offset) + offset).clamp(0, latest)


def keeps_layout(table: Table, stored: Stored, ranks: Ranks) -> bool:
    """Return whether each part of a table finds all of its ids, and nothing else, in one file."""
    there, here = stored.entry.placement, table.placement(ranks.world_size)
    return not stored.is_foreign and there.rule == here.rule and there.num_parts == here.num_parts


def files_of_rank(table: Table, stored: Stored, ranks: Ranks) -> list[int]:
    """Return the parts whose files may hold ids of this rank."""
    own = table.placement(ranks.world_size).part_of(ranks.rank)
    if own is None:
        return []
    return [own.number] if keeps_layout(table, stored, ranks) else list(range(stored.num_parts))


def rows_of_rank(
    table: Table, stored: Stored, conversion: Conversion, ranks: Ranks, disk: FileSystem
) -> Iterator[Rows]:
    """Yield the rows of a table that this rank owns."""
    for file_rank in files_of_rank(table, stored, ranks):
        with ExitStack() as stack:
            files = _Files(table, stored, conversion)
            files.open(stack, file_rank, disk)
            yield from _owned(table, stored.counts[file_rank], files, ranks)


class _Files:
    """The files of one writing rank that are read."""

    def __init__(self, table: Table, stored: Stored, conversion: Conversion) -> None:
        self._table, self._stored, self._conversion = table, stored, conversion

    def open(self, stack: ExitStack, rank: int, disk: FileSystem) -> None:
        """Open them until ``stack`` is left."""
        table, stored, conversion = self._table, self._stored, self._conversion
        with_scores = stored.num_columns > 0 and not conversion.fresh_scores
        # Tables that only evaluate have a file of it, without any values.
        with_state = conversion.with_state and stored.num_state > 0 and table.num_state > 0

        def reader(item: str, dtype: type[np.generic], width: int) -> FileReader:
            return stack.enter_context(FileReader(disk, stored.path(item, rank), dtype, width))

        self.keys = reader(KEYS, np.int64, 1)
        self.values = reader(VALUES, np.float32, table.dim)
        self._scores = reader(SCORES, np.int64, stored.num_columns) if with_scores else None
        self._state = reader(OPT_VALUES, np.float32, stored.num_state) if with_state else None

    def read(self, begin: int, count: int, kept: Kept) -> Rows:
        """Return the rows of a part of a batch; ``kept`` says which of them."""
        weights = torch.from_numpy(self.values.read(begin, count)[kept])
        ids = torch.from_numpy(self.keys.read(begin, count)[kept, 0])
        columns = np.empty((count, 0), np.int64)
        if self._scores is not None:
            columns = self._scores.read(begin, count)
        scores = self._conversion.scores(self._table, self._stored, columns[kept])
        state = None if self._state is None else torch.from_numpy(self._state.read(begin, count)[kept])
        return Rows(ids, weights, state, scores)


def _owned(table: Table, count: int, files: _Files, ranks: Ranks) -> Iterator[Rows]:
    size = min(BATCH_SIZE_PER_DUMP, max(1, _BATCH_BYTES // (4 * (table.dim + table.num_state))))
    for begin in range(0, count, size):
        ids = torch.from_numpy(files.keys.read(begin, min(size, count - begin))[:, 0])
        own = table.owns(ids, ranks).nonzero().flatten().numpy()
        if not own.size:
            continue
        # Only the part of the batch between the first and the last row of ours is read, and copied if not all is ours.
        first, length = int(own[0]), int(own[-1]) + 1 - int(own[0])
        yield files.read(begin + first, length, slice(None) if own.size == length else own - first)


def tombstones_of_rank(table: Table, stored: Stored, ranks: Ranks, disk: FileSystem) -> list[np.ndarray]:
    """Return the ids of this rank, i64 ``[M]`` each, that an increment says are gone."""
    found = []
    for file_rank in files_of_rank(table, stored, ranks):
        count = stored.num_tombstones(file_rank)
        if count:
            with FileReader(disk, stored.path(TOMBSTONES, file_rank), np.int64, 1) as reader:
                ids = reader.read(0, count)[:, 0]
            found.append(ids[table.owns(torch.from_numpy(ids), ranks).numpy()])
    return found


def counts_of_rank(
    table: Table, stored: Stored, ranks: Ranks, disk: FileSystem
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ``(ids i64[M], occurrences i64[M])`` of the ids of this rank that were not admitted yet."""
    assert stored.num_counts is not None
    for file_rank in files_of_rank(table, stored, ranks):
        count = stored.num_counts[file_rank]
        with ExitStack() as stack:
            keys, counts = (
                stack.enter_context(FileReader(disk, stored.path(item, file_rank), np.int64, 1))
                for item in (COUNTER_KEYS, COUNTER_FREQUENCIES)
            )
            for begin in range(0, count, BATCH_SIZE_PER_DUMP):
                size = min(BATCH_SIZE_PER_DUMP, count - begin)
                ids = torch.from_numpy(keys.read(begin, size)[:, 0])
                occurrences = torch.from_numpy(counts.read(begin, size)[:, 0])
                # Unsigned numbers; ours end before the sign.
                occurrences = torch.where(occurrences < 0, MAX_SCORE, occurrences)
                own = table.owns(ids, ranks)
                yield ids[own], occurrences[own]
