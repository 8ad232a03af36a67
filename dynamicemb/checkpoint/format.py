"""Names, sizes and the manifest of a dump. ``docs/checkpoint.md`` describes the format for readers of the files."""

import json
import re
import types
import typing
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dynamicemb.checkpoint.checksum import crc32
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from dynamicemb.table.placement import Placement, Rule

FORMAT_VERSION = 2
MANIFEST = "manifest.json"

KEYS = "emb_keys"
VALUES = "emb_values"
SCORES = "emb_scores"
OPT_VALUES = "emb_opt_values"
COUNTER_KEYS = "counter_keys"
COUNTER_FREQUENCIES = "counter_frequencies"
TOMBSTONES = "emb_tombstones"
ITEMS = (KEYS, VALUES, SCORES, OPT_VALUES, COUNTER_KEYS, COUNTER_FREQUENCIES, TOMBSTONES)

FULL = "full"
INCREMENT = "increment"

_RANK_FILE = re.compile(rf"(?s)(.+)_({'|'.join(ITEMS)})\.rank_(0|[1-9]\d*)\.world_size_([1-9]\d*)")
_META_SUFFIX = "_opt_args.json"
_ENVELOPE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n"manifest": (.*)\}\n', re.DOTALL)


def rank_file(table: str, item: str, rank: int, world_size: int) -> str:
    """Return the name of one of a rank's files; of a table on some of the ranks, the part and how many there are."""
    return f"{table}_{item}.rank_{rank}.world_size_{world_size}"


def meta_file(table: str) -> str:
    """Return the name of the file with a table's optimizer arguments."""
    return table + _META_SUFFIX


def encode_meta_json_file_path(root_path: str, table_name: str) -> str:
    """Return the path of a table's JSON file in a folder; the reference implementation's name for it."""
    return inside(root_path, meta_file(table_name))


def encode_checkpoint_file_path(root_path: str, table_name: str, rank: int, world_size: int, item: str) -> str:
    """Return the path of a rank's file; ``item`` is ``keys``, ``values``, ``scores`` or ``opt_values``.

    Raises:
        ValueError: another item.
    """
    return _encoded(root_path, table_name, rank, world_size, f"emb_{item}")


def encode_counter_checkpoint_file_path(root_path: str, table_name: str, rank: int, world_size: int, item: str) -> str:
    """Return the path of a rank's counter file; ``item`` is ``keys`` or ``frequencies``.

    Raises:
        ValueError: another item.
    """
    return _encoded(root_path, table_name, rank, world_size, f"counter_{item}")


def _encoded(root_path: str, table_name: str, rank: int, world_size: int, item: str) -> str:
    if item not in ITEMS:
        raise ValueError(f"item must be one of {', '.join(ITEMS)} without its prefix, got {item!r}")
    return inside(root_path, rank_file(table_name, item, rank, world_size))


def inside(folder: str, name: str) -> str:
    """Return a file's path relative to the dump; ``folder`` may be empty."""
    return f"{folder}/{name}" if folder else name


@dataclass(frozen=True)
class RankFile:
    """What the name of a file says."""

    table: str
    item: str
    rank: int
    world_size: int


def parse_rank_file(name: str) -> RankFile | None:
    """Return what a name says, None if it is not that of a rank's file."""
    match = _RANK_FILE.fullmatch(name)
    return None if match is None else RankFile(match[1], match[2], int(match[3]), int(match[4]))


def is_ours(name: str) -> bool:
    """Return whether the format names a file so."""
    return name == MANIFEST or name.endswith(_META_SUFFIX) or parse_rank_file(name) is not None


def is_collection(name: str) -> bool:
    """Return whether a folder of a dump may have this name: the path of a collection, from ``model`` on."""
    return name.split(".", 1)[0] == "model"


def check_folder(name: str) -> None:
    """Refuse the path of a collection that cannot be a folder's name; it may be empty.

    Raises:
        ValueError: it has a slash or a zero byte in it.
    """
    if "/" in name or "\0" in name:
        raise ValueError(
            f"collection {name!r} cannot name a folder; name modules of the model without '/' and zero bytes"
        )


def check_table_name(name: str) -> None:
    """Refuse a table name that cannot begin a file name.

    Raises:
        ValueError: it has a slash or a zero byte in it, or is empty.
    """
    if not name or "/" in name or "\0" in name:
        raise ValueError(f"table name {name!r} cannot begin a file name; name tables without '/' and zero bytes")


@dataclass(frozen=True)
class FileEntry:
    """A file of a dump."""

    size: int
    crc32: int


@dataclass(frozen=True)
class TableEntry:
    """A table of a dump. Lists have an entry for each part of the rows: for each rank, unless some have none.

    Attributes:
        dim: D.
        dtype: of the weights in memory, such as ``float32``; files hold float32.
        optimizer: name of the optimizer.
        num_state: float32 values of optimizer state per row in ``emb_opt_values``; -1 if there is no such file.
        score_strategy: names of the strategies in the order of the columns of ``emb_scores``.
        dist_type: routing that the ranks had.
        num_embeddings: rows over all ranks, which ``continuous`` routing needs; None if unknown.
        seed: of initial values, low 64 bits.
        updates: optimizer applications so far.
        has_counter: whether there are counter files.
        counts: rows in the files.
        sizes: ids in the table; an increment has fewer rows.
        num_buckets: buckets; rows are in the order of their buckets.
        capacities: rows at most.
        num_counters: entries of the counter files.
        num_tombstones: ids in ``emb_tombstones``; only of an increment.
        placement: where the table was. Its rule says what ``dist_type`` and ``num_embeddings`` say, for readers of
            version 1 of the format, which had no placements.
    """

    dim: int
    dtype: str
    optimizer: str
    num_state: int
    score_strategy: list[str]
    dist_type: str
    num_embeddings: int | None
    seed: int
    updates: int
    has_counter: bool
    counts: list[int]
    sizes: list[int]
    num_buckets: list[int]
    capacities: list[int]
    num_counters: list[int]
    num_tombstones: list[int]
    placement: Placement

    @property
    def num_parts(self) -> int:
        """How many files there are of each kind."""
        return self.placement.num_parts

    def items(self, kind: str) -> list[str]:
        """Return which files each rank has."""
        items = [KEYS, VALUES, SCORES]
        items += [OPT_VALUES] if self.num_state >= 0 else []
        items += [COUNTER_KEYS, COUNTER_FREQUENCIES] if self.has_counter else []
        return items + ([TOMBSTONES] if kind == INCREMENT else [])

    def check_placement(self, world_size: int) -> None:
        """Raise ValueError where the placement does not fit the other fields, or the ranks that wrote."""
        placement, rule = self.placement, Rule(self.dist_type, self.num_embeddings)
        if placement.columns != ((0, self.dim),) or placement.rule != rule or max(placement.ranks) >= world_size:
            raise ValueError(f"{placement} of a table with dim {self.dim} and {rule} on {world_size} ranks")

    def file_size(self, item: str, rank: int) -> int:
        """Return the bytes that a file must have."""
        rows = self.counts[rank]
        return {
            KEYS: rows * 8,
            VALUES: rows * self.dim * 4,
            SCORES: rows * len(self.score_strategy) * 8,
            OPT_VALUES: rows * max(0, self.num_state) * 4,
            COUNTER_KEYS: self.num_counters[rank] * 8,
            COUNTER_FREQUENCIES: self.num_counters[rank] * 8,
            TOMBSTONES: self.num_tombstones[rank] * 8,
        }[item]


@dataclass(frozen=True)
class Manifest:
    """What a dump consists of; its file is written last.

    Attributes:
        package_version: of the writer.
        kind: FULL or INCREMENT.
        dump_id: random, names the dump.
        chain: ids of the dumps that an increment continues, base first; empty for a full one.
        world_size: ranks that wrote.
        clock: Unix nanoseconds; ages count from here, and it is later than any timestamp.
        collections: folder -> table -> entry. The folder of a module's own dump is "".
        files: path inside the dump -> entry.
        format_version: of the files.
    """

    package_version: str
    kind: str
    dump_id: str
    chain: list[str]
    world_size: int
    clock: int
    collections: dict[str, dict[str, TableEntry]]
    files: dict[str, FileEntry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def foreign(cls) -> "Manifest":
        """Return what stands for the manifest of a dump of another program, which has none."""
        return cls("", FULL, "", [], 0, 0, {})

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote the dump, without a manifest."""
        return not self.dump_id

    def expected_files(self) -> dict[str, int]:
        """Return the path of every file and its size; -1 where only the file's entry knows."""
        sizes = {}
        for folder, tables in self.collections.items():
            for name, table in tables.items():
                sizes[inside(folder, meta_file(name))] = -1
                for item in table.items(self.kind):
                    for part in range(table.num_parts):
                        path = inside(folder, rank_file(name, item, part, table.num_parts))
                        sizes[path] = table.file_size(item, part)
        return sizes

    def to_bytes(self) -> bytes:
        """Return the contents of the file: the manifest as JSON, and its CRC."""
        body = json.dumps(asdict(self), indent=1, sort_keys=True).encode()
        return b'{"crc32": "%08x",\n"manifest": %s}\n' % (crc32(body), body)

    @staticmethod
    def is_one(data: bytes) -> bool:
        """Return whether these are the contents of a manifest of ours, perhaps with a damaged spot."""
        return data.startswith(b'{"crc32": "') or b'"dump_id": "' in data

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Read the contents of a manifest file.

        Args:
            data: the contents.
            path: of the file, for the errors.

        Raises:
            CheckpointCorruptError: the file is damaged, or contradicts itself.
            DynamicEmbError: a later version of the package wrote it.
        """
        match = _ENVELOPE.fullmatch(data)
        if match is None:
            raise CheckpointCorruptError(path, "a manifest with its checksum", f"{len(data)} bytes of something else")
        if crc32(match[2]) != int(match[1], 16):
            raise CheckpointCorruptError(path, f"CRC {match[1].decode()}", f"{crc32(match[2]):08x}")
        values = json.loads(match[2])
        version = values.get("format_version") if isinstance(values, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise DynamicEmbError(
                f"{path} has format version {version}, this package reads up to {FORMAT_VERSION}; "
                f"load it with dynamicemb {values.get('package_version')} or later"
            )
        try:
            if version == 1:
                _add_placements(values)
            manifest: Manifest = typed(cls, values, "manifest")
            manifest._check()
        except ValueError as error:
            raise CheckpointCorruptError(path, "a consistent manifest", str(error)) from None
        return manifest

    def _check(self) -> None:
        """Raise ValueError where fields contradict each other."""
        if self.kind not in (FULL, INCREMENT) or (self.kind == INCREMENT) != bool(self.chain):
            raise ValueError(f"kind {self.kind!r} with a chain of {len(self.chain)}")
        for folder, tables in self.collections.items():
            check_folder(folder)
            if folder in (".", ".."):
                raise ValueError(f"folder {folder!r}")
            for name, table in tables.items():
                check_table_name(name)
                table.check_placement(self.world_size)
                lists = (
                    table.counts,
                    table.sizes,
                    table.num_buckets,
                    table.capacities,
                    table.num_counters,
                    table.num_tombstones,
                )
                if any(len(values) != table.num_parts or min(values) < 0 for values in lists):
                    raise ValueError(f"table {name!r} has {[len(v) for v in lists]} numbers of {table.num_parts} parts")
        expected = self.expected_files()
        if expected.keys() != self.files.keys():
            raise ValueError(f"files {sorted(expected.keys() ^ self.files.keys())[:3]} are listed or needed, not both")
        for path, size in expected.items():
            if size not in (-1, self.files[path].size):
                raise ValueError(f"{path} has {self.files[path].size} bytes, its table needs {size}")


def _add_placements(values: Any) -> None:
    """Add what version 1 did not say to a parsed manifest: each table had a part of its rows on every rank.

    Raises:
        ValueError: it is no manifest.
    """
    try:
        for tables in values["collections"].values():
            for entry in tables.values():
                add_placement(entry, values["world_size"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"manifest of version 1 without {error!r}") from None


def add_placement(entry: dict[str, Any], world_size: int) -> None:
    """Add to a parsed entry of version 1 that a part of the rows was on each of so many ranks."""
    rule = {"dist_type": entry["dist_type"], "num_embeddings": entry["num_embeddings"]}
    entry["placement"] = {"rule": rule, "ranks": list(range(world_size)), "columns": [[0, entry["dim"]]]}


def typed(kind: Any, value: Any, where: str) -> Any:
    """Return a parsed JSON value as what a type annotation says.

    Raises:
        ValueError: it is something else.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict and isinstance(value, dict):
        return {name: typed(arguments[1], part, f"{where}[{name!r}]") for name, part in value.items()}
    if origin is list and isinstance(value, list):
        return [typed(arguments[0], part, where) for part in value]
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            return tuple(typed(kind, part, where) for kind, part in zip(kinds, value, strict=True))
    if origin is types.UnionType:
        return None if value is None else typed(arguments[0], value, where)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        if {f.name for f in fields(kind)} != value.keys():
            raise ValueError(f"{where} has the fields {sorted(value)}")
        hints = typing.get_type_hints(kind)
        return kind(**{name: typed(hints[name], part, f"{where}.{name}") for name, part in value.items()})
    raise ValueError(f"{where} is {value!r}")
