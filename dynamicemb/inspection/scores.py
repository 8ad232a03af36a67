"""Histograms of scores and of admission counts."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from dynamicemb.checkpoint.disk.io import FileSystem
from dynamicemb.checkpoint.disk.reader import FileReader
from dynamicemb.checkpoint.format import COUNTER_FREQUENCIES, SCORES
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.inspection.dumped import DumpedTable, Part
from dynamicemb.inspection.facts import AGE, COUNT, NUMBER, Bin, Histogram
from dynamicemb.inspection.sample import blocks
from dynamicemb.inspection.units import DAY, HOUR, MINUTE, SECOND
from dynamicemb.score_strategy import DynamicEmbScoreStrategy
from dynamicemb.table.scores import MAX_SCORE

_UNITS = {
    DynamicEmbScoreStrategy.TIMESTAMP.name: AGE,
    DynamicEmbScoreStrategy.NO_EVICTION.name: AGE,
    DynamicEmbScoreStrategy.LFU.name: COUNT,
}
_AGE_EDGES = [
    0, SECOND // 1000, SECOND // 100, SECOND // 10, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR, 6 * HOUR, DAY,
    3 * DAY, 7 * DAY, 30 * DAY, 90 * DAY, 365 * DAY,
]  # fmt: skip
_COUNT_EDGES = [0, *(digit * 10**power for power in range(19) for digit in (1, 2, 5))]
_NUM_LINEAR_BINS = 10


def unit_of(column: str) -> str:
    """Return AGE, COUNT or NUMBER for the name of a strategy."""
    return _UNITS.get(column, NUMBER)


def holds_ages(table: DumpedTable) -> bool:
    """Return whether times are ages in the files: a TIMESTAMP that stands alone."""
    return table.strategy_names == [DynamicEmbScoreStrategy.TIMESTAMP.name]


def as_ages(table: DumpedTable, times: np.ndarray, now: int) -> np.ndarray:
    """Return nanoseconds before ``now`` of times as files have them, i64 ``[M]``."""
    return times if holds_ages(table) else np.maximum(now - np.minimum(times, now), 0)


def clipped(scores: np.ndarray) -> np.ndarray:
    """Return scores as a load takes them: unsigned numbers, of which ours end before the sign."""
    return np.where(scores < 0, MAX_SCORE, scores)


def score_histograms(part: Part, limit: int | None, disk: FileSystem) -> list[Histogram]:
    """Return a histogram of each column of a table's scores; none without rows or scores."""
    table, stored = part.table, part.stored
    if stored.num_columns == 0 or sum(stored.counts) == 0:
        return []

    def batches() -> Iterator[np.ndarray]:
        for block in blocks(stored.counts, limit, BATCH_SIZE_PER_DUMP):
            with FileReader(disk, stored.path(SCORES, block.rank), np.int64, stored.num_columns) as reader:
                yield clipped(reader.read(block.begin, block.num_rows))

    newest = np.max([batch.max(0) for batch in batches()], 0).tolist()
    histograms = []
    for c, name in enumerate(table.strategy_names):
        column = partial(_column, table, batches, c, stored.clock or newest[c])
        histograms.append(_histogram(name, unit_of(name), column))
    return histograms


def count_histogram(part: Part, limit: int | None, disk: FileSystem) -> Histogram | None:
    """Return a histogram of the occurrences of ids that were not admitted; None if there are none."""
    stored = part.stored
    if not stored.num_counts or not sum(stored.num_counts):
        return None
    counts = stored.num_counts

    def batches() -> Iterator[np.ndarray]:
        for block in blocks(counts, limit, BATCH_SIZE_PER_DUMP):
            with FileReader(disk, stored.path(COUNTER_FREQUENCIES, block.rank), np.int64, 1) as reader:
                yield clipped(reader.read(block.begin, block.num_rows))[:, 0]

    return _histogram("occurrences", COUNT, batches)


def _column(
    table: DumpedTable, batches: Callable[[], Iterator[np.ndarray]], column: int, now: int
) -> Iterator[np.ndarray]:
    """Yield a column of scores, times as ages."""
    is_time = unit_of(table.strategy_names[column]) == AGE
    for batch in batches():
        yield as_ages(table, batch[:, column], now) if is_time else batch[:, column]


def _histogram(column: str, unit: str, batches: Callable[[], Iterator[np.ndarray]]) -> Histogram:
    """Read the values twice: for their range, and to count them."""
    extents = [(int(batch.min()), int(batch.max()), batch.size) for batch in batches()]
    low, high = min(e[0] for e in extents), max(e[1] for e in extents)
    edges = _edges(unit, low, high)
    found = np.zeros(len(edges), np.int64)
    for batch in batches():
        found += np.bincount(np.searchsorted(edges, batch, side="right") - 1, minlength=len(edges))
    begin, end = np.flatnonzero(found)[[0, -1]]
    bins = [
        Bin(edge, after - 1 if after is not None else None, int(count))
        for edge, after, count in list(zip(edges, [*edges[1:], None], found, strict=True))[begin : end + 1]
    ]
    return Histogram(column, unit, sum(e[2] for e in extents), low, high, bins)


def _edges(unit: str, low: int, high: int) -> list[int]:
    """Return where bins begin, ascending; the last one has no end."""
    if unit == NUMBER:
        width = (high - low) // _NUM_LINEAR_BINS + 1
        edges = range(low, high + width + 1, width)
        return [edge for edge in edges if edge <= MAX_SCORE]
    return _AGE_EDGES if unit == AGE else _COUNT_EDGES
