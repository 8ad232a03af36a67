"""Statistics of a group: tallies read without waiting for the device, and how full the buckets are."""

from typing import Any

import torch

from dynamicemb.table.index import ERASED, EVICTED, EXPIRED, HITS, INSERTED, MISSES, TALLY_NAMES, Residents, Touches
from dynamicemb.table.layout import FIRST_DIGEST


class TallyReader:
    """Brings the tallies of an index to the host behind the work that changes them.

    On a GPU a copy goes into pinned memory, with an event behind it; ``latest`` returns the last one that has arrived.
    Two copies are under way at most: while the first has not arrived, each new one replaces the second. So the last
    copy sent always arrives, and the first is never put off.
    """

    def __init__(self, touches: Touches, values: list[list[int]] | None = None) -> None:
        """Read the tallies of an index; ``values`` are their present values, None is 0."""
        self._touches = touches
        self._latest = values or [[0] * touches.tallies.shape[1] for _ in range(touches.num_tables)]
        self._on_host = touches.tallies.device.type == "cpu"
        self._pending: list[tuple[Any, torch.Tensor]] = []
        self._free: list[torch.Tensor] = []

    def send(self) -> None:
        """Start a copy of the tallies as they are after the work queued so far. Inside a graph capture: nothing."""
        tallies = self._touches.tallies
        if self._on_host:
            self._latest = tallies.tolist()
            return
        if torch.cuda.is_current_stream_capturing():
            return
        self._collect()
        if len(self._pending) == 2:
            _, buffer = self._pending.pop()
        else:
            buffer = self._free.pop() if self._free else self._new_buffer()
        buffer.copy_(tallies, non_blocking=True)
        self._pending.append((self._mark(), buffer))

    def latest(self) -> list[list[int]]:
        """Return the last values that arrived, per table in the order of ``TALLY_NAMES``. Host sync: none."""
        # An event may not be asked while a graph is captured.
        if self._pending and not torch.cuda.is_current_stream_capturing():
            self._collect()
        return self._latest

    def wait(self) -> list[list[int]]:
        """Return the true values; copies on their way, which are older, are dropped. Host sync: one or more."""
        for event, buffer in self._pending:
            event.synchronize()
            self._free.append(buffer)
        self._pending.clear()
        self._latest = self._touches.tallies.tolist()
        return self._latest

    def _collect(self) -> None:
        while self._pending and self._pending[0][0].query():
            _, buffer = self._pending.pop(0)
            self._latest = buffer.tolist()
            self._free.append(buffer)

    def _new_buffer(self) -> torch.Tensor:
        return torch.empty(self._touches.tallies.shape, dtype=torch.int64, device="cpu", pin_memory=True)

    def _mark(self) -> Any:
        """Return an event behind the work queued so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._touches.tallies.device))
        return event


def size_of(counts: list[int]) -> int:
    """Return how many places of a table are taken by its tallies, those of ids that have expired since included."""
    return counts[INSERTED] - counts[EVICTED] - counts[ERASED] - counts[EXPIRED]


def occurrences_of(counts: list[int]) -> int:
    """Return how many occurrences a table has looked up for training by its tallies."""
    return counts[HITS] + counts[MISSES]


def describe(size: int, capacity: int, counts: list[int]) -> dict[str, float]:
    """Return the statistics of one table by name."""
    return {
        "size": size,
        "capacity": capacity,
        "load": size / capacity,
        **dict(zip(TALLY_NAMES, counts, strict=True)),
    }


def bucket_loads(index: Residents, table: int) -> torch.Tensor:
    """Return how many buckets of a table hold 0, 1, ... ids, i64 ``[bucket_capacity + 1]`` in host memory."""
    begin, end = index.bucket_offsets[table : table + 2].tolist()
    digests = index.digests.view(-1, index.bucket_capacity)[begin:end]
    loads = (digests >= FIRST_DIGEST).sum(1)
    return torch.bincount(loads, minlength=index.bucket_capacity + 1).cpu()
