"""What the score of an id is, and what follows from it for eviction and for dumps."""

import enum
import os
from typing import Any, TypeAlias

# Environment variable: "0" silences the warning about decreasing scores.
DYNAMICEMB_CSTM_SCORE_CHECK = "DYNAMICEMB_CSTM_SCORE_CHECK"


class DynamicEmbScoreStrategy(enum.IntEnum):
    """What the score of an id is. The lowest score is evicted first.

    Members:
        TIMESTAMP: when the id was last used in training, Unix nanoseconds; one time for all ids of a step.
        STEP: the number of the training forward that last used the id, from 1; of an import, that of the next one.
        CUSTOMIZED: the number last given to ``set_score`` when the id was last used, from 1 to 2^63 - 1.
        LFU: how often the id has occurred in training since it got its row.
        NO_EVICTION: when the id was inserted, Unix nanoseconds. The table grows instead of evicting; only when there is
            no memory left for that, it warns and evicts the oldest.
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


ScoreStrategy: TypeAlias = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]

_COMPOUND_ORDER = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)


class EvictStrategy(enum.Enum):
    """Names of eviction rules in dumps: ``str()`` of a member is written to the meta file."""

    KLru = 0
    KLfu = 1
    KEpochLru = 2
    KEpochLfu = 3
    KCustomized = 4


class DynamicEmbEvictStrategy(enum.Enum):
    """Eviction rules by their public names. The rule of a table follows from its score strategy."""

    LRU = EvictStrategy.KLru
    LFU = EvictStrategy.KLfu
    EPOCH_LRU = EvictStrategy.KEpochLru
    EPOCH_LFU = EvictStrategy.KEpochLfu
    CUSTOMIZED = EvictStrategy.KCustomized


_EVICT_STRATEGY_OF_SCORE = {
    DynamicEmbScoreStrategy.TIMESTAMP: DynamicEmbEvictStrategy.LRU,
    DynamicEmbScoreStrategy.STEP: DynamicEmbEvictStrategy.CUSTOMIZED,
    DynamicEmbScoreStrategy.CUSTOMIZED: DynamicEmbEvictStrategy.CUSTOMIZED,
    DynamicEmbScoreStrategy.LFU: DynamicEmbEvictStrategy.LFU,
    DynamicEmbScoreStrategy.NO_EVICTION: DynamicEmbEvictStrategy.CUSTOMIZED,
}


def normalize_score_strategy(score_strategy: Any) -> ScoreStrategy:
    """Return the canonical form of a strategy: a member, or a tuple of two. A 1-tuple becomes its member.

    Raises:
        TypeError: something is not a ``DynamicEmbScoreStrategy``.
        NotImplementedError: a combination other than {TIMESTAMP, LFU}.
    """
    if isinstance(score_strategy, DynamicEmbScoreStrategy):
        return score_strategy
    if not isinstance(score_strategy, tuple | list) or not score_strategy:
        raise TypeError(
            f"score_strategy must be a DynamicEmbScoreStrategy or a tuple of them, got {score_strategy!r}; "
            "use for example DynamicEmbScoreStrategy.TIMESTAMP"
        )
    for element in score_strategy:
        if not isinstance(element, DynamicEmbScoreStrategy):
            raise TypeError(f"score_strategy must hold DynamicEmbScoreStrategy members, got {element!r}")
    strategies: tuple[DynamicEmbScoreStrategy, ...] = tuple(score_strategy)
    if len(strategies) == 1:
        return strategies[0]
    if sorted(strategies) != sorted(_COMPOUND_ORDER):
        raise NotImplementedError(
            f"score_strategy ({', '.join(s.name for s in strategies)}) is not supported; "
            "the only combination is TIMESTAMP with LFU, in either order"
        )
    return strategies


def validate_score_strategy(score_strategy: Any) -> None:
    """Raise what ``normalize_score_strategy`` raises."""
    normalize_score_strategy(score_strategy)


def get_eviction_score_strategy(score_strategy: Any) -> DynamicEmbScoreStrategy:
    """Return the strategy that ranks evictions: of the compound, the one that is not TIMESTAMP."""
    strategy = normalize_score_strategy(score_strategy)
    return DynamicEmbScoreStrategy.LFU if isinstance(strategy, tuple) else strategy


def get_evict_strategy(score_strategy: Any) -> DynamicEmbEvictStrategy:
    """Return the eviction rule that a score strategy implies; dumps name it."""
    return _EVICT_STRATEGY_OF_SCORE[get_eviction_score_strategy(score_strategy)]


def score_strategy_has_timestamp_column(score_strategy: Any) -> bool:
    """Return whether one of the score words is a timestamp."""
    return DynamicEmbScoreStrategy.TIMESTAMP in get_physical_score_order(score_strategy)


def get_physical_score_order(score_strategy: Any) -> tuple[DynamicEmbScoreStrategy, ...]:
    """Return the strategies in the order of their words in memory: compounds always (TIMESTAMP, LFU)."""
    strategy = normalize_score_strategy(score_strategy)
    return _COMPOUND_ORDER if isinstance(strategy, tuple) else (strategy,)


def score_dump_permutation(score_strategy: Any) -> list[int]:
    """Return ``p`` such that ``in_memory[:, p]`` has its columns in the user's order, as in a dump."""
    strategy = normalize_score_strategy(score_strategy)
    logical = strategy if isinstance(strategy, tuple) else (strategy,)
    physical = get_physical_score_order(strategy)
    return [physical.index(element) for element in logical]


def score_load_permutation(score_strategy: Any) -> list[int]:
    """Return ``p`` such that ``from_dump[:, p]`` has its columns in the order in memory."""
    dump = score_dump_permutation(score_strategy)
    return [dump.index(column) for column in range(len(dump))]


def string_to_evict_strategy(strategy_str: str) -> EvictStrategy:
    """Return the rule named ``"KLru"`` or ``"EvictStrategy.KLru"``, and so on.

    Raises:
        ValueError: there is no such rule.
    """
    name = strategy_str.removeprefix("EvictStrategy.")
    if name not in EvictStrategy.__members__:
        raise ValueError(
            f"evict strategy {strategy_str!r} is unknown; use one of {', '.join(EvictStrategy.__members__)}"
        )
    return EvictStrategy[name]


def warning_for_cstm_score() -> bool:
    """Return whether to warn about a decreasing custom score: unless DYNAMICEMB_CSTM_SCORE_CHECK is "0"."""
    return os.environ.get(DYNAMICEMB_CSTM_SCORE_CHECK) != "0"
