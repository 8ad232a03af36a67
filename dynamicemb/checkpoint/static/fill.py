"""Put rows of static tables into dynamic ones, and look that they are there."""

import torch

from dynamicemb.checkpoint.tables import Table
from dynamicemb.errors import DynamicEmbError
from dynamicemb.score_strategy import DynamicEmbScoreStrategy
from dynamicemb.table.importing.rows import RowImport


def new_scores(table: Table, count: int, now: int, counts: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the scores that ids have which ``insert`` brings, as ``RowImport.add`` takes them, on the table's device.

    Args:
        table: the table.
        count: how many ids.
        now: the time, in Unix nanoseconds.
        counts: i64 ``[count]``, what tables that count begin with; None is one occurrence.
    """
    strategy = table.strategy
    if isinstance(strategy, tuple):
        values = [now, 1]
    elif strategy in (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.NO_EVICTION):
        values = [now]
    else:
        # STEP: the next step. CUSTOMIZED: the number that was set. LFU: one occurrence.
        values = [table.group.get_score(table.index)]
    scores = [torch.full((count,), value, dtype=torch.int64, device=table.group.device) for value in values]
    if counts is not None and (isinstance(strategy, tuple) or strategy is DynamicEmbScoreStrategy.LFU):
        scores[-1] = counts.to(table.group.device)
    return scores


def check_scored(table: Table) -> None:
    """Refuse a table of strategy CUSTOMIZED that was never given a score.

    Raises:
        DynamicEmbError: as said.
    """
    if table.strategy is DynamicEmbScoreStrategy.CUSTOMIZED and table.group.get_score(table.index) <= 0:
        raise DynamicEmbError(
            f"score_strategy CUSTOMIZED: table {table} has no score; call set_score({{{table.name!r}: 1}}) of its "
            "module, or dynamicemb.incremental_dump.set_score(model, 1), before import_static"
        )


class Filler:
    """Fills one table inside of a ``RowImport``.

    Attributes:
        num_received: rows that came.
    """

    def __init__(self, table: Table, importer: RowImport, now: int) -> None:
        """Take the import, which is open, and the time of the scores."""
        self.num_received = 0
        self._table = table
        self._importer = importer
        self._now = now

    def add(
        self, ids: torch.Tensor, weights: torch.Tensor, state: torch.Tensor | None, counts: torch.Tensor | None = None
    ) -> None:
        """Write rows, and read them again.

        Args:
            ids: i64 ``[n]``, no id twice.
            weights: f32 ``[n, D]``.
            state: f32 ``[n, S]``; None is the optimizer's initial state.
            counts: i64 ``[n]``, how often each id has occurred; None is once.

        Raises:
            DynamicEmbError: a weight is too large for the table's dtype, or the table holds something else than was
                written.
        """
        table, device = self._table, self._table.group.device
        if not ids.numel():
            return
        dtype = table.module.embedding_dtype
        stored = weights.to(dtype).float()
        too_large = None if dtype is torch.float32 else (torch.isinf(stored) & ~torch.isinf(weights)).any(1)
        if too_large is not None and too_large.any():
            raise DynamicEmbError(
                f"table {table}: {int(too_large.sum())} rows have weights beyond the range of {dtype}, the first one "
                f"that of id {int(ids[too_large][0])}; make the table with embedding_dtype torch.float32 or bfloat16"
            )
        ids, weights = ids.to(device), weights.to(device)
        state = None if state is None else state.to(device)
        self._importer.add(ids, weights, state, new_scores(table, ids.numel(), self._now, counts))
        self.num_received += ids.numel()
        self._compare(ids, stored.to(device), state)

    def _compare(self, ids: torch.Tensor, weights: torch.Tensor, state: torch.Tensor | None) -> None:
        """Raise where the table does not hold the rows of the ids that found a place."""
        table, group = self._table, self._table.group
        ranges = torch.zeros(len(group.names) + 1, dtype=torch.int64, device=group.device)
        ranges[table.index + 1 :] = ids.numel()
        rows = group.find(ids, ranges)
        held = rows >= 0
        if not held.all():
            ids, rows, weights = ids[held], rows[held], weights[held]
            state = None if state is None else state[held]
        found_weights, found_state = group.read(table.index, rows)
        different = _differ(found_weights, weights)
        if state is not None:
            different = different | _differ(found_state, state)
        if different.any():
            raise DynamicEmbError(
                f"table {table}: {int(different.sum())} rows are not as they were written, the first one that of id "
                f"{int(ids[different][0])}; memory may be damaged, all tables of the call are empty"
            )

    def finish(self) -> tuple[int, int]:
        """Check that every row that came is there or counted, inside of the import; return how many came and were lost.

        Raises:
            DynamicEmbError: as said.
        """
        lost = self._importer.num_lost + self._importer.num_repeated + self._importer.num_expired
        size = self._table.group.size(self._table.index)
        if size != self.num_received - lost:
            raise DynamicEmbError(
                f"table {self._table}: of {self.num_received} rows {size} are in the table and {lost} are known to be "
                "lost; all tables of the call are empty"
            )
        return self.num_received, self._importer.num_lost


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return bool ``[n]``: which rows differ in a bit; a NaN equals a NaN."""
    bits = [values.contiguous().view(torch.int32) for values in (a, b)]
    if torch.equal(*bits):
        return torch.zeros(a.shape[0], dtype=torch.bool, device=a.device)
    return ~((bits[0] == bits[1]) | (torch.isnan(a) & torch.isnan(b))).all(1)
