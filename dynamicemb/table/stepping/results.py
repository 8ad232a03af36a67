"""What the kernels return beside rows."""

from typing import Any, NamedTuple, Protocol

import torch

from dynamicemb.table.stepping.staging import Staged

# What became of a missing id: it got no slot, a free one, that of a victim, or that of an expired id, its own or
# another's.
FAILED_OUTCOME = 0
INSERTED_OUTCOME = 1
EVICTED_OUTCOME = 2
EXPIRED_OUTCOME = 3
# Of an occurrence on the CPU: an earlier one of the same batch has got the slot.
FOLLOWED_OUTCOME = 4
NUM_OUTCOMES = 5


class OpenBatch(NamedTuple):
    """A lookup that has begun.

    Attributes:
        offsets: i64 ``[F*B+1]``, safe to index with; without pooling anything.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        scratch: what ``find_or_insert`` works in, or None.
    """

    offsets: torch.Tensor
    table_ranges: torch.Tensor
    scratch: Any = None


class InsertResult(NamedTuple):
    """Outcome of an insert, in batch order.

    Attributes:
        new: i64 ``[M]``, the occurrences that took a slot; their rows hold nothing yet, or a victim's values.
        evicted: i64 ``[E]``, the subset of ``new`` that took the slot of another id.
        evicted_ids: i64 ``[E]``, the ids that lost their slot; the row is that of the occurrence in ``evicted``.
        evicted_scores: i64 ``[E]``, their scores.
        evicted_stamps: i64 ``[E]``, when they were touched last; ``[0]`` in a group without stamps.
    """

    new: torch.Tensor
    evicted: torch.Tensor
    evicted_ids: torch.Tensor
    evicted_scores: torch.Tensor
    evicted_stamps: torch.Tensor


class InsertEvents(Protocol):
    """An insert that ran on the device; its outcome is fetched only when somebody asks.

    Attributes:
        staged: what the lookup reads where ids were not admitted; None: its rows say it.
    """

    @property
    def staged(self) -> Staged | None: ...

    def result(self) -> InsertResult:
        """Return the outcome; waits for the device."""
