"""Score strategies as kernels know them."""

from collections.abc import Sequence

SCORE_TIMESTAMP = 0
SCORE_STEP = 1
SCORE_CUSTOMIZED = 2
# The time of the step that inserted the id; touches leave it alone.
SCORE_NO_EVICTION = 3
# From here on scores count occurrences.
SCORE_LFU = 4
# TIMESTAMP with LFU: the score counts, and a second column holds the time of the last touch.
SCORE_COMPOUND = 5
# In place of the one strategy of a group whose tables have several: some of them count, or none does.
SCORE_MIXED = 6
SCORE_MIXED_UNCOUNTED = 7

# Whose scores, or for the compound one stamps, are times.
TIMED_SCORES = (SCORE_TIMESTAMP, SCORE_NO_EVICTION, SCORE_COMPOUND)

MAX_SCORE = 2**63 - 1
# Of a count that is imported: kernels add to it without a look at the sum, which never gets to 2**63 from here.
MAX_IMPORTED_COUNT = 2**62

# Which tables of a group count, for kernels to be compiled for.
COUNT_NONE = 0
COUNT_SOME = 1
COUNT_ALL = 2


def common_strategy(strategies: Sequence[int]) -> int:
    """Return the strategy that all tables of a group have, or SCORE_MIXED or SCORE_MIXED_UNCOUNTED."""
    if len(set(strategies)) == 1:
        return strategies[0]
    return SCORE_MIXED if max(strategies) >= SCORE_LFU else SCORE_MIXED_UNCOUNTED


def counting(strategy: int) -> int:
    """Return COUNT_NONE, COUNT_SOME or COUNT_ALL for what ``common_strategy`` returns."""
    if strategy in (SCORE_LFU, SCORE_COMPOUND):
        return COUNT_ALL
    return COUNT_SOME if strategy == SCORE_MIXED else COUNT_NONE


def keeping(strategy: int) -> bool:
    """Return whether some table may keep its scores when ids are touched, for what ``common_strategy`` returns."""
    return strategy in (SCORE_NO_EVICTION, SCORE_MIXED, SCORE_MIXED_UNCOUNTED)
