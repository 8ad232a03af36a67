"""``import_static``: fill dynamic tables from a checkpoint of static ones."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import nn
from tqdm import tqdm

from dynamicemb.checkpoint.agreement import check_everywhere, check_placement, describe
from dynamicemb.checkpoint.disk.read_ahead import ReadAhead
from dynamicemb.checkpoint.load import warn_of_outstanding
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.static.entries import Entries
from dynamicemb.checkpoint.static.fill import Filler
from dynamicemb.checkpoint.static.keys import listed, raw_ids_of, state_of, weights_of
from dynamicemb.checkpoint.static.match import Match, match_tables, named_sources
from dynamicemb.checkpoint.static.plan import Planner, TablePlan
from dynamicemb.checkpoint.static.row_ids import given_ids
from dynamicemb.checkpoint.static.sources import open_entries
from dynamicemb.checkpoint.static.stream import Received, Stream
from dynamicemb.checkpoint.tables import Table, tables_of_model
from dynamicemb.errors import DynamicEmbError
from dynamicemb.optimizer import OptimizerKind
from dynamicemb.table.importing.rows import RowImport, adopt_clock, adopt_updates, clear
from dynamicemb.table.index import UPDATES
from dynamicemb.table.scores import MAX_SCORE
from dynamicemb.warn import warn


@dataclass(frozen=True)
class StaticTableReport:
    """What an import did to one table, over all ranks.

    Attributes:
        source: key of the weights in the checkpoint.
        num_rows: rows of the static table, all of which were read.
        num_lost: ids that found no place, or lost it: the dynamic table is too small.
        num_repeated: rows whose id another row has; the last one counts.
        num_without_id: rows that no id belongs to; they are not imported.
        has_state: whether rows have the optimizer state of the checkpoint, not the initial one.
    """

    source: str
    num_rows: int
    num_lost: int
    num_repeated: int
    num_without_id: int
    has_state: bool


def import_static(
    model: nn.Module,
    checkpoint: Any,
    optimizer: Any = None,
    table_names: Mapping[str, Iterable[str]] | None = None,
    id_maps: Mapping[str, Any] | None = None,
    step: int | None = None,
    pg: Any = None,
) -> dict[str, dict[str, StaticTableReport]]:
    """Fill the dynamic tables of a model from a checkpoint of static ones; a collective on the ranks of ``pg``.

    What the named tables held is gone, and gradients of forwards before this call are dropped. Ids get the scores that
    ``insert`` gives. The learning rate and the other numbers of the optimizer stay those of the model. Everything is
    checked before a table is touched, and each row is compared after it was written.

    Args:
        model: the model, after sharding.
        checkpoint: ``state_dict()`` of a model with static tables, sharded over the same ranks or not at all (then one
            rank may pass all and the others ``{}``); or the path of a folder of ``torch.distributed.checkpoint``,
            written by any number of ranks; or that of a file of plain tensors.
        optimizer: ``fused_optimizer.state_dict()`` that belongs to it, or a path; None: what ``checkpoint`` has; False:
            rows begin with the initial state.
        table_names: tables to import, per collection path, as in ``{"model.ebc": ["user"]}``, or with the key of each
            one's weights in the checkpoint, as in ``{"model.ebc": {"user": "old.embedding_bags.user.weight"}}``. All of
            a collection that is not named, as far as the checkpoint has them.
        id_maps: per ``path.table``, or name of a table, the ids of rows: int64 ``[N]``, or a pair ``(rows, ids)`` where
            some rows have none. Else those of a managed-collision module in the checkpoint, else the id of row r is r.
        step: how many steps the optimizer has made, which ADAM needs and a checkpoint of TorchRec does not have; 0
            begins its bias correction anew.
        pg: the ranks over which the tables are sharded; None is all.

    Returns:
        Per collection and table, what happened.

    Raises:
        CheckpointCorruptError: a file is missing, too short or unreadable.
        DynamicEmbError: a CUSTOMIZED table has no score, or rows are not as they were written; in the last case the
            tables are empty.
        FileNotFoundError: there is no checkpoint.
        OSError: the disk failed; the tables are empty.
        TypeError: an argument of the wrong type.
        ValueError: no table of the checkpoint fits, or one fits in parts: dim, dtype, optimizer, sizes, ids.
    """
    ranks = Ranks(pg)
    tables = ranks.each(lambda: _checked(model, table_names, step, ranks))
    if not any(ranks.gather(bool(tables))):
        return {}
    named = ranks.each(lambda: named_sources(table_names))
    _check_agreement(ranks, describe(tables), named, step, optimizer is False)
    entries = ranks.each(lambda: open_entries(checkpoint, "checkpoint"))
    of_optimizer = ranks.each(lambda: _open_optimizer(optimizer, entries))
    matches = _matched(tables, entries, of_optimizer, named, ranks)
    static = listed({key for of_rank in ranks.gather([*filter(weights_of, entries.by_key)]) for key in of_rank})
    ranks.each(lambda: _check_missing(tables, matches, table_names, static, ranks))
    maps = ranks.each(lambda: given_ids(id_maps, [match.table for match in matches]))
    if len({tuple(sorted(map(str, of_rank))) for of_rank in ranks.gather([str(table) for table in maps])}) > 1:
        raise ValueError("id_maps: the ranks name different tables; all must give the same")
    planner = Planner(entries, of_optimizer, ranks)
    plans = [planner.plan(match, maps.get(match.table)) for match in matches]
    updates = ranks.each(lambda: _updates(plans, step, ranks))
    ranks.each(lambda: warn_of_outstanding([plan.table for plan in plans]))
    return _import(plans, updates, ranks)


def _checked(
    model: nn.Module, table_names: Mapping[str, Iterable[str]] | None, step: int | None, ranks: Ranks
) -> list[Table]:
    """Return the tables that are meant.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    if step is not None and (not isinstance(step, Integral) or isinstance(step, bool)):
        raise TypeError(f"step must be an int or None, got {step!r}")
    if step is not None and not 0 <= step <= MAX_SCORE:
        raise ValueError(f"step must be in 0..{MAX_SCORE}, got {step}")
    tables = tables_of_model(model, table_names, ranks)
    check_everywhere(tables, "import_static")
    for table in tables:
        check_placement(table, ranks)
    return tables


def _check_agreement(ranks: Ranks, *values: Any) -> None:
    """Refuse ranks that were called with different arguments."""
    gathered = ranks.gather(values)
    if any(of_rank != gathered[0] for of_rank in gathered):
        raise DynamicEmbError(f"the ranks disagree about the tables or options of import_static: {gathered}")


def _open_optimizer(optimizer: Any, checkpoint: Entries) -> Entries | None:
    if optimizer is None:
        return checkpoint
    return None if optimizer is False else open_entries(optimizer, "optimizer")


def _matched(
    tables: list[Table],
    checkpoint: Entries,
    optimizer: Entries | None,
    named: Mapping[tuple[str, str], str],
    ranks: Ranks,
) -> list[Match]:
    """Match the tables with what any rank has."""
    keys = [key for key in checkpoint.by_key if weights_of(key) or raw_ids_of(key)]
    of_optimizer: list[str] = []
    if optimizer is not None:
        of_optimizer = [key for key in optimizer.by_key if state_of(key)]
        of_optimizer += [key for key in optimizer.stateless if weights_of(key)]
    gathered = ranks.gather((keys, of_optimizer))
    unions = [list(dict.fromkeys(key for of_rank in gathered for key in of_rank[i])) for i in (0, 1)]
    return ranks.each(lambda: match_tables(tables, unions[0], unions[1], named))


def _check_missing(
    tables: list[Table],
    matches: list[Match],
    table_names: Mapping[str, Iterable[str]] | None,
    static: str,
    ranks: Ranks,
) -> None:
    """Refuse, or warn, where no rank has a static table for a dynamic one; ``static`` lists those that any rank has."""
    there = {(match.table.folder, match.table.name) for match in matches}
    missing = [table for table in tables if (table.folder, table.name) not in there]
    asked = [table for table in missing if table.name in list((table_names or {}).get(table.folder, []))]
    if asked or not matches:
        raise ValueError(
            f"checkpoint: there is no static table for {listed(asked or missing)}; the checkpoint has the weights "
            f"{static}. Name one with table_names={{path: {{table: key}}}}"
        )
    if missing and ranks.rank == 0:
        warn(f"checkpoint: there is no static table for {listed(missing)}, which stay as they are; it has {static}")


def _updates(plans: list[TablePlan], step: int | None, ranks: Ranks) -> dict[int, int]:
    """Return the step count that each group of tables goes on from, by the position of a plan.

    Raises:
        ValueError: nobody knows it.
    """
    needing = [i for i, plan in enumerate(plans) if _counts_steps(plan)]
    if step is not None and not needing and ranks.rank == 0:
        warn("step has no effect: no table takes over the state of ADAM, the only optimizer that counts steps")
    result = {}
    for i in needing:
        plan = plans[i]
        steps = step if step is not None else plan.steps
        if steps is None:
            raise ValueError(
                f"table {plan.table}: ADAM needs the number of steps that {plan.source} was trained for, which "
                "TorchRec does not save; pass step=, or step=0 to begin the bias correction anew, as TorchRec does "
                "after a restart"
            )
        result[i] = int(steps)
    if ranks.rank == 0:
        _warn_of_others(plans, result)
    return result


def _warn_of_others(plans: list[TablePlan], updates: dict[int, int]) -> None:
    """Warn where tables that are not imported get another step count, which their group shares."""
    groups = {id(plans[i].table.group): plans[i].table for i in updates}
    for key, table in groups.items():
        steps = max(steps for i, steps in updates.items() if id(plans[i].table.group) == key)
        imported = {plan.table.name for plan in plans if id(plan.table.group) == key}
        others = [f"{table.folder}/{name}" for name in table.group.names if name not in imported]
        before = int(table.group.index.clock[UPDATES])
        if others and before not in (0, steps):
            warn(
                f"step={steps}: {listed(others)} share their step count with table {table}; that count goes from "
                f"{before} to {steps}, and so does the bias correction of ADAM. Import all tables of a collection "
                "in one call, before the first step"
            )


def _counts_steps(plan: TablePlan) -> bool:
    return bool(plan.state) and plan.table.module.optimizer.kind is OptimizerKind.ADAM


def _import(plans: list[TablePlan], updates: dict[int, int], ranks: Ranks) -> dict[str, dict[str, StaticTableReport]]:
    """Fill the tables; if that fails, all of them are empty."""
    tables = [plan.table for plan in plans]
    now = max(ranks.together(lambda: max(table.group.now() for table in tables)))
    for table in tables:
        adopt_clock(table.group, now)
    result: dict[str, dict[str, StaticTableReport]] = {}
    total = sum(plan.weights.num_rows for plan in plans)
    disable = None if ranks.rank == 0 else True
    try:
        with tqdm(total=total, desc="import", unit=" rows", disable=disable) as progress:
            for plan in plans:
                result.setdefault(plan.table.folder, {})[plan.table.name] = _fill(plan, now, ranks, progress)
        reached: dict[int, int] = {}
        for i, steps in updates.items():
            group = plans[i].table.group
            # Tables of a group count together.
            reached[id(group)] = max(steps, reached.get(id(group), 0))
            adopt_updates(group, reached[id(group)], keep=False)
    except BaseException:
        for table in tables:
            clear(table.group, table.index)
        raise
    return result


def _fill(plan: TablePlan, now: int, ranks: Ranks, progress: Any) -> StaticTableReport:
    """Fill a table; a collective."""
    table, row_ids = plan.table, plan.row_ids
    stream = Stream([plan.weights, *plan.state], row_ids, table.placement(ranks.world_size).owner, ranks)
    expected = -(-row_ids.num_ids // ranks.world_size)
    importer = RowImport(table.group, table.index, False, expected, table.module.optimizer.initial_accumulator_value)
    filler = Filler(table, importer, now)
    blocks = stream.blocks()
    with ExitStack() as stack:
        ranks.each(lambda: stack.enter_context(importer))
        values = iter(stack.enter_context(ReadAhead(stream.read(block) for block in blocks)))
        for block in blocks:
            read = ranks.each(lambda: next(values))
            received = stream.exchange(block, read)
            ranks.each(lambda: _add(filler, plan, received))  # noqa: B023
            progress.update(block.num_rows)
        counts = ranks.together(filler.finish)
    return _report(plan, counts, ranks)


def _add(filler: Filler, plan: TablePlan, received: Received) -> None:
    """Put rows into the table."""
    weights, *state = received.columns
    counts = None if plan.row_ids.counts is None else plan.row_ids.counts[received.rows]
    filler.add(received.ids, weights, plan.assembly.state(state) if state else None, counts)


def _report(plan: TablePlan, counts: list[tuple[int, int]], ranks: Ranks) -> StaticTableReport:
    """Add up what the ranks received and lost, check that nothing is missing, and warn about losses."""
    received, lost = (sum(column) for column in zip(*counts, strict=True))
    row_ids, num_rows = plan.row_ids, plan.weights.num_rows
    if received != row_ids.num_ids:
        raise DynamicEmbError(
            f"table {plan.table}: {row_ids.num_ids} rows were sent and {received} came; all tables of the call are "
            "empty"
        )
    without = num_rows - row_ids.num_ids - row_ids.num_repeated
    if lost and ranks.rank == 0:
        warn(
            f"table {plan.table}: {lost} of {received} ids found no place; raise max_capacity (with a planner "
            "num_embeddings) to keep them"
        )
    return StaticTableReport(plan.source, num_rows, lost, row_ids.num_repeated, without, bool(plan.state))
