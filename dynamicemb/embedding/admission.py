"""From the options of a module's tables to what decides which new ids get a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynamicemb.admission import FrequencyAdmissionStrategy, KVCounter, ProbabilityAdmissionStrategy
from dynamicemb.capacity import MAX_GROUP_SLOTS
from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.admission import ADMIT_BY_CALL, ADMIT_BY_CHANCE, ADMIT_BY_COUNT, Admission, create_counter
from dynamicemb.table.group import TableGroup
from dynamicemb.table.index import Index
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.types import AdmissionStrategy, Counter


@dataclass(frozen=True)
class UserJudge:
    """A strategy that the user wrote, and the user's counters; see ``table.admission.Judge``.

    Both see the ids of one table at a time, int64 and distinct; the number of the table is its place in the module.

    Attributes:
        strategy: of all tables.
        counters: of each table, or none at all.
    """

    strategy: AdmissionStrategy
    counters: Sequence[Counter]

    def count(self, ids: torch.Tensor, tables: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
        """Add to the counters, and return the occurrences so far, i64 ``[U]``."""
        totals = amounts.clone()
        for t, counter in enumerate(self.counters):
            mine = _places(tables, t)
            if mine.numel():
                added = counter.add(ids[mine], tables[mine], amounts[mine])
                totals[mine] = _checked(added, mine.numel(), torch.int64, f"{type(counter).__name__}.add")
        return totals

    def admit(self, ids: torch.Tensor, tables: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
        """Return bool ``[U]``, which ids get a row."""
        admitted = torch.zeros_like(ids, dtype=torch.bool)
        for t in tables.unique().tolist():
            mine = _places(tables, t)
            mask = self.strategy.admit(ids[mine], totals[mine])
            admitted[mine] = _checked(mask, mine.numel(), torch.bool, f"{type(self.strategy).__name__}.admit")
        return admitted

    def forget(self, ids: torch.Tensor, tables: torch.Tensor) -> None:
        """Erase admitted ids from the counters."""
        for t, counter in enumerate(self.counters):
            mine = _places(tables, t)
            if mine.numel():
                counter.erase(ids[mine], tables[mine])

    def fill(self, table: int, values: torch.Tensor) -> bool:
        """Let the strategy overwrite what rejected ids of a table read."""
        indices = torch.arange(values.shape[0], device=values.device)
        filled = self.strategy.initialize_non_admitted_embeddings(values, indices)
        if not isinstance(filled, bool):
            # None of a forgotten return would pass for False, and what was written would be lost.
            name = f"{type(self.strategy).__name__}.initialize_non_admitted_embeddings"
            raise TypeError(f"{name} must return True or False, got {filled!r}; True if it filled the rows")
        return filled


def _places(tables: torch.Tensor, table: int) -> torch.Tensor:
    return (tables == table).nonzero().flatten()


def _checked(result: torch.Tensor, number: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return what a user's method returned.

    Raises:
        TypeError: it is no tensor, or of another dtype.
        ValueError: it has another shape.
    """
    if not isinstance(result, torch.Tensor) or result.dtype != dtype:
        got = f"a {result.dtype} tensor" if isinstance(result, torch.Tensor) else repr(result)
        raise TypeError(f"{name} must return a tensor of {dtype}, got {got}")
    if result.shape != (number,):
        raise ValueError(f"{name} must return shape ({number},), one entry per id, got {tuple(result.shape)}")
    return result


def build_admission(
    options: Sequence[DynamicEmbTableOptions], names: Sequence[str], seed: int, device: torch.device
) -> Admission | None:
    """Return how a module's tables admit new ids, or None if all get a row; ``options`` must have been checked.

    Raises:
        ValueError: some of the tables have a counter and some have none, or their counters do not fit together.
    """
    strategy = options[0].admit_strategy
    if strategy is None:
        return None
    counter, counters = _build_counter(options, names, device)
    kind, limit, judge = ADMIT_BY_CALL, 0, None
    args = None
    # Exactly these classes: one derived from them may decide otherwise.
    if type(strategy) is FrequencyAdmissionStrategy and counter is not None:
        kind, limit, args = ADMIT_BY_COUNT, strategy.threshold, strategy.initializer_args
    elif type(strategy) is ProbabilityAdmissionStrategy:
        kind, limit, args = ADMIT_BY_CHANCE, strategy.limit, strategy.initializer_args
    else:
        judge = UserJudge(strategy, counters)
        if isinstance(strategy, FrequencyAdmissionStrategy | ProbabilityAdmissionStrategy):
            args = strategy.initializer_args
    return Admission(
        kind,
        torch.full((len(names),), limit, dtype=torch.int64, device=device),
        InitializerTable.create([args or o.initializer_args for o in options], names, seed, device),
        counter,
        judge,
    )


def _build_counter(
    options: Sequence[DynamicEmbTableOptions], names: Sequence[str], device: torch.device
) -> tuple[Index | None, list[Counter]]:
    """Return the counters of a module's tables: an index for ``KVCounter``, or those that the user wrote."""
    counters = [option.admission_counter for option in options]
    kinds = {"KVCounter" if isinstance(c, KVCounter) else "none" if c is None else "your own" for c in counters}
    if len(kinds) > 1:
        listed = ", ".join(f"{name!r} has {c!r}" for name, c in zip(names, counters, strict=True))
        raise ValueError(
            f"admission_counter: the tables of one module need counters of one kind, but {listed}; "
            "give all of them the same kind, or give them to several modules"
        )
    if kinds == {"your own"}:
        return None, counters
    if kinds == {"none"}:
        return None, []
    layouts = [counter.layout() for counter in counters]
    buckets = sorted({bucket for _, bucket in layouts})
    if len(buckets) > 1:
        raise ValueError(
            f"admission_counter: the counters of one module need one bucket_capacity, but they have buckets of "
            f"{buckets} ids; give them equal ones, or give the tables to several modules"
        )
    places = sum(number * bucket for number, bucket in layouts)
    if places > MAX_GROUP_SLOTS:
        raise ValueError(
            f"admission_counter: the counters of {list(names)} have {places} places together, more than "
            f"{MAX_GROUP_SLOTS}; lower their capacities or give the tables to several modules"
        )
    return create_counter([number for number, _ in layouts], buckets[0], device), []


def refuse_capture(group: TableGroup) -> None:
    """Raise while a CUDA graph is being captured, if the user's own code decides who is admitted."""
    admission = group.admission
    if admission is None or admission.judge is None or group.device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        raise DynamicEmbError(
            "admit_strategy: a strategy or counter of your own runs on the host between kernels, which a CUDA graph "
            "cannot; use FrequencyAdmissionStrategy with a KVCounter, or ProbabilityAdmissionStrategy"
        )
