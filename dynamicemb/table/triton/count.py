"""Admission by count: add the occurrences of each new id of a lookup to its count, and compare with the limit."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.admission import Admission
from dynamicemb.table.index import Index
from dynamicemb.table.scores import COUNT_NONE
from dynamicemb.table.triton.constants import ERASED, MISSING_LENGTH, NUM_TALLIES, OLDEST, STEP
from dynamicemb.table.triton.counting import count_by_table
from dynamicemb.table.triton.elect import push
from dynamicemb.table.triton.find import slots_of
from dynamicemb.table.triton.hashing import mix
from dynamicemb.table.triton.judged import LOST, SLOTS, Judged, leaders_of
from dynamicemb.table.triton.launch import cdiv, launch, persistent_grid
from dynamicemb.table.triton.missing import Missing, lengths_of, list_part

_BLOCK = 64


def count(
    index: Index, admission: Admission, ids: torch.Tensor, rows: torch.Tensor, missing: Missing, judged: Judged
) -> None:
    """Judge the leaders by what their counts will be, and write what the counter knows already.

    Args:
        index: the group's index; the step must have begun.
        admission: with the counter, which changes: ids that win are forgotten, others get their new count.
        ids: i64 ``[N]``.
        rows: i32 ``[N]`` from ``elect``.
        missing: the scratch memory, with amounts.
        judged: where the results go. Leaders that are new to the counter are listed, unless ``missing.ordered``.

    Host sync: none; the grid is persistent.
    """
    counter, lists = admission.counter, judged.lists
    assert counter is not None
    if missing.ordered:
        # ``order`` reads what the kernel does not write.
        judged.slots().zero_()
    args = (
        ids, rows, missing.claims, missing.amounts, missing.lists, admission.limits, index.clock, counter.keys,
        counter.digests, counter.scores, counter.tags, counter.bucket_offsets, counter.tallies, counter.clock,
        lists.lists, missing.num_lists, lists.num_lists, missing.stride,
    )  # fmt: skip
    constants = {
        "BUCKET": counter.bucket_capacity,
        "COUNTING": index.counting != COUNT_NONE,
        "LIST": not missing.ordered,
        "BLOCK": _BLOCK,
    }
    launch(_count_kernel, persistent_grid(ids.device, cdiv(ids.numel(), _BLOCK)), args, constants, num_warps=1)


@triton.jit(do_not_specialize=["num_lists", "num_judged_lists", "stride"])
def _count_kernel(
    ids_ptr,
    rows_ptr,
    claims_ptr,
    amounts_ptr,
    lists_ptr,
    limits_ptr,
    clock_ptr,
    keys_ptr,
    digests_ptr,
    scores_ptr,
    tags_ptr,
    bucket_offsets_ptr,
    tallies_ptr,
    counter_clock_ptr,
    judged_ptr,
    num_lists,
    num_judged_lists,
    stride,
    BUCKET: tl.constexpr,
    COUNTING: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lost_ptr = list_part(judged_ptr, num_judged_lists, stride, LOST)
    slots_ptr = list_part(judged_ptr, num_judged_lists, stride, SLOTS)
    step = tl.load(clock_ptr + STEP)
    if tl.program_id(0) == 0:
        # Begins the step of the counter, for ``insert``: it alone is protected.
        tl.store(counter_clock_ptr + STEP, step)
        tl.store(counter_clock_ptr + OLDEST, step)
    num_missing = tl.load(lengths_of(lists_ptr, num_lists) + MISSING_LENGTH) + 1
    begin = tl.program_id(0) * BLOCK
    while begin < num_missing:
        i, table, ids, place, leader, miss = leaders_of(
            begin, num_missing, ids_ptr, rows_ptr, claims_ptr, lists_ptr, num_lists, stride, BLOCK
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
            count_by_table(tallies_ptr + ERASED, table, known & wins, NUM_TALLIES)
        if COUNTING:
            tl.store(amounts_ptr + place, total, mask=wins)
        tl.store(scores_ptr + slot, total, mask=known & loses)
        tl.store(tags_ptr + slot, step.to(tl.int32), mask=known & loses)
        tl.store(lost_ptr + i, loses.to(tl.int32), mask=leads)
        new = loses & (slot < 0)
        tl.store(slots_ptr + i, -2 - place, mask=new)
        if LIST:
            push(new, i, ids, mix(ids), table, bucket_offsets_ptr, judged_ptr, num_judged_lists, stride)
        begin += tl.num_programs(0) * BLOCK
