"""Scores of a module of dynamic tables, as users set and ask them."""

from collections.abc import Iterable, Mapping
from numbers import Integral

from dynamicemb.aliases import also_named
from dynamicemb.dynamicemb_config import warning_for_cstm_score
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.group import TableGroup
from dynamicemb.table.scores import MAX_SCORE, SCORE_CUSTOMIZED, TIMED_SCORES
from dynamicemb.warn import warn


class TableScores:
    """The part of a module that knows scores."""

    _group: TableGroup
    # CUSTOMIZED tables that were never given a score.
    _unscored: set[str]

    def _begin_scores(self) -> None:
        """Start with no score given."""
        strategies = zip(self._group.names, self._group.options.strategies, strict=True)
        self._unscored = {name for name, strategy in strategies if strategy == SCORE_CUSTOMIZED}

    def _check_scores(self, tables: Iterable[int]) -> None:
        without = [self._group.names[t] for t in tables if self._group.names[t] in self._unscored]
        if without:
            raise DynamicEmbError(
                f"score_strategy CUSTOMIZED: table {', '.join(without)} has no score; "
                f"call set_score({{{without[0]!r}: 1}}) first, or dynamicemb.incremental_dump.set_score(model, 1)"
            )

    @also_named(scores="named_score")
    def set_score(self, named_score: Mapping[str, int]) -> None:
        """Set the score that the following training lookups leave, per table name (CUSTOMIZED); warns if it decreases.

        Raises:
            TypeError: not a mapping, or a score that is not an int.
            ValueError: an unknown table, a score outside 1..2^63-1, or another strategy.
        """
        if not isinstance(named_score, Mapping):
            raise TypeError(
                f"named_score must map table names to ints, got {named_score!r}; call set_score({{'name': 1}})"
            )
        for name, value in named_score.items():
            if self._group.options.strategies[self._group.number_of(name)] != SCORE_CUSTOMIZED:
                raise ValueError(
                    f"set_score needs score_strategy CUSTOMIZED, which table {name!r} does not have; "
                    "the other strategies make their own scores"
                )
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"score of table {name!r} must be an int, got {value!r}")
            if not 0 < value <= MAX_SCORE:
                raise ValueError(f"score of table {name!r} must be in 1..{MAX_SCORE}, got {value}")
        for name, value in named_score.items():
            table = self._group.number_of(name)
            before = self._group.get_score(table)
            if value < before and warning_for_cstm_score():
                warn(
                    f"score of table {name!r} decreases from {before} to {value}: ids touched from now on are evicted "
                    "before older ones; set DYNAMICEMB_CSTM_SCORE_CHECK=0 if that is intended",
                )
            self._group.set_score(table, int(value))
            self._unscored.discard(name)

    def get_score(self) -> dict[str, int]:
        """Return, per table, a threshold: ids touched from now on have at least this score.

        TIMESTAMP, alone or with LFU, and NO_EVICTION (ids inserted from now on): the present time in Unix nanoseconds.
        STEP: the number of the next training forward. CUSTOMIZED: the score last set, 0 if none. LFU: 1.
        """
        group = self._group
        timed = [strategy in TIMED_SCORES for strategy in group.options.strategies]
        now = group.now() if any(timed) else 0
        return {name: now if timed[t] else group.get_score(t) for t, name in enumerate(group.names)}
