"""Which new ids get a row: the strategies of this package, and the options of the counter that they ask."""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

from dynamicemb.capacity import bucket_layout, check_bucket_capacity
from dynamicemb.types import AdmissionStrategy, Counter, DynamicEmbInitializerArgs

_KEY_TYPES = (torch.int64, torch.uint64)


@dataclass(frozen=True)
class KVCounter:
    """The counter of one table: ids that have no row yet, with their occurrences so far.

    This object only describes it: tables that are given the same one count apart.

    It lives where the table lives, at 25 bytes for an id. Where a bucket of it is full, the id with the lowest count
    is forgotten.

    Attributes:
        capacity: ids on this rank at most, rounded up to whole buckets; the planner does not divide it. It should hold
            the ids that are new between two occurrences of the ones to admit: where ``counter_evicted`` or
            ``counter_failed`` of ``stats()`` grow fast, ids are forgotten before they reach the threshold.
        bucket_capacity: ids that compete with each other, a multiple of 16, or MAX_BUCKET_CAPACITY for a single bucket;
            the time to find the lowest count grows with it. None is 128, with places to spare in a small counter as in
            a small table. The counters of one module must agree.
        key_type: int64 or uint64, which are the same 64 bits here.
    """

    capacity: int
    bucket_capacity: int | None = None
    key_type: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        if not isinstance(self.capacity, Integral) or isinstance(self.capacity, bool):
            raise TypeError(f"capacity of a KVCounter must be an int, got {self.capacity!r}")
        if self.capacity < 1:
            raise ValueError(f"capacity of a KVCounter must be >= 1, got {self.capacity}")
        check_bucket_capacity(self.bucket_capacity)
        if self.key_type not in _KEY_TYPES:
            raise ValueError(f"key_type of a KVCounter must be int64 or uint64, got {self.key_type}")

    def layout(self) -> tuple[int, int]:
        """Return ``(number of buckets, slots of a bucket)``."""
        return bucket_layout(self.capacity, self.bucket_capacity)


def _check_initializer(initializer_args: DynamicEmbInitializerArgs | None) -> None:
    if initializer_args is None:
        return
    if not isinstance(initializer_args, DynamicEmbInitializerArgs):
        raise TypeError(f"initializer_args must be a DynamicEmbInitializerArgs or None, got {initializer_args!r}")
    initializer_args.validate()


@dataclass(frozen=True)
class FrequencyAdmissionStrategy(AdmissionStrategy):
    """Admits an id in the step in which its occurrences, over all ranks, reach a threshold; needs a counter.

    Attributes:
        threshold: occurrences, at least 0. With 0 or 1 every id is admitted at once.
        initializer_args: what an id reads until then, a function of the id as the first value of a row is; missing
            bounds are 0 and 1. None: the first value that its row would have.
    """

    threshold: int
    initializer_args: DynamicEmbInitializerArgs | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, Integral) or isinstance(self.threshold, bool):
            raise TypeError(f"threshold must be an int, got {self.threshold!r}")
        if not 0 <= self.threshold < 2**63:
            raise ValueError(f"threshold must be in 0..2**63-1, got {self.threshold}")
        _check_initializer(self.initializer_args)

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Return which ids have reached the threshold; lookups decide it in their kernels."""
        return frequencies >= self.threshold

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        """Return False: lookups fill by id, in their kernels."""
        return False


@dataclass(frozen=True)
class ProbabilityAdmissionStrategy(AdmissionStrategy):
    """Admits a new id with a probability, drawn once in each step that brings it.

    The draw is a function of (seed, table, id, step), so every occurrence of a step gets the same answer, and so does
    another run. Dumps do not hold the number of the step: a run that goes on from one may admit other
    ids than a run that was never interrupted. ``docs/random.md`` is the specification.

    Attributes:
        probability: in (0, 1].
        initializer_args: what an id reads until then, see ``FrequencyAdmissionStrategy``.
    """

    probability: float
    initializer_args: DynamicEmbInitializerArgs | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.probability, Real) or isinstance(self.probability, bool):
            raise TypeError(f"probability must be a number, got {self.probability!r}")
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability must be in (0, 1], got {self.probability}")
        _check_initializer(self.initializer_args)

    @property
    def limit(self) -> int:
        """Return how many of the 2^32 values of a random word admit an id; at least one does."""
        return max(1, round(float(self.probability) * 2**32))

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Raise: a draw depends on seed, table and step, which lookups know and the arguments do not.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ProbabilityAdmissionStrategy decides inside a lookup, which knows seed and step")

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        """Return False: lookups fill by id, in their kernels."""
        return False


def counts_occurrences(strategy: AdmissionStrategy | None) -> bool:
    """Return whether it matters to admission how often an id occurs."""
    return strategy is not None and type(strategy) is not ProbabilityAdmissionStrategy


def counter_kind(counter: Any) -> tuple[str, int] | str | None:
    """Return in what the counters of the tables of one module must agree: the kind and, of ours, slots of a bucket."""
    if isinstance(counter, KVCounter):
        return "KVCounter", counter.layout()[1]
    return None if counter is None else "your own"


def check_admission(strategy: Any, counter: Any) -> None:
    """Check that a table's strategy and counter fit together.

    Raises:
        TypeError: one of them is of a wrong type.
        ValueError: the strategy lacks its counter, or has one that it does not read.
    """
    if strategy is not None and not isinstance(strategy, AdmissionStrategy):
        raise TypeError(
            f"admit_strategy must be an AdmissionStrategy, got {strategy!r}; "
            "use for example FrequencyAdmissionStrategy(threshold=2), or derive yours from AdmissionStrategy"
        )
    if strategy is not None and type(strategy).__hash__ is None:
        raise TypeError(
            f"admit_strategy: {type(strategy).__name__} cannot be hashed, and tables are grouped by their strategies; "
            "give it a __hash__, or make it a dataclass with frozen=True"
        )
    if counter is not None and not isinstance(counter, KVCounter | Counter):
        raise TypeError(
            f"admission_counter must be a KVCounter or a Counter, got {counter!r}; "
            "use for example KVCounter(capacity=...)"
        )
    if type(strategy) is FrequencyAdmissionStrategy and counter is None:
        raise ValueError(
            "FrequencyAdmissionStrategy needs an admission_counter that remembers ids over steps; "
            "use for example KVCounter(capacity=...)"
        )
    if isinstance(strategy, ProbabilityAdmissionStrategy) and type(strategy) is not ProbabilityAdmissionStrategy:
        if type(strategy).admit is ProbabilityAdmissionStrategy.admit:
            raise ValueError(
                f"admit_strategy: {type(strategy).__name__} must decide by itself, for only "
                "ProbabilityAdmissionStrategy itself draws inside a lookup; override admit, or use that class"
            )
    if type(strategy) is ProbabilityAdmissionStrategy and counter is not None:
        raise ValueError("admission_counter has no effect on ProbabilityAdmissionStrategy; leave it None")
