"""A dump as it lies on the disk: what is there, and whether it is all that should be there."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dynamicemb.checkpoint.checksum import crc32
from dynamicemb.checkpoint.described import DescribedTable
from dynamicemb.checkpoint.disk.io import FileSystem, base_name, join, parent_of
from dynamicemb.checkpoint.disk.reader import read_file
from dynamicemb.checkpoint.format import (
    COUNTER_FREQUENCIES,
    COUNTER_KEYS,
    INCREMENT,
    KEYS,
    MANIFEST,
    OPT_VALUES,
    SCORES,
    TOMBSTONES,
    VALUES,
    FileEntry,
    Manifest,
    TableEntry,
    inside,
    is_ours,
    meta_file,
    parse_rank_file,
    rank_file,
)
from dynamicemb.checkpoint.place import Target, is_unfinished
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from dynamicemb.optimizer import get_optimizer_state_dim
from dynamicemb.table.placement import Placement, Rule
from dynamicemb.warn import warn


@dataclass(frozen=True)
class Stored:
    """One table in one dump.

    Attributes:
        folder: where its files are.
        name: the table's name.
        num_parts: into how many files of each kind its rows are divided: one for each rank, unless some had none.
        num_columns: of the scores, 0 if there is no file.
        meta: contents of the JSON file.
        entry: from the manifest; of a foreign dump, what names and sizes of its files tell.
        clock: from the manifest; 0 in a foreign dump.
        files: what the manifest says of the table's files, by path; empty in a foreign dump.
        is_foreign: there is no manifest. Then nobody knows checksums, routing, order and seed.
    """

    folder: str
    name: str
    num_parts: int
    num_columns: int
    meta: dict[str, Any]
    entry: TableEntry
    clock: int
    files: dict[str, FileEntry]
    is_foreign: bool = False

    @property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return self.entry.counts

    @property
    def num_state(self) -> int:
        """Values of optimizer state of each row, -1 if there is no file."""
        return self.entry.num_state

    @property
    def num_counts(self) -> list[int] | None:
        """Ids in each rank's files of admission counts, None if there are none."""
        return self.entry.num_counters if self.entry.has_counter else None

    def path(self, item: str, part: int) -> str:
        """Return the path of a part's file."""
        return join(self.folder, rank_file(self.name, item, part, self.num_parts))

    def num_tombstones(self, rank: int) -> int:
        """Return how many ids a rank's file of removed ids holds."""
        return self.entry.num_tombstones[rank]


@dataclass(frozen=True)
class OpenedDump:
    """A dump whose manifest, if there is one, fits the files that are there.

    Attributes:
        path: as the user gave it.
        root: the folder of the manifest, or of the dump if there is none.
        folder: where ``path`` is one collection of a dump, its name; else "".
        manifest: of a foreign dump, one that says nothing: without a name, a clock, tables and files.
    """

    path: str
    root: str
    folder: str
    manifest: Manifest

    def stored_table_names(self, disk: FileSystem) -> set[tuple[str, str]]:
        """Return (folder, table) of everything in the dump."""
        if not self.manifest.is_foreign:
            found = {(folder, name) for folder, tables in self.manifest.collections.items() for name in tables}
            return {(folder, name) for folder, name in found if not self.folder or folder == self.folder}
        names = set()
        for folder in ["", *(n for n, is_folder in (disk.entries(self.root) or {}).items() if is_folder)]:
            for name in disk.entries(join(self.root, folder)) or {}:
                file = parse_rank_file(name)
                if file is not None:
                    names.add((folder, file.table))
        return names

    def stored(self, table: DescribedTable, disk: FileSystem) -> Stored:
        """Return what the dump holds of a table.

        Raises:
            CheckpointCorruptError: files of the table are missing, or their sizes do not fit.
            DynamicEmbError: the dump does not hold the table.
        """
        folder = table.folder or self.folder
        if (folder, table.name) not in self.stored_table_names(disk):
            there = sorted(inside(*pair) for pair in self.stored_table_names(disk))
            lacking = f"dump {self.path!r} holds no table {inside(folder, table.name)!r}, it holds"
            if not there:
                raise DynamicEmbError(f"{lacking} none; give the folder that DynamicEmbDump wrote, not one around it")
            raise DynamicEmbError(
                f"{lacking} {there}; paths of collections and names of tables must be those of the dump; name the "
                "tables to load in table_names, or load another dump"
            )
        if self.manifest.is_foreign:
            return _stored_without_manifest(join(self.root, folder), table, disk)
        return self._ours(folder, table.name, disk)

    def _ours(self, folder: str, name: str, disk: FileSystem) -> Stored:
        manifest = self.manifest
        entry = manifest.collections[folder][name]
        place = join(self.root, folder) if folder else self.root
        listed = [inside(folder, meta_file(name))] + [
            inside(folder, rank_file(name, item, part, entry.num_parts))
            for item in entry.items(manifest.kind)
            for part in range(entry.num_parts)
        ]
        files = {join(self.root, path): manifest.files[path] for path in listed}
        meta_path = join(place, meta_file(name))
        check_crc(meta_path, files[meta_path], disk)
        meta = read_json(meta_path, disk)
        columns = len(entry.score_strategy)
        return Stored(place, name, entry.num_parts, columns, meta, entry, manifest.clock, files)


def open_dump(path: str, disk: FileSystem) -> OpenedDump:
    """Read the manifest of a dump and compare it with the files that are there.

    Raises:
        FileNotFoundError: there is no dump.
        CheckpointCorruptError: the manifest is damaged, or files are missing, too many or of another size.
    """
    dump = find_dump(path, disk)
    for error in wrong_files(dump, disk):
        raise error
    return dump


def find_dump(path: str, disk: FileSystem) -> OpenedDump:
    """Read the manifest of a dump; the files may be others than it says.

    Raises:
        FileNotFoundError: there is no dump.
        CheckpointCorruptError: the manifest is damaged.
    """
    root = disk.real_path(path)
    if not disk.entries(root):
        target = Target(path, disk)
        previous = target.previous
        if disk.size(join(previous, MANIFEST)) < 0:
            message = f"there is no dump in {path!r}"
            if disk.entries(target.writing):
                message += f"; one is being written, or was not finished: {target.writing!r}"
            raise FileNotFoundError(message)
        warn(
            f"{path!r} was being replaced when its writer was stopped; the dump before is read from {previous!r}",
        )
        root = previous
    for candidate, folder in ((root, ""), (parent_of(root), base_name(root))):
        if disk.size(join(candidate, MANIFEST)) >= 0:
            path_of_it = join(candidate, MANIFEST)
            data = read_file(path_of_it, disk)
            if folder and not Manifest.is_one(data):
                continue
            manifest = Manifest.from_bytes(data, path_of_it)
            if folder and folder not in manifest.collections:
                continue
            return OpenedDump(path, candidate, folder, manifest)
    for candidate in (root, parent_of(root)):
        if is_unfinished(candidate):
            raise FileNotFoundError(f"{path!r} is a dump that is being written, or was not finished; load another one")
    warn(
        f"dump {path!r} has no {MANIFEST}, as those of the reference implementation: only the sizes of its files can "
        "be checked",
    )
    return OpenedDump(path, root, "", Manifest.foreign())


def check_chain(dumps: list[OpenedDump]) -> None:
    """Check that dumps are a base and its increments in order.

    Raises:
        DynamicEmbError: one does not follow the one before.
    """
    chain: list[str] = []
    for place, dump in enumerate(dumps):
        manifest = dump.manifest
        if manifest.is_foreign:
            if len(dumps) > 1:
                raise DynamicEmbError(f"{dump.path!r} has no {MANIFEST} and cannot be part of a chain; load it alone")
            return
        if manifest.chain != chain:
            before = "the dump before it is missing (it is the first of the list)"
            if chain:
                before = f"the dump before it is {dumps[place - 1].path!r} (dump {chain[-1]}, number {place - 1} of its"
                before += " chain)"
            kind = f"number {len(manifest.chain)}" if manifest.kind == INCREMENT else "a full dump"
            after = f"dump {manifest.chain[-1]}" if manifest.chain else "nothing"
            raise DynamicEmbError(
                f"chain: {dump.path!r} is {kind} and continues {after}, but {before}; give the "
                "base and all of its increments, in the order in which they were written"
            )
        chain = [*chain, manifest.dump_id]


def read_json(path: str, disk: FileSystem) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file.

    Raises:
        CheckpointCorruptError: it holds something else.
    """
    if disk.size(path) < 0:
        return {}
    try:
        values = json.loads(read_file(path, disk))
    except ValueError as error:
        raise CheckpointCorruptError(path, "JSON", str(error)) from None
    if not isinstance(values, dict):
        raise CheckpointCorruptError(path, "a JSON object", repr(values))
    return values


def check_crc(path: str, entry: FileEntry, disk: FileSystem) -> None:
    """Compare a file with what the manifest says of it.

    Raises:
        CheckpointCorruptError: it is another one.
    """
    size = disk.size(path)
    if size != entry.size:
        raise CheckpointCorruptError(path, f"{entry.size} bytes", f"{size} bytes" if size >= 0 else "no file")
    crc = checksum(path, size, disk)
    if crc != entry.crc32:
        raise CheckpointCorruptError(path, f"CRC {entry.crc32:08x}", f"{crc:08x}")


def checksum(path: str, size: int, disk: FileSystem) -> int:
    """Return the CRC of a file of so many bytes.

    Raises:
        CheckpointCorruptError: it ends before.
    """
    buffer = memoryview(bytearray(min(size, 2**22)))
    crc, offset = 0, 0
    file = disk.open(path)
    try:
        while offset < size:
            number = disk.read(file, buffer[: size - offset], offset)
            if number == 0:
                raise CheckpointCorruptError(path, f"{size} bytes", f"{offset} bytes")
            crc = crc32(buffer[:number], crc)
            offset += number
    finally:
        disk.close(file)
    return crc


def wrong_files(dump: OpenedDump, disk: FileSystem) -> Iterator[CheckpointCorruptError]:
    """Compare the names and sizes of all files of our format with the manifest; yield what differs."""
    root, manifest = dump.root, dump.manifest
    if manifest.is_foreign:
        return
    there = set()
    for name, is_folder in (disk.entries(root) or {}).items():
        inner = (disk.entries(join(root, name)) or {}) if is_folder else {}
        there |= {inside(name, n) for n in inner if is_ours(n)} if is_folder else {name} if is_ours(name) else set()
    for path in sorted(there - manifest.files.keys() - {MANIFEST}):
        yield CheckpointCorruptError(join(root, path), "no such file in this dump", "a file")
    for path, entry in manifest.files.items():
        size = disk.size(join(root, path))
        if size != entry.size:
            got = f"{size} bytes" if size >= 0 else "no file"
            yield CheckpointCorruptError(join(root, path), f"{entry.size} bytes", got)


def _stored_without_manifest(folder: str, table: DescribedTable, disk: FileSystem) -> Stored:
    """Find out from names and sizes what a folder holds of a table."""
    files = [f for f in map(parse_rank_file, disk.entries(folder) or {}) if f is not None and f.table == table.name]
    world_sizes = sorted({file.world_size for file in files})
    if len(world_sizes) != 1:
        path = join(folder, rank_file(table.name, KEYS, 0, world_sizes[-1]))
        raise CheckpointCorruptError(path, "files of one world size", f"files of {world_sizes}")
    world_size = world_sizes[0]
    written = {file.rank for file in files if file.item == KEYS}
    if len(written) != world_size:
        rank = next(rank for rank in range(world_size) if rank not in written)
        raise CheckpointCorruptError(join(folder, rank_file(table.name, KEYS, rank, world_size)), "a file", "none")
    if any(file.item == TOMBSTONES for file in files):
        path = join(folder, rank_file(table.name, TOMBSTONES, 0, world_size))
        raise CheckpointCorruptError(path, f"a {MANIFEST} beside an increment", "none")
    meta = read_json(join(folder, meta_file(table.name)), disk)
    widths = {KEYS: 8, VALUES: table.dim * 4, SCORES: 8, OPT_VALUES: _state_bytes(meta, table)}
    sizes = {
        item: [disk.size(join(folder, rank_file(table.name, item, rank, world_size))) for rank in range(world_size)]
        for item in widths
    }
    counts = [size // 8 for size in sizes[KEYS]]
    if not any(counts):
        widths[SCORES] = 8 * len(table.strategy_names)
    if any(count > 0 and size == count * 16 for count, size in zip(counts, sizes[SCORES], strict=True)):
        widths[SCORES] = 16
    for item, width in widths.items():
        if (item in (SCORES, OPT_VALUES) and max(sizes[item]) < 0) or width < 0:
            continue
        for rank, size in enumerate(sizes[item]):
            if size != counts[rank] * width:
                path = join(folder, rank_file(table.name, item, rank, world_size))
                wanted = f"{max(0, counts[rank]) * width} bytes for {max(0, counts[rank])} rows"
                wanted += f" of dim {table.dim}" if item == VALUES else ""
                raise CheckpointCorruptError(path, wanted, f"{size} bytes" if size >= 0 else "no file")
    num_columns = widths[SCORES] // 8 if max(sizes[SCORES]) >= 0 else 0
    num_state = widths[OPT_VALUES] // 4 if max(sizes[OPT_VALUES]) >= 0 else -1
    num_counts = _counts_without_manifest(folder, table.name, world_size, disk)
    entry = _entry(table, meta, num_state, counts, num_counts)
    return Stored(folder, table.name, world_size, num_columns, meta, entry, 0, {}, is_foreign=True)


def _entry(
    table: DescribedTable, meta: dict[str, Any], num_state: int, counts: list[int], num_counts: list[int] | None
) -> TableEntry:
    """Return what a manifest would say of a table, as far as it is known."""
    nothing = [0] * len(counts)
    return TableEntry(
        dim=table.dim,
        dtype="",
        optimizer=str(meta.get("opt_type", table.optimizer_name)),
        num_state=num_state,
        score_strategy=table.strategy_names,
        dist_type="",
        num_embeddings=None,
        seed=0,
        updates=0,
        has_counter=num_counts is not None,
        counts=counts,
        sizes=counts,
        num_buckets=nothing,
        capacities=nothing,
        num_counters=num_counts or nothing,
        num_tombstones=nothing,
        placement=Placement.row_wise(Rule(), len(counts), max(1, table.dim)),
    )


def _counts_without_manifest(folder: str, name: str, world_size: int, disk: FileSystem) -> list[int] | None:
    """Return how many admission counts each rank wrote, None if none did."""
    sizes = {
        item: [disk.size(join(folder, rank_file(name, item, rank, world_size))) for rank in range(world_size)]
        for item in (COUNTER_KEYS, COUNTER_FREQUENCIES)
    }
    if max(map(max, sizes.values())) < 0:
        return None
    for rank, (keys, counts) in enumerate(zip(*sizes.values(), strict=True)):
        if keys < 0 or keys % 8:
            path = join(folder, rank_file(name, COUNTER_KEYS, rank, world_size))
            raise CheckpointCorruptError(path, "ids of 8 bytes", f"{keys} bytes" if keys >= 0 else "no file")
        if counts != keys:
            path = join(folder, rank_file(name, COUNTER_FREQUENCIES, rank, world_size))
            raise CheckpointCorruptError(path, f"{keys} bytes", f"{counts} bytes" if counts >= 0 else "no file")
    return [size // 8 for size in sizes[COUNTER_KEYS]]


def _state_bytes(meta: dict[str, Any], table: DescribedTable) -> int:
    """Return the bytes of a row's optimizer state in files of the reference implementation, -4 if unknown."""
    try:
        return 4 * get_optimizer_state_dim(meta.get("opt_type", table.optimizer_name), table.dim)
    except ValueError:
        return -4
