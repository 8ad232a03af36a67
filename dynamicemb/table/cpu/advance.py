"""Begin a step: advance the clock that all kernels of the step read."""

import time

import torch

from dynamicemb.table.index import NOW, OLDEST, SEEN, STEP, Touches
from dynamicemb.table.scores import (
    SCORE_COMPOUND,
    SCORE_CUSTOMIZED,
    SCORE_LFU,
    SCORE_NO_EVICTION,
    SCORE_STEP,
    SCORE_TIMESTAMP,
)


def advance(touches: Touches, lag: int, training: bool = True) -> None:
    """Begin a step.

    Args:
        touches: of the group's index; ``clock`` and, for strategies that move by themselves, ``score_values`` change.
        lag: how many steps before the new one the oldest protected step is.
        training: whether it is a training forward, which STEP scores count.
    """
    clock = touches.clock.numpy()
    clock[STEP] += 1
    clock[OLDEST] = max(1, clock[STEP] - lag)
    clock[NOW] = clock[SEEN] = max(clock[SEEN] + 1, time.time_ns())
    if touches.strategy in (SCORE_CUSTOMIZED, SCORE_LFU, SCORE_COMPOUND):
        return
    strategies, values = touches.strategies.numpy(), touches.score_values.numpy()
    values[(strategies == SCORE_TIMESTAMP) | (strategies == SCORE_NO_EVICTION)] = clock[NOW]
    if training:
        values[strategies == SCORE_STEP] += 1


def observe_time(touches: Touches, lag: int) -> None:
    """Let ids expire that are too old by now; for whoever looks without a step.

    Args:
        touches: of the group's index; its ``clock`` changes.
        lag: how many steps before a next one the oldest protected step would be.
    """
    clock = touches.clock.numpy()
    clock[OLDEST] = max(clock[OLDEST], clock[STEP] + 1 - lag)
    clock[SEEN] = max(clock[SEEN], time.time_ns())


def rebase(touches: Touches, shift: int) -> None:
    """Lower all tags, at least to 0, and the step number by ``shift``."""
    touches.clock[STEP] -= shift
    torch.clamp(touches.tags.sub_(shift), min=0, out=touches.tags)
