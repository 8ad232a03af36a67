"""Tables as dumps describe them: what a manifest says, or what can be told from the files without one."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynamicemb.checkpoint.disk.io import FileSystem, join
from dynamicemb.checkpoint.disk.reader import FileReader
from dynamicemb.checkpoint.format import KEYS, SCORES, VALUES, TableEntry, inside, meta_file, parse_rank_file, rank_file
from dynamicemb.checkpoint.reading.opened import OpenedDump, Stored, read_json
from dynamicemb.score_strategy import DynamicEmbScoreStrategy, ScoreStrategy, string_to_evict_strategy
from dynamicemb.table.placement import ROUNDROBIN, Placement, Rule

UNKNOWN = "unknown"

# What the rules of eviction that dumps of the reference implementation name say about one column of scores.
_STRATEGY_OF_RULE = {"KLru": DynamicEmbScoreStrategy.TIMESTAMP, "KLfu": DynamicEmbScoreStrategy.LFU}
# Counts are smaller, nanoseconds since 1970, or since a machine was started, are larger.
_LEAST_TIME = 10**13


@dataclass(frozen=True)
class DumpedTable:
    """A table of a dump, as ``described.DescribedTable``.

    Attributes:
        folder: of its files inside the dump.
        name: the table's name.
        dim: D, 0 where nothing tells.
        optimizer_name: as dumps name it, or UNKNOWN.
        strategy: None if unknown.
        strategy_names: of each column of the scores, or UNKNOWN.
        dist_type: routing that the ranks had, None if unknown.
        num_embeddings: rows over all ranks, where known.
        evict_strategy: rule of eviction as the JSON file has it, None if it has none.
    """

    folder: str
    name: str
    dim: int
    optimizer_name: str
    strategy: ScoreStrategy | None
    strategy_names: list[str]
    dist_type: str | None
    num_embeddings: int | None
    evict_strategy: str | None = None

    def placement(self, world_size: int) -> Placement:
        """Return where so many ranks would have the table."""
        return Placement.row_wise(Rule(self.dist_type or ROUNDROBIN, self.num_embeddings), world_size, max(1, self.dim))

    def __str__(self) -> str:
        return inside(self.folder, self.name)


@dataclass(frozen=True)
class Part:
    """What one dump of a chain holds of a table."""

    table: DumpedTable
    stored: Stored


@dataclass
class Damage:
    """Messages about what is wrong, each once, in the order in which they were found."""

    messages: list[str] = field(default_factory=list)

    def add(self, error: Exception) -> None:
        """Take note of an error."""
        if str(error) not in self.messages:
            self.messages.append(str(error))


def dumped_table(dump: OpenedDump, folder: str, name: str, disk: FileSystem) -> DumpedTable:
    """Return what a dump says about one of its tables.

    Raises:
        CheckpointCorruptError: the JSON file holds something else.
    """
    if not dump.manifest.is_foreign:
        return _ours(folder, name, dump.manifest.collections[folder][name])
    return _without_manifest(folder, name, join(dump.root, folder) if folder else dump.root, disk)


def _ours(folder: str, name: str, entry: TableEntry) -> DumpedTable:
    strategies = tuple(DynamicEmbScoreStrategy.__members__.get(column) for column in entry.score_strategy)
    strategy: Any = None if None in strategies else strategies[0] if len(strategies) == 1 else strategies
    return DumpedTable(
        folder, name, entry.dim, entry.optimizer, strategy, entry.score_strategy, entry.dist_type, entry.num_embeddings
    )


def _without_manifest(folder: str, name: str, place: str, disk: FileSystem) -> DumpedTable:
    """Tell from the JSON file and the sizes of files what the format does not say."""
    meta = read_json(join(place, meta_file(name)), disk)
    sizes = [
        tuple(disk.size(join(place, rank_file(name, item, f.rank, f.world_size))) for item in (KEYS, VALUES, SCORES))
        for f in map(parse_rank_file, disk.entries(place) or {})
        if f is not None and f.table == name and f.item == KEYS
    ]
    dim = _ratio([(keys, values * 2) for keys, values, _ in sizes])
    columns = _ratio([(keys, scores) for keys, _, scores in sizes])
    rule = meta.get("evict_strategy")
    strategy = _strategy(rule, columns, place, name, disk)
    names = [strategy] if isinstance(strategy, DynamicEmbScoreStrategy) else strategy or ()
    return DumpedTable(
        folder,
        name,
        dim,
        str(meta.get("opt_type", UNKNOWN)),
        strategy,
        [column.name for column in names] or _unknown(columns),
        str(meta["dist_type"]) if "dist_type" in meta else None,
        None,
        None if rule is None else str(rule),
    )


def _unknown(columns: int) -> list[str]:
    return [UNKNOWN] if columns < 2 else [f"{UNKNOWN} {column}" for column in range(1, columns + 1)]


def _ratio(pairs: list[tuple[int, int]]) -> int:
    """Return how many times the first number of a pair is in the second one, by the majority; 0 where none tells."""
    known = [(first, second) for first, second in pairs if first > 0 and second > 0]
    whole = Counter(second // first for first, second in known if second % first == 0)
    return whole.most_common(1)[0][0] if whole else max((second // first for first, second in known), default=0)


def _strategy(rule: Any, columns: int, place: str, name: str, disk: FileSystem) -> ScoreStrategy | None:
    try:
        known = None if rule is None else string_to_evict_strategy(str(rule)).name
    except ValueError:
        return None
    if columns < 2:
        return _STRATEGY_OF_RULE.get(known or "")
    # The file does not say which column is which; times are far larger than counts.
    for file in map(parse_rank_file, disk.entries(place) or {}):
        if file is None or file.table != name or file.item != SCORES:
            continue
        path = join(place, rank_file(name, SCORES, file.rank, file.world_size))
        count = min(1000, disk.size(path) // (8 * columns))
        if count > 0:
            with FileReader(disk, path, np.int64, columns) as reader:
                is_time = (reader.read(0, count).min(0) >= _LEAST_TIME).tolist()
            if sorted(is_time) != [False, True]:
                return None
            timestamp, lfu = DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU
            return (timestamp, lfu) if is_time[0] else (lfu, timestamp)
    return None
