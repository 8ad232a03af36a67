"""What rows look like: their norms, and what should not be in them."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from dynamicemb.checkpoint.disk.io import FileSystem
from dynamicemb.checkpoint.disk.reader import FileReader
from dynamicemb.checkpoint.format import KEYS, OPT_VALUES, VALUES
from dynamicemb.checkpoint.reading.opened import Stored
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.inspection.dumped import Part
from dynamicemb.inspection.facts import Health
from dynamicemb.inspection.sample import Block, blocks, num_looked_at
from dynamicemb.table.layout import fmix64, locate

# Begins anew to yield a rank and some of the ids in its files, i64 ``[M]``, M > 0.
Ids: TypeAlias = Callable[[], Iterator[tuple[int, np.ndarray]]]

_BATCH_BYTES = 2**24
# Norms of which the median is taken: all, or every second one, every third one, ...
_MAX_NORMS = 2**20
# Ids that are compared at a time.
_MAX_IDS = 2**24


def health_of(part: Part, limit: int | None, disk: FileSystem, progress: Any) -> Health:
    """Look at the rows of a table.

    Args:
        part: the table in one dump.
        limit: rows at most, None for all.
        disk: the file system.
        progress: told how many rows were read, by ``update``.

    Raises:
        CheckpointCorruptError: a file ends too early.
        OSError: the disk failed.
    """
    table, stored = part.table, part.stored
    looked_at = num_looked_at(stored.counts, limit)
    scan = _Scan(every=-(-looked_at // _MAX_NORMS) or 1)
    row_bytes = 4 * (table.dim + max(0, stored.num_state))
    size = min(BATCH_SIZE_PER_DUMP, max(1, _BATCH_BYTES // max(1, row_bytes)))
    for block in blocks(stored.counts, limit, size):
        scan.add_values(_read(stored, VALUES, block, table.dim, np.float32, disk))
        if stored.num_state > 0:
            scan.add_state(_read(stored, OPT_VALUES, block, stored.num_state, np.float32, disk))
        progress.update(block.num_rows)
    norms = np.concatenate(scan.norms)

    def ids() -> Iterator[tuple[int, np.ndarray]]:
        for block in blocks(stored.counts, limit, BATCH_SIZE_PER_DUMP):
            yield block.rank, _read(stored, KEYS, block, 1, np.int64, disk)[:, 0]

    return Health(
        looked_at=looked_at,
        norm_min=scan.least if norms.size else None,
        norm_median=float(np.median(norms)) if norms.size else None,
        norm_max=scan.greatest if norms.size else None,
        non_finite_values=scan.non_finite_values,
        non_finite_state=scan.non_finite_state if stored.num_state > 0 else None,
        zero_rows=scan.zero_rows,
        repeated_ids=_num_repeated(stored, ids, looked_at),
        wrong_rank_ids=_num_strays(stored, ids()),
    )


def _read(stored: Stored, item: str, block: Block, width: int, dtype: type[np.generic], disk: FileSystem) -> np.ndarray:
    with FileReader(disk, stored.path(item, block.rank), dtype, width) as reader:
        return reader.read(block.begin, block.num_rows)


class _Scan:
    """What was seen of weights and states so far. ``every``: of how many norms one is kept for the median."""

    def __init__(self, every: int) -> None:
        self.norms: list[np.ndarray] = [np.empty(0)]
        self.least, self.greatest = np.inf, 0.0
        self.non_finite_values = self.non_finite_state = self.zero_rows = 0
        self._every = every

    def add_values(self, values: np.ndarray) -> None:
        """Look at weights, f32 ``[M, D]``."""
        # In double precision, in which the squares of all float32 are finite and only that of zero is zero.
        squares = np.einsum("ij,ij->i", values, values, dtype=np.float64)
        finite = np.isfinite(squares)
        self.non_finite_values += int((~finite).sum())
        self.zero_rows += int((squares == 0).sum())
        norms = np.sqrt(squares[finite])
        if norms.size:
            self.least, self.greatest = min(self.least, float(norms.min())), max(self.greatest, float(norms.max()))
            self.norms.append(norms[:: self._every])

    def add_state(self, state: np.ndarray) -> None:
        """Look at optimizer state, f32 ``[M, num_state]``."""
        self.non_finite_state += int((~np.isfinite(state).all(1)).sum())


def _num_repeated(stored: Stored, ids: Ids, total: int) -> int:
    if stored.is_foreign:
        return num_repeated(ids, total)
    return num_repeated_in_buckets(ids, stored.entry.num_buckets)


def num_repeated(ids: Ids, total: int) -> int:
    """Return how many ids are there beyond the first of each, reading them as often as memory demands.

    Args:
        ids: begins anew to yield (rank, i64 ``[M]``).
        total: how many there are.

    Memory: 2^24 ids, a few times.
    """
    repeated, passes = 0, -(-total // _MAX_IDS)
    for number in range(passes):
        share = [batch[fmix64(batch) % np.uint64(passes) == number] if passes > 1 else batch for _, batch in ids()]
        together = np.concatenate(share)
        repeated += together.size - np.unique(together).size
    return repeated


def num_repeated_in_buckets(ids: Ids, num_buckets: list[int]) -> int:
    """Return the same of files in the order of buckets, where equal ids of a rank are near each other.

    Args:
        ids: yields (rank, i64 ``[M]``), of each rank in the order of its file.
        num_buckets: of each rank.
    """
    repeated, last_rank = 0, -1
    # The ids of the bucket that the batch before ended in.
    last_ids = np.empty(0, np.int64)
    for rank, batch in ids():
        if rank != last_rank:
            last_rank, last_ids = rank, np.empty(0, np.int64)
        distinct = np.unique(np.concatenate([last_ids, batch]))
        repeated += last_ids.size + batch.size - distinct.size
        buckets = locate(distinct, max(1, num_buckets[rank]), 1)[0]
        last_ids = distinct[buckets == locate(batch[-1:], max(1, num_buckets[rank]), 1)[0]]
    return repeated


def _num_strays(stored: Stored, ids: Iterator[tuple[int, np.ndarray]]) -> int | None:
    """Return how many ids are in the files of a rank that does not own them; None without a manifest."""
    if stored.is_foreign:
        return None
    if stored.num_parts == 1:
        return 0
    placement = stored.entry.placement
    return sum(int((placement.parts(torch.from_numpy(i)) != number).sum()) for number, i in ids)
