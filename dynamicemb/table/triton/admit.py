"""Admission: count the new ids of a lookup, decide which of them get a row, and stage what the others read.

Between ``elect`` and ``insert``. ``elect`` has given every missing id a place, a leader and, where it matters, the sum
of its occurrences. The leaders are then judged, those that lost are counted and marked, the others are listed for
``insert``; and every occurrence of an id that lost gets a staged row, so that nothing after it takes it for missing.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from dynamicemb.table.counter import (
    ADMIT_BY_CALL,
    ADMIT_BY_CHANCE,
    ADMIT_BY_COUNT,
    CHANCE_WORD,
    Admission,
    Candidates,
    ask_judge,
    fill_by_judge,
)
from dynamicemb.table.index import ERASED, EVICTED, FAILED, INSERTED, NUM_COUNTERS, OLDEST, STEP, Index
from dynamicemb.table.rows import RowStore
from dynamicemb.table.scores import COUNT_NONE
from dynamicemb.table.staging import Stage, Staged
from dynamicemb.table.triton.counting import MAX_FREQUENCY, count_by_table
from dynamicemb.table.triton.erase import erase
from dynamicemb.table.triton.find import find_and_list, slots_of
from dynamicemb.table.triton.hashing import mix
from dynamicemb.table.triton.initialize import initialize_leaders
from dynamicemb.table.triton.insert import insert
from dynamicemb.table.triton.launch import carve, cdiv, launch, padded_tables, persistent_grid
from dynamicemb.table.triton.missing import (
    EVICTED_OUTCOME,
    FAILED_OUTCOME,
    MISSING_COUNT,
    Missing,
    elect,
    order,
    push,
    settle,
)
from dynamicemb.table.triton.philox import philox4x32, words_of
from dynamicemb.table.triton.transfer import read_rows, write_rows

_BLOCK = 64

_CHANCE_WORD = tl.constexpr(CHANCE_WORD)
_ERASED = tl.constexpr(ERASED)
_EVICTED = tl.constexpr(EVICTED)
_EVICTED_OUTCOME = tl.constexpr(EVICTED_OUTCOME)
_FAILED = tl.constexpr(FAILED)
_FAILED_OUTCOME = tl.constexpr(FAILED_OUTCOME)
_INSERTED = tl.constexpr(INSERTED)
_MISSING = tl.constexpr(MISSING_COUNT)
_NUM_COUNTERS = tl.constexpr(NUM_COUNTERS)
_OLDEST = tl.constexpr(OLDEST)
_STEP = tl.constexpr(STEP)


@dataclass(slots=True)
class _Scratch:
    """What an admission works in beside ``Missing``.

    Attributes:
        lists: leaders by the buckets of the counter.
        slots: i32 ``[N]``: ``-2 - place`` for leaders that the counter does not know and shall, then their slots.
        lost: i32 ``[num_claims]``, 1 where the id of a place lost, 0 where it won.
        losers: leaders that lost: ``leader_rows`` (staged), ``leader_ids``, ``leader_tables`` and ``counts``. They are
            written in the place of parts of ``lists`` that have served by then.
    """

    lists: Missing
    slots: torch.Tensor
    lost: Any
    losers: Missing

    @classmethod
    def allocate(cls, missing: Missing, index: Index) -> "_Scratch":
        padded = (missing.num_ids + 3) // 4 * 4
        lists = missing.beside(index, padded + missing.num_claims)
        end = lists.places.end
        losers = replace(
            lists,
            leader_rows=lists.next,
            leader_ids=lists.victim_ids,
            leader_tables=lists.work,
            counts=carve(lists.scratch, lists.places.heads + lists.num_lists, 4, torch.int32),
        )
        slots = lists.scratch[end : end + missing.num_ids]
        return cls(lists, slots, carve(lists.scratch, end + padded, missing.num_claims, torch.int32), losers)

    def lost_tensor(self) -> torch.Tensor:
        """Return ``lost`` as a tensor."""
        return self.lists.scratch[-self.lists.num_claims :]


@dataclass(frozen=True)
class Rejected:
    """The ids of a lookup that were not admitted; how many, the device alone knows.

    Attributes:
        stage: their staged rows.
        leaders: one leader for each: ``leader_rows`` (staged), ``leader_ids``, ``leader_tables``, ``counts``.
        admission: what decided.
        positions: of a user's strategy: the losing occurrences that lead, i64 ``[M]``, ascending.
    """

    stage: Stage
    leaders: Missing
    admission: Admission
    positions: torch.Tensor | None

    def initialize(self, table_ranges: torch.Tensor, state_values: torch.Tensor) -> None:
        """Fill the staged rows. Host sync: none, but for a user's strategy."""
        initialize_leaders(self.stage.store, self.admission.initializers, self.leaders, state_values)
        if self.positions is not None and self.admission.judge is not None:
            tables = torch.searchsorted(table_ranges, self.positions, right=True) - 1
            ranges = torch.searchsorted(self.positions, table_ranges)
            rows = self.stage.rows(tables, self.positions)
            fill_by_judge(self.admission.judge, (read_rows, write_rows), self.stage, ranges, rows)

    def settle(self, index: Index, table_ranges: torch.Tensor, rows: torch.Tensor, missing: Missing) -> Staged:
        """Do what ``missing.settle`` does, and leave -1 in ``rows`` for who lost; returns what the lookup reads."""
        first_row = self.stage.first_row
        staged = settle(index, table_ranges, rows, missing, first_row)
        assert staged is not None
        return Staged(self.stage.store, staged, first_row, self.stage.memory)


def admit(
    index: Index,
    store: RowStore,
    admission: Admission,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    rows: torch.Tensor,
    missing: Missing,
) -> Rejected:
    """Decide which leaders get a row; the rule is that of the CPU twin.

    Args:
        index: the group's index; the step must have begun.
        store: the group's rows.
        admission: how to decide; its counter changes.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``.
        rows: i32 ``[N]`` from ``elect``; the entries of ids that lose become staged rows.
        missing: the scratch memory; leaders that win are listed, unless ``missing.ordered``.

    Returns:
        Who lost; their rows are still to be initialised.

    Concurrency: a leader belongs to one lane, a place to its leader, a bucket of the counter to the program of
    ``insert`` that has it. Host sync: none, but for the user's own strategy. Bytes moved per missing occurrence: 40,
    and per leader those of a look-up in the counter; ids that are new to the counter cost what they cost ``insert``.
    """
    counter = admission.counter
    scratch = _Scratch.allocate(missing, index if counter is None else counter)
    positions = None
    if admission.kind == ADMIT_BY_CALL:
        positions = _ask(index, admission, ids, table_ranges, rows, (missing, scratch))
    elif admission.kind == ADMIT_BY_CHANCE:
        _draw(index, admission, ids, rows, missing, scratch)
    else:
        assert counter is not None
        _count(index, admission, ids, rows, missing, scratch)
        if missing.ordered:
            order(counter, ids, table_ranges, scratch.slots, scratch.lists)
        insert(counter, scratch.slots, scratch.lists)
    stage = Stage.allocate(store, ids.numel())
    _reject(index, admission, stage, ids, table_ranges, rows, (store, missing, scratch))
    return Rejected(stage, scratch.losers, admission, positions)


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
    missing = Missing.allocate(counter, ids.numel()).filled()
    # The kernels take amounts for frequencies of a batch, and clamp them; the rest is added below.
    within = amounts.clamp(max=MAX_FREQUENCY)
    slots = find_and_list(counter, ids, table_ranges, within, missing)
    if ids.numel():
        elect(counter, ids, slots, table_ranges, within, missing)
        if missing.ordered:
            order(counter, ids, table_ranges, slots, missing)
        insert(counter, slots, missing)
        settle(counter, table_ranges, slots, missing)
    placed, places = slots >= 0, slots.clamp(min=0).long()
    counter.scores.index_add_(0, places, torch.where(placed, amounts - within, 0))
    return torch.where(placed, counter.scores[places], amounts)


def _ask(index, admission, ids, table_ranges, rows, scratch) -> torch.Tensor:
    """Ask the user's strategy about the leaders; mark those that lost, and return who they are, ascending."""
    missing, own = scratch
    number = int(missing.tensor("counts", MISSING_COUNT + 1)[MISSING_COUNT]) + 1
    occurrences = missing.tensor("victim_ids", number) & 0xFFFFFFFF
    places = -2 - rows[occurrences].long()
    leads = missing.tensor("claims", missing.num_claims)[places] == occurrences
    positions, by_position = occurrences[leads].sort()
    places = places[leads][by_position]
    amounts = missing.amounts
    if not isinstance(amounts, torch.Tensor):
        amounts = missing.tensor("amounts", missing.num_claims)
    candidates = Candidates(
        ids[positions],
        torch.searchsorted(table_ranges, positions, right=True) - 1,
        torch.searchsorted(positions, table_ranges),
        amounts[places],
    )
    admitted, totals = ask_judge(admission, (add_counts, erase), index.clock, candidates)
    amounts[places] = totals
    own.lost_tensor()[places] = (~admitted).to(torch.int32)
    return positions[~admitted]


def _draw(index, admission, ids, rows, missing, scratch) -> None:
    args = (
        ids, rows, missing.entries(), missing.counts, missing.claims, scratch.lost, admission.limits, index.clock,
        admission.initializers.keys,
    )  # fmt: skip
    grid = persistent_grid(ids.device, cdiv(ids.numel(), _BLOCK))
    launch(_draw_kernel, grid, args, {"BLOCK": _BLOCK}, num_warps=1)


def _count(index, admission, ids, rows, missing, scratch) -> None:
    counter, lists = admission.counter, scratch.lists
    if missing.ordered:
        # ``order`` reads what the kernel does not write.
        scratch.slots.zero_()
    args = (
        ids, rows, missing.entries(), missing.counts, missing.claims, missing.amounts, scratch.lost, scratch.slots,
        admission.limits, index.clock, counter.keys, counter.digests, counter.scores, counter.tags,
        counter.bucket_offsets, counter.counters, counter.clock, *lists.lists(), lists.num_lists - 1,
    )  # fmt: skip
    constants = {
        "BUCKET": counter.bucket_capacity,
        "COUNTING": index.counting != COUNT_NONE,
        "LIST": not missing.ordered,
        "BLOCK": _BLOCK,
    }
    launch(_count_kernel, persistent_grid(ids.device, cdiv(ids.numel(), _BLOCK)), args, constants, num_warps=1)


def _reject(index, admission, stage, ids, table_ranges, rows, memory) -> None:
    store, missing, scratch = memory
    lists, losers = scratch.lists, scratch.losers
    counted = admission.kind == ADMIT_BY_COUNT
    args = (
        ids, table_ranges, index.bucket_offsets, rows, missing.entries(), missing.claims, scratch.lost,
        *missing.lists(), losers.leader_rows, losers.leader_ids, losers.leader_tables, losers.counts, lists.counts,
        lists.leader_tables, lists.outcomes, admission.counter.counters if counted else index.counters,
        store.chunk_bases, store.row_bytes, stage.store.chunk_bases, stage.memory, missing.num_lists - 1,
        store.chunk_bases.numel(), index.num_tables, stage.first_row, stage.stride, stage.num_entries,
        store.chunk_shift,
    )  # fmt: skip
    constants = {
        "COUNTED": counted,
        "LIST": not missing.ordered,
        "TABLES": padded_tables(index.num_tables + 1),
        "BLOCK": _BLOCK,
    }
    launch(_reject_kernel, persistent_grid(ids.device, cdiv(ids.numel(), _BLOCK)), args, constants, num_warps=1)


@triton.jit
def _leaders(begin, num_missing, ids_ptr, rows_ptr, missing_ptr, claims_ptr, BLOCK: tl.constexpr):
    """Return occurrence, table, id, place and leading occurrence of missing entries, and which of them exist."""
    m = begin + tl.arange(0, BLOCK)
    miss = m < num_missing
    entry = tl.load(missing_ptr + m, mask=miss, other=0)
    i = (entry & 0xFFFFFFFF).to(tl.int32)
    table = (entry >> 32).to(tl.int32)
    place = -2 - tl.load(rows_ptr + i, mask=miss, other=-2)
    leader = tl.load(claims_ptr + place, mask=miss, other=-1)
    return i, table, tl.load(ids_ptr + i, mask=miss, other=0), place, leader, miss


@triton.jit
def _draw_kernel(
    ids_ptr,
    rows_ptr,
    missing_ptr,
    counts_ptr,
    claims_ptr,
    lost_ptr,
    limits_ptr,
    clock_ptr,
    keys_ptr,
    BLOCK: tl.constexpr,
):
    num_missing = tl.load(counts_ptr + _MISSING) + 1
    step = tl.load(clock_ptr + _STEP)
    begin = tl.program_id(0) * BLOCK
    while begin < num_missing:
        i, table, ids, place, leader, miss = _leaders(
            begin, num_missing, ids_ptr, rows_ptr, missing_ptr, claims_ptr, BLOCK
        )
        leads = miss & (leader == i)
        k0, k1 = words_of(tl.load(keys_ptr + table))
        c0, c1 = words_of(ids)
        low, _ = words_of(step)
        zero = tl.zeros([BLOCK], tl.uint32)
        word, _, _, _ = philox4x32(k0, k1, c0, c1, zero + _CHANCE_WORD, zero + low)
        lost = word.to(tl.int64) >= tl.load(limits_ptr + table)
        tl.store(lost_ptr + place, lost.to(tl.int32), mask=leads)
        begin += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["lists_mask"])
def _count_kernel(
    ids_ptr,
    rows_ptr,
    missing_ptr,
    counts_ptr,
    claims_ptr,
    amounts_ptr,
    lost_ptr,
    slots_ptr,
    limits_ptr,
    clock_ptr,
    keys_ptr,
    digests_ptr,
    scores_ptr,
    tags_ptr,
    bucket_offsets_ptr,
    counters_ptr,
    counter_clock_ptr,
    heads_ptr,
    list_counts_ptr,
    leader_ids_ptr,
    leader_tables_ptr,
    leader_buckets_ptr,
    positions_ptr,
    next_ptr,
    work_ptr,
    lists_mask,
    BUCKET: tl.constexpr,
    COUNTING: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.load(clock_ptr + _STEP)
    if tl.program_id(0) == 0:
        # Begins the step of the counter, for ``insert``: it alone is protected.
        tl.store(counter_clock_ptr + _STEP, step)
        tl.store(counter_clock_ptr + _OLDEST, step)
    num_missing = tl.load(counts_ptr + _MISSING) + 1
    begin = tl.program_id(0) * BLOCK
    while begin < num_missing:
        i, table, ids, place, leader, miss = _leaders(
            begin, num_missing, ids_ptr, rows_ptr, missing_ptr, claims_ptr, BLOCK
        )
        leads = miss & (leader == i)
        slot = slots_of(keys_ptr, digests_ptr, bucket_offsets_ptr, ids, table, leads, BUCKET)
        known = leads & (slot >= 0)
        total = tl.load(amounts_ptr + place, mask=leads, other=0) + tl.load(scores_ptr + slot, mask=known, other=0)
        wins = leads & (total >= tl.load(limits_ptr + table))
        loses = leads & (wins == 0)
        # Admitted ids are forgotten. Who probes the bucket meanwhile walks over an erased slot as over a taken one.
        tl.store(digests_ptr + slot, tl.full([BLOCK], 1, tl.uint8), mask=known & wins)
        if tl.max((known & wins).to(tl.int32), 0) > 0:
            count_by_table(counters_ptr + _ERASED, table, known & wins, _NUM_COUNTERS)
        if COUNTING:
            tl.store(amounts_ptr + place, total, mask=wins)
        tl.store(scores_ptr + slot, total, mask=known & loses)
        tl.store(tags_ptr + slot, step.to(tl.int32), mask=known & loses)
        tl.store(lost_ptr + place, loses.to(tl.int32), mask=leads)
        new = loses & (slot < 0)
        tl.store(slots_ptr + i, -2 - place, mask=new)
        if LIST:
            lists = (
                heads_ptr, list_counts_ptr, leader_ids_ptr, leader_tables_ptr, leader_buckets_ptr, positions_ptr,
                next_ptr, work_ptr,
            )  # fmt: skip
            push(new, i, ids, mix(ids), table, bucket_offsets_ptr, lists, lists_mask)
        begin += tl.num_programs(0) * BLOCK


@triton.jit
def _count_outcomes(counts_ptr, tables_ptr, outcomes_ptr, counters_ptr, BLOCK: tl.constexpr):
    """Count what ``insert`` did to the counter: nobody else reads the outcomes."""
    num_leaders = tl.load(counts_ptr) + 1
    begin = tl.program_id(0) * BLOCK
    while begin < num_leaders:
        k = begin + tl.arange(0, BLOCK)
        table = tl.load(tables_ptr + k, mask=k < num_leaders, other=0)
        outcome = tl.load(outcomes_ptr + k, mask=k < num_leaders, other=-1)
        count_by_table(counters_ptr + _INSERTED, table, outcome > 0, _NUM_COUNTERS)
        count_by_table(counters_ptr + _EVICTED, table, outcome == _EVICTED_OUTCOME, _NUM_COUNTERS)
        count_by_table(counters_ptr + _FAILED, table, outcome == _FAILED_OUTCOME, _NUM_COUNTERS)
        begin += tl.num_programs(0) * BLOCK


@triton.jit
def _write_bases(
    table_ranges_ptr, bases_ptr, row_bytes_ptr, staged_bases_ptr, memory_ptr, num_bases, num_tables, stride,
    num_entries, chunk_shift, TABLES: tl.constexpr,
):  # fmt: skip
    """Write the chunk table with the staged rows; ``staging.Stage.write_bases`` has the rule."""
    t = tl.arange(0, TABLES)
    for first in range(0, num_bases, TABLES):
        base = tl.load(bases_ptr + first + t, mask=first + t < num_bases, other=0)
        tl.store(staged_bases_ptr + first + t, base, mask=first + t < num_bases)
    begin = tl.load(table_ranges_ptr + t, mask=t < num_tables, other=0)
    end = tl.load(table_ranges_ptr + t + 1, mask=t < num_tables, other=0)
    row_bytes = tl.load(row_bytes_ptr + t, mask=t < num_tables, other=0)
    size = (end - begin) * row_bytes
    start = memory_ptr.to(tl.int64) + tl.cumsum(size, 0) - size - begin * row_bytes
    num_parts = tl.where(stride > 0, num_tables, 1)
    for entry in range(0, num_entries):
        tl.store(staged_bases_ptr + num_bases + t * num_entries + entry, start, mask=t < num_parts)
        start += row_bytes << chunk_shift


@triton.jit(
    do_not_specialize=[
        "lists_mask", "num_bases", "num_tables", "first_row", "stride", "num_entries", "chunk_shift",
    ]
)  # fmt: skip
def _reject_kernel(
    ids_ptr,
    table_ranges_ptr,
    bucket_offsets_ptr,
    rows_ptr,
    missing_ptr,
    claims_ptr,
    lost_ptr,
    heads_ptr,
    counts_ptr,
    leader_ids_ptr,
    leader_tables_ptr,
    leader_buckets_ptr,
    positions_ptr,
    next_ptr,
    work_ptr,
    loser_rows_ptr,
    loser_ids_ptr,
    loser_tables_ptr,
    loser_count_ptr,
    counted_ptr,
    counted_tables_ptr,
    outcomes_ptr,
    counters_ptr,
    bases_ptr,
    row_bytes_ptr,
    staged_bases_ptr,
    memory_ptr,
    lists_mask,
    num_bases,
    num_tables,
    first_row,
    stride,
    num_entries,
    chunk_shift,
    COUNTED: tl.constexpr,
    LIST: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        _write_bases(
            table_ranges_ptr, bases_ptr, row_bytes_ptr, staged_bases_ptr, memory_ptr, num_bases, num_tables, stride,
            num_entries, chunk_shift, TABLES,
        )  # fmt: skip
    if COUNTED:
        _count_outcomes(counted_ptr, counted_tables_ptr, outcomes_ptr, counters_ptr, BLOCK)
    num_missing = tl.load(counts_ptr + _MISSING) + 1
    begin = tl.program_id(0) * BLOCK
    while begin < num_missing:
        i, table, ids, place, leader, miss = _leaders(
            begin, num_missing, ids_ptr, rows_ptr, missing_ptr, claims_ptr, BLOCK
        )
        lost = miss & (tl.load(lost_ptr + place, mask=miss, other=0) != 0)
        row = first_row + table * stride + leader
        tl.store(rows_ptr + i, row, mask=lost)
        leads = miss & (leader == i)
        loses = lost & leads
        losing = loses.to(tl.int32)
        number = tl.sum(losing, 0)
        if number > 0:
            k = tl.atomic_add(loser_count_ptr, number, sem="relaxed") + tl.cumsum(losing, 0)
            tl.store(loser_rows_ptr + k, row, mask=loses)
            tl.store(loser_ids_ptr + k, ids, mask=loses)
            tl.store(loser_tables_ptr + k, table, mask=loses)
        if LIST:
            lists = (
                heads_ptr, counts_ptr, leader_ids_ptr, leader_tables_ptr, leader_buckets_ptr, positions_ptr, next_ptr,
                work_ptr,
            )  # fmt: skip
            push(leads & (lost == 0), i, ids, mix(ids), table, bucket_offsets_ptr, lists, lists_mask)
        begin += tl.num_programs(0) * BLOCK
