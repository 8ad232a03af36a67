"""The files of a counter that the user wrote, which reads and writes them itself."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch

from dynamicemb.checkpoint.disk.io import DISK, FileSystem, join, temporary_folder
from dynamicemb.checkpoint.disk.reader import FileReader
from dynamicemb.checkpoint.disk.writer import FileWriter
from dynamicemb.checkpoint.format import COUNTER_FREQUENCIES, COUNTER_KEYS
from dynamicemb.checkpoint.tables import Table
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.errors import DynamicEmbError
from dynamicemb.types import Counter

# Ids and their occurrences, i64 ``[M]`` each.
Counts: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def own_counts(counter: Counter, table: Table) -> Iterator[Counts]:
    """Let a counter write its two files into a temporary folder; a context with what they hold, batch by batch.

    Args:
        counter: the user's.
        table: whose ids it counts.

    Raises:
        DynamicEmbError: what it wrote are not two files of int64, equally long.
    """
    with temporary_folder() as folder:
        files = [join(folder, item) for item in (COUNTER_KEYS, COUNTER_FREQUENCIES)]
        counter.dump(files[0], files[1], table.index)
        sizes = [DISK.size(file) for file in files]
        if sizes[0] < 0 or sizes[0] % 8 or sizes[0] != sizes[1]:
            raise DynamicEmbError(
                f"table {table}: {type(counter).__name__}.dump must write int64 ids and as many int64 counts into the "
                f"two files that it is given; it left {sizes} bytes (-1: no file)"
            )
        yield _batches(files, sizes[0] // 8)


def _batches(files: list[str], count: int) -> Counts:
    with FileReader(DISK, files[0], np.int64, 1) as keys, FileReader(DISK, files[1], np.int64, 1) as counts:
        for begin in range(0, count, BATCH_SIZE_PER_DUMP):
            size = min(BATCH_SIZE_PER_DUMP, count - begin)
            ids, occurrences = (torch.from_numpy(file.read(begin, size)[:, 0]) for file in (keys, counts))
            yield ids, occurrences


def load_own(counter: Counter, table: Table, batches: Counts, disk: FileSystem) -> None:
    """Let a counter read this rank's counts from files of their own; ids that have a row are left out."""
    group = table.group
    with temporary_folder() as folder:
        with FileWriter(disk, folder, COUNTER_KEYS) as keys, FileWriter(disk, folder, COUNTER_FREQUENCIES) as counts:
            for ids, occurrences in batches:
                rows = group.find(ids.to(group.device), group.ranges_of(table.index, ids.numel())).cpu()
                keys.write(ids[rows < 0].numpy())
                counts.write(occurrences[rows < 0].numpy())
        counter.load(join(folder, COUNTER_KEYS), join(folder, COUNTER_FREQUENCIES), table.index)
