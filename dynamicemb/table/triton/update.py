"""Sum the gradients of each row and apply the optimizer to it."""

import torch
import triton
import triton.language as tl

from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.index import UPDATES
from dynamicemb.table.layout import POOLING_MEAN, POOLING_NONE
from dynamicemb.table.lookup import Lookup
from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.group import PIECE, Groups, group_by_row, unpack
from dynamicemb.table.triton.pool import bag_table_and_place
from dynamicemb.table.triton.rows import (
    find_range,
    load_float,
    num_programs,
    pointers,
    row_shape,
    store_float,
    stream_float,
)
from dynamicemb.table.triton.rules import apply_rule, load_state, row_words, step_constants, store_stochastic

_UPDATES = tl.constexpr(UPDATES)
_LOCATED = 256
_WARPS_PER_MULTIPROCESSOR = 64


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
        clock: i64 ``[CLOCK_SIZE]``; UPDATES is the number of this step, from 1: Adam's t and the step of stochastic
            rounding. Read on the device.
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
    if lookup.rows.numel() == 0:
        return
    if groups is None:
        groups = group_by_row(store, lookup)
    shape = row_shape(store)
    device = grad.device
    num_windows = lookup.rows.numel() // PIECE + 1
    warps = max(1, min(8, shape.block_dim // 256))
    per_multiprocessor = _WARPS_PER_MULTIPROCESSOR // warps
    # First pieces, then all others: two pieces of either kind begin at least PIECE occurrences apart.
    partials = torch.empty(2, num_windows, shape.block_dim, dtype=torch.float32, device=device)
    common = (
        lookup.ids,
        groups.order if table_keys is None else table_keys,
        clock,
        learning_rate,
        store.dims,
        store.state_offsets,
        partials,
        num_windows,
        *(float(x) for x in (spec.weight_decay, spec.eps, spec.beta1, 1 - spec.beta1, spec.beta2, 1 - spec.beta2)),
    )
    constants = {
        "KIND": int(spec.kind),
        "BETA1": spec.beta1,
        "BETA2": spec.beta2,
        "DIM": shape.dim,
        "BLOCK_DIM": shape.block_dim,
        "STATE_OFFSET": shape.state_offset,
        "STATE_ALIGNMENT": shape.state_alignment,
        "ALIGNMENT": shape.alignment,
        "WEIGHT": shape.weight,
        "STOCHASTIC": stochastic,
        "PIECE": PIECE,
        "num_warps": warps,
        # The CPU twin rounds every product too.
        "enable_fp_fusion": False,
    }
    _launch_units(groups, lookup, spec, grad.contiguous(), common, constants, per_multiprocessor)
    if lookup.rows.numel() > PIECE:
        _combine_kernel[(num_programs(device, per_multiprocessor, num_windows),)](
            groups.counts,
            groups.order,
            groups.long_units,
            groups.long_addresses,
            groups.long_counts,
            *common,
            AT_ONCE=8,
            **constants,
        )


def _rows_at_once(block_dim: int) -> int:
    """Return how many gradients of a unit are in flight together; most units have one or two."""
    return max(4, min(16, 256 // block_dim))


def _launch_units(groups, lookup, spec, grad, common, constants, per_multiprocessor) -> None:
    pooled = lookup.layout.pooling != POOLING_NONE
    scaled = pooled and (lookup.layout.pooling == POOLING_MEAN or lookup.per_sample_weights is not None)
    num = lookup.rows.numel()
    places = torch.empty(num, dtype=torch.int64, device=grad.device) if pooled else groups.order
    scales = torch.empty(num, dtype=torch.float32, device=grad.device) if scaled else groups.order
    if pooled:
        layout, weights = lookup.layout, lookup.per_sample_weights
        _locate_kernel[(triton.cdiv(num, _LOCATED),)](
            lookup.offsets.contiguous(),
            layout.feature_tables,
            layout.column_offsets,
            scales if weights is None else weights.contiguous(),
            places,
            scales,
            num,
            lookup.offsets.numel() - 1,
            layout.batch_size,
            layout.width,
            MEAN=layout.pooling == POOLING_MEAN,
            WEIGHTED=weights is not None,
            SCALED=scaled,
            BLOCK=_LOCATED,
            num_warps=2,
        )
    _update_kernel[(num_programs(grad.device, per_multiprocessor, num),)](
        groups.counts,
        groups.order,
        groups.units,
        groups.addresses,
        grad,
        places,
        scales,
        float(spec.max_gradient),
        *common,
        POOLED=pooled,
        SCALED=scaled,
        CLIP=spec.gradient_clipping and spec.max_gradient > 0,
        AT_ONCE=_rows_at_once(constants["BLOCK_DIM"]),
        **constants,
    )


@triton.jit(do_not_specialize=["num", "num_bags", "batch_size", "width"])
def _locate_kernel(
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
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
def _sum_occurrences(
    begin,
    count,
    column,
    columns,
    order_ptr,
    grad_ptr,
    places_ptr,
    scales_ptr,
    max_gradient,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Return the fp32 sum of the gradients of ``order[begin:begin + count]``, AT_ONCE rows in flight."""
    sums = tl.zeros([BLOCK_DIM], tl.float32)
    done = 0
    while done < count:
        lane = done + tl.arange(0, AT_ONCE)
        present = lane < count
        i = tl.load(order_ptr + begin + lane, mask=present, other=0)
        if POOLED:
            place = tl.multiple_of(tl.load(places_ptr + i, mask=present, other=0), ALIGNMENT)
        else:
            place = i * DIM
        mask = present[:, None]
        if BLOCK_DIM != DIM:
            mask = mask & columns[None, :]
        values = stream_float(grad_ptr + place[:, None] + column[None, :], mask)
        if CLIP:
            # Comparisons with NaN are false: NaN stays.
            values = tl.where(values > max_gradient, max_gradient, values)
            values = tl.where(values < -max_gradient, -max_gradient, values)
        if SCALED:
            values *= tl.load(scales_ptr + i, mask=present, other=0.0)[:, None]
        sums += tl.sum(values, 0)
        done += AT_ONCE
    return sums


@triton.jit
def _dim_and_state(
    table, address, dims_ptr, state_offsets_ptr, DIM: tl.constexpr, STATE_OFFSET: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Return the dim of a row's table and a pointer to the row's state."""
    dim = DIM
    if DIM == 0:
        dim = tl.multiple_of(tl.load(dims_ptr + table), ALIGNMENT)
    # Added to the aligned pointer: Triton loses what it knows of an address when a constant is added before the cast.
    state = pointers(address, tl.float32)
    if STATE_OFFSET >= 0:
        state += STATE_OFFSET // 4
    else:
        state += tl.multiple_of(tl.load(state_offsets_ptr + table) // 4, STATE_ALIGNMENT // 4)
    return dim, state


@triton.jit
def _store_weights(
    weights, values, columns, begin, table, order_ptr, ids_ptr, keys_ptr, clock_ptr,
    BLOCK_DIM: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    if STOCHASTIC:
        row_id = tl.load(ids_ptr + tl.load(order_ptr + begin))
        words = row_words(tl.load(keys_ptr + table), row_id, tl.load(clock_ptr + _UPDATES), BLOCK_DIM)
        store_stochastic(weights, values, columns, words)
    else:
        store_float(weights, values, columns, "")


@triton.jit(do_not_specialize=["num_windows"])
def _update_kernel(
    counts_ptr,
    order_ptr,
    units_ptr,
    addresses_ptr,
    grad_ptr,
    places_ptr,
    scales_ptr,
    max_gradient,
    ids_ptr,
    keys_ptr,
    clock_ptr,
    learning_rate_ptr,
    dims_ptr,
    state_offsets_ptr,
    partials_ptr,
    num_windows,
    weight_decay,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
    KIND: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STATE_OFFSET: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PIECE: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    num_units = tl.load(counts_ptr)
    constants = step_constants(clock_ptr, learning_rate_ptr, weight_decay, KIND, BETA1, BETA2)
    settings = (eps, beta1, rest1, beta2, rest2)
    column = tl.arange(0, BLOCK_DIM)
    u = tl.program_id(0)
    unit = tl.load(units_ptr + u, mask=u < num_units, other=0)
    address = tl.load(addresses_ptr + u, mask=u < num_units, other=0)
    while u < num_units:
        # The next unit's numbers arrive while this one is worked on.
        following = u + tl.num_programs(0)
        next_unit = tl.load(units_ptr + following, mask=following < num_units, other=0)
        next_address = tl.load(addresses_ptr + following, mask=following < num_units, other=0)
        begin, count, table, initial, whole = unpack(unit)
        dim, state = _dim_and_state(
            table, address, dims_ptr, state_offsets_ptr, DIM, STATE_OFFSET, STATE_ALIGNMENT, ALIGNMENT
        )
        columns = column < dim
        weights = pointers(address, WEIGHT) + column
        # A piece leaves its row to the second kernel.
        limit = tl.where(whole, dim, 0)
        old = load_float(weights, column < limit)
        loaded = load_state(state, column, dim, limit, KIND)
        sums = _sum_occurrences(
            begin, count, column, columns, order_ptr, grad_ptr, places_ptr, scales_ptr, max_gradient,
            DIM, BLOCK_DIM, ALIGNMENT, POOLED, SCALED, CLIP, AT_ONCE,
        )  # fmt: skip
        if whole:
            new = apply_rule(old, sums, state, loaded, column, dim, columns, constants, settings, KIND)
            _store_weights(
                weights, new, columns, begin, table, order_ptr, ids_ptr, keys_ptr, clock_ptr, BLOCK_DIM, STOCHASTIC
            )
        else:
            window = tl.where(initial, 0, num_windows) + begin // PIECE
            tl.store(partials_ptr + window.to(tl.int64) * BLOCK_DIM + column, sums)
        u = following
        unit = next_unit
        address = next_address


@triton.jit(do_not_specialize=["num_windows"])
def _combine_kernel(
    counts_ptr,
    order_ptr,
    long_units_ptr,
    long_addresses_ptr,
    long_counts_ptr,
    ids_ptr,
    keys_ptr,
    clock_ptr,
    learning_rate_ptr,
    dims_ptr,
    state_offsets_ptr,
    partials_ptr,
    num_windows,
    weight_decay,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
    KIND: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
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
    num_long = tl.load(counts_ptr + 1)
    constants = step_constants(clock_ptr, learning_rate_ptr, weight_decay, KIND, BETA1, BETA2)
    settings = (eps, beta1, rest1, beta2, rest2)
    column = tl.arange(0, BLOCK_DIM)
    q = tl.program_id(0)
    while q < num_long:
        begin, _, table, _, _ = unpack(tl.load(long_units_ptr + q))
        address = tl.load(long_addresses_ptr + q)
        num_pieces = tl.cdiv(tl.load(long_counts_ptr + q), PIECE)
        dim, state = _dim_and_state(
            table, address, dims_ptr, state_offsets_ptr, DIM, STATE_OFFSET, STATE_ALIGNMENT, ALIGNMENT
        )
        columns = column < dim
        weights = pointers(address, WEIGHT) + column
        old = load_float(weights, columns)
        loaded = load_state(state, column, dim, dim, KIND)
        first = partials_ptr + (begin // PIECE).to(tl.int64) * BLOCK_DIM
        sums = tl.load(first + column)
        others = first + num_windows.to(tl.int64) * BLOCK_DIM
        piece = 1
        while piece < num_pieces:
            lane = piece + tl.arange(0, AT_ONCE)
            places = others + lane.to(tl.int64)[:, None] * BLOCK_DIM + column[None, :]
            sums += tl.sum(tl.load(places, mask=(lane < num_pieces)[:, None], other=0.0), 0)
            piece += AT_ONCE
        new = apply_rule(old, sums, state, loaded, column, dim, columns, constants, settings, KIND)
        _store_weights(
            weights, new, columns, begin, table, order_ptr, ids_ptr, keys_ptr, clock_ptr, BLOCK_DIM, STOCHASTIC
        )
        q += tl.num_programs(0)
