"""Give ids that return after they expired the slots in which they did."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import Index
from dynamicemb.table.triton.constants import COUNT_NONE, EXPIRED_OUTCOME, LEADERS_LENGTH, NOW, SCORE_LFU, STEP
from dynamicemb.table.triton.find import slots_of
from dynamicemb.table.triton.launch import cdiv, launch, persistent_grid
from dynamicemb.table.triton.missing import (
    LEADER_IDS,
    LEADER_ROWS,
    LEADER_TABLES,
    OUTCOMES,
    POSITIONS,
    Missing,
    lengths_of,
    list_part,
)

_BLOCK = 64


def revive(index: Index, rows: torch.Tensor, missing: Missing) -> None:
    """Place the leaders whose ids are still in the index: ``find`` took them for missing, so they had expired.

    Before ``insert``, which leaves their slots alone because they are of this step; so it does not matter which of the
    ids of a bucket is placed first.

    Args:
        index: the group's index.
        rows: i32 ``[N]``; the entries of leaders that are placed become their rows.
        missing: the leaders. Written: ``leader_rows``, -1 for those that ``insert`` is to place, and ``outcomes``.

    Concurrency: a slot holds one id, and an id has one leader. Host sync: none; the grid is persistent. Bytes moved per
    leader: 12, and what a probe reads.
    """
    args = (
        index.keys, index.digests, index.scores, index.rows, index.tags, index.bucket_offsets, index.score_values,
        index.strategies, index.times(), index.clock, rows, missing.amounts, missing.lists, missing.num_lists,
        missing.stride,
    )  # fmt: skip
    constants = {
        "BUCKET": index.bucket_capacity,
        "COUNTING": index.counting,
        "STAMPS": index.has_stamps,
        "BLOCK": _BLOCK,
    }
    launch(_revive_kernel, persistent_grid(rows.device, cdiv(rows.numel(), _BLOCK)), args, constants, num_warps=1)


@triton.jit(do_not_specialize=["num_lists", "stride"])
def _revive_kernel(
    keys_ptr,
    digests_ptr,
    scores_ptr,
    slot_rows_ptr,
    tags_ptr,
    bucket_offsets_ptr,
    score_values_ptr,
    strategies_ptr,
    stamps_ptr,
    clock_ptr,
    out_ptr,
    amounts_ptr,
    lists_ptr,
    num_lists,
    stride,
    BUCKET: tl.constexpr,
    COUNTING: tl.constexpr,
    STAMPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    leader_ids_ptr = list_part(lists_ptr, num_lists, stride, LEADER_IDS)
    leader_tables_ptr = list_part(lists_ptr, num_lists, stride, LEADER_TABLES)
    leader_rows_ptr = list_part(lists_ptr, num_lists, stride, LEADER_ROWS)
    positions_ptr = list_part(lists_ptr, num_lists, stride, POSITIONS)
    outcomes_ptr = list_part(lists_ptr, num_lists, stride, OUTCOMES)
    num_leaders = tl.load(lengths_of(lists_ptr, num_lists) + LEADERS_LENGTH) + 1
    begin = tl.program_id(0) * BLOCK
    while begin < num_leaders:
        k = begin + tl.arange(0, BLOCK)
        inside = k < num_leaders
        ids = tl.load(leader_ids_ptr + k, mask=inside, other=0)
        table = tl.load(leader_tables_ptr + k, mask=inside, other=0)
        slot = slots_of(keys_ptr, digests_ptr, bucket_offsets_ptr, ids, table, inside, BUCKET)
        back = inside & (slot >= 0)
        row = tl.load(slot_rows_ptr + slot, mask=back, other=-1)
        entry_ptr = out_ptr + tl.load(positions_ptr + k, mask=inside, other=0)
        score = tl.load(score_values_ptr + table)
        if COUNTING != COUNT_NONE:
            counts = back & (tl.load(strategies_ptr + table) >= SCORE_LFU)
            place = -2 - tl.load(entry_ptr, mask=counts, other=-2)
            score = tl.where(counts, tl.load(amounts_ptr + place, mask=counts, other=0), score)
        tl.store(scores_ptr + slot, score, mask=back)
        tl.store(tags_ptr + slot, tl.load(clock_ptr + STEP).to(tl.int32), mask=back)
        if STAMPS:
            tl.store(stamps_ptr + slot, tl.load(clock_ptr + NOW), mask=back)
        tl.store(entry_ptr, row, mask=back)
        tl.store(outcomes_ptr + k, EXPIRED_OUTCOME, mask=back)
        tl.store(leader_rows_ptr + k, row, mask=inside)
        begin += tl.num_programs(0) * BLOCK
