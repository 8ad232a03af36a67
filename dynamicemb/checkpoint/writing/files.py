"""The writing of a dump by one rank: files, manifest, place."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from dynamicemb.checkpoint.checksum import crc32
from dynamicemb.checkpoint.disk.io import FileSystem
from dynamicemb.checkpoint.disk.writer import FileWriter, WriteBehind
from dynamicemb.checkpoint.format import (
    COUNTER_FREQUENCIES,
    COUNTER_KEYS,
    TOMBSTONES,
    FileEntry,
    Manifest,
    TableEntry,
    inside,
    meta_file,
    rank_file,
)
from dynamicemb.checkpoint.place import Target
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.tables import Table
from dynamicemb.checkpoint.writing.chain import Chain
from dynamicemb.checkpoint.writing.contents import Contents, to_file
from dynamicemb.errors import DynamicEmbError
from dynamicemb.version import __version__


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote."""

    collections: dict[str, dict[str, TableEntry]]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Writing:
    """A dump in progress on one rank.

    Attributes:
        target: its place.
        chain: the dumps that it continues.
        dump_id: its name, the same on all ranks.
        clock: Unix nanoseconds from which ages count, in the time of the chain.
        ranks: who writes.
        disk: the file system.
        advance: called with the number of rows that were written.
    """

    target: Target
    chain: Chain
    dump_id: str
    clock: int
    ranks: Ranks
    disk: FileSystem
    advance: Callable[[int], object]

    def write(self, tables: Iterator[Contents]) -> RankPart:
        """Write this rank's files."""
        part = RankPart({}, {})
        with WriteBehind(self.disk) as behind:
            for contents in tables:
                table = contents.table
                with contents:
                    entry = self._write_table(contents, part, behind)
                    meta = contents.meta
                part.collections.setdefault(table.folder, {})[table.name] = entry
                if table.is_first(self.ranks):
                    path = inside(table.folder, meta_file(table.name))
                    self.target.write_file(path, meta)
                    part.files[path] = FileEntry(len(meta), crc32(meta))
        return part

    def _write_table(self, contents: Contents, part: RankPart, behind: WriteBehind) -> TableEntry:
        table, entry = contents.table, contents.entry
        placement = table.placement(self.ranks.world_size)
        own = placement.part_of(self.ranks.rank)
        assert own is not None
        with ExitStack() as stack:
            writers = {}
            for item in entry.items(self.chain.kind):
                path = inside(table.folder, rank_file(table.name, item, own.number, placement.num_parts))
                writers[item] = stack.enter_context(FileWriter(self.disk, self.target.writing, path, behind))
            # Before the files are closed, also where something fails.
            stack.callback(behind.settle)
            for block in contents.blocks:
                for rows in block.parts():
                    check_owner(table, rows.keys, self.ranks)
                    for item, values in to_file(table, rows, self.clock, self.chain.time_shift).items():
                        if item in writers:
                            writers[item].write(values)
                    entry.counts[0] += rows.keys.numel()
                    behind.then(partial(self.advance, rows.keys.numel()))
            for ids, occurrences in contents.counts:
                check_owner(table, ids, self.ranks)
                writers[COUNTER_KEYS].write(ids.numpy())
                writers[COUNTER_FREQUENCIES].write(occurrences.numpy())
                entry.num_counters[0] += ids.numel()
            if TOMBSTONES in writers:
                behind.flush()
                gone = self.chain.gone(table, contents.holds, self.ranks, self.disk)
                writers[TOMBSTONES].write(gone)
                entry.num_tombstones[0] = gone.size
            for writer in writers.values():
                part.files[writer.path] = writer.finish()
        return replace(entry, placement=placement)

    def commit(self, parts: list[RankPart]) -> None:
        """Put together what the ranks wrote, and give the dump its place."""
        files = {path: entry for part in parts for path, entry in part.files.items()}
        collections: dict[str, dict[str, TableEntry]] = {}
        for part in parts:
            for folder, tables in part.collections.items():
                for name, entry in tables.items():
                    if name not in collections.setdefault(folder, {}):
                        entries = [parts[rank].collections[folder][name] for rank in entry.placement.ranks]
                        collections[folder][name] = joined_entries(entries)
        chain = self.chain
        manifest = Manifest(
            __version__, chain.kind, self.dump_id, chain.ids, len(parts), self.clock, collections, files
        )
        self.target.commit(manifest)


def check_owner(table: Table, ids: torch.Tensor, ranks: Ranks) -> None:
    """Refuse to write ids that a load would look for in another rank's files.

    Raises:
        DynamicEmbError: this rank holds ids of other ranks.
    """
    foreign = ids[~table.owns(ids, ranks)]
    if foreign.numel():
        raise DynamicEmbError(
            f"table {table} holds ids on rank {ranks.rank} that {table.placement(ranks.world_size)} "
            f"gives to others, such as {int(foreign[0])}: no lookup finds them there. Import "
            "rows on the rank that owns_of names, and dump with the ranks over which the tables are sharded"
        )


def joined_entries(entries: list[TableEntry]) -> TableEntry:
    """Put the lists of all parts together, in their order."""
    return replace(
        entries[0],
        updates=max(entry.updates for entry in entries),
        counts=[entry.counts[0] for entry in entries],
        sizes=[entry.sizes[0] for entry in entries],
        num_buckets=[entry.num_buckets[0] for entry in entries],
        capacities=[entry.capacities[0] for entry in entries],
        num_counters=[entry.num_counters[0] for entry in entries],
        num_tombstones=[entry.num_tombstones[0] for entry in entries],
    )
