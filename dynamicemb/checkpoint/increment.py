"""The dumps that an increment continues, and what of them is gone."""

from dataclasses import dataclass, field

import numpy as np
import torch

from dynamicemb.checkpoint.format import FULL, INCREMENT, KEYS, TOMBSTONES
from dynamicemb.checkpoint.io import FileSystem
from dynamicemb.checkpoint.opened import Stored, check_chain, check_crc, open_dump
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.read import FileReader, files_of_rank, tombstones_of_rank
from dynamicemb.checkpoint.sources import Table
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.errors import DynamicEmbError


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

    def first_step(self, table: Table) -> int:
        """Return the step from which on rows are written, 0 for all."""
        return table.group.marks[table.index].first_step if self.ids else 0

    def gone(self, table: Table, ranks: Ranks, disk: FileSystem) -> np.ndarray:
        """Return the ids of this rank that the chain holds and the table does not, i64 ``[M]``, ascending.

        Reads all ids of the chain. Memory: 8 bytes for each id that is gone.
        """
        gone = np.empty(0, np.int64)
        for part in self.stored[str(table)]:
            # An increment says first what is gone, then what is there.
            removed = tombstones_of_rank(table, part, ranks, disk)
            if removed:
                gone = np.setdiff1d(gone, np.concatenate(removed))
            missing = [gone]
            for rank in files_of_rank(table, part, ranks):
                missing += _missing(table, part, rank, ranks, disk)
            gone = np.unique(np.concatenate(missing))
        return gone


def _missing(table: Table, stored: Stored, rank: int, ranks: Ranks, disk: FileSystem) -> list[np.ndarray]:
    """Return the ids of one file that this rank owns and does not hold, batch by batch."""
    missing = []
    with FileReader(disk, stored.path(KEYS, rank), np.int64, 1) as reader:
        for begin in range(0, stored.counts[rank], BATCH_SIZE_PER_DUMP):
            count = min(BATCH_SIZE_PER_DUMP, stored.counts[rank] - begin)
            ids = torch.from_numpy(reader.read(begin, count)[:, 0])
            ids = ids[table.owners(ids, ranks.world_size) == ranks.rank]
            # By the time that the dump observed: one that expires now is neither here nor in the rows of the dump gone.
            ranges = table.group._ranges_of(table.index, ids.numel())
            rows = table.group.find(ids.to(table.group.device), ranges).cpu()
            missing.append(ids[rows < 0].numpy())
    return missing


def open_chain(tables: list[Table], paths: tuple[str, ...], optim: bool, disk: FileSystem) -> Chain:
    """Check that the tables agreed with the last dump of a chain, and since when they do not.

    Raises:
        CheckpointCorruptError: a file of the chain is damaged.
        DynamicEmbError: it is not a chain, or not the one that the tables were dumped to or loaded from last.
    """
    if not paths:
        return Chain()
    dumps = [open_dump(path, disk) for path in paths]
    check_chain(dumps)
    if dumps[-1].manifest is None:
        raise DynamicEmbError(f"base {paths[-1]!r} has no manifest; an increment needs a dump of this package")
    chain = Chain([dump.manifest.dump_id for dump in dumps if dump.manifest is not None])
    shifts = set()
    for table in tables:
        mark = table.group.marks.get(table.index)
        if mark is None or mark.dump_id != chain.ids[-1]:
            last = "none" if mark is None else f"dump {mark.dump_id}"
            raise DynamicEmbError(
                f"table {table}: base ends with {paths[-1]!r} (dump {chain.ids[-1]}), but the last dump or load of the "
                f"table was {last}; pass the whole chain, or write a full dump"
            )
        shifts.add(mark.time_shift)
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
    if len(shifts) > 1:
        raise DynamicEmbError("base: the tables were loaded at different times; write a full dump")
    chain.time_shift = shifts.pop()
    return chain
