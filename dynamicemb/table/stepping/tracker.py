"""Which steps are outstanding, so that their ids are neither evicted nor moved."""

import threading
from typing import Any

# A step number is a 32-bit tag in the index; long before it overflows, tags are rebased.
REBASE_AT = 2**30


class Step:
    """A forward whose backward may still come; its protection ends when it is finished or nobody holds it."""

    __slots__ = ("_tracker", "number")

    def __init__(self, tracker: "StepTracker", number: int):
        self._tracker = tracker
        self.number = number

    def finish(self) -> None:
        """Say that nothing of this step will come any more; doing so twice is harmless."""
        self._tracker._outstanding.discard(self.number)

    @property
    def finished(self) -> bool:
        """Whether the step's ids are no longer protected by it."""
        return self.number not in self._tracker._outstanding

    def __del__(self) -> None:
        self.finish()


class StepTracker:
    """Hands out step numbers and knows the oldest outstanding one.

    Numbers count all steps since the table was made. The index stores smaller ones once they were rebased.
    """

    def __init__(self, protect_steps: int = 0, num_tables: int = 1):
        """Make a tracker.

        Args:
            protect_steps: how many finished steps before the current one stay protected.
            num_tables: how many tables the steps look ids up in.
        """
        self._protect_steps = protect_steps
        # Per table, the last step whose rows are gone.
        self._replaced = [0] * num_tables
        self._last_replaced = 0
        self._outstanding: set[int] = set()
        self._lock = threading.Lock()
        self._base = 0
        self.current = 0

    def begin(self) -> Step:
        """Start the next step."""
        with self._lock:
            self.current += 1
            self._outstanding.add(self.current)
            return Step(self, self.current)

    def oldest(self) -> int:
        """Return the number of the oldest step whose ids are protected."""
        if len(self._outstanding) == 1 and self.current in self._outstanding:
            return max(1, self.current - self._protect_steps)
        return max(1, min([*self._outstanding, self.current]) - self._protect_steps)

    def replace_rows(self, table: int) -> None:
        """Say that the rows of all steps so far are gone from a table, also where an id has a row again.

        A step whose rows are gone from all tables is over: nothing of it can come any more.
        """
        with self._lock:
            self._replaced[table] = self._last_replaced = self.current
            # Of a copy: the garbage collector may end steps meanwhile.
            self._outstanding.difference_update(n for n in self.outstanding() if n <= min(self._replaced))

    def replaced_since(self, number: int) -> tuple[int, ...]:
        """Return the tables from which the rows of a step are gone."""
        if number > self._last_replaced:
            return ()
        return tuple(t for t, last in enumerate(self._replaced) if number <= last)

    def num_awaited(self, table: int) -> int:
        """Return how many outstanding steps may still change rows of a table."""
        return sum(number > self._replaced[table] for number in self.outstanding())

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no outstanding steps: no graph will ever call back into it.
        return {
            "protect_steps": self._protect_steps,
            "base": self._base,
            "current": self.current,
            "replaced": self._replaced.copy(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        StepTracker.__init__(self, state["protect_steps"])
        self._base = state["base"]
        self.current = state["current"]
        self._replaced = state["replaced"]
        self._last_replaced = max(self._replaced, default=0)

    @property
    def num_outstanding(self) -> int:
        """Steps begun and not finished."""
        return len(self._outstanding)

    def outstanding(self) -> list[int]:
        """Return the numbers of the steps begun and not finished."""
        return sorted(self._outstanding)

    def tag_of(self, number: int) -> int:
        """Return the tag that a step's ids have in the index; at most 0 once it was rebased away."""
        return number - self._base

    def lag(self) -> int:
        """Return how many steps before the current one the oldest protected step is."""
        return self.current - self.oldest()

    def next_lag(self) -> int:
        """Return what ``lag`` will be once the next step has begun, if no step ends before."""
        coming = self.current + 1
        return coming - max(1, min([*self._outstanding, coming]) - self._protect_steps)

    def rebase(self) -> int:
        """Return by how much tags must be lowered before the next step, 0 while they are small."""
        if self.current - self._base < REBASE_AT:
            return 0
        shift = self.oldest() - 1 - self._base
        self._base += shift
        return shift
