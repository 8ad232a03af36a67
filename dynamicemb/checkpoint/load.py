"""Read tables back: check everything, then fill the tables, whatever the ranks and the routing were."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from torch import nn
from tqdm import tqdm

from dynamicemb.checkpoint.agreement import Described, check_agreement, check_placement, describe
from dynamicemb.checkpoint.disk.io import DISK, AnyPath, FileSystem, as_paths
from dynamicemb.checkpoint.disk.read_ahead import ReadAhead
from dynamicemb.checkpoint.disk.watched import WatchedDisk
from dynamicemb.checkpoint.flags import check_flags
from dynamicemb.checkpoint.format import inside
from dynamicemb.checkpoint.own_counter import Counts, load_own
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reading.opened import OpenedDump, Stored, check_chain, open_dump
from dynamicemb.checkpoint.reading.rows import Conversion, counts_of_rank, rows_of_rank, tombstones_of_rank
from dynamicemb.checkpoint.reading.settings import adopt_settings, check_compatible, initial_state
from dynamicemb.checkpoint.reading.verify import Verified, bytes_to_verify, verify
from dynamicemb.checkpoint.tables import Table, here, tables_of_model
from dynamicemb.checkpoint.writing.background import settle_at
from dynamicemb.table.importing.counts import CountImport
from dynamicemb.table.importing.rows import RowImport, adopt_clock, clear
from dynamicemb.table.touched import Mark, next_change
from dynamicemb.warn import warn


@dataclass(frozen=True)
class TableReport:
    """What a load did to one table, over all ranks.

    Attributes:
        num_rows: rows read for it.
        num_lost: ids that found no place, or lost it: the table is smaller, or its buckets are others.
        num_repeated: ids that came more than once (or, with ``merge``, were there already); the last one counts.
        num_expired: ids that nothing had touched for longer than the table's ``ttl``; they are absent.
        num_counts_lost: ids that found no place in the admission counter, which is smaller.
    """

    num_rows: int
    num_lost: int
    num_repeated: int
    num_expired: int = 0
    num_counts_lost: int = 0


@dataclass(frozen=True)
class LoadRequest:
    """What to load; see ``DynamicEmbLoad``."""

    paths: tuple[str, ...]
    optim: bool = False
    counter: bool = False
    merge: bool = False
    fresh_scores: bool = False
    # Whether tables of the dump that nobody asked for are worth a warning.
    all_tables: bool = True

    def __post_init__(self) -> None:
        check_flags(self)


def DynamicEmbLoad(
    path: AnyPath | Sequence[AnyPath],
    model: nn.Module,
    table_names: Mapping[str, list[str]] | None = None,
    optim: bool = False,
    counter: bool = False,
    pg: Any = None,
    merge: bool = False,
    fresh_scores: bool = False,
) -> dict[str, dict[str, TableReport]]:
    """Fill the dynamic tables of a model from a dump; a collective on the ranks of ``pg``.

    Every file is checked before a table is touched. Ranks, routing, device and capacity may be others than those of the
    writer; where not all ids find a place, those with the highest scores do. A dump that this process is writing to
    ``path`` in the background is waited for; if it failed and nobody has heard of it, its error is raised.

    Gradients of forwards before the load are dropped and counted in the tables that are loaded. Where the backward of
    some has not run and their outputs are still there, a warning says how many.

    Args:
        path: folder of a dump of this package or of the reference implementation; or a list, a full dump and then its
            increments in order.
        model: the model; its collections must have the paths that they had.
        table_names: tables to load, per collection path, as in ``{"model.ebc": ["user"]}``; all of a collection that is
            not named.
        optim: whether to load optimizer state, step counts and the optimizer's numbers, also the learning rate, in the
            place of those that the model was made with. Without, rows start with the optimizer's initial state, even
            where the dump has another.
        counter: whether to load admission counters. Without, they are empty after a load, and as they were after one
            with ``merge``.
        pg: the ranks over which the tables are sharded; None is all.
        merge: keep the other ids of the tables, instead of replacing their contents; counts of an id that both have
            are added up.
        fresh_scores: ignore the scores of the dump, which may then have been those of another strategy: all ids get the
            score of the present.

    Returns:
        Per collection and table, what happened.

    Raises:
        CheckpointCorruptError: a file is damaged, missing or too many; the tables are as they were.
        DynamicEmbError: a table is not in the dump.
        FileNotFoundError: there is no dump.
        OSError: the disk failed. If it did after all files were checked, the named tables are empty.
        ValueError: the dump does not fit the tables: dim, score strategy, optimizer.
    """
    ranks = Ranks(pg)
    request, tables = ranks.each(
        lambda: (
            LoadRequest(as_paths(path), optim, counter, merge, fresh_scores, table_names is None),
            tables_of_model(model, table_names, ranks),
        )
    )
    return load_tables(request, tables, ranks)


def load_tables(
    request: LoadRequest, tables: list[Table], ranks: Ranks, disk: FileSystem = DISK
) -> dict[str, dict[str, TableReport]]:
    """Load tables, in the same order on all ranks."""
    load = _Load(request, tables, ranks, disk)
    if not load.agree():
        return {}
    load.look()
    load.verify()
    return report_of(tables, load.fill(), ranks)


@dataclass(frozen=True)
class _Chained:
    """A table, and what each dump of the chain has of it."""

    table: Table
    stored: list[Stored]

    @property
    def last(self) -> Stored:
        """What the last dump has of it."""
        return self.stored[-1]


class _Load:
    """A load in four phases; each is one exchange of the ranks, after which all know whether one has failed.

    Until ``fill`` the tables are as they were.
    """

    _dumps: list[OpenedDump]
    _parts: list[_Chained]
    _verified: Verified
    _now: int

    def __init__(self, request: LoadRequest, tables: list[Table], ranks: Ranks, disk: FileSystem) -> None:
        """Prepare to load ``tables``."""
        self._request, self._ranks, self._disk = request, ranks, disk
        # Of the others this rank has no part.
        self._all, self._tables = tables, here(tables)

    def agree(self) -> bool:
        """Wait for a dump that this process still writes, and compare what the ranks want; returns whether it is any.

        Raises:
            DynamicEmbError: the ranks want different things.
        """
        request, tables = self._request, self._all

        def wanted() -> tuple[list[Described], LoadRequest]:
            settle_at(request.paths, self._disk)
            return describe(tables), request

        answers = self._ranks.together(wanted)
        if not any(described for described, _ in answers):
            return False
        check_agreement([described for described, _ in answers], [of_rank for _, of_rank in answers], "load")
        return True

    def look(self) -> None:
        """Open the dumps, and compare what they say of the tables with the tables."""
        self._ranks.each(self._look)

    def _look(self) -> None:
        request, ranks, disk = self._request, self._ranks, self._disk
        for table in self._all:
            check_placement(table, ranks)
        self._dumps = _open(request, self._all, ranks, disk)
        self._parts = [_Chained(table, [dump.stored(table, disk) for dump in self._dumps]) for table in self._tables]
        for part in self._parts:
            for stored in part.stored:
                first = part.table.is_first(ranks)
                check_compatible(part.table, stored, request.optim, request.fresh_scores, first)
        if request.counter and ranks.rank == 0:
            _warn_of_missing_counts(self._parts)

    def verify(self) -> None:
        """Read all files once, each rank its share, and agree on the time of the load."""
        answers = self._ranks.together(self._verify)
        self._verified = Verified.joined([verified for verified, _ in answers])
        self._now = max(now for _, now in answers)

    def _verify(self) -> tuple[Verified, int]:
        tables, stored = self._tables, [part.stored for part in self._parts]
        total = sum(bytes_to_verify(part.table, s, self._ranks) for part in self._parts for s in part.stored)
        with self._progress(total, "verify", "B", unit_scale=True) as progress:
            verified = verify(tables, stored, self._ranks, WatchedDisk(self._disk, progress.update))
        warn_of_outstanding(tables)
        return verified, max((table.group.now() for table in tables), default=0)

    def fill(self) -> list[dict[str, TableReport]]:
        """Fill the tables; returns what became of them, by their names in messages, for each rank.

        If a rank fails, all tables are empty.
        """
        request = self._request
        for table in self._tables:
            # All ranks agree on who is too old.
            adopt_clock(table.group, self._now)
        try:
            reports = self._ranks.together(self._import)
            last = [part.last for part in self._parts]
            self._ranks.each(
                lambda: adopt_settings(self._tables, last, request.optim, request.merge, request.fresh_scores)
            )
        except BaseException:
            for table in self._tables:
                clear(table.group, table.index)
            raise
        self._mark()
        return reports

    def _import(self) -> dict[str, TableReport]:
        """Fill this rank's part of the tables."""
        total = sum(self._num_owned(part.table)[0] for part in self._parts)
        with self._progress(total, "load", " rows") as progress:
            return {str(part.table): self._import_table(part, progress) for part in self._parts}

    def _num_owned(self, table: Table) -> tuple[int, int]:
        """Return how many ids of the dumps this rank will own, and all ranks together."""
        own = table.placement(self._ranks.world_size).part_of(self._ranks.rank)
        assert own is not None
        numbers = self._verified.num_owned[str(table)]
        return numbers[own.number], sum(numbers)

    def _import_table(self, part: _Chained, progress: Any) -> TableReport:
        request, ranks, disk, table = self._request, self._ranks, self._disk, part.table
        conversion = Conversion(self._now, request.optim, request.fresh_scores, self._verified.newest)
        expected = _num_expected(part, *self._num_owned(table))
        num_rows = 0
        initial = initial_state(table, part.last, request.optim)
        with RowImport(table.group, table.index, request.merge, expected, initial) as importer:
            # Newest first: an id is what the last increment says that names it.
            superseded = np.empty(0, np.int64)
            for stored in reversed(part.stored):
                newer = [superseded]
                rows = rows_of_rank(table, stored, conversion.of(table, stored, part.last), ranks, disk)
                with ReadAhead(rows) as batches:
                    for batch in batches:
                        if stored is not part.stored[0]:
                            newer.append(batch.ids.numpy())
                        batch = batch.without(superseded)
                        importer.add(*batch.on(table.group.device))
                        num_rows += batch.ids.numel()
                        progress.update(batch.ids.numel())
                newer += tombstones_of_rank(table, stored, ranks, disk)
                superseded = np.unique(np.concatenate(newer))
        lost = self._import_counts(part)
        return TableReport(num_rows, importer.num_lost, importer.num_repeated, importer.num_expired, lost)

    def _import_counts(self, part: _Chained) -> int:
        """Fill this rank's admission counter of a table, behind its rows; returns how many ids found no place."""
        if not self._request.counter or not part.table.has_counter or part.last.num_counts is None:
            return 0
        counts = counts_of_rank(part.table, part.last, self._ranks, self._disk)
        return fill_counter(part.table, counts, self._request.merge, self._disk)

    def _mark(self) -> None:
        """Let increments continue the dump where the tables now agree with it."""
        request, last = self._request, self._dumps[-1]
        if last.manifest.is_foreign or request.merge or request.fresh_scores:
            return
        for part in self._parts:
            if request.optim or part.last.num_state <= 0:
                group = part.table.group
                mark = Mark(last.manifest.dump_id, next_change(group.steps), self._now - last.manifest.clock)
                group.marks[part.table.index] = mark

    def _progress(self, total: int, description: str, unit: str, **more: Any) -> Any:
        """Return a bar, which is shown where somebody watches rank 0."""
        disable = None if self._ranks.rank == 0 else True
        return tqdm(total=total, desc=description, unit=unit, disable=disable, **more)


def _open(request: LoadRequest, tables: list[Table], ranks: Ranks, disk: FileSystem) -> list[OpenedDump]:
    dumps = [open_dump(path, disk) for path in request.paths]
    if not dumps:
        raise ValueError("path: the list of dumps is empty")
    check_chain(dumps)
    if request.all_tables and ranks.rank == 0:
        wanted = {(table.folder or dumps[-1].folder, table.name) for table in tables}
        others = sorted(dumps[-1].stored_table_names(disk) - wanted)
        if others:
            warn(
                f"dump {dumps[-1].path!r} also holds {[inside(*o) for o in others]}, which the model does not have",
            )
    return dumps


def warn_of_outstanding(tables: list[Table]) -> None:
    """Say how many forwards wait for their backward, whose gradients a load of some tables of this rank drops."""
    waiting: dict[int, tuple[list[str], int]] = {}
    for table in tables:
        number = table.group.steps.num_awaited(table.index)
        if number:
            names, most = waiting.setdefault(id(table.group), ([], 0))
            waiting[id(table.group)] = ([*names, str(table)], max(most, number))
    if waiting:
        found = ", ".join(f"{number} of tables {names}" for names, number in waiting.values())
        warn(
            f"load: the backward of forwards has not run: {found}. Their rows are replaced, so their gradients for "
            "these tables will be dropped, and counted in stats()['<table>']['dropped_gradients']; to keep them, call "
            "backward before the load"
        )


def _warn_of_missing_counts(parts: list[_Chained]) -> None:
    counted = [part for part in parts if part.table.has_counter]
    if not counted:
        warn("counter=True has no effect: no table has an admission counter")
    for part in counted:
        if part.last.num_counts is None:
            warn(
                f"table {part.table}: the dump has no admission counts; write it with counter=True",
            )


def fill_counter(table: Table, batches: Counts, merge: bool, disk: FileSystem) -> int:
    """Fill the admission counter of a table, of either kind; returns how many ids found no place."""
    if table.own_counter is not None:
        load_own(table.own_counter, table, batches, disk)
        return 0
    with CountImport(table.group, table.index, merge) as importer:
        for ids, counts in batches:
            importer.add(ids.to(table.group.device), counts.to(table.group.device))
    return importer.num_lost


def _num_expected(part: _Chained, num_owned: int, num_all: int) -> int:
    """Return about how many ids a rank will own at the end of a chain, exactly for a full dump."""
    if len(part.stored) == 1:
        return num_owned
    return sum(part.last.entry.sizes) * num_owned // max(1, num_all)


def report_of(
    tables: list[Table], reports: list[dict[str, TableReport]], ranks: Ranks
) -> dict[str, dict[str, TableReport]]:
    """Add up what the ranks did, and warn about losses; ``reports`` has the tables of each rank, by name."""
    result: dict[str, dict[str, TableReport]] = {}
    for table in tables:
        parts = [of_rank[str(table)] for of_rank in reports if str(table) in of_rank]
        report = TableReport(*(sum(numbers) for numbers in zip(*map(astuple, parts), strict=True)))
        result.setdefault(table.folder, {})[table.name] = report
        if not table.is_first(ranks):
            continue
        if report.num_lost:
            warn(
                f"table {table}: {report.num_lost} of {report.num_rows} ids of the dump found no place, the ones with "
                "the lowest scores; raise max_capacity (with a planner num_embeddings) to keep them",
            )
        if report.num_expired == report.num_rows > 0:
            warn(
                f"table {table}: all {report.num_rows} ids of the dump have expired, by the ttl of "
                f"{table.options.ttl} s that the table has; raise it to keep them"
            )
        if report.num_counts_lost:
            warn(
                f"table {table}: {report.num_counts_lost} ids that were not admitted yet found no place in the "
                "counter, the ones with the lowest counts; raise the capacity of its KVCounter to keep them",
            )
    return result
