"""Give every occurrence of a missing id what its leader got, and count what became of the leaders."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import Touches
from dynamicemb.table.triton.constants import (
    EVICTED,
    EVICTED_OUTCOME,
    EXPIRED,
    EXPIRED_OUTCOME,
    FAILED,
    INSERTED,
    LEADERS_LENGTH,
    NON_ADMITTED,
    NUM_TALLIES,
)
from dynamicemb.table.triton.counting import count_by_table
from dynamicemb.table.triton.hashing import table_of
from dynamicemb.table.triton.launch import Launcher, cdiv, padded_tables
from dynamicemb.table.triton.missing import LEADER_TABLES, MISSED, OUTCOMES, Missing, lengths_of, list_part

_BLOCK = 1024


def settle(
    touches: Touches,
    table_ranges: torch.Tensor,
    rows: torch.Tensor,
    missing: Missing,
    first_staged: int | None = None,
) -> torch.Tensor | None:
    """Give every occurrence of a missing id the row of its leader; count what was inserted, evicted and failed.

    Args:
        touches: of the group's index; the tallies change.
        table_ranges: i64 ``[T+1]``.
        rows: i32 ``[N]``, leaders' rows or -1, and ``-2 - place`` for all other occurrences of missing ids.
        missing: the scratch memory.
        first_staged: rows from here on are staged: they become -1 in ``rows``, and count as not admitted.

    Returns:
        With ``first_staged``, the rows with the staged ones, i32 ``[N]``.

    Host sync: none. Bytes moved: 4 per occurrence, 12 more per occurrence of a missing id; 4 per occurrence for the
    staged ones.
    """
    staged = None if first_staged is None else torch.empty_like(rows)
    key = ("settle", staged is not None)
    launcher = touches.prepared.get(key) or touches.prepared.setdefault(key, _prepare(touches, staged is not None))
    launcher(
        cdiv(rows.numel(), _BLOCK),
        (rows, missing.claims, missing.lists, table_ranges, rows if staged is None else staged),
        (missing.num_lists, missing.stride, rows.numel(), first_staged or 0),
    )
    return staged


def _prepare(touches: Touches, is_staged: bool) -> Launcher:
    """Prepare launches for an index."""
    constants = {
        "EXPIRES": touches.expires, "STAGED": is_staged, "TABLES": padded_tables(touches.num_tables), "BLOCK": _BLOCK
    }  # fmt: skip
    stays = (touches.tallies, touches.num_tables)
    return Launcher(touches.tallies.device, _settle_kernel, constants, stays, num_warps=4)


@triton.jit
def settle_missed(
    program, num_programs, num_missing, rows_ptr, claims_ptr, lists_ptr, num_lists, stride, tallies_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Settle the missing occurrences of which this program, one of ``num_programs``, takes a share."""
    missed_ptr = list_part(lists_ptr, num_lists, stride, MISSED).to(tl.pointer_type(tl.int64))
    begin = program * BLOCK
    while begin < num_missing:
        m = begin + tl.arange(0, BLOCK)
        entry = tl.load(missed_ptr + m, mask=m < num_missing, other=0)
        i = (entry & 0xFFFFFFFF).to(tl.int32)
        row = tl.load(rows_ptr + i, mask=m < num_missing, other=0)
        follower = row < -1
        position = tl.load(claims_ptr + (-2 - row), mask=follower, other=0)
        settled = tl.load(rows_ptr + position, mask=follower, other=0)
        tl.store(rows_ptr + i, settled, mask=follower)
        failed = (tl.where(follower, settled, row) == -1) & (m < num_missing)
        if tl.max(failed.to(tl.int32), 0) > 0:
            count_by_table(tallies_ptr + FAILED, (entry >> 32).to(tl.int32), failed, NUM_TALLIES)
        begin += num_programs * BLOCK


@triton.jit
def count_outcomes(
    program, num_programs, lists_ptr, num_lists, stride, tallies_ptr, EXPIRES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count what became of the leaders of which this program, one of ``num_programs``, takes a share."""
    num_leaders = tl.load(lengths_of(lists_ptr, num_lists) + LEADERS_LENGTH) + 1
    tables_ptr = list_part(lists_ptr, num_lists, stride, LEADER_TABLES)
    outcomes_ptr = list_part(lists_ptr, num_lists, stride, OUTCOMES)
    begin = program * BLOCK
    while begin < num_leaders:
        k = begin + tl.arange(0, BLOCK)
        table = tl.load(tables_ptr + k, mask=k < num_leaders, other=0)
        outcome = tl.load(outcomes_ptr + k, mask=k < num_leaders, other=0)
        count_by_table(tallies_ptr + INSERTED, table, outcome > 0, NUM_TALLIES)
        count_by_table(tallies_ptr + EVICTED, table, outcome == EVICTED_OUTCOME, NUM_TALLIES)
        if EXPIRES:
            count_by_table(tallies_ptr + EXPIRED, table, outcome == EXPIRED_OUTCOME, NUM_TALLIES)
        begin += num_programs * BLOCK


@triton.jit(do_not_specialize=["num_lists", "stride", "num_ids", "num_tables", "first_staged"])
def _settle_kernel(
    rows_ptr,
    claims_ptr,
    lists_ptr,
    table_ranges_ptr,
    staged_ptr,
    num_lists,
    stride,
    num_ids,
    first_staged,
    tallies_ptr,
    num_tables,
    EXPIRES: tl.constexpr,
    STAGED: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i, mask=i < num_ids, other=0)
    follower = row < -1
    # Only followers' entries are written here, and only leaders' entries are read through a claim.
    position = tl.load(claims_ptr + (-2 - row), mask=follower, other=0)
    settled = tl.load(rows_ptr + position, mask=follower, other=0)
    tl.store(rows_ptr + i, settled, mask=follower)
    if STAGED:
        tl.store(staged_ptr + i, tl.where(follower, settled, row), mask=i < num_ids)
        # Nobody follows a leader that is staged: its followers have its row already.
        rejected = (row >= first_staged) & (i < num_ids)
        if tl.max(rejected.to(tl.int32), 0) > 0:
            tl.store(rows_ptr + i, -1, mask=rejected)
            table = table_of(i, begin, tl.minimum(begin + BLOCK, num_ids), table_ranges_ptr, num_tables, TABLES)
            count_by_table(tallies_ptr + NON_ADMITTED, table, rejected, NUM_TALLIES)
    failed = (tl.where(follower, settled, row) == -1) & (i < num_ids)
    if tl.max(failed.to(tl.int32), 0) > 0:
        table = table_of(i, begin, tl.minimum(begin + BLOCK, num_ids), table_ranges_ptr, num_tables, TABLES)
        count_by_table(tallies_ptr + FAILED, table, failed, NUM_TALLIES)
    # There are no more leaders than occurrences, so the same grid covers them.
    count_outcomes(tl.program_id(0), tl.num_programs(0), lists_ptr, num_lists, stride, tallies_ptr, EXPIRES, BLOCK)
