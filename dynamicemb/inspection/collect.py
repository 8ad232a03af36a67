"""Open dumps, check them as a load does, and gather what there is to say about them."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from dynamicemb.checkpoint.disk.io import FileSystem, base_name, join
from dynamicemb.checkpoint.disk.watched import WatchedDisk
from dynamicemb.checkpoint.format import (
    MANIFEST,
    inside,
    is_ours,
)
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reading.opened import OpenedDump, check_chain, find_dump, wrong_files
from dynamicemb.checkpoint.reading.verify import bytes_to_verify, check_true_ids, verify
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from dynamicemb.inspection.describe import OneDump, dump_facts, table_facts
from dynamicemb.inspection.dumped import Damage, Part, dumped_table
from dynamicemb.inspection.facts import DumpFacts, KeyFacts, TableFacts
from dynamicemb.inspection.health import health_of
from dynamicemb.inspection.keys import look_up
from dynamicemb.inspection.sample import num_looked_at
from dynamicemb.inspection.scores import count_histogram, score_histograms


class NoDumpError(ValueError):
    """There is nothing to inspect: no dump at a path, or no such table in it."""


@dataclass
class Inspection:
    """A dump or a chain of them.

    Attributes:
        dumps: base first; none where a manifest is damaged.
        damage: what a load would refuse.
    """

    disk: FileSystem
    dumps: list[OneDump] = field(default_factory=list)
    damage: Damage = field(default_factory=Damage)

    @classmethod
    def open(cls, paths: Sequence[str], names: Sequence[str], disk: FileSystem) -> "Inspection":
        """Read manifests and compare them with the files that are there.

        Args:
            paths: a dump, or a base and its increments in order.
            names: of the tables that are wanted, with or without their folder; empty for all.
            disk: the file system.

        Raises:
            NoDumpError: there is no dump at one of the paths, or no such table.
            OSError: the disk failed.
        """
        inspection = cls(disk)
        try:
            dumps = [_opened(path, disk) for path in paths]
            if len(dumps) > 1:
                check_chain([dump.opened for dump in dumps])
        except DynamicEmbError as error:
            inspection.damage.add(error)
            return inspection
        inspection.dumps = dumps
        for dump in dumps:
            wanted = _wanted(dump.opened, names, disk)
            wrong = list(wrong_files(dump.opened, disk))
            for found in wrong:
                inspection.damage.add(found)
            for folder, name in wanted:
                inspection._add_part(dump, folder, name, {str(found.path) for found in wrong})
            for folder, name in sorted(set(_wanted(dumps[-1].opened, names, disk)) - set(wanted)):
                table = inside(folder, name)
                message = f"dump {dump.opened.path!r} holds no table {table!r}, but the last one of the chain does"
                inspection.damage.add(DynamicEmbError(message))
        return inspection

    def _add_part(self, dump: OneDump, folder: str, name: str, wrong: set[str]) -> None:
        try:
            table = dumped_table(dump.opened, folder, name, self.disk)
            stored = dump.opened.stored(table, self.disk)
        except (DynamicEmbError, OSError) as error:
            self.damage.add(error)
            return
        if not wrong & stored.files.keys():
            dump.parts[str(table)] = Part(table, stored)

    def verify(self) -> None:
        """Read every file and check what a load would check, with a bar where somebody watches."""
        parts = [part for name in self._table_names() for dump in self.dumps for part in _of(dump, name)]
        total = sum(bytes_to_verify(part.table, part.stored, Ranks()) for part in parts)
        with tqdm(total=total, desc="verify", unit="B", unit_scale=True, disable=None) as progress:
            disk = WatchedDisk(self.disk, progress.update)
            for part in parts:
                try:
                    check_true_ids(part.table, part.stored)
                    verify([part.table], [[part.stored]], Ranks(), disk)
                except (DynamicEmbError, OSError) as error:
                    self.damage.add(error)

    def facts(self, limit: int | None, look: bool = True) -> list[DumpFacts]:
        """Return what there is to say about each dump.

        Args:
            limit: rows of each table to look at, None for all.
            look: whether to look at rows at all.
        """
        total = sum(num_looked_at(p.stored.counts, limit) for dump in self.dumps for p in dump.parts.values())
        facts = []
        with tqdm(total=total, desc="look", unit=" rows", disable=None if look else True) as progress:
            for dump in self.dumps:
                tables = []
                for _, part in sorted(dump.parts.items()):
                    try:
                        tables.append(table_facts(part, self.disk))
                        if look:
                            tables[-1] = self._looked_at(tables[-1], part, limit, progress)
                    except (DynamicEmbError, OSError) as error:
                        self.damage.add(error)
                facts.append(dump_facts(dump, tables))
        return facts

    def _looked_at(self, table: TableFacts, part: Part, limit: int | None, progress: Any) -> TableFacts:
        return replace(
            table,
            scores=score_histograms(part, limit, self.disk),
            counts=count_histogram(part, limit, self.disk),
            health=health_of(part, limit, self.disk, progress),
        )

    def look_up(self, ids: Sequence[int], full: bool) -> list[KeyFacts]:
        """Return where ids are, table by table."""
        found = []
        for name in self._table_names():
            parts = [part for dump in self.dumps for part in _of(dump, name)]
            if len(parts) < len(self.dumps):
                # Damaged in one of them, which is said elsewhere: what the others say may be out of date.
                continue
            places = [(dump.opened.path, dump.number) for dump in self.dumps]
            try:
                found += look_up(ids, parts, places, full, self.disk)
            except (DynamicEmbError, OSError) as error:
                self.damage.add(error)
        return found

    def _table_names(self) -> list[str]:
        return sorted({name for dump in self.dumps for name in dump.parts})


def _of(dump: OneDump, name: str) -> Iterator[Part]:
    if name in dump.parts:
        yield dump.parts[name]


def _opened(path: str, disk: FileSystem) -> OneDump:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dump = find_dump(path, disk)
        except FileNotFoundError as error:
            raise NoDumpError(str(error)) from None
        except NotADirectoryError:
            raise NoDumpError(f"there is no dump in {path!r}") from None
        except CheckpointCorruptError as error:
            if base_name(str(error.path)) == MANIFEST and not _has_files(path, disk):
                raise NoDumpError(
                    f"{path!r} is no dump: its {MANIFEST} is that of something else, and no other file bears a name of "
                    "the format"
                ) from None
            raise
    inner = _dumps_inside(dump, disk)
    if inner:
        raise NoDumpError(
            f"{path!r} is no dump, but holds {inner}; give one of them, or a full one and its increments in order"
        )
    if dump.manifest.is_foreign and not dump.stored_table_names(disk):
        raise NoDumpError(f"{path!r} is no dump: it has no {MANIFEST}, and no file bears a name of the format")
    return OneDump(dump, [str(warning.message) for warning in caught])


def _dumps_inside(dump: OpenedDump, disk: FileSystem) -> list[str]:
    """Return the folders with manifests in a folder that has none."""
    if not dump.manifest.is_foreign:
        return []
    found = sorted(name for name, is_folder in (disk.entries(dump.root) or {}).items() if is_folder)
    return [name for name in found if disk.size(join(dump.root, name, MANIFEST)) >= 0]


def _has_files(path: str, disk: FileSystem) -> bool:
    """Return whether there are files of our format beside the manifest."""
    root = disk.real_path(path)
    for name, is_folder in (disk.entries(root) or {}).items():
        inner = (disk.entries(join(root, name)) or {}) if is_folder else {name: False}
        if any(is_ours(n) and n != MANIFEST for n in inner):
            return True
    return False


def _wanted(dump: OpenedDump, names: Sequence[str], disk: FileSystem) -> list[tuple[str, str]]:
    """Return (folder, table) of the tables that are wanted."""
    there = sorted(dump.stored_table_names(disk))
    for name in names:
        if not any(name in (table, inside(folder, table)) for folder, table in there):
            raise NoDumpError(
                f"--table: dump {dump.path!r} holds no table {name!r}, it holds {[inside(*pair) for pair in there]}"
            )
    return [(f, t) for f, t in there if not names or t in names or inside(f, t) in names]
