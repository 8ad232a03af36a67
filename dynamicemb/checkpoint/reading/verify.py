"""Read every file of a dump once before any table is touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dynamicemb.checkpoint.described import DescribedTable
from dynamicemb.checkpoint.disk.io import FileSystem
from dynamicemb.checkpoint.disk.reader import FileReader
from dynamicemb.checkpoint.format import COUNTER_KEYS, KEYS, SCORES
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reading.opened import Stored, check_crc
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from dynamicemb.score_strategy import DynamicEmbScoreStrategy
from dynamicemb.table.layout import locate
from dynamicemb.table.placement import CONTINUOUS, Placement


@dataclass
class Verified:
    """What one rank found, or all together.

    Attributes:
        num_owned: per table of this rank, by its name in messages, how many ids each of its parts will own.
        newest: per table without a clock, the newest time in its scores.
    """

    num_owned: dict[str, list[int]]
    newest: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def joined(parts: "list[Verified]") -> "Verified":
        """Add up what the ranks found."""
        owned: dict[str, list[int]] = {}
        for part in parts:
            for name, numbers in part.num_owned.items():
                owned[name] = [a + b for a, b in zip(owned.get(name, [0] * len(numbers)), numbers, strict=True)]
        newest: dict[str, int] = {}
        for part in parts:
            for name, time in part.newest.items():
                newest[name] = max(time, newest.get(name, 0))
        return Verified(owned, newest)


def check_true_ids(table: DescribedTable, stored: Stored) -> None:
    """Refuse files that hold changed ids.

    Raises:
        DynamicEmbError: as said.
    """
    if stored.is_foreign and stored.meta.get("dist_type") == CONTINUOUS and stored.num_parts > 1:
        raise DynamicEmbError(
            f"table {table}: the dump was written with 'continuous' routing by {stored.num_parts} ranks and has no "
            "manifest; the reference implementation stores ids there that are counted from each rank's first one, from "
            "which the true ids cannot be told. Dump it again there with 'roundrobin' or on one rank"
        )


def verify(tables: Sequence[DescribedTable], stored: list[list[Stored]], ranks: Ranks, disk: FileSystem) -> Verified:
    """Check this rank's share of the files: part p of P checks those of the written parts p, p + P, ...

    Raises:
        CheckpointCorruptError: a file is not what the manifest says, or ids of a dump of ours are repeated, out of
            order, or in the wrong rank's file.
    """
    found = Verified({})
    for table, parts in zip(tables, stored, strict=True):
        placement = table.placement(ranks.world_size)
        owned = np.zeros(placement.num_parts, np.int64)
        for part in parts:
            for number in _share(table, part, ranks):
                suffix = f".rank_{number}.world_size_{part.num_parts}"
                for path, entry in part.files.items():
                    if path.endswith(suffix):
                        check_crc(path, entry, disk)
                owned += _check_keys(placement, part, number, disk)
                _check_counted(part, number, disk)
                if part.is_foreign and isinstance(table.strategy, tuple) and part.num_columns:
                    newest = _newest(table, part, number, disk)
                    found.newest[str(table)] = max(newest, found.newest.get(str(table), 0))
        found.num_owned[str(table)] = owned.tolist()
    return found


def _share(table: DescribedTable, stored: Stored, ranks: Ranks) -> range:
    """Return which parts' files this rank checks; none where it has no part of the table."""
    placement = table.placement(ranks.world_size)
    own = placement.part_of(ranks.rank)
    return range(0) if own is None else range(own.number, stored.num_parts, placement.num_parts)


def _batches(disk: FileSystem, path: str, count: int, width: int = 1) -> Iterator[np.ndarray]:
    with FileReader(disk, path, np.int64, width) as reader:
        for begin in range(0, count, BATCH_SIZE_PER_DUMP):
            yield reader.read(begin, min(BATCH_SIZE_PER_DUMP, count - begin))


def bytes_to_verify(table: DescribedTable, stored: Stored, ranks: Ranks) -> int:
    """Return what the check of this rank's share reads: all of its files, and some of them once more."""
    writers = _share(table, stored, ranks)
    num_rows = sum(stored.counts[part] for part in writers)
    if stored.is_foreign:
        # Without a clock the newest time is looked for.
        return 8 * num_rows * (3 if isinstance(table.strategy, tuple) else 1)
    ends = tuple(f".rank_{part}.world_size_{stored.num_parts}" for part in writers)
    files = sum(entry.size for path, entry in stored.files.items() if path.endswith(ends))
    return files + 8 * (num_rows + sum((stored.num_counts or [0] * stored.num_parts)[part] for part in writers))


def _check_keys(placement: Placement, stored: Stored, file_rank: int, disk: FileSystem) -> np.ndarray:
    """Check the ids of one file; return how many of them each part of a placement will own."""
    owned = np.zeros(placement.num_parts, np.int64)
    path = stored.path(KEYS, file_rank)
    # The bucket that the last batch ended in, and the ids of that bucket.
    last_bucket, last_ids = -1, np.empty(0, np.int64)
    for batch in _batches(disk, path, stored.counts[file_rank]):
        ids = batch[:, 0]
        owned += np.bincount(placement.parts(torch.from_numpy(ids)).numpy(), minlength=owned.size)
        if stored.is_foreign:
            continue
        _check_writer(path, ids, stored, file_rank)
        buckets = locate(ids, max(1, stored.entry.num_buckets[file_rank]), 1)[0]
        if buckets[0] < last_bucket or (np.diff(buckets) < 0).any():
            raise CheckpointCorruptError(path, "ids in the order of their buckets", "another order")
        if buckets[0] == last_bucket:
            ids = np.concatenate([last_ids, ids])
            buckets = np.concatenate([np.full(last_ids.size, last_bucket), buckets])
        ordered = ids[np.lexsort((ids, buckets))]
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.size:
            raise CheckpointCorruptError(path, "every id once", f"id {repeated[0]} twice")
        last_bucket, last_ids = int(buckets[-1]), ids[buckets == buckets[-1]]
    return owned


def _check_writer(path: str, ids: np.ndarray, stored: Stored, file_rank: int) -> None:
    writers = stored.entry.placement.parts(torch.from_numpy(ids)).numpy()
    if (writers != file_rank).any():
        stray = int(ids[writers != file_rank][0])
        raise CheckpointCorruptError(path, f"ids of rank {file_rank}", f"id {stray} of another one")


def _check_counted(stored: Stored, file_rank: int, disk: FileSystem) -> None:
    """Check the ids of one of our files of admission counts."""
    if stored.is_foreign or stored.num_counts is None:
        return
    path = stored.path(COUNTER_KEYS, file_rank)
    for batch in _batches(disk, path, stored.num_counts[file_rank]):
        _check_writer(path, batch[:, 0], stored, file_rank)


def _newest(table: DescribedTable, stored: Stored, file_rank: int, disk: FileSystem) -> int:
    column = table.strategy_names.index(DynamicEmbScoreStrategy.TIMESTAMP.name)
    batches = _batches(disk, stored.path(SCORES, file_rank), stored.counts[file_rank], stored.num_columns)
    return max((int(batch[:, column].max()) for batch in batches), default=0)
