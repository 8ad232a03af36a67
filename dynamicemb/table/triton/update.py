"""Sum the gradients of each row and apply the optimizer to it."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.index import UPDATES
from dynamicemb.table.layout import POOLING_MEAN, POOLING_NONE
from dynamicemb.table.lookup import Lookup
from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.group import PIECE, Groups, group_by_row, most_long_segments, unpack
from dynamicemb.table.triton.launch import carve, cdiv, launch, persistent_grid
from dynamicemb.table.triton.pool import bag_table_and_place
from dynamicemb.table.triton.rows import TRITON_DTYPES, RowShape, find_range, row_shape, stream_float
from dynamicemb.table.triton.rules import close_rows, open_rows, step_constants

_UPDATES = tl.constexpr(UPDATES)
_LOCATED = 256
# Programs beyond those that fit at once even out unequal shares.
_WAVES = 4
# Values of a tile of whole segments.
_FEW_TILE = 256
# Values of a tile of partial sums, and its warps: with one 19 us for 2,440 segments on an H200, with two 36, four 24.
_COMBINE_TILE = 2048
_COMBINE_WARPS = 1


def _grid(device: torch.device, most: int, warps: int) -> tuple[int]:
    (programs,) = persistent_grid(device, most, warps)
    return (min(most, programs * _WAVES) if device.type == "cuda" else programs,)


def update(
    store: RowStore,
    spec: OptimizerSpec,
    lookup: Lookup,
    grad: torch.Tensor,
    clock: torch.Tensor,
    learning_rate: torch.Tensor,
    table_keys: torch.Tensor | None = None,
    groups: Groups | None = None,
) -> None:
    """Apply one optimizer step to every row of a lookup, in place; what it computes is in the CPU twin.

    Units of at most PIECE occurrences are summed by one program each. A unit that is a whole segment is applied at
    once; the sums of pieces go to scratch memory, and a second kernel adds them in order and applies them. So a sum
    depends on its segment alone and repeats bit for bit, whatever else is in the batch.

    Args:
        store: the rows.
        spec: the optimizer; its learning rate is not read.
        lookup: occurrences of the forward.
        grad: ``[B, total_D]`` with pooling, else ``[N, D]``; float32, float16 or bfloat16.
        clock: i64 ``[CLOCK_SIZE]``; UPDATES counts this step, in place, and is then its number: Adam's t and the step
            of stochastic rounding. Read on the device.
        learning_rate: f32 ``[1]``, read on the device.
        table_keys: i64 ``[T]``, random keys of the tables; needed for stochastic rounding of fp16 and bf16 weights.
        groups: ``group_by_row(store, lookup)`` if known.

    Raises:
        ValueError: stochastic rounding without ``table_keys``.

    Host sync: none. Bytes moved: 2 U * row size + N * D * gradient size + 24 N; pooling adds 24 N, long segments
    8 D / PIECE for each occurrence; and those of the grouping.
    """
    stochastic = spec.stochastic_rounding and store.dtype != torch.float32
    if stochastic and table_keys is None:
        raise ValueError("table_keys: stochastic rounding needs the random key of each table, got None")
    shape = row_shape(store)
    num = lookup.rows.numel()
    scratch = _Scratch.allocate(lookup, shape.block_dim, groups is None)
    _begin(lookup, clock, scratch)
    if num == 0:
        return
    if groups is None:
        groups = group_by_row(store, lookup, scratch.counts, scratch.words)
    num_windows = most_long_segments(num)
    common = (
        lookup.ids,
        clock if table_keys is None else table_keys,
        clock,
        learning_rate,
        store.dims,
        store.state_offsets,
        scratch.partials,
        num_windows,
    )
    constants = _constants(spec, shape, stochastic)
    _launch_units(groups, spec, grad.contiguous(), scratch, common, constants)
    if num > PIECE:
        warps = min(8, max(_COMBINE_WARPS, shape.block_dim // 256))
        launch(
            _combine_kernel,
            _grid(grad.device, num_windows, warps),
            (groups.order, groups.counts, groups.words, num, groups.most_long, *common),
            {**constants, "AT_ONCE": max(4, min(32, _COMBINE_TILE // shape.block_dim))},
            num_warps=warps,
            # The CPU twin rounds every product too.
            enable_fp_fusion=False,
        )


@dataclass(slots=True)
class _Scratch:
    """What an update works in: one allocation, its parts as ``launch.carve`` returns them.

    Attributes:
        memory: i32, all of it.
        counts: i32 ``[3]``, of ``Groups``.
        words: i64 ``[3 N + 3 most_long]``, of ``Groups``.
        partials: f32 ``[2, N // PIECE + 1, block_dim]``, the sums of first pieces, then of all others: two pieces of
            either kind begin at least PIECE occurrences apart.
        places: i64 ``[N]``, where in ``[B, total_D]`` an occurrence's gradient starts; None without pooling.
        scales: f32 ``[N]``, its factor; None where all are 1.
    """

    memory: torch.Tensor
    counts: Any
    words: Any
    partials: Any
    places: Any
    scales: Any

    @classmethod
    def allocate(cls, lookup: Lookup, block_dim: int, with_groups: bool) -> "_Scratch":
        num = lookup.rows.numel()
        pooling = lookup.layout.pooling
        pooled = pooling != POOLING_NONE
        scaled = pooled and (pooling == POOLING_MEAN or lookup.per_sample_weights is not None)
        num_words = 3 * (num + most_long_segments(num)) if with_groups else 0
        num_partials = 2 * most_long_segments(num) * block_dim
        begins = [0]
        for size in (4, 2 * num_words, num_partials, 2 * num if pooled else 0, num if scaled else 0):
            begins.append(begins[-1] + (size + 3) // 4 * 4)
        memory = torch.empty(begins[-1], dtype=torch.int32, device=lookup.rows.device)
        return cls(
            memory,
            carve(memory, 0, 3, torch.int32),
            carve(memory, begins[1], num_words, torch.int64),
            carve(memory, begins[2], num_partials, torch.float32),
            carve(memory, begins[3], num, torch.int64) if pooled else None,
            carve(memory, begins[4], num, torch.float32) if scaled else None,
        )


def _constants(spec: OptimizerSpec, shape: RowShape, stochastic: bool) -> dict[str, Any]:
    """Return the constexpr parameters of both kernels that apply an optimizer."""
    return {
        "KIND": int(spec.kind),
        "BETA1": float(spec.beta1),
        "BETA2": float(spec.beta2),
        "EPS": float(spec.eps),
        "WEIGHT_DECAY": float(spec.weight_decay),
        "DIM": shape.dim,
        "BLOCK_DIM": shape.block_dim,
        "STATE_OFFSET": shape.state_offset,
        "STATE_ALIGNMENT": shape.state_alignment,
        "ALIGNMENT": shape.alignment,
        "WEIGHT": shape.weight,
        "STOCHASTIC": stochastic,
        "PIECE": PIECE,
    }


def _launch_units(
    groups: Groups,
    spec: OptimizerSpec,
    grad: torch.Tensor,
    scratch: _Scratch,
    common: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Sum the units, apply whole segments."""
    num, block_dim = groups.order.numel(), constants["BLOCK_DIM"]
    warps = max(1, min(8, block_dim // 256))
    pooled, scaled = scratch.places is not None, scratch.scales is not None
    launch(
        _update_kernel,
        _grid(grad.device, num, warps),
        (
            groups.order,
            groups.counts,
            groups.words,
            grad,
            scratch.places if pooled else groups.order,
            scratch.scales if scaled else grad,
            num,
            *common,
        ),
        {
            **constants,
            "GRADIENT": TRITON_DTYPES[grad.dtype],
            "POOLED": pooled,
            "SCALED": scaled,
            "CLIP": float(spec.max_gradient) if spec.gradient_clipping else 0.0,
            "AT_ONCE": max(4, min(16, 1024 // block_dim)),
            "ROWS": max(1, min(32, _FEW_TILE // block_dim)),
        },
        num_warps=warps,
        enable_fp_fusion=False,
    )


def _begin(lookup: Lookup, clock: torch.Tensor, scratch: _Scratch) -> None:
    """Count the application, clear the counts, and with pooling find the gradient of every occurrence."""
    layout, weights, num = lookup.layout, lookup.per_sample_weights, lookup.rows.numel()
    pooled, scaled = scratch.places is not None, scratch.scales is not None
    launch(
        _begin_kernel,
        (max(1, cdiv(num, _LOCATED)) if pooled else 1,),
        (
            clock,
            scratch.counts,
            lookup.offsets,
            layout.feature_tables,
            layout.column_offsets,
            clock if weights is None else weights.contiguous(),
            scratch.places if pooled else clock,
            scratch.scales if scaled else clock,
            num,
            lookup.offsets.numel() - 1,
            layout.batch_size,
            layout.width,
        ),
        {
            "POOLED": pooled,
            "MEAN": layout.pooling == POOLING_MEAN,
            "WEIGHTED": weights is not None,
            "SCALED": scaled,
            "BLOCK": _LOCATED,
        },
        num_warps=2,
    )


@triton.jit(do_not_specialize=["num", "num_bags", "batch_size", "width"])
def _begin_kernel(
    clock_ptr,
    counts_ptr,
    offsets_ptr,
    feature_tables_ptr,
    column_offsets_ptr,
    weights_ptr,
    places_ptr,
    scales_ptr,
    num,
    num_bags,
    batch_size,
    width,
    POOLED: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        tl.store(clock_ptr + _UPDATES, tl.load(clock_ptr + _UPDATES) + 1)
        part = tl.arange(0, 4)
        tl.store(counts_ptr + part, 0, mask=part < 3)
    if POOLED:
        # An empty batch may have no bags.
        if tl.program_id(0) * BLOCK < num:
            _locate(
                offsets_ptr, feature_tables_ptr, column_offsets_ptr, weights_ptr, places_ptr, scales_ptr, num,
                num_bags, batch_size, width, MEAN, WEIGHTED, SCALED, BLOCK,
            )  # fmt: skip


@triton.jit
def _locate(
    offsets_ptr, feature_tables_ptr, column_offsets_ptr, weights_ptr, places_ptr, scales_ptr, num, num_bags, batch_size,
    width, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write where in ``[B, total_D]`` the gradient of each occurrence starts, and its factor.

    A block of occurrences touches few bags, so the bags of its first and last one bound the search for the others.
    """
    first = tl.program_id(0) * BLOCK
    last = tl.minimum(first + BLOCK, num) - 1
    zero = tl.full((), 0, tl.int32)
    lowest = find_range(first, offsets_ptr, zero, num_bags)
    highest = find_range(last, offsets_ptr, zero, num_bags)
    i = first + tl.arange(0, BLOCK)
    inside = i < num
    bag = find_range(i, offsets_ptr, tl.zeros([BLOCK], tl.int32) + lowest, highest - lowest + 1)
    _, place = bag_table_and_place(bag, feature_tables_ptr, column_offsets_ptr, batch_size, width, 1)
    tl.store(places_ptr + i, place, mask=inside)
    if SCALED:
        scale = tl.full([BLOCK], 1.0, tl.float32)
        if MEAN:
            length = tl.load(offsets_ptr + bag + 1) - tl.load(offsets_ptr + bag)
            scale = tl.div_rn(scale, tl.maximum(length, 1).to(tl.float32))
        if WEIGHTED:
            scale *= tl.load(weights_ptr + i, mask=inside, other=0.0)
        tl.store(scales_ptr + i, scale, mask=inside)


@triton.jit
def _gradients(
    i, present, column, columns, grads, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGNMENT: tl.constexpr,
    POOLED: tl.constexpr, SCALED: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Return the fp32 gradients ``[R, D]`` of occurrences ``i [R]``, clamped to +-CLIP if it is > 0, scaled.

    ``columns`` says which columns the rows have; ``grads`` is ``(grad_ptr, places_ptr, scales_ptr)``.
    """
    grad_ptr, places_ptr, scales_ptr = grads
    if POOLED:
        place = tl.multiple_of(tl.load(places_ptr + i, mask=present, other=0), ALIGNMENT)
    else:
        place = i * DIM
    mask = present[:, None]
    if BLOCK_DIM != DIM:
        mask = mask & columns
    values = stream_float(grad_ptr + place[:, None] + column, mask)
    if CLIP > 0:
        # Comparisons with NaN are false: NaN stays.
        values = tl.where(values > CLIP, CLIP, values)
        values = tl.where(values < -CLIP, -CLIP, values)
    if SCALED:
        values *= tl.load(scales_ptr + i, mask=present, other=0.0)[:, None]
    return values


@triton.jit
def _update_many(
    lists, grads, random, places, constants, settings, partials_ptr, num_windows, column, KIND: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, STATE_OFFSET: tl.constexpr, STATE_ALIGNMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr, WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr, PIECE: tl.constexpr, POOLED: tl.constexpr,
    SCALED: tl.constexpr, CLIP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Work on units of many occurrences: one at a time, AT_ONCE gradients in flight."""
    counts_ptr, order_ptr, units_ptr, addresses_ptr, firsts_ptr, num = lists
    num_many = tl.load(counts_ptr + 1)
    one = tl.arange(0, 1)
    u = tl.program_id(0)
    while u < num_many:
        place = num - 1 - u
        begin, count, table, initial, whole = unpack(tl.load(units_ptr + place))
        tables = one + table
        # A piece leaves its row to the second kernel.
        valid = one < tl.where(whole, 1, 0)
        row = open_rows(
            tl.load(addresses_ptr + place + one), tables, valid, column, places,
            KIND, DIM, STATE_OFFSET, STATE_ALIGNMENT, ALIGNMENT, WEIGHT,
        )  # fmt: skip
        sums = tl.zeros([1, BLOCK_DIM], tl.float32)
        done = 0
        while done < count:
            lane = done + tl.arange(0, AT_ONCE)
            i = tl.load(order_ptr + begin + lane, mask=lane < count, other=0)
            values = _gradients(
                i, lane < count, column, column < row[2], grads, DIM, BLOCK_DIM, ALIGNMENT, POOLED, SCALED, CLIP
            )
            sums += tl.sum(values, 0)[None, :]
            done += AT_ONCE
        if whole:
            i = tl.load(firsts_ptr + place + one)
            close_rows(row, sums, i, tables, column, valid, constants, settings, random, KIND, STOCHASTIC, BLOCK_DIM)
        else:
            window = tl.where(initial, 0, num_windows) + begin // PIECE
            tl.store(partials_ptr + window.to(tl.int64) * BLOCK_DIM + column, sums)
        u += tl.num_programs(0)


@triton.jit
def _update_few(
    lists, grads, random, places, constants, settings, column, KIND: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, STATE_OFFSET: tl.constexpr, STATE_ALIGNMENT: tl.constexpr, ALIGNMENT: tl.constexpr,
    WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr, POOLED: tl.constexpr, SCALED: tl.constexpr, CLIP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Work on whole segments of few occurrences: ROWS side by side, first the first occurrence of each."""
    counts_ptr, order_ptr, units_ptr, addresses_ptr, firsts_ptr = lists[:5]
    num_few = tl.load(counts_ptr)
    first = tl.program_id(0) * ROWS
    while first < num_few:
        u = first + tl.arange(0, ROWS)
        valid = u < num_few
        begin, count, table, _, _ = unpack(tl.load(units_ptr + u, mask=valid, other=0))
        i = tl.load(firsts_ptr + u, mask=valid, other=0)
        address = tl.load(addresses_ptr + u, mask=valid, other=0)
        row = open_rows(
            address, table, valid, column, places, KIND, DIM, STATE_OFFSET, STATE_ALIGNMENT, ALIGNMENT, WEIGHT
        )
        columns = column < row[2]
        sums = _gradients(i, valid, column, columns, grads, DIM, BLOCK_DIM, ALIGNMENT, POOLED, SCALED, CLIP)
        longest = tl.max(count, 0)
        done = 1
        while done < longest:
            present = done < count
            other = tl.load(order_ptr + begin + done, mask=present, other=0)
            sums += _gradients(other, present, column, columns, grads, DIM, BLOCK_DIM, ALIGNMENT, POOLED, SCALED, CLIP)
            done += 1
        close_rows(row, sums, i, table, column, valid, constants, settings, random, KIND, STOCHASTIC, BLOCK_DIM)
        first += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["num", "num_windows"])
def _update_kernel(
    order_ptr,
    counts_ptr,
    words_ptr,
    grad_ptr,
    places_ptr,
    scales_ptr,
    num,
    ids_ptr,
    keys_ptr,
    clock_ptr,
    learning_rate_ptr,
    dims_ptr,
    state_offsets_ptr,
    partials_ptr,
    num_windows,
    KIND: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STATE_OFFSET: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PIECE: tl.constexpr,
    GRADIENT: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
):
    constants = step_constants(clock_ptr, learning_rate_ptr, KIND, BETA1, BETA2, WEIGHT_DECAY)
    settings = (EPS, BETA1, 1 - BETA1, BETA2, 1 - BETA2)
    addresses_ptr = words_ptr + num
    lists = (counts_ptr, order_ptr, words_ptr, addresses_ptr, addresses_ptr + num, num)
    grads = (grad_ptr, places_ptr, scales_ptr)
    random = (ids_ptr, keys_ptr, clock_ptr)
    places = (dims_ptr, state_offsets_ptr)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    _update_many(
        lists, grads, random, places, constants, settings, partials_ptr, num_windows, column, KIND, DIM, BLOCK_DIM,
        STATE_OFFSET, STATE_ALIGNMENT, ALIGNMENT, WEIGHT, STOCHASTIC, PIECE, POOLED, SCALED, CLIP, AT_ONCE,
    )  # fmt: skip
    _update_few(
        lists, grads, random, places, constants, settings, column, KIND, DIM, BLOCK_DIM,
        STATE_OFFSET, STATE_ALIGNMENT, ALIGNMENT, WEIGHT, STOCHASTIC, POOLED, SCALED, CLIP, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num", "most_long", "num_windows"])
def _combine_kernel(
    order_ptr,
    counts_ptr,
    words_ptr,
    num,
    most_long,
    ids_ptr,
    keys_ptr,
    clock_ptr,
    learning_rate_ptr,
    dims_ptr,
    state_offsets_ptr,
    partials_ptr,
    num_windows,
    KIND: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STATE_OFFSET: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PIECE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    constants = step_constants(clock_ptr, learning_rate_ptr, KIND, BETA1, BETA2, WEIGHT_DECAY)
    settings = (EPS, BETA1, 1 - BETA1, BETA2, 1 - BETA2)
    random = (ids_ptr, keys_ptr, clock_ptr)
    places = (dims_ptr, state_offsets_ptr)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    one = tl.arange(0, 1)
    valid = one < 1
    num_long = tl.load(counts_ptr + 2)
    long_ptr = words_ptr + 3 * num.to(tl.int64)
    q = tl.program_id(0)
    while q < num_long:
        begin, _, table, _, _ = unpack(tl.load(long_ptr + q))
        num_pieces = tl.cdiv(tl.load(long_ptr + 2 * most_long + q).to(tl.int32), PIECE)
        tables = one + table
        row = open_rows(
            tl.load(long_ptr + most_long + q + one), tables, valid, column, places,
            KIND, DIM, STATE_OFFSET, STATE_ALIGNMENT, ALIGNMENT, WEIGHT,
        )  # fmt: skip
        first = partials_ptr + (begin // PIECE).to(tl.int64) * BLOCK_DIM
        sums = tl.load(first + column)
        others = first + num_windows.to(tl.int64) * BLOCK_DIM
        piece = 1
        while piece < num_pieces:
            lane = piece + tl.arange(0, AT_ONCE)
            partials = others + lane.to(tl.int64)[:, None] * BLOCK_DIM + column
            sums += tl.sum(tl.load(partials, mask=(lane < num_pieces)[:, None], other=0.0), 0)[None, :]
            piece += AT_ONCE
        i = tl.load(order_ptr + begin + one)
        close_rows(row, sums, i, tables, column, valid, constants, settings, random, KIND, STOCHASTIC, BLOCK_DIM)
        q += tl.num_programs(0)
