"""Read tables back: check everything, then fill the tables, whatever the ranks and the routing were."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from torch import nn
from tqdm import tqdm

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
from dynamicemb.checkpoint.tables import Table, check_routing_known, describe, tables_of_model
from dynamicemb.checkpoint.writing.background import settle_at
from dynamicemb.errors import DynamicEmbError
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
    if not any(ranks.gather(bool(tables))):
        return {}
    ranks.each(lambda: settle_at(request.paths, disk))
    dumps = ranks.each(lambda: _open(request, tables, ranks, disk))
    stored = ranks.each(lambda: [[dump.stored(table, disk) for dump in dumps] for table in tables])
    ranks.each(lambda: _check(request, tables, stored, ranks))
    parts = ranks.together(lambda: _verify(tables, stored, ranks, disk))
    verified = Verified.joined(parts)
    ranks.each(lambda: warn_of_outstanding(tables))
    now = max(ranks.together(lambda: max(table.group.now() for table in tables)))
    for table in tables:
        # All ranks agree on who is too old.
        adopt_clock(table.group, now)
    conversion = Conversion(now, request.optim, request.fresh_scores, verified.newest)
    try:
        reports = ranks.together(lambda: _import(request, tables, stored, verified, conversion, ranks, disk))
        last = [parts[-1] for parts in stored]
        ranks.each(lambda: adopt_settings(tables, last, request.optim, request.merge, request.fresh_scores))
    except BaseException:
        for table in tables:
            clear(table.group, table.index)
        raise
    _mark(request, tables, stored, dumps[-1], now)
    return report_of(tables, reports, ranks)


def _verify(tables: list[Table], stored: list[list[Stored]], ranks: Ranks, disk: FileSystem) -> Verified:
    """Check this rank's share of the files, with a bar where somebody watches rank 0."""
    total = sum(bytes_to_verify(table, p, ranks) for table, parts in zip(tables, stored, strict=True) for p in parts)
    disable = None if ranks.rank == 0 else True
    with tqdm(total=total, desc="verify", unit="B", unit_scale=True, disable=disable) as progress:
        return verify(tables, stored, ranks, WatchedDisk(disk, progress.update))


def _mark(request: LoadRequest, tables: list[Table], stored: list[list[Stored]], last: OpenedDump, now: int) -> None:
    """Let increments continue the dump where the tables now agree with it."""
    if last.manifest is None or request.merge or request.fresh_scores:
        return
    for table, parts in zip(tables, stored, strict=True):
        if request.optim or parts[-1].num_state <= 0:
            first_step = next_change(table.group.steps)
            mark = Mark(last.manifest.dump_id, first_step, now - last.manifest.clock)
            table.group.marks[table.index] = mark


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


def _check(request: LoadRequest, tables: list[Table], stored: list[list[Stored]], ranks: Ranks) -> None:
    for kind, descriptions in (("tables", ranks.gather(describe(tables))), ("options", ranks.gather(request))):
        if any(description != descriptions[0] for description in descriptions):
            raise DynamicEmbError(f"the ranks disagree about the {kind} to load: {descriptions}")
    for table, parts in zip(tables, stored, strict=True):
        check_routing_known(table, ranks.world_size)
        for part in parts:
            check_compatible(table, part, request.optim, request.fresh_scores, ranks.rank == 0)
    if request.counter and ranks.rank == 0:
        _warn_of_missing_counts(tables, stored)


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


def _warn_of_missing_counts(tables: list[Table], stored: list[list[Stored]]) -> None:
    counted = [(table, parts[-1]) for table, parts in zip(tables, stored, strict=True) if table.has_counter]
    if not counted:
        warn("counter=True has no effect: no table has an admission counter")
    for table, part in counted:
        if part.num_counts is None:
            warn(
                f"table {table}: the dump has no admission counts; write it with counter=True",
            )


def _import(
    request: LoadRequest,
    tables: list[Table],
    stored: list[list[Stored]],
    verified: Verified,
    conversion: Conversion,
    ranks: Ranks,
    disk: FileSystem,
) -> list[TableReport]:
    """Fill this rank's part of the tables."""
    reports = []
    total = sum(verified.num_owned[t][ranks.rank] for t in range(len(tables)))
    with tqdm(total=total, desc="load", unit=" rows", disable=None if ranks.rank == 0 else True) as progress:
        for t, (table, parts) in enumerate(zip(tables, stored, strict=True)):
            num_rows = 0
            expected = _num_expected(parts, verified.num_owned[t], ranks.rank)
            initial = initial_state(table, parts[-1], request.optim)
            with RowImport(table.group, table.index, request.merge, expected, initial) as importer:
                # Newest first: an id is what the last increment says that names it.
                superseded = np.empty(0, np.int64)
                for part in reversed(parts):
                    newer = [superseded]
                    rows = rows_of_rank(table, part, conversion.of(table, part, parts[-1]), ranks, disk)
                    with ReadAhead(rows) as batches:
                        for batch in batches:
                            if part is not parts[0]:
                                newer.append(batch.ids.numpy())
                            batch = batch.without(superseded)
                            importer.add(*batch.on(table.group.device))
                            num_rows += batch.ids.numel()
                            progress.update(batch.ids.numel())
                    newer += tombstones_of_rank(table, part, ranks, disk)
                    superseded = np.unique(np.concatenate(newer))
            lost = _import_counts(request, table, parts[-1], ranks, disk)
            reports.append(TableReport(num_rows, importer.num_lost, importer.num_repeated, importer.num_expired, lost))
    return reports


def _import_counts(request: LoadRequest, table: Table, last: Stored, ranks: Ranks, disk: FileSystem) -> int:
    """Fill this rank's admission counter of a table, behind its rows; returns how many ids found no place."""
    if not request.counter or not table.has_counter or last.num_counts is None:
        return 0
    return fill_counter(table, counts_of_rank(table, last, ranks, disk), request.merge, disk)


def fill_counter(table: Table, batches: Counts, merge: bool, disk: FileSystem) -> int:
    """Fill the admission counter of a table, of either kind; returns how many ids found no place."""
    if table.own_counter is not None:
        load_own(table.own_counter, table, batches, disk)
        return 0
    with CountImport(table.group, table.index, merge) as importer:
        for ids, counts in batches:
            importer.add(ids.to(table.group.device), counts.to(table.group.device))
    return importer.num_lost


def _num_expected(parts: list[Stored], num_owned: list[int], rank: int) -> int:
    """Return about how many ids a rank will own at the end of a chain, exactly for a full dump."""
    last = parts[-1].entry
    if len(parts) == 1 or last is None:
        return num_owned[rank]
    return sum(last.sizes) * num_owned[rank] // max(1, sum(num_owned))


def report_of(tables: list[Table], reports: list[list[TableReport]], ranks: Ranks) -> dict[str, dict[str, TableReport]]:
    """Add up what the ranks did, and warn about losses."""
    result: dict[str, dict[str, TableReport]] = {}
    for t, table in enumerate(tables):
        parts = [of_rank[t] for of_rank in reports]
        report = TableReport(*(sum(numbers) for numbers in zip(*map(astuple, parts), strict=True)))
        result.setdefault(table.folder, {})[table.name] = report
        if report.num_lost and ranks.rank == 0:
            warn(
                f"table {table}: {report.num_lost} of {report.num_rows} ids of the dump found no place, the ones with "
                "the lowest scores; raise max_capacity (with a planner num_embeddings) to keep them",
            )
        if report.num_expired == report.num_rows > 0 and ranks.rank == 0:
            warn(
                f"table {table}: all {report.num_rows} ids of the dump have expired, by the ttl of "
                f"{table.options.ttl} s that the table has; raise it to keep them"
            )
        if report.num_counts_lost and ranks.rank == 0:
            warn(
                f"table {table}: {report.num_counts_lost} ids that were not admitted yet found no place in the "
                "counter, the ones with the lowest counts; raise the capacity of its KVCounter to keep them",
            )
    return result
