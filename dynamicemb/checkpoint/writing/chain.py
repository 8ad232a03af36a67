"""The dumps that an increment continues, and what of them is gone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from dynamicemb.checkpoint.disk.io import FileSystem
from dynamicemb.checkpoint.format import FULL, INCREMENT, KEYS, TOMBSTONES
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reading.opened import Stored, check_chain, check_crc, open_dump
from dynamicemb.checkpoint.reading.rows import FileReader, files_of_rank, tombstones_of_rank
from dynamicemb.checkpoint.tables import Table
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.touched import Mark


@dataclass
class Chain:
    """A full dump and its increments, which the next increment continues; empty before a full dump.

    Attributes:
        ids: of the dumps, the full one first.
        time_shift: by how much times in memory are later than those of the chain.
        stored: what each of them holds of a table, by the table's name in messages.
    """

    ids: list[str] = field(default_factory=list)
    time_shift: int = 0
    stored: dict[str, list[Stored]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What the next dump is."""
        return INCREMENT if self.ids else FULL

    def gone(
        self, table: Table, holds: Callable[[torch.Tensor], torch.Tensor], ranks: Ranks, disk: FileSystem
    ) -> np.ndarray:
        """Return the ids of this rank that the chain holds and the table does not, i64 ``[M]``, ascending.

        Reads all ids of the chain. Memory: 8 bytes for each id that is gone.

        Args:
            table: the table.
            holds: which of some ids i64 ``[M]`` it has, bool ``[M]``.
            ranks: who dumps.
            disk: the file system.
        """
        gone = np.empty(0, np.int64)
        for part in self.stored[str(table)]:
            # An increment says first what is gone, then what is there.
            removed = tombstones_of_rank(table, part, ranks, disk)
            if removed:
                gone = np.setdiff1d(gone, np.concatenate(removed))
            missing = [gone]
            for rank in files_of_rank(table, part, ranks):
                for ids in _own_ids(table, part, rank, ranks, disk):
                    missing.append(ids[~holds(ids)].numpy())
            gone = np.unique(np.concatenate(missing))
        return gone


def _own_ids(table: Table, stored: Stored, rank: int, ranks: Ranks, disk: FileSystem) -> Iterator[torch.Tensor]:
    """Yield the ids of one file that this rank owns, batch by batch."""
    with FileReader(disk, stored.path(KEYS, rank), np.int64, 1) as reader:
        for begin in range(0, stored.counts[rank], BATCH_SIZE_PER_DUMP):
            count = min(BATCH_SIZE_PER_DUMP, stored.counts[rank] - begin)
            ids = torch.from_numpy(reader.read(begin, count)[:, 0])
            yield ids[table.owns(ids, ranks)]


def marks_of(tables: list[Table], paths: tuple[str, ...]) -> list[Mark]:
    """Return since when each table may differ from the last dump of a chain; none for a full dump.

    Raises:
        DynamicEmbError: a table agreed with no dump, or the tables with dumps of different times.
    """
    if not paths:
        return []
    marks = []
    for table in tables:
        mark = table.group.marks.get(table.index)
        if mark is None:
            raise DynamicEmbError(
                f"table {table}: base ends with {paths[-1]!r}, but the last dump or load of the table was none that an "
                "increment may continue: there was none in this process, or it was a load with merge or fresh_scores, "
                "without the dump's optimizer state, or of a state_dict; write a full dump"
            )
        marks.append(mark)
    if len({mark.time_shift for mark in marks}) > 1:
        raise DynamicEmbError("base: the tables were loaded at different times; write a full dump")
    return marks


def open_chain(tables: list[Table], marks: list[Mark], paths: tuple[str, ...], optim: bool, disk: FileSystem) -> Chain:
    """Check that the tables agreed with the last dump of a chain, as their marks say.

    Raises:
        CheckpointCorruptError: a file of the chain is damaged.
        DynamicEmbError: it is not a chain, or not the one that the tables were dumped to or loaded from last.
    """
    if not paths:
        return Chain()
    dumps = [open_dump(path, disk) for path in paths]
    check_chain(dumps)
    if dumps[-1].manifest.is_foreign:
        raise DynamicEmbError(f"base {paths[-1]!r} has no manifest; an increment needs a dump of this package")
    chain = Chain([dump.manifest.dump_id for dump in dumps])
    for table, mark in zip(tables, marks, strict=True):
        if mark.dump_id != chain.ids[-1]:
            raise DynamicEmbError(
                f"table {table}: base ends with {paths[-1]!r} (dump {chain.ids[-1]}), but the last dump or load of the "
                f"table was dump {mark.dump_id}; give a base that ends with that one (python -m dynamicemb.inspect "
                "prints the id of a dump), or write a full dump"
            )
        stored = [dump.stored(table, disk) for dump in dumps]
        if (stored[-1].num_state >= 0) != optim:
            raise DynamicEmbError(
                f"table {table}: base was written with optim={not optim}, so its increments must be too"
            )
        for part in stored:
            for path, entry in part.files.items():
                if f"_{KEYS}." in path or f"_{TOMBSTONES}." in path:
                    check_crc(path, entry, disk)
        chain.stored[str(table)] = stored
        chain.time_shift = mark.time_shift
    return chain
