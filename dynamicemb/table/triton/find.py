"""Look ids up; touch what is found."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.index import HITS, MISSES, NUM_COUNTERS, STEP, Index
from dynamicemb.table.triton.hashing import bucket_of, digest_of, group_of, mix

# One warp per program and 32-64 ids per program were fastest on an H200.
_BLOCK = 64


def find(
    index: Index,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    touch: bool,
    frequencies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the row of every id, and touch what is found; see the CPU twin for what a touch is.

    Args:
        index: the group's index.
        ids: i64 ``[N]``, the occurrences of one table after those of another.
        table_ranges: i64 ``[T+1]``, the occurrences of each table.
        touch: whether scores, tags and the hit and miss counters change.
        frequencies: i64 ``[N]``, how often each occurrence counts; None is once. Only LFU reads it.

    Returns:
        i32 ``[N]`` row ids, -1 where the id is not in its table.

    Host sync: none. Bytes moved per id: 8 id, 16 digests, 8 key, 4 row, 4 result; a touch adds 8 score and 4 tag.
    """
    rows = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    if ids.numel() == 0:
        return rows
    grid = (triton.cdiv(ids.numel(), _BLOCK),)
    _find_kernel[grid](
        index.keys,
        index.digests,
        index.scores,
        index.rows,
        index.tags,
        index.bucket_offsets,
        index.score_values,
        index.clock,
        index.counters,
        ids,
        table_ranges,
        rows,
        ids if frequencies is None else frequencies,
        ids.numel(),
        index.num_tables,
        BUCKET=index.bucket_capacity,
        TOUCH=touch,
        ACCUMULATE=index.accumulate,
        HAS_FREQUENCIES=frequencies is not None,
        STEP_INDEX=STEP,
        HITS_COLUMN=HITS,
        MISSES_COLUMN=MISSES,
        NUM_COLUMNS=NUM_COUNTERS,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return rows


@triton.jit
def _probe(keys_ptr, digests_ptr, base, group, digest, ids, pending, NUM_GROUPS: tl.constexpr):
    """Return the slot of each id in its bucket, or -1; lanes that are not pending get -1.

    Example: bucket of 32 slots at base 64, start group 1, the id in slot 70: group 1 (slots 80..95) is full, so the
    walk wraps to group 0 (slots 64..79) and returns 70. Had group 1 an empty slot, it would have returned -1.
    """
    slot = tl.full(ids.shape, -1, tl.int64)
    lane = tl.arange(0, 16)
    walked = 0
    while (walked < NUM_GROUPS) & (tl.max(pending.to(tl.int32), 0) > 0):
        first = base + group * 16
        places = first[:, None] + lane[None, :]
        found = tl.load(digests_ptr + places, mask=pending[:, None], other=0)
        candidate = (found == digest[:, None]) & pending[:, None]
        key = tl.load(keys_ptr + places, mask=candidate, other=0)
        hit = candidate & (key == ids[:, None])
        position = tl.max(tl.where(hit, lane[None, :] + 1, 0), 1)
        slot = tl.where(position > 0, first + position - 1, slot)
        has_empty = tl.max((found == 0).to(tl.int32), 1) > 0
        pending = pending & (position == 0) & (has_empty == 0)
        group = tl.where(group + 1 < NUM_GROUPS, group + 1, 0)
        walked += 1
    return slot


@triton.jit(do_not_specialize=["num_ids", "num_tables"])
def _find_kernel(
    keys_ptr,
    digests_ptr,
    scores_ptr,
    rows_ptr,
    tags_ptr,
    bucket_offsets_ptr,
    score_values_ptr,
    clock_ptr,
    counters_ptr,
    ids_ptr,
    table_ranges_ptr,
    out_ptr,
    frequencies_ptr,
    num_ids,
    num_tables,
    BUCKET: tl.constexpr,
    TOUCH: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HAS_FREQUENCIES: tl.constexpr,
    STEP_INDEX: tl.constexpr,
    HITS_COLUMN: tl.constexpr,
    MISSES_COLUMN: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_ids
    ids = tl.load(ids_ptr + i, mask=inside, other=0)
    table = tl.zeros([BLOCK], tl.int32)
    for t in range(1, num_tables):
        table += (i >= tl.load(table_ranges_ptr + t)).to(tl.int32)
    first_bucket = tl.load(bucket_offsets_ptr + table)
    num_buckets = tl.load(bucket_offsets_ptr + table + 1) - first_bucket
    h = mix(ids)
    base = (first_bucket + bucket_of(h, num_buckets)) * BUCKET
    group = group_of(h, BUCKET // 16)
    slot = _probe(keys_ptr, digests_ptr, base, group, digest_of(h), ids, inside, BUCKET // 16)
    hit = inside & (slot >= 0)
    row = tl.load(rows_ptr + slot, mask=hit, other=-1)
    tl.store(out_ptr + i, row, mask=inside)
    if TOUCH:
        tl.store(tags_ptr + slot, tl.load(clock_ptr + STEP_INDEX).to(tl.int32), mask=hit)
        if ACCUMULATE:
            amount = tl.full([BLOCK], 1, tl.int64)
            if HAS_FREQUENCIES:
                amount = tl.load(frequencies_ptr + i, mask=inside, other=0)
            tl.atomic_add(scores_ptr + slot, amount, mask=hit, sem="relaxed")
        else:
            tl.store(scores_ptr + slot, tl.load(score_values_ptr + table), mask=hit)
        # A block seldom straddles tables: one pass, two atomics.
        for t in range(tl.min(tl.where(inside, table, num_tables), 0), tl.max(tl.where(inside, table, 0), 0) + 1):
            mine = inside & (table == t)
            hits = tl.sum((mine & hit).to(tl.int64), 0)
            counter = counters_ptr + t * NUM_COLUMNS
            tl.atomic_add(counter + HITS_COLUMN, hits, sem="relaxed")
            tl.atomic_add(counter + MISSES_COLUMN, tl.sum(mine.to(tl.int64), 0) - hits, sem="relaxed")
