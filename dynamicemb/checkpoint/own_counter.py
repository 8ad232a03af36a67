"""The files of a counter that the user wrote, which reads and writes them itself."""

from collections.abc import Iterable
from typing import TypeAlias

import torch

from dynamicemb.checkpoint.format import COUNTER_FREQUENCIES, COUNTER_KEYS, FileEntry
from dynamicemb.checkpoint.io import FileSystem, join, temporary_folder
from dynamicemb.checkpoint.opened import checksum
from dynamicemb.checkpoint.sources import Table
from dynamicemb.checkpoint.writer import FileWriter
from dynamicemb.errors import DynamicEmbError
from dynamicemb.types import Counter

# Ids and their occurrences, i64 ``[M]`` each.
Counts: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor]]


def dump_own(counter: Counter, table: Table, root: str, paths: tuple[str, str], disk: FileSystem) -> list[FileEntry]:
    """Let a counter write its two files, and sync them.

    Args:
        counter: the user's.
        table: whose ids it counts.
        root: folder of the dump.
        paths: of the files of ids and counts inside it.
        disk: the file system.

    Raises:
        DynamicEmbError: what it wrote are not two files of int64, equally long.
    """
    files = [join(root, path) for path in paths]
    counter.dump(files[0], files[1], table.index)
    sizes = [disk.size(file) for file in files]
    if sizes[0] < 0 or sizes[0] % 8 or sizes[0] != sizes[1]:
        raise DynamicEmbError(
            f"table {table}: {type(counter).__name__}.dump must write int64 ids and as many int64 counts into the two "
            f"files that it is given; it left {sizes} bytes (-1: no file)"
        )
    entries = []
    for file, size in zip(files, sizes, strict=True):
        opened = disk.open(file)
        try:
            disk.sync(opened)
        finally:
            disk.close(opened)
        entries.append(FileEntry(size, checksum(file, size, disk)))
    return entries


def load_own(counter: Counter, table: Table, batches: Counts, disk: FileSystem) -> None:
    """Let a counter read this rank's counts from files of their own; ids that have a row are left out."""
    group = table.group
    with temporary_folder() as folder:
        with FileWriter(disk, folder, COUNTER_KEYS) as keys, FileWriter(disk, folder, COUNTER_FREQUENCIES) as counts:
            for ids, occurrences in batches:
                rows = group.find(ids.to(group.device), group._ranges_of(table.index, ids.numel())).cpu()
                keys.write(ids[rows < 0].numpy())
                counts.write(occurrences[rows < 0].numpy())
        counter.load(join(folder, COUNTER_KEYS), join(folder, COUNTER_FREQUENCIES), table.index)
