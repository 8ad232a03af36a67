"""What a dump says about itself and its tables, without a look at their rows."""

from dataclasses import dataclass, field

from dynamicemb.checkpoint.disk.io import FileSystem, join
from dynamicemb.checkpoint.format import INCREMENT, ITEMS, TOMBSTONES, meta_file
from dynamicemb.checkpoint.reading.opened import OpenedDump, Stored
from dynamicemb.inspection.dumped import DumpedTable, Part
from dynamicemb.inspection.facts import DumpFacts, TableFacts
from dynamicemb.inspection.units import date

# Of the JSON file, what is not a number of the optimizer.
_NOT_NUMBERS = ("opt_type", "evict_strategy", "dist_type", "step_score")


@dataclass
class OneDump:
    """A dump that was opened, and those of its tables that are wanted and whose files are there."""

    opened: OpenedDump
    notes: list[str]
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Its place in its chain."""
        return len(self.opened.manifest.chain)


def dump_facts(dump: OneDump, tables: list[TableFacts]) -> DumpFacts:
    """Return what a dump says about itself."""
    manifest = dump.opened.manifest
    total = sum(sum(table.bytes.values()) for table in tables)
    world_sizes = {part.stored.num_parts for part in dump.parts.values()}
    if manifest.is_foreign:
        world_size = world_sizes.pop() if len(world_sizes) == 1 else None
        return DumpFacts(
            dump.opened.path, None, 0, None, [], None, None, world_size, None, None, total, dump.notes, tables
        )
    return DumpFacts(
        path=dump.opened.path,
        kind=manifest.kind,
        number=dump.number,
        dump_id=manifest.dump_id,
        chain=manifest.chain,
        format_version=manifest.format_version,
        package_version=manifest.package_version,
        world_size=manifest.world_size,
        clock=manifest.clock,
        written=date(manifest.clock),
        bytes=total,
        notes=dump.notes,
        tables=tables,
    )


def table_facts(part: Part, disk: FileSystem) -> TableFacts:
    """Return what a dump says about a table.

    Raises:
        OSError: the disk failed.
    """
    table, stored, meta = part.table, part.stored, part.stored.meta
    entry = None if stored.is_foreign else stored.entry
    strategy_known = entry is not None or table.strategy is not None
    return TableFacts(
        folder=table.folder,
        name=table.name,
        dim=table.dim,
        dtype=None if entry is None else entry.dtype,
        optimizer=table.optimizer_name,
        optimizer_numbers={name: value for name, value in meta.items() if name not in _NOT_NUMBERS},
        num_state=None if stored.num_state < 0 else stored.num_state,
        score_strategy=table.strategy_names if strategy_known else None,
        evict_strategy=table.evict_strategy,
        step_score=meta.get("step_score"),
        dist_type=table.dist_type,
        num_embeddings=table.num_embeddings,
        seed=None if entry is None else entry.seed,
        updates=None if entry is None else entry.updates,
        rows=stored.counts,
        sizes=None if entry is None else entry.sizes,
        capacities=None if entry is None else entry.capacities,
        num_buckets=None if entry is None else entry.num_buckets,
        counted=stored.num_counts,
        tombstones=_tombstones(stored),
        bytes=_sizes(table, stored, disk),
    )


def _tombstones(stored: Stored) -> list[int] | None:
    """Return how many ids each rank says are gone, None of a full dump."""
    has_file = any(f"_{TOMBSTONES}." in path for path in stored.files)
    return stored.entry.num_tombstones if has_file else None


def _sizes(table: DumpedTable, stored: Stored, disk: FileSystem) -> dict[str, int]:
    """Return the bytes of a table's files, per kind of file."""
    sizes: dict[str, int] = {}
    for item in ITEMS:
        paths = [stored.path(item, rank) for rank in range(stored.num_parts)]
        known = [stored.files[path].size for path in paths if path in stored.files]
        if stored.is_foreign:
            known = [size for size in map(disk.size, paths) if size >= 0]
        if known:
            sizes[item] = sum(known)
    meta = join(stored.folder, meta_file(table.name))
    sizes["opt_args"] = stored.files[meta].size if meta in stored.files else max(0, disk.size(meta))
    return sizes


def needs(facts: DumpFacts) -> str | None:
    """Return what a load needs beside a single dump, None for nothing."""
    if facts.kind != INCREMENT:
        return None
    return f"a load takes the dumps before it too ({len(facts.chain)}), from base {facts.chain[0]} on"
