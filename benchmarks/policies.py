"""Ways in which a table decides what it holds, and what they cost beside the plain one."""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from dynamicemb import DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, KVCounter, ProbabilityAdmissionStrategy
from dynamicemb.dynamicemb_config import DEMB_DETERMINISM_MODE

_COMPOUND = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)
# Seconds: nothing expires while a benchmark runs, but every lookup looks.
_TTL = 86_400.0
# Occurrences that admit an id.
THRESHOLD = 2


def decayed_frequency(scores: Sequence[float], cur_timestamp: float) -> float:
    """Rank by a frequency that loses a tenth in every second without a touch."""
    return math.log(max(scores[1], 1)) + (cur_timestamp - scores[0]) * 1e-9 * math.log(0.9)


def table_options(policy: str, rows: int) -> dict[str, Any]:
    """Return the options of a table that a policy changes.

    Args:
        policy: ``lru`` (the default options), ``lfu``, ``compound``, ``score_function``, ``ttl``, ``admission`` by
            count, ``chance``, or ``deterministic``.
        rows: rows of the table.
    """
    options: dict[str, dict[str, Any]] = {
        "lru": {},
        "deterministic": {},
        "lfu": {"score_strategy": DynamicEmbScoreStrategy.LFU},
        "compound": {"score_strategy": _COMPOUND},
        "score_function": {"score_strategy": _COMPOUND, "score_function": decayed_frequency},
        "ttl": {"ttl": _TTL},
        "admission": {
            "admit_strategy": FrequencyAdmissionStrategy(THRESHOLD),
            "admission_counter": KVCounter(rows),
        },
        "chance": {"admit_strategy": ProbabilityAdmissionStrategy(0.5)},
    }
    return options[policy]


@contextlib.contextmanager
def in_force(policy: str) -> Iterator[None]:
    """Make what a step asks the process for as the policy wants it."""
    if policy != "deterministic":
        yield
        return
    before = os.environ.get(DEMB_DETERMINISM_MODE)
    os.environ[DEMB_DETERMINISM_MODE] = "1"
    try:
        yield
    finally:
        del os.environ[DEMB_DETERMINISM_MODE]
        if before is not None:
            os.environ[DEMB_DETERMINISM_MODE] = before
