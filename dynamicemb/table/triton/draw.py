"""Admission by chance: draw for each new id of a lookup whether it gets a row."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.admission import Admission
from dynamicemb.table.index import Touches
from dynamicemb.table.triton.constants import CHANCE_WORD, MISSING_LENGTH, STEP
from dynamicemb.table.triton.judged import LOST, Judged, leaders_of
from dynamicemb.table.triton.launch import cdiv, launch, persistent_grid
from dynamicemb.table.triton.missing import Missing, lengths_of, list_part
from dynamicemb.table.triton.philox import philox4x32, words_of

_BLOCK = 64


def draw(
    touches: Touches, admission: Admission, ids: torch.Tensor, rows: torch.Tensor, missing: Missing, judged: Judged
) -> None:
    """Mark the leaders that lose.

    Args:
        touches: of the group's index; the step must have begun, for the draw depends on its number.
        admission: with a limit for each table: the draw of an id, 32 bits, wins below it.
        ids: i64 ``[N]``.
        rows: i32 ``[N]`` from ``elect``.
        missing: the scratch memory.
        judged: where the result goes.

    Host sync: none; the grid is persistent.
    """
    args = (
        ids, rows, missing.claims, missing.lists, judged.lists.lists, admission.limits, touches.clock,
        admission.initializers.keys, missing.num_lists, judged.lists.num_lists, missing.stride,
    )  # fmt: skip
    grid = persistent_grid(ids.device, cdiv(ids.numel(), _BLOCK))
    launch(_draw_kernel, grid, args, {"BLOCK": _BLOCK}, num_warps=1)


@triton.jit(do_not_specialize=["num_lists", "num_judged_lists", "stride"])
def _draw_kernel(
    ids_ptr,
    rows_ptr,
    claims_ptr,
    lists_ptr,
    judged_ptr,
    limits_ptr,
    clock_ptr,
    keys_ptr,
    num_lists,
    num_judged_lists,
    stride,
    BLOCK: tl.constexpr,
):
    lost_ptr = list_part(judged_ptr, num_judged_lists, stride, LOST)
    num_missing = tl.load(lengths_of(lists_ptr, num_lists) + MISSING_LENGTH) + 1
    step = tl.load(clock_ptr + STEP)
    begin = tl.program_id(0) * BLOCK
    while begin < num_missing:
        i, table, ids, _, leader, miss = leaders_of(
            begin, num_missing, ids_ptr, rows_ptr, claims_ptr, lists_ptr, num_lists, stride, BLOCK
        )
        leads = miss & (leader == i)
        k0, k1 = words_of(tl.load(keys_ptr + table))
        c0, c1 = words_of(ids)
        low, _ = words_of(step)
        zero = tl.zeros([BLOCK], tl.uint32)
        word, _, _, _ = philox4x32(k0, k1, c0, c1, zero + CHANCE_WORD, zero + low)
        lost = word.to(tl.int64) >= tl.load(limits_ptr + table)
        tl.store(lost_ptr + i, lost.to(tl.int32), mask=leads)
        begin += tl.num_programs(0) * BLOCK
