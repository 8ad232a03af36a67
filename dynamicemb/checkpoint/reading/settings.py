"""What a dump says about a table beside its rows: whether it fits, and what the table adopts."""

from dataclasses import replace

from dynamicemb.checkpoint.reading.opened import Stored
from dynamicemb.checkpoint.reading.verify import check_true_ids
from dynamicemb.checkpoint.tables import Table
from dynamicemb.optimizer import OptimizerSpec, saved_iterations
from dynamicemb.score_strategy import DynamicEmbScoreStrategy, get_evict_strategy
from dynamicemb.table.importing.rows import adopt_initial_state, adopt_score, adopt_seed, adopt_updates
from dynamicemb.table.scores import MAX_SCORE
from dynamicemb.warn import warn


def check_compatible(table: Table, stored: Stored, optim: bool, fresh_scores: bool, report: bool) -> None:
    """Refuse a dump that does not fit a table.

    Args:
        table: the table.
        stored: the dump's.
        optim: whether optimizer state is to be loaded.
        fresh_scores: whether scores are not.
        report: whether this rank is the one that warns.

    Raises:
        DynamicEmbError: the files of the reference implementation hold changed ids.
        ValueError: dim, score strategy or optimizer differ.
    """
    entry = stored.entry
    if entry.dim != table.dim:
        raise ValueError(
            f"table {table} has dim {table.dim}, the dump {entry.dim}; make the table with dim={entry.dim}"
        )
    check_true_ids(table, stored)
    if not fresh_scores:
        _check_scores(table, stored)
        _step_score(table, stored)
    if optim:
        _check_optimizer(table, stored, report)


def _check_scores(table: Table, stored: Stored) -> None:
    remedy = "make the table with that strategy, or load with fresh_scores=True"
    if not stored.is_foreign:
        if sorted(stored.entry.score_strategy) != sorted(table.strategy_names):
            raise ValueError(
                f"table {table} has score_strategy {'+'.join(table.strategy_names)}, the dump "
                f"{'+'.join(stored.entry.score_strategy)}; {remedy}"
            )
        return
    evict = stored.meta.get("evict_strategy")
    mine = get_evict_strategy(table.strategy)
    if evict is not None and evict != str(mine.value):
        raise ValueError(f"Evict strategy mismatch: table {table} has {mine.value}, the dump {evict}; {remedy}")
    if stored.num_columns not in (0, len(table.strategy_names)):
        raise ValueError(
            f"table {table} has score_strategy {'+'.join(table.strategy_names)}, the dump {stored.num_columns} scores "
            f"for each id; {remedy}"
        )
    if stored.num_columns == 0 and table.strategy is not DynamicEmbScoreStrategy.TIMESTAMP:
        raise ValueError(f"table {table}: the dump has no scores; load with fresh_scores=True")


def _check_optimizer(table: Table, stored: Stored, report: bool) -> None:
    """Refuse the state of another optimizer; warn where there is none."""
    name = table.optimizer_name
    if "opt_type" in stored.meta:
        # Raises where the optimizer or one of its numbers is another one, or missing.
        try:
            _spec(table, stored)
            _updates(stored)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"table {table}: {error}; load with optim=False to begin with fresh state") from None
    if stored.num_state <= 0 and table.num_state > 0 and report:
        warn(
            f"table {table}: the dump has no optimizer state; rows begin with the initial state of {name}",
        )


def _spec(table: Table, stored: Stored) -> OptimizerSpec:
    """Return the optimizer with the numbers of the dump, which may be any in JSON.

    Raises:
        TypeError, ValueError, OverflowError: they are not those of this optimizer, or no numbers for it.
    """
    spec = table.module.optimizer.updated(stored.meta)
    initial = float(spec.initial_accumulator_value)
    return replace(spec, learning_rate=float(spec.learning_rate), initial_accumulator_value=initial)


def _updates(stored: Stored) -> int:
    """Return the optimizer's step count in the dump.

    Raises:
        TypeError, ValueError, OverflowError: it is no such number.
    """
    updates = saved_iterations(stored.meta) if stored.is_foreign else stored.entry.updates
    if not 0 <= updates <= MAX_SCORE:
        raise ValueError(f"the optimizer's step count in the dump must be in 0..{MAX_SCORE}, got {updates}")
    return updates


def _step_score(table: Table, stored: Stored) -> int:
    """Return the number that the next step of a STEP table has, or the custom score; 0 where the dump does not tell.

    Raises:
        ValueError: it is no such number.
    """
    value = stored.meta.get("step_score", 0)
    if table.strategy not in (DynamicEmbScoreStrategy.STEP, DynamicEmbScoreStrategy.CUSTOMIZED):
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"table {table}: step_score of the dump must be an integer from 0 on, got {value!r}")
    # An unsigned number; ours end before the sign.
    return min(value, MAX_SCORE)


def initial_state(table: Table, stored: Stored, optim: bool) -> float:
    """Return what optimizer state starts at: with ``optim``, as the dump's optimizer has it."""
    spec = table.module.optimizer
    if optim and "opt_type" in stored.meta:
        spec = _spec(table, stored)
    return spec.initial_accumulator_value


def adopt_settings(tables: list[Table], stored: list[Stored], optim: bool, merge: bool, fresh_scores: bool) -> None:
    """Make loaded tables go on as the dumped ones would have.

    Steps and custom scores go on, unless scores are fresh; seeds, so that ids to come begin as they would have; with
    ``optim``, the optimizer's numbers and step count.
    """
    updates: dict[int, int] = {}
    for table, part in zip(tables, stored, strict=True):
        if not fresh_scores:
            _adopt_score(table, part, merge)
        if not part.is_foreign and not merge:
            adopt_seed(table.group, table.index, part.entry.seed)
        if optim and "opt_type" in part.meta:
            # Tables of one module count together.
            seen = updates.get(id(table.group), 0)
            updates[id(table.group)] = _adopt_optimizer(table, part, seen, merge)


def _adopt_score(table: Table, stored: Stored, merge: bool) -> None:
    reached = _step_score(table, stored)
    if table.strategy is DynamicEmbScoreStrategy.STEP:
        adopt_score(table.group, table.index, max(1, reached) - 1, merge)
    elif reached > 0:
        table.module.set_score({table.name: reached})


def _adopt_optimizer(table: Table, stored: Stored, seen: int, merge: bool) -> int:
    """Adopt numbers and step count, at least ``seen``; returns the count."""
    module = table.module
    spec = _spec(table, stored)
    module.optimizer_settings.adopt(spec)
    adopt_initial_state(module.tables, spec.initial_accumulator_value)
    updates = max(seen, _updates(stored))
    adopt_updates(module.tables, updates, merge)
    return updates
