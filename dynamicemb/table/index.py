"""The index of a group: which id is in which slot, which row the slot owns, and who was there last.

An ``Index`` has two parts. ``Residents`` says where ids are: all that a table needs which nobody trains. ``Touches``
says how ids were used: what is evicted, protected or forgotten follows from it, and only training writes it. A function
that takes one of the two parts leaves the other one alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch

from dynamicemb.table.memory import allocate
from dynamicemb.table.scores import SCORE_COMPOUND, common_strategy, counting

# Entries of ``Touches.clock``, a small tensor on the table's device so that a step can advance it without the host.
STEP = 0  # step number, the tag of everything this step touches
OLDEST = 1  # oldest step whose ids are protected
NOW = 2  # timestamp of the step, Unix nanoseconds
UPDATES = 3  # optimizer applications so far
SEEN = 4  # the latest time anybody asked for, at least NOW; what is expired is so by then
CLOCK_SIZE = 5

# Columns of ``Touches.tallies``.
HITS = 0
MISSES = 1
INSERTED = 2
EVICTED = 3
FAILED = 4
ERASED = 5
DROPPED = 6  # gradients of ids that were gone by the time of backward
CLAMPED = 7  # offsets and frequencies on a GPU that were out of range
EXPIRED = 8  # ids that were forgotten because they were too old
NON_ADMITTED = 9  # occurrences of ids that got no row because they were not admitted
NUM_TALLIES = 10
TALLY_NAMES = (
    "hits", "misses", "inserted", "evicted", "failed", "erased", "dropped_gradients", "clamped_inputs", "expired",
    "non_admitted",
)  # fmt: skip

# keys, digests, scores, rows, tags.
INDEX_BYTES_PER_SLOT = 8 + 1 + 8 + 4 + 4
# What ``Touches.stamps`` adds where it is needed.
STAMP_BYTES_PER_SLOT = 8

# The time to live of an id that never expires, in nanoseconds.
NEVER = 2**63 - 1


def unshared(tensor: torch.Tensor) -> torch.Tensor | np.ndarray:
    """Return a copy to be pickled in place of a tensor that this process goes on changing.

    Pickling a tensor for another process moves its memory, so that kernels' addresses dangle, and shares it, so that
    each process sees the other's steps. For a process that is being started a cloned tensor does not do: it is freed,
    and its file descriptor closed, before the process has it.
    """
    if get_spawning_popen() is not None and tensor.device.type == "cpu":
        return tensor.numpy()
    return tensor.clone()


# Where ``prepared`` is kept: not a field.
_PREPARED = "_prepared"
# In ``prepared``, a list of tensors that kernels under way may read: whoever lets go of them does it by stream.
KEPT = "kept"


class _Tensors:
    """A dataclass of tensors on one device, and numbers."""

    @property
    def prepared(self) -> dict[Any, Any]:
        """What a backend has prepared for its launches; empty again once an attribute is set."""
        prepared: dict[Any, Any] | None = self.__dict__.get(_PREPARED)
        if prepared is None:
            prepared = self.__dict__[_PREPARED] = {}
        return prepared

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop(_PREPARED, None)
        object.__setattr__(self, name, value)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in field order."""
        values = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def __getstate__(self) -> dict[str, Any]:
        state = {name: unshared(v) if isinstance(v, torch.Tensor) else v for name, v in self.__dict__.items()}
        state.pop(_PREPARED, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in state.items()})


@dataclass
class Residents(_Tensors):
    """Who is where: the ids of a group's tables, and their rows. Tables are ranges of buckets.

    Attributes:
        keys: i64 ``[S]``, meaningful where the digest says occupied.
        digests: u8 ``[S]``, 0 empty, 1 erased, else a fingerprint of the key.
        rows: i32 ``[S]``, the row a slot owns, also while the slot is empty.
        moved: i64 ``[1]``, not 0: entries have moved, and slot i of a table need not own the table's row i.
        bucket_offsets: i64 ``[T+1]``, first bucket of each table.
        bucket_capacity: slots of a bucket, a multiple of 16.
    """

    keys: torch.Tensor
    digests: torch.Tensor
    rows: torch.Tensor
    moved: torch.Tensor
    bucket_offsets: torch.Tensor
    bucket_capacity: int

    @property
    def num_slots(self) -> int:
        """S."""
        return self.keys.numel()

    @property
    def num_tables(self) -> int:
        """T."""
        return self.bucket_offsets.numel() - 1

    def slots_of(self, table: int) -> slice:
        """Return the slots of a table. Host sync: one."""
        begin, end = self.bucket_offsets[table : table + 2].tolist()
        return slice(begin * self.bucket_capacity, end * self.bucket_capacity)

    def entries_moved(self) -> None:
        """Note that rows are to be read from ``rows`` from now on; kernels spare themselves that until then."""
        self.moved.fill_(1)


@dataclass
class Touches(_Tensors):
    """How ids were used, and the rules of that.

    Attributes:
        scores: i64 ``[S]``, lowest is evicted first.
        tags: i32 ``[S]``, the last step that touched the slot.
        stamps: i64 ``[S]``, the time of that step, or ``[0]``: only a group with a compound table has them.
        clock: i64 ``[CLOCK_SIZE]``.
        score_values: i64 ``[T]``, the score that a touch leaves; of no use for tables that count.
        strategies: i32 ``[T]``, SCORE_* of each table.
        ttls: i64 ``[T]``, nanoseconds without a touch after which an id is forgotten, or NEVER; ``[0]`` in a group in
            which no id is.
        tallies: i64 ``[T, NUM_TALLIES]``.
        strategy: the strategy of all tables, as ``common_strategy`` says, which the host knows without asking.
        score_function: what ranks instead of the score, as ``score_function.translate`` returned it; all tables are
            compound then.
        counting: COUNT_*: whether touches add to the score instead of replacing it in none, some or all tables.
        has_stamps: whether touches are stamped with their time.
        expires: whether ids are forgotten.
    """

    scores: torch.Tensor
    tags: torch.Tensor
    stamps: torch.Tensor
    clock: torch.Tensor
    score_values: torch.Tensor
    strategies: torch.Tensor
    ttls: torch.Tensor
    tallies: torch.Tensor
    strategy: int
    score_function: str | None = None
    counting: int = field(init=False)
    has_stamps: bool = field(init=False)
    expires: bool = field(init=False)

    def __post_init__(self) -> None:
        self.counting = counting(self.strategy)
        self.has_stamps = self.stamps.numel() > 0
        self.expires = self.ttls.numel() > 0

    @property
    def num_tables(self) -> int:
        """T."""
        return self.score_values.numel()

    def times(self) -> torch.Tensor:
        """Return when each slot was touched last, i64 ``[S]``; of use for tables with a timestamp."""
        return self.stamps if self.has_stamps else self.scores

    def expired(self, table: int, slots: torch.Tensor) -> torch.Tensor:
        """Return bool ``[M]``: which of a table's occupied slots hold ids that are forgotten by the time SEEN."""
        old = self.times()[slots] < self.clock[SEEN] - self.ttls[table]
        return old & (self.tags[slots] < self.clock[OLDEST])


@dataclass
class Index(Touches, Residents):
    """The index of a group that is trained: who is where, and how it was used."""

    @classmethod
    def create(
        cls,
        num_buckets: list[int],
        bucket_capacity: int,
        first_rows: list[int],
        strategies: Sequence[int],
        device: torch.device,
        score_function: str | None = None,
        ttls: Sequence[int] = (),
    ) -> "Index":
        """Make an empty index.

        Args:
            num_buckets: buckets of each table.
            bucket_capacity: slots of a bucket.
            first_rows: row id of each table's first slot; slot ``i`` of table ``t`` owns row ``first_rows[t] + i``.
            strategies: SCORE_* of each table.
            device: where the tensors live.
            score_function: of ``Touches``.
            ttls: of each table, or none.
        """
        slots = sum(num_buckets) * bucket_capacity

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        rows = allocate(slots, torch.int32, device)
        begin = 0
        for buckets, first_row in zip(num_buckets, first_rows, strict=True):
            size = buckets * bucket_capacity
            # ``device`` also here: torch.set_default_device may say another.
            part = rows[begin : begin + size]
            torch.arange(first_row, first_row + size, dtype=torch.int32, device=device, out=part)
            begin += size
        return cls(
            keys=allocate(slots, torch.int64, device, zero=True),
            digests=allocate(slots, torch.uint8, device, zero=True),
            rows=rows,
            moved=zeros(1),
            bucket_offsets=torch.tensor([0, *num_buckets], dtype=torch.int64, device=device).cumsum(0),
            bucket_capacity=bucket_capacity,
            scores=allocate(slots, torch.int64, device, zero=True),
            tags=allocate(slots, torch.int32, device, zero=True),
            stamps=allocate(slots if SCORE_COMPOUND in strategies else 0, torch.int64, device, zero=True),
            clock=zeros(CLOCK_SIZE),
            score_values=zeros(len(num_buckets)),
            strategies=torch.tensor(strategies, dtype=torch.int32, device=device),
            ttls=torch.tensor(ttls, dtype=torch.int64, device=device),
            tallies=zeros(len(num_buckets), NUM_TALLIES),
            strategy=common_strategy(strategies),
            score_function=score_function,
        )
