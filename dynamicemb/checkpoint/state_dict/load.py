"""Fill tables from a state_dict, whatever part of the rows each rank has."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from dynamicemb.checkpoint.agreement import check_everywhere, check_placement, describe
from dynamicemb.checkpoint.disk.io import DISK
from dynamicemb.checkpoint.load import TableReport, fill_counter, report_of, warn_of_outstanding
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reading.opened import Stored
from dynamicemb.checkpoint.reading.rows import Conversion, Rows
from dynamicemb.checkpoint.reading.settings import adopt_settings, check_compatible, initial_state
from dynamicemb.checkpoint.state_dict.entries import (
    COUNTER_COUNTS,
    COUNTER_IDS,
    IDS,
    SCORES,
    STATE,
    TABLE,
    TENSORS,
    VALUES,
    Description,
    sum_of,
)
from dynamicemb.checkpoint.state_dict.exchange import Exchange
from dynamicemb.checkpoint.state_dict.shards import local_rows
from dynamicemb.checkpoint.tables import Table
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.importing.rows import RowImport, adopt_clock, clear
from dynamicemb.warn import warn

T = TypeVar("T")

_MORE_IN_DUMPS = " (optim and fresh_scores are arguments of DynamicEmbLoad, for dumps of DynamicEmbDump)"


@dataclass(frozen=True)
class _Found:
    """What a state_dict holds of a table.

    Attributes:
        table: the table.
        description: of its rows.
        stored: the same, as a load of a dump has it.
        local: this rank's part of each tensor, in host memory; of those that are there.
        complete: whether every one of several ranks has all rows.
    """

    table: Table
    description: Description
    stored: Stored
    local: dict[str, torch.Tensor]
    complete: bool = False

    @classmethod
    def create(cls, table: Table, entries: dict[str, Any]) -> "_Found":
        """Take the entries of a table; None stands for one that is not there."""
        description = Description.from_json(entries.get(TABLE), table)
        there = {name: entries[name] for name in TENSORS if entries.get(name) is not None}
        local = {name: local_rows(value, f"table {table}: {name} of the state_dict") for name, value in there.items()}
        for name, tensor in local.items():
            _check_dtype(tensor, name, table)
        return cls(table, description, description.stored(table), local)

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """The size over all ranks that each tensor must have."""
        entry = self.description.entry
        rows, counts = self.description.num_rows, self.description.num_counts
        sizes: dict[str, tuple[int, ...]] = {
            IDS: (rows,), VALUES: (rows, entry.dim), SCORES: (rows, len(entry.score_strategy)),
        }  # fmt: skip
        if entry.num_state > 0 and self.table.num_state > 0:
            sizes[STATE] = (rows, self.table.num_state)
        if entry.has_counter and self.table.has_counter:
            sizes |= {COUNTER_IDS: (counts,), COUNTER_COUNTS: (counts,)}
        return sizes


def _check_dtype(tensor: torch.Tensor, name: str, table: Table) -> None:
    """Refuse numbers that would come back as others, or not at all.

    Raises:
        DynamicEmbError: as said.
    """
    fits = tensor.is_floating_point() if name in (VALUES, STATE) else tensor.dtype == torch.int64
    if not fits:
        wanted = "a floating dtype" if name in (VALUES, STATE) else "torch.int64"
        raise DynamicEmbError(
            f"table {table}: {name!r} of the state_dict must have {wanted}, got {tensor.dtype}; give it as it was saved"
        )


def load_tables_state(tables: list[Table], entries: list[dict[str, Any]], ranks: Ranks) -> dict[str, TableReport]:
    """Replace the contents of tables by what a state_dict holds; a collective, with the same tables on all ranks.

    Scores, times, ids that have expired, tables that are smaller and forwards whose backward has not run are treated
    as ``DynamicEmbLoad`` does.

    Args:
        tables: the tables.
        entries: of each table, by name.
        ranks: the ranks over which they are sharded.

    Returns:
        Per table, what happened.

    Raises:
        DynamicEmbError: entries are damaged, incomplete, or of another checkpoint on other ranks. The tables are as
            they were.
        ValueError: they do not fit the tables: dim, score strategy, optimizer. The tables are as they were.
    """
    ranks.each(lambda: check_everywhere(tables, "load_state_dict"))
    found = ranks.each(lambda: [_Found.create(*pair) for pair in zip(tables, entries, strict=True)])
    found = _checked(found, ranks)
    ranks.on_first(lambda: _warn_about_counts(found))
    ranks.each(lambda: warn_of_outstanding(tables))
    now = max(ranks.together(lambda: max(table.group.now() for table in tables)))
    for table in tables:
        adopt_clock(table.group, now)
    conversion = Conversion(now, with_state=True, fresh_scores=False, newest={})
    try:
        reports = {str(part.table): _import(part, conversion, ranks) for part in found}
        stored = [part.stored for part in found]
        ranks.each(lambda: adopt_settings(tables, stored, optim=True, merge=False, fresh_scores=False))
    except BaseException:
        for table in tables:
            clear(table.group, table.index)
        raise
    return report_of(tables, ranks.gather(reports), ranks).get("", {})


def _checked(found: list[_Found], ranks: Ranks) -> list[_Found]:
    """Compare the entries with the tables, and what the ranks have of them; learn which tables every rank has whole."""

    def check() -> None:
        for part in found:
            check_placement(part.table, ranks)
            try:
                check_compatible(part.table, part.stored, optim=True, fresh_scores=False, report=ranks.rank == 0)
            except ValueError as error:
                raise ValueError(f"load_state_dict: {error}{_MORE_IN_DUMPS}") from None

    ranks.each(check)
    tables = [part.table for part in found]
    dtypes = [sorted((name, str(tensor.dtype)) for name, tensor in part.local.items()) for part in found]
    agreed = [(part.description, of_part) for part, of_part in zip(found, dtypes, strict=True)]
    sizes = [{name: tensor.shape for name, tensor in part.local.items()} for part in found]
    sums = [{name: sum_of(part.local[name]) for name in (IDS, COUNTER_IDS) if name in part.local} for part in found]
    gathered = ranks.gather((describe(tables), agreed, sizes, sums))
    for what, value in enumerate(("tables", "entries")):
        if any(of_rank[what] != gathered[0][what] for of_rank in gathered):
            raise DynamicEmbError(
                f"load_state_dict: the ranks disagree about the {value} of dynamic tables; give all ranks their parts "
                f"of one checkpoint: {[of_rank[what] for of_rank in gathered]}"
            )
    checked = []
    for p, part in enumerate(found):
        of_ranks = [of_rank[2][p] for of_rank in gathered]
        part = replace(part, complete=_is_complete(part, of_ranks))
        _check_sizes(part, of_ranks)
        _check_ids(part, [of_rank[3][p] for of_rank in gathered])
        checked.append(part)
    return checked


def _warn_about_counts(found: list[_Found]) -> None:
    """Say that what was counted for admission is not loaded."""
    for part in found:
        table, has = part.table, part.description.entry.has_counter
        if table.has_counter and not has:
            lack = "the state_dict has no admission counts, which begin anew"
        elif part.description.num_counts and not table.has_counter:
            number = part.description.num_counts
            lack = f"the state_dict has admission counts of {number} ids, but the table has no counter"
        else:
            continue
        warn(f"table {table}: {lack}")


def _is_complete(part: _Found, sizes: list[dict[str, torch.Size]]) -> bool:
    """Return whether each of several ranks has all rows of a table; ``sizes`` are those of each rank's part.

    Example::

        ids of 5 rows in all, of sizes [5, 5]: complete; [5, 0] and [2, 3]: parts; [5, 3]: neither, which is refused
    """
    names = [name for name in (IDS, COUNTER_IDS) if name in part.wanted]
    found = [of_rank.get(name) == part.wanted[name] for of_rank in sizes for name in names]
    return len(sizes) > 1 and all(found)


def _check_sizes(part: _Found, sizes: list[dict[str, torch.Size]]) -> None:
    """Raise where a tensor is missing or has another size than was saved; ``sizes`` are those of each rank's part."""
    for name, wanted in part.wanted.items():
        if name not in part.local:
            raise DynamicEmbError(
                f"table {part.table}: the state_dict has no {name!r}, though the table was saved with it; pass all "
                "entries of the table"
            )
        parts = [of_rank[name] for of_rank in sizes]
        rows = parts[0][0] if part.complete else sum(size[0] for size in parts)
        equal = all(size[0] == wanted[0] for size in parts) if part.complete else rows == wanted[0]
        aligned = name in (COUNTER_IDS, COUNTER_COUNTS) or all(size[0] == s[IDS][0] for size, s in zip(parts, sizes))
        if not equal or not aligned or any(tuple(size[1:]) != wanted[1:] for size in parts):
            raise DynamicEmbError(
                f"table {part.table}: {name!r} of the state_dict must have the size {wanted} over all ranks, which "
                f"hold {[tuple(size) for size in parts]}; load with torch.distributed.checkpoint and "
                "dynamicemb.DynamicEmbLoadPlanner(), or with as many ranks as saved"
            )


def _check_ids(part: _Found, sums: list[dict[str, int]]) -> None:
    """Raise where the ids are not those that were saved; ``sums`` are those of each rank's part."""
    description = part.description
    for name, wanted in ((IDS, description.ids_sum), (COUNTER_IDS, description.counter_ids_sum)):
        found = [of_rank[name] for of_rank in sums] if name in part.wanted else []
        if found and any(total % 2**64 != wanted for total in (found if part.complete else [sum(found)])):
            raise DynamicEmbError(
                f"table {part.table}: {name!r} of the state_dict are other ids than were saved; a state_dict of "
                "several ranks cannot be put together with full_state_dict=True; use torch.distributed.checkpoint"
            )


class _Failure:
    """The first error of this rank, kept until all ranks have sent each other everything."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def after(self, work: Callable[[], T]) -> T | None:
        """Do something, unless there was an error before."""
        if self.error is None:
            try:
                return work()
            except Exception as error:
                self.error = error
        return None

    def check(self) -> None:
        """Raise the error."""
        if self.error is not None:
            raise self.error


def _import(part: _Found, conversion: Conversion, ranks: Ranks) -> TableReport:
    """Fill a table of this rank."""
    table, stored = part.table, part.stored
    names = [name for name in (IDS, VALUES, SCORES, STATE) if name in part.wanted]
    rows = Exchange(table, [part.local[name] for name in names], part.complete, ranks)
    of_table = conversion.of(table, stored, stored)
    failure = _Failure()

    def add(importer: RowImport, columns: dict[str, torch.Tensor]) -> None:
        scores = of_table.scores(table, stored, columns[SCORES].numpy())
        state = columns[STATE].float() if STATE in columns else None
        batch = Rows(columns[IDS], columns[VALUES].float(), state, scores)
        importer.add(*batch.on(table.group.device))

    with ExitStack() as stack:
        initial = initial_state(table, stored, optim=True)
        importer = RowImport(table.group, table.index, False, rows.num_owned, initial)
        failure.after(lambda: stack.enter_context(importer))
        for batch in rows:
            columns = dict(zip(names, batch, strict=True))
            failure.after(lambda columns=columns: add(importer, columns))  # type: ignore[misc]
    ranks.each(failure.check)
    lost = _import_counts(part, ranks)
    return TableReport(rows.num_owned, importer.num_lost, importer.num_repeated, importer.num_expired, lost)


def _import_counts(part: _Found, ranks: Ranks) -> int:
    """Fill this rank's admission counter; returns how many ids found no place."""
    if COUNTER_IDS not in part.wanted:
        return 0
    counts = Exchange(part.table, [part.local[COUNTER_IDS], part.local[COUNTER_COUNTS]], part.complete, ranks)
    batches = list(counts)
    return ranks.each(lambda: fill_counter(part.table, ((ids, n) for ids, n in batches), False, DISK))
