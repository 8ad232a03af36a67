"""Begin a step: advance the clock that all kernels of the step read."""

import time

import torch

from dynamicemb.table.index import NOW, OLDEST, STEP, Index
from dynamicemb.table.scores import SCORE_STEP, SCORE_TIMESTAMP


def advance(index: Index, step: int, oldest: int, strategy: int) -> None:
    """Begin a step.

    Args:
        index: the group's index; ``clock`` and, for strategies that move by themselves, ``score_values`` change.
        step: tag of what the step touches.
        oldest: tag from which slots are protected.
        strategy: SCORE_*, see ``table/scores.py``.
    """
    clock = index.clock.numpy()
    clock[STEP] = step
    clock[OLDEST] = oldest
    clock[NOW] = max(clock[NOW] + 1, time.time_ns())
    if strategy == SCORE_TIMESTAMP:
        index.score_values.fill_(int(clock[NOW]))
    elif strategy == SCORE_STEP:
        index.score_values += 1


def rebase(index: Index, shift: int) -> None:
    """Lower all tags by ``shift``, at least to 0."""
    torch.clamp(index.tags.sub_(shift), min=0, out=index.tags)
