"""Find ids in the files of a dump, or of a chain of dumps."""

from collections.abc import Sequence
from dataclasses import replace

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
from dynamicemb.checkpoint.reading.opened import Stored
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.inspection.dumped import DumpedTable, Part
from dynamicemb.inspection.facts import ABSENT, AGE, COUNTED, GONE, ROW, KeyFacts
from dynamicemb.inspection.scores import as_ages, clipped, holds_ages, unit_of
from dynamicemb.optimizer import OptimizerKind, OptimizerSpec
from dynamicemb.table.layout import locate

# Weights, or values of state, that are shown.
NUM_SHOWN = 8
# Ids read at a time once their bucket is found.
_BUCKET_BATCH = 4096


def look_up(
    ids: Sequence[int], parts: list[Part], places: list[tuple[str, int]], full: bool, disk: FileSystem
) -> list[KeyFacts]:
    """Return what a chain says about ids of one table: what the newest of its dumps says that names the id.

    Args:
        ids: the ids.
        parts: the table in each dump, base first.
        places: path and number of each dump.
        full: whether all values are wanted.
        disk: the file system.

    Raises:
        CheckpointCorruptError: a file ends too early.
        OSError: the disk failed.
    """
    table = parts[-1].table
    found: dict[int, KeyFacts] = {}
    for part, (path, number) in zip(reversed(parts), reversed(places), strict=True):
        wanted = [i for i in ids if i not in found]
        for i, (rank, position, repeats) in _rows(wanted, part.stored, disk).items():
            facts = KeyFacts(i, table.folder, table.name, ROW, path, number, rank, position, repeats)
            found[i] = _with_contents(facts, part, full, disk)
        for i, (rank, _, _) in _scan(wanted, part.stored, TOMBSTONES, _tombstones(part.stored), disk).items():
            # A dump says first what is gone, then what is there.
            found.setdefault(i, KeyFacts(i, table.folder, table.name, GONE, path, number, rank))
    counts = _counts([i for i in ids if i not in found or found[i].found == GONE], parts[-1].stored, disk)
    for i, (rank, count) in counts.items():
        path, number = places[-1]
        found[i] = KeyFacts(i, table.folder, table.name, COUNTED, path, number, rank, count=count)
    return [found.get(i, KeyFacts(i, table.folder, table.name, ABSENT)) for i in ids]


def _rows(ids: list[int], stored: Stored, disk: FileSystem) -> dict[int, tuple[int, int, int]]:
    """Return rank, position and number of rows, by id."""
    if stored.is_foreign:
        return _scan(ids, stored, KEYS, stored.counts, disk)
    found = {}
    for i in ids:
        rank = _owner(i, stored)
        position = _position(i, rank, stored, disk)
        if position >= 0:
            found[i] = (rank, position, 1)
    return found


def _owner(key: int, stored: Stored) -> int:
    """Return the rank in whose files an id of one of our dumps is."""
    return int(stored.entry.placement.parts(torch.tensor([key]))[0])


def _position(key: int, rank: int, stored: Stored, disk: FileSystem) -> int:
    """Return the place of an id in a file in the order of buckets, -1 if it is not there."""
    num_buckets = max(1, stored.entry.num_buckets[rank])

    def buckets(ids: np.ndarray) -> np.ndarray:
        return locate(ids, num_buckets, 1)[0]

    bucket = int(buckets(np.array([key], np.int64))[0])
    with FileReader(disk, stored.path(KEYS, rank), np.int64, 1) as reader:
        low, high = 0, stored.counts[rank]
        while low < high:
            middle = (low + high) // 2
            before = buckets(reader.read(middle, 1)[:, 0])[0] < bucket
            low, high = (middle + 1, high) if before else (low, middle)
        for begin in range(low, stored.counts[rank], _BUCKET_BATCH):
            ids = reader.read(begin, min(_BUCKET_BATCH, stored.counts[rank] - begin))[:, 0]
            places = np.flatnonzero(ids == key)
            if places.size:
                return begin + int(places[0])
            if buckets(ids[-1:])[0] > bucket:
                break
    return -1


def _scan(
    ids: list[int], stored: Stored, item: str, counts: Sequence[int], disk: FileSystem
) -> dict[int, tuple[int, int, int]]:
    """Read all files of an item; return rank and position of the last row of each id, and how many rows it has."""
    found: dict[int, tuple[int, int, int]] = {}
    wanted = np.array(ids, np.int64)
    for rank, total in enumerate(counts):
        if not total or not ids:
            continue
        with FileReader(disk, stored.path(item, rank), np.int64, 1) as reader:
            for begin in range(0, total, BATCH_SIZE_PER_DUMP):
                batch = reader.read(begin, min(BATCH_SIZE_PER_DUMP, total - begin))[:, 0]
                for place in np.flatnonzero(np.isin(batch, wanted)):
                    key = int(batch[place])
                    found[key] = (rank, begin + int(place), found.get(key, (0, 0, 0))[2] + 1)
    return found


def _tombstones(stored: Stored) -> list[int]:
    return [stored.num_tombstones(rank) for rank in range(stored.num_parts)]


def _counts(ids: list[int], stored: Stored, disk: FileSystem) -> dict[int, tuple[int, int]]:
    """Return rank and occurrences of ids that were not admitted yet."""
    found = {}
    for i, (rank, position, _) in _scan(ids, stored, COUNTER_KEYS, stored.num_counts or [], disk).items():
        with FileReader(disk, stored.path(COUNTER_FREQUENCIES, rank), np.int64, 1) as reader:
            found[i] = (rank, int(clipped(reader.read(position, 1))[0, 0]))
    return found


def _with_contents(facts: KeyFacts, part: Part, full: bool, disk: FileSystem) -> KeyFacts:
    """Return the facts with what the row holds."""
    table, stored = part.table, part.stored
    rank, position = facts.rank, facts.position
    assert rank is not None and position is not None

    def row(item: str, dtype: type[np.generic], width: int) -> np.ndarray:
        with FileReader(disk, stored.path(item, rank), dtype, width) as reader:
            return reader.read(position, 1)[0]

    shown = None if full else NUM_SHOWN
    state = row(OPT_VALUES, np.float32, stored.num_state).tolist() if stored.num_state > 0 else []
    scores: dict[str, int] = {}
    ages: dict[str, int] = {}
    if stored.num_columns:
        columns = clipped(row(SCORES, np.int64, stored.num_columns))
        for name, column in zip(table.strategy_names, columns[:, None], strict=True):
            scores[name] = int(column[0])
            if unit_of(name) == AGE and (stored.clock or holds_ages(table)):
                ages[name] = int(as_ages(table, column, stored.clock)[0])
    return replace(
        facts,
        scores=scores,
        ages=ages,
        dim=table.dim,
        num_state=len(state),
        values=row(VALUES, np.float32, table.dim)[:shown].tolist(),
        optimizer_state={name: values[:shown] for name, values in _state_parts(state, table).items()},
    )


def _state_parts(state: list[float], table: DumpedTable) -> dict[str, list[float]]:
    """Return the moments of Adam apart, and the state of others as it is."""
    if not state:
        return {}
    adam = table.optimizer_name == OptimizerSpec(OptimizerKind.ADAM).name
    return {"moments": state[: table.dim], "squares": state[table.dim :]} if adam else {"state": state}
