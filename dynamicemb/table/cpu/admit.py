"""Admission: count the new ids of a lookup, decide which of them get a row, and stage what the others read."""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit

from dynamicemb.table.admission import (
    ADMIT_BY_CALL,
    ADMIT_BY_COUNT,
    CHANCE_WORD,
    Admission,
    Candidates,
    Newcomers,
    ask_judge,
    begin_counting,
    fill_by_judge,
)
from dynamicemb.table.cpu.erase import erase
from dynamicemb.table.cpu.find import find
from dynamicemb.table.cpu.hashing import mix
from dynamicemb.table.cpu.initialize import initialize
from dynamicemb.table.cpu.insert import insert
from dynamicemb.table.cpu.memory import read_i64, write_i32, write_i64, write_u8
from dynamicemb.table.cpu.philox import philox4x32
from dynamicemb.table.cpu.probe import home, index_view, probe
from dynamicemb.table.cpu.transfer import read_rows, write_rows
from dynamicemb.table.index import ERASED, NON_ADMITTED, STEP, Index
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.staging import Stage, Staged

_CHANCE_WORD = np.uint32(CHANCE_WORD)


@dataclass(frozen=True)
class Verdict:
    """What became of the missing occurrences of a lookup.

    Attributes:
        rejected: i64 ``[M]``, the occurrences whose ids were not admitted.
        rows: i32 ``[M]``, their staged rows.
        stage: the staged rows.
        frequencies: i64 ``[N]``, what each occurrence counts in ``insert``: an admitted id starts with all that was
            counted before. None is once.
    """

    rejected: torch.Tensor
    rows: torch.Tensor
    stage: Stage
    frequencies: torch.Tensor | None

    def hide(self, rows: torch.Tensor) -> None:
        """Give the rejected occurrences their staged rows, so that ``insert`` passes them over."""
        rows[self.rejected] = self.rows

    def settle(self, rows: torch.Tensor) -> Staged | None:
        """Return what the lookup reads, if that is not ``rows``; leave -1 there for occurrences without a row."""
        if not self.rejected.numel():
            return None
        staged = Staged(self.stage.store, rows.clone(), self.stage.first_row, self.stage.memory)
        rows[self.rejected] = -1
        return staged


def admit(
    index: Index,
    store: RowStore,
    newcomers: Newcomers,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    rows: torch.Tensor,
    frequencies: torch.Tensor | None,
) -> Verdict | None:
    """Decide which missing ids get a row.

    The occurrences of an id are counted together. An id whose count, with those before, reaches its table's limit is
    admitted and forgotten by the counter. The others stay in it, or enter it, in batch order, where a full bucket loses
    its lowest count that does not belong to this lookup; an id that finds no place is not remembered.

    Args:
        index: the group's index; the step must have begun.
        store: the group's rows.
        newcomers: with an admission, whose counter changes.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        rows: i32 ``[N]`` from ``find``, -1 where missing; not changed.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once.

    Returns:
        The verdict, or None where nothing changes: all missing ids are admitted, and none of them was counted before.

    Example: limit 3, id 9 counted once before; ``ids = [9, 5, 9]``, all missing: 9 is admitted with a count of 3, and
    its score starts at 3 where scores count; 5 is counted once.
    """
    missing = np.flatnonzero(rows.numpy() < 0)
    if not missing.size:
        return None
    leader_of = np.empty(missing.size, np.int64)
    leaders = np.empty(missing.size, np.int64)
    tables = np.empty(missing.size, np.int64)
    amounts = np.empty(missing.size, np.int64)
    claims = np.full(2 << (missing.size - 1).bit_length(), -1, np.int64)
    batch = (ids.data_ptr(), table_ranges.data_ptr(), 0 if frequencies is None else frequencies.data_ptr())
    number = _elect_kernel(batch, missing, leader_of, leaders, tables, amounts, claims)
    positions, of_leaders = leaders[:number], torch.from_numpy(tables[:number])
    candidates = Candidates(
        ids[torch.from_numpy(positions)],
        of_leaders,
        torch.searchsorted(torch.from_numpy(positions), table_ranges),
        torch.from_numpy(amounts[:number]),
    )
    assert newcomers.admission is not None
    admitted, totals = _decide(index, newcomers.admission, candidates)
    if index.counting:
        before = (totals - candidates.amounts).numpy()
        counted = admitted & (before > 0)
        if counted.any():
            frequencies = torch.ones_like(ids) if frequencies is None else frequencies.clone()
            frequencies.numpy()[positions[counted]] += before[counted]
        elif admitted.all():
            return None
    elif admitted.all():
        return None
    losers = torch.from_numpy(np.flatnonzero(~admitted))
    stage, rows = _stage(store, newcomers, candidates, losers)
    # Of each candidate: which staged row is its.
    number_of = np.full(number, -1, np.int64)
    number_of[losers.numpy()] = np.arange(losers.numel())
    staged = number_of[leader_of]
    rejected = staged >= 0
    owners = candidates.tables[torch.from_numpy(leader_of[rejected])]
    index.tallies[:, NON_ADMITTED] += torch.bincount(owners, minlength=index.num_tables)
    return Verdict(torch.from_numpy(missing[rejected]), rows[torch.from_numpy(staged[rejected])], stage, frequencies)


def _decide(index: Index, admission: Admission, candidates: Candidates) -> tuple[np.ndarray, torch.Tensor]:
    """Return which candidates are admitted, bool ``[U]``, and their counts, i64 ``[U]``."""
    ids, amounts = candidates.ids, candidates.amounts
    admitted = np.zeros(ids.numel(), np.bool_)
    counter = admission.counter
    if admission.kind == ADMIT_BY_CALL:
        mask, totals = ask_judge(admission, (add_counts, erase), index.clock, candidates)
        return mask.numpy(), totals
    limits, tables = admission.limits.numpy(), candidates.tables.numpy()
    if admission.kind != ADMIT_BY_COUNT:
        step = int(index.clock[STEP])
        _draw_kernel(ids.numpy(), tables, limits, admission.initializers.keys.numpy(), step, admitted)
        return admitted, amounts
    assert counter is not None
    begin_counting(counter, index.clock)
    totals = amounts.clone()
    unknown = np.zeros(ids.numel(), np.bool_)
    _count_kernel(
        index_view(counter), ids.numpy(), tables, limits, totals.numpy(), admitted, unknown, counter.tallies.numpy()
    )
    new = torch.from_numpy(unknown)
    ranges = torch.searchsorted(candidates.tables[new], torch.arange(len(candidates.ranges), device="cpu"))
    insert(counter, ids[new], ranges, torch.full((int(new.sum()),), -1, dtype=torch.int32, device="cpu"), amounts[new])
    return admitted, totals


def _stage(
    store: RowStore, newcomers: Newcomers, candidates: Candidates, losers: torch.Tensor
) -> tuple[Stage, torch.Tensor]:
    """Stage what the candidates ``losers`` i64 ``[M]`` read; returns the stage and their rows, i32 ``[M]``."""
    ids, tables = candidates.ids[losers], candidates.tables[losers]
    stage = Stage.allocate(store, losers.numel())
    ranges = torch.searchsorted(tables, torch.arange(store.num_tables + 1, device="cpu"))
    stage.write_bases(store, ranges)
    rows = stage.rows(tables, torch.arange(losers.numel(), device="cpu"))
    admission = newcomers.admission
    assert admission is not None
    initialize(stage.store, admission.initializers, rows, ids, tables.to(torch.int32), newcomers.state_values)
    if admission.judge is not None:
        fill_by_judge(admission.judge, (read_rows, write_rows), stage, ranges, rows)
    return stage, rows


def add_counts(counter: Index, ids: torch.Tensor, table_ranges: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
    """Add to the counts of ids, new ones included; return the counts after it.

    Args:
        counter: the counters; the step must have begun.
        ids: i64 ``[U]``, distinct in a table.
        table_ranges: i64 ``[T+1]``, the ids of each table.
        amounts: i64 ``[U]``.

    Returns:
        i64 ``[U]``; the amounts where a bucket is full of ids of this lookup.
    """
    slots = find(counter, ids, table_ranges, True, amounts)
    insert(counter, ids, table_ranges, slots, amounts)
    return torch.where(slots >= 0, counter.scores[slots.long()], amounts)


@njit(cache=True, nogil=True)
def _elect_kernel(batch, missing, leader_of, leaders, tables, amounts, claims):
    """Number the distinct missing ids in batch order and sum their occurrences; returns how many there are."""
    ids, table_ranges, frequencies = batch
    mask = claims.size - 1
    number = 0
    t = 0
    for m in range(missing.size):
        i = missing[m]
        while i >= read_i64(table_ranges, t + 1):
            t += 1
        key = read_i64(ids, i)
        # The same id in many tables must not make one cluster.
        place = np.int64((mix(key) + np.uint64(t)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)) & mask
        while True:
            leader = claims[place]
            if leader < 0:
                leader = number
                claims[place] = leader
                leaders[leader] = i
                tables[leader] = t
                amounts[leader] = 0
                number += 1
                break
            if tables[leader] == t and read_i64(ids, leaders[leader]) == key:
                break
            place = (place + 1) & mask
        leader_of[m] = leader
        amounts[leader] += read_i64(frequencies, i) if frequencies != 0 else 1
    return number


@njit(cache=True, nogil=True)
def _count_kernel(view, ids, tables, limits, totals, admitted, unknown, tallies):
    """Add what the counter knows to ``totals``; forget ids that reach their limit, keep the sum of the others."""
    for k in range(ids.size):
        t = tables[k]
        base, group, digest = home(view, t, ids[k])
        slot = probe(view, base, group, digest, ids[k])
        if slot >= 0:
            totals[k] += read_i64(view.scores, slot)
        if totals[k] >= limits[t]:
            admitted[k] = True
            if slot >= 0:
                write_u8(view.digests, slot, 1)
                tallies[t, ERASED] += 1
        elif slot >= 0:
            write_i64(view.scores, slot, totals[k])
            write_i32(view.tags, slot, view.step)
        else:
            unknown[k] = True


@njit(cache=True, nogil=True)
def _draw_kernel(ids, tables, limits, keys, step, admitted):
    """Draw a word for each id; ``docs/random.md`` is the specification."""
    for k in range(ids.size):
        key = keys[tables[k]]
        word, _, _, _ = philox4x32(
            np.uint32(key), np.uint32(key >> 32), np.uint32(ids[k]), np.uint32(ids[k] >> 32), _CHANCE_WORD,
            np.uint32(step),
        )  # fmt: skip
        admitted[k] = np.int64(word) < limits[tables[k]]
