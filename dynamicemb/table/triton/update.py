"""Sum the gradients of each row and apply the optimizer to it."""

import torch
import triton
import triton.language as tl

from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.triton.begin_update import MOST_RANKED, Scratch, begin_update
from dynamicemb.table.triton.launch import FULL_PROCESSOR, Launcher
from dynamicemb.table.triton.rows import TRITON_DTYPES, load_evicting, row_shape
from dynamicemb.table.triton.rules import Rule, close_rows, open_rows, step_constants
from dynamicemb.table.triton.segments import (
    FEW,
    FEW_UNITS,
    MANY_UNITS,
    PIECE,
    Groups,
    Sorted,
    group_by_row,
    num_windows,
    unpack,
    unpack_segment,
)

_FEW = tl.constexpr(FEW)
_PIECE = tl.constexpr(PIECE)
# Programs beyond those that fit at once even out unequal shares.
_WAVES = 4
# Values of a tile of whole segments.
_FEW_TILE = 256
# Values of a tile of partial sums.
_PARTIALS_TILE = 2048


def update(
    store: RowStore,
    spec: OptimizerSpec,
    gradients: Gradients,
    clock: torch.Tensor,
    learning_rate: torch.Tensor,
    table_keys: torch.Tensor | None = None,
) -> None:
    """Apply one optimizer step to every row of a batch, in place; what it computes is in the CPU twin.

    Units of at most PIECE occurrences are summed by one program each. A unit that is a whole segment is applied at
    once. The sums of pieces go to scratch memory; the program that finds all others of its segment there adds them in
    order and applies them. So a sum depends on its segment alone and repeats bit for bit, whatever else is in the
    batch.

    Args:
        store: the rows.
        spec: the optimizer; its learning rate is not read.
        gradients: of the occurrences.
        clock: i64 ``[CLOCK_SIZE]``; UPDATES counts this step, in place, and is then its number: Adam's t and the step
            of stochastic rounding. Read on the device.
        learning_rate: f32 ``[1]``, read on the device.
        table_keys: i64 ``[T]``, random keys of the tables; needed for stochastic rounding of fp16 and bf16 weights.

    Raises:
        ValueError: stochastic rounding without ``table_keys``.

    Host sync: none. Bytes moved: 2 U * row size + N * D * gradient size + 24 N; pooling adds 24 N, long segments
    8 D / PIECE for each occurrence; and those of the grouping.
    """
    stochastic = spec.stochastic_rounding and store.dtype != torch.float32
    if stochastic and table_keys is None:
        raise ValueError("table_keys: stochastic rounding needs the random key of each table, got None")
    num, values = gradients.rows.numel(), gradients.values
    few = num <= MOST_RANKED
    scratch = Scratch.allocate(gradients, row_shape(store).block_dim)
    begin_update(store, gradients, clock, scratch, few)
    if num == 0:
        return
    if few:
        groups = Groups(scratch.order, scratch.counts, scratch.words)
    else:
        located = None
        if scratch.sorted_places is not None:
            located = Sorted(scratch.places, scratch.scales, scratch.sorted_places, scratch.sorted_scales)
        groups = group_by_row(store, gradients, scratch.counts, scratch.words, located)
    places, scales, is_sorted = scratch.places, scratch.scales, scratch.sorted_places is not None
    if is_sorted:
        places, scales = scratch.sorted_places, scratch.sorted_scales
    key = ("update", Rule.of(spec, stochastic), values.dtype, places is not None, scales is not None, is_sorted)
    launcher = store.prepared.get(key) or store.prepared.setdefault(key, _prepare(store, *key[1:]))
    launcher(
        min(num, launcher.fill * _WAVES),
        (values, groups.order if places is None else places, values if scales is None else scales, groups.order,
         groups.counts, groups.words, gradients.ids, clock if table_keys is None else table_keys, clock, learning_rate,
         scratch.partials),
        (num, num_windows(num)),
    )  # fmt: skip


def _prepare(
    store: RowStore, rule: Rule, gradient: torch.dtype, is_placed: bool, is_scaled: bool, is_sorted: bool
) -> Launcher:
    """Prepare launches for a store."""
    shape = row_shape(store)
    block_dim = shape.block_dim
    constants = {
        "RULE": rule,
        "ROW": shape,
        "GRADIENT": TRITON_DTYPES[gradient],
        "POOLED": is_placed,
        "SCALED": is_scaled,
        "SORTED": is_sorted,
        "AT_ONCE": max(4, min(16, 1024 // block_dim)),
        "ROWS": max(1, min(32, _FEW_TILE // block_dim)),
        "PARTIALS": max(4, min(32, _PARTIALS_TILE // block_dim)),
    }
    return Launcher(
        store.device, _update_kernel, constants, (store.dims, store.state_offsets),
        num_warps=max(1, min(8, block_dim // 256)), maxnreg=FULL_PROCESSOR,
        # The CPU twin rounds every product too.
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _gradients(
    i, present, column, columns, grads, RULE: tl.constexpr, ROW: tl.constexpr, POOLED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Return the fp32 gradients ``[R, D]`` of occurrences ``i [R]``, clamped and scaled.

    ``columns`` says which columns the rows have; ``grads`` is ``(grad_ptr, places_ptr, scales_ptr)``.
    """
    ALIGNMENT: tl.constexpr = ROW.alignment
    grad_ptr, places_ptr, scales_ptr = grads
    if POOLED:
        place = tl.multiple_of(tl.load(places_ptr + i, mask=present, other=0), ALIGNMENT)
    else:
        place = i * ROW.dim
    mask = present[:, None]
    if ROW.block_dim != ROW.dim:
        mask = mask & columns
    # Each occurrence of a bag reads the bag's gradient.
    values = load_evicting(grad_ptr + place[:, None] + column, mask, "evict_last" if POOLED else "evict_first")
    if RULE.clip > 0:
        # Comparisons with NaN are false: NaN stays.
        values = tl.where(values > RULE.clip, RULE.clip, values)
        values = tl.where(values < -RULE.clip, -RULE.clip, values)
    if SCALED:
        values *= tl.load(scales_ptr + i, mask=present, other=0.0)[:, None]
    return values


@triton.jit
def _sum_of_pieces(
    partials_ptr, window, length, num_windows, column, ROW: tl.constexpr, PARTIALS: tl.constexpr
):  # fmt: skip
    """Return the sum of a segment whose pieces have all been summed: the first, then the others in order."""
    BLOCK_DIM: tl.constexpr = ROW.block_dim
    first = partials_ptr + window.to(tl.int64) * BLOCK_DIM
    # Other programs have written them: not from this multiprocessor's own cache.
    sums = tl.load(first + column, cache_modifier=".cg")
    others = first + num_windows.to(tl.int64) * BLOCK_DIM
    num_pieces = tl.cdiv(length, _PIECE)
    piece = 1
    while piece < num_pieces:
        lane = piece + tl.arange(0, PARTIALS)
        partials = others + lane.to(tl.int64)[:, None] * BLOCK_DIM + column
        values = tl.load(partials, mask=(lane < num_pieces)[:, None], other=0.0, cache_modifier=".cg")
        sums += tl.sum(values, 0)[None, :]
        piece += PARTIALS
    return sums


@triton.jit
def _update_many(
    lists, grads, random, formats, constants, partials_ptr, num_windows, column, RULE: tl.constexpr,
    ROW: tl.constexpr, POOLED: tl.constexpr, SCALED: tl.constexpr, SORTED: tl.constexpr, AT_ONCE: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    """Work on units of many occurrences: one at a time, AT_ONCE gradients in flight."""
    counts_ptr, order_ptr, units_ptr, addresses_ptr, firsts_ptr, arrivals_ptr, num = lists
    num_many = tl.load(counts_ptr + MANY_UNITS)
    one = tl.arange(0, 1)
    BLOCK_DIM: tl.constexpr = ROW.block_dim
    u = tl.program_id(0)
    while u < num_many:
        place = num - 1 - u
        word = tl.load(units_ptr + place)
        begin, count, table, initial, whole = unpack(word)
        # Where units are not compacted there are places without one.
        if word >= 0:
            tables = one + table
            # A piece leaves its row to the last one of its segment.
            valid = one < tl.where(whole, 1, 0)
            row = open_rows(tl.load(addresses_ptr + place + one), tables, valid, column, formats, RULE, ROW)
            sums = tl.zeros([1, BLOCK_DIM], tl.float32)
            # The gradients of a short segment one by one, as among units of few occurrences: a sum shall not depend on
            # where its unit stands.
            width = tl.where(whole & (count <= _FEW), 1, AT_ONCE)
            done = 0
            while done < count:
                lane = done + tl.arange(0, AT_ONCE)
                present = lane < tl.minimum(count, done + width)
                i = begin + lane
                if not SORTED:
                    i = tl.load(order_ptr + i, mask=present, other=0)
                values = _gradients(i, present, column, column < row[2], grads, RULE, ROW, POOLED, SCALED)
                sums += tl.sum(values, 0)[None, :]
                done += width
            first = tl.load(firsts_ptr + place)
            if whole:
                close_rows(row, sums, first + one, tables, column, valid, constants, random, RULE, ROW)
            else:
                window = tl.where(initial, 0, num_windows) + begin // _PIECE
                tl.store(partials_ptr + window.to(tl.int64) * BLOCK_DIM + column, sums)
                begin, length = unpack_segment(first)
                # All threads have written their part of the sum.
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals_ptr + begin // _PIECE, 1, sem="acq_rel")
                if arrived == tl.cdiv(length, _PIECE) - 1:
                    tl.debug_barrier()
                    row = open_rows(tl.load(addresses_ptr + place + one), tables, one < 1, column, formats, RULE, ROW)
                    sums = _sum_of_pieces(partials_ptr, begin // _PIECE, length, num_windows, column, ROW, PARTIALS)
                    i = tl.load(order_ptr + begin + one)
                    close_rows(row, sums, i, tables, column, one < 1, constants, random, RULE, ROW)
        u += tl.num_programs(0)


@triton.jit
def _update_few(
    lists, grads, random, formats, constants, column, RULE: tl.constexpr, ROW: tl.constexpr, POOLED: tl.constexpr,
    SCALED: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Work on whole segments of few occurrences: ROWS side by side, first the first occurrence of each."""
    counts_ptr, order_ptr, units_ptr, addresses_ptr, firsts_ptr = lists[:5]
    num_few = tl.load(counts_ptr + FEW_UNITS)
    first = tl.program_id(0) * ROWS
    while first < num_few:
        u = first + tl.arange(0, ROWS)
        valid = u < num_few
        begin, count, table, _, _ = unpack(tl.load(units_ptr + u, mask=valid, other=0))
        i = tl.load(firsts_ptr + u, mask=valid, other=0)
        address = tl.load(addresses_ptr + u, mask=valid, other=0)
        row = open_rows(address, table, valid, column, formats, RULE, ROW)
        columns = column < row[2]
        sums = _gradients(begin if SORTED else i, valid, column, columns, grads, RULE, ROW, POOLED, SCALED)
        longest = tl.max(count, 0)
        done = 1
        while done < longest:
            present = done < count
            other = begin + done
            if not SORTED:
                other = tl.load(order_ptr + other, mask=present, other=0)
            sums += _gradients(other, present, column, columns, grads, RULE, ROW, POOLED, SCALED)
            done += 1
        close_rows(row, sums, i, table, column, valid, constants, random, RULE, ROW)
        first += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["num", "num_windows"])
def _update_kernel(
    grad_ptr,
    places_ptr,
    scales_ptr,
    order_ptr,
    counts_ptr,
    words_ptr,
    ids_ptr,
    keys_ptr,
    clock_ptr,
    learning_rate_ptr,
    partials_ptr,
    num,
    num_windows,
    dims_ptr,
    state_offsets_ptr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    GRADIENT: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    SORTED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    constants = step_constants(clock_ptr, learning_rate_ptr, RULE)
    addresses_ptr = words_ptr + num
    firsts_ptr = addresses_ptr + num
    lists = (counts_ptr, order_ptr, words_ptr, addresses_ptr, firsts_ptr, firsts_ptr + num, num)
    grads = (grad_ptr, places_ptr, scales_ptr)
    random = (ids_ptr, keys_ptr, clock_ptr)
    formats = (dims_ptr, state_offsets_ptr)
    column = tl.arange(0, ROW.block_dim)[None, :]
    _update_many(
        lists, grads, random, formats, constants, partials_ptr, num_windows, column, RULE, ROW, POOLED, SCALED, SORTED,
        AT_ONCE, PARTIALS,
    )  # fmt: skip
    _update_few(lists, grads, random, formats, constants, column, RULE, ROW, POOLED, SCALED, SORTED, ROWS)
