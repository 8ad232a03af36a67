"""Give the ids that lost staged rows, and list the others for the insert."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.admission import ADMIT_BY_COUNT, Admission
from dynamicemb.table.index import Index
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.staging import Stage
from dynamicemb.table.triton.constants import (
    EVICTED,
    EVICTED_OUTCOME,
    FAILED,
    FAILED_OUTCOME,
    INSERTED,
    LEADERS_LENGTH,
    LOSERS_LENGTH,
    MISSING_LENGTH,
    NUM_TALLIES,
)
from dynamicemb.table.triton.counting import count_by_table
from dynamicemb.table.triton.elect import push
from dynamicemb.table.triton.hashing import mix
from dynamicemb.table.triton.judged import LOSER_IDS, LOSER_ROWS, LOSER_TABLES, LOST, Judged, leaders_of
from dynamicemb.table.triton.launch import cdiv, launch, padded_tables, persistent_grid
from dynamicemb.table.triton.missing import LEADER_TABLES, OUTCOMES, Missing, lengths_of, list_part

_BLOCK = 64


def reject(
    index: Index, admission: Admission, store: RowStore, ids: torch.Tensor, table_ranges: torch.Tensor,
    rows: torch.Tensor, missing: Missing, judged: Judged,
) -> Stage:  # fmt: skip
    """Stage the rows of ids that lost; list the leaders that won, unless ``missing.ordered``.

    Args:
        index: the group's index.
        admission: what decided.
        store: the group's rows.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``.
        rows: i32 ``[N]`` from ``elect``; the entries of ids that lost become staged rows.
        missing: the scratch memory.
        judged: what was decided; the losers are written, over lists that have served by now.

    Returns:
        The staged rows, not initialised.

    Host sync: none; the grid is persistent.
    """
    stage = Stage.allocate(store, ids.numel())
    lists = judged.lists
    counted = admission.kind == ADMIT_BY_COUNT
    tallies = index.tallies if admission.counter is None else admission.counter.tallies
    args = (
        ids, table_ranges, index.bucket_offsets, rows, missing.claims, missing.lists, lists.lists, tallies,
        store.chunk_bases, store.row_bytes, stage.store.chunk_bases, stage.memory, missing.num_lists, lists.num_lists,
        missing.stride, index.num_tables, stage.first_row, stage.stride, stage.num_entries, store.chunk_shift,
    )  # fmt: skip
    constants = {
        "COUNTED": counted,
        "LIST": not missing.ordered,
        "TABLES": padded_tables(index.num_tables + 1),
        "BLOCK": _BLOCK,
    }
    launch(_reject_kernel, persistent_grid(ids.device, cdiv(ids.numel(), _BLOCK)), args, constants, num_warps=1)
    return stage


@triton.jit
def _count_outcomes(lists_ptr, num_lists, stride, tallies_ptr, BLOCK: tl.constexpr):
    """Count what ``insert`` did to the counter: nobody else reads the outcomes."""
    tables_ptr = list_part(lists_ptr, num_lists, stride, LEADER_TABLES)
    outcomes_ptr = list_part(lists_ptr, num_lists, stride, OUTCOMES)
    num_leaders = tl.load(lengths_of(lists_ptr, num_lists) + LEADERS_LENGTH) + 1
    begin = tl.program_id(0) * BLOCK
    while begin < num_leaders:
        k = begin + tl.arange(0, BLOCK)
        table = tl.load(tables_ptr + k, mask=k < num_leaders, other=0)
        outcome = tl.load(outcomes_ptr + k, mask=k < num_leaders, other=-1)
        count_by_table(tallies_ptr + INSERTED, table, outcome > 0, NUM_TALLIES)
        count_by_table(tallies_ptr + EVICTED, table, outcome == EVICTED_OUTCOME, NUM_TALLIES)
        count_by_table(tallies_ptr + FAILED, table, outcome == FAILED_OUTCOME, NUM_TALLIES)
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
        "num_lists", "num_judged_lists", "stride", "num_tables", "first_row", "rows_of_table", "num_entries",
        "chunk_shift",
    ]
)  # fmt: skip
def _reject_kernel(
    ids_ptr,
    table_ranges_ptr,
    bucket_offsets_ptr,
    rows_ptr,
    claims_ptr,
    lists_ptr,
    judged_ptr,
    tallies_ptr,
    bases_ptr,
    row_bytes_ptr,
    staged_bases_ptr,
    memory_ptr,
    num_lists,
    num_judged_lists,
    stride,
    num_tables,
    first_row,
    rows_of_table,
    num_entries,
    chunk_shift,
    COUNTED: tl.constexpr,
    LIST: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        # The entries of the tables' own rows are those before the first staged row.
        _write_bases(
            table_ranges_ptr, bases_ptr, row_bytes_ptr, staged_bases_ptr, memory_ptr, first_row >> chunk_shift,
            num_tables, rows_of_table, num_entries, chunk_shift, TABLES,
        )  # fmt: skip
    if COUNTED:
        _count_outcomes(judged_ptr, num_judged_lists, stride, tallies_ptr, BLOCK)
    lost_ptr = list_part(judged_ptr, num_judged_lists, stride, LOST)
    num_missing = tl.load(lengths_of(lists_ptr, num_lists) + MISSING_LENGTH) + 1
    begin = tl.program_id(0) * BLOCK
    while begin < num_missing:
        i, table, ids, place, leader, miss = leaders_of(
            begin, num_missing, ids_ptr, rows_ptr, claims_ptr, lists_ptr, num_lists, stride, BLOCK
        )
        lost = miss & (tl.load(lost_ptr + leader, mask=miss, other=0) != 0)
        row = first_row + table * rows_of_table + leader
        tl.store(rows_ptr + i, row, mask=lost)
        leads = miss & (leader == i)
        loses = lost & leads
        losing = loses.to(tl.int32)
        number = tl.sum(losing, 0)
        if number > 0:
            count_ptr = lengths_of(judged_ptr, num_judged_lists) + LOSERS_LENGTH
            k = tl.atomic_add(count_ptr, number, sem="relaxed") + tl.cumsum(losing, 0)
            tl.store(list_part(judged_ptr, num_judged_lists, stride, LOSER_ROWS) + k, row, mask=loses)
            tl.store(list_part(judged_ptr, num_judged_lists, stride, LOSER_IDS) + k, ids, mask=loses)
            tl.store(list_part(judged_ptr, num_judged_lists, stride, LOSER_TABLES) + k, table, mask=loses)
        if LIST:
            push(leads & (lost == 0), i, ids, mix(ids), table, bucket_offsets_ptr, lists_ptr, num_lists, stride)
        begin += tl.num_programs(0) * BLOCK
