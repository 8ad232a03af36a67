"""Sum the gradients of each row and apply the optimizer to it."""

from typing import NamedTuple

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.cpu.memory import F32, f32_at, read_f32, read_i32, read_i64
from dynamicemb.table.cpu.pool import BagsView, bag_position, bag_scale, bags_view
from dynamicemb.table.cpu.rules import apply_rule, rule_of, store_stochastic
from dynamicemb.table.cpu.segments import group_by_row
from dynamicemb.table.cpu.threads import launcher
from dynamicemb.table.cpu.vectors import (
    DTYPE_CODES,
    add_scaled,
    fill,
    i64_at,
    item_size,
    load,
    prefetch_row,
    prefetch_span,
    row_address,
    split_point,
    store_scaled,
    store_view,
)
from dynamicemb.table.index import UPDATES
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.gradients import Bags, Gradients

_AHEAD = 8


class GradientView(NamedTuple):
    """Where each occurrence's gradient is. ``clip`` is 0 for no clamp; ``keys`` 0 for rounding to nearest.

    ``positions`` i64 ``[N]`` are the bytes from ``grad`` to the gradient of an occurrence, ``scales`` f32 ``[N]`` its
    factor; both are 0 without pooling, where the gradients lie one after the other.
    """

    grad: int
    dtype: int
    positions: int
    scales: int
    order: int
    starts: int
    num_segments: int
    ids: int
    table_ranges: int
    keys: int
    step: int
    scratch: int
    scratch_dim: int
    clip: np.float32


def update(
    store: RowStore,
    spec: OptimizerSpec,
    gradients: Gradients,
    clock: torch.Tensor,
    learning_rate: torch.Tensor,
    table_keys: torch.Tensor | None = None,
) -> None:
    """Apply one optimizer step to every row of a batch, in place.

    The gradient of a row is the fp32 sum over its occurrences, in their order, of the incoming gradient (clamped to
    +-max_gradient if the spec clips) times the occurrence's factor: 1, for MEAN 1 / bag length, times its weight.
    The gradients themselves are not changed. Occurrences with row -1 are dropped. A row is read and written once.

    Args:
        store: the rows.
        spec: the optimizer.
        gradients: of the occurrences.
        clock: i64 ``[CLOCK_SIZE]``; UPDATES counts this step, in place, and is then its number: Adam's t and the step
            of stochastic rounding.
        learning_rate: f32 ``[1]``, used in place of the spec's.
        table_keys: i64 ``[T]``, random keys of the tables; needed for stochastic rounding of fp16 and bf16 weights.

    Host sync: none (CPU). Bytes moved: 2 U * row size + N * D * gradient size + 40 N.
    """
    clock.numpy()[UPDATES] += 1
    groups = group_by_row(gradients.rows)
    if groups[0].numel():
        _launch(gradients.rows, store, (spec, clock, learning_rate, table_keys), gradients, groups)


@launcher("rows")
def _launch(
    rows: torch.Tensor,
    store: RowStore,
    step: tuple[OptimizerSpec, torch.Tensor, torch.Tensor, torch.Tensor | None],
    gradients: Gradients,
    groups: tuple[torch.Tensor, torch.Tensor],
) -> None:
    spec, clock, learning_rate, table_keys = step
    order, starts = groups
    rows = rows.contiguous()
    iteration = int(clock[UPDATES])
    stochastic = spec.stochastic_rounding and store.dtype != torch.float32
    if stochastic and table_keys is None:
        raise ValueError("table_keys: stochastic rounding needs the random key of each table, got None")
    num_parts = get_num_threads()
    scratch_dim = (max(row_format.dim for row_format in store.formats) + 15) // 16 * 16
    grad, ids, table_ranges = gradients.values, gradients.ids.contiguous(), gradients.table_ranges.contiguous()
    positions, scales, bags = _places(gradients)
    scratch = torch.empty(num_parts * 3 * scratch_dim, dtype=torch.float32, device="cpu")
    gradient = GradientView(
        grad=grad.data_ptr(),
        dtype=DTYPE_CODES[grad.dtype],
        positions=0 if positions is None else positions.data_ptr(),
        scales=scales.data_ptr(),
        order=order.data_ptr(),
        starts=starts.data_ptr(),
        num_segments=starts.numel() - 1,
        ids=ids.data_ptr(),
        table_ranges=table_ranges.data_ptr(),
        keys=table_keys.data_ptr() if stochastic and table_keys is not None else 0,
        step=iteration,
        scratch=scratch.data_ptr(),
        scratch_dim=scratch_dim,
        clip=np.float32(spec.max_gradient if spec.gradient_clipping else 0.0),
    )
    rule = rule_of(spec, float(learning_rate), iteration)
    _update(store_view(store), rule, gradient, _bags_view(rows, bags), num_parts)


def _places(gradients: Gradients) -> tuple[torch.Tensor | None, torch.Tensor, Bags | None]:
    """Return bytes and factors of ``GradientView``, and the bags, made contiguous, that write them."""
    num, bags, places, scales = gradients.rows.numel(), gradients.bags, gradients.places, gradients.scales
    if places is not None:
        ones = torch.ones(num, dtype=torch.float32, device="cpu")
        return places * gradients.values.element_size(), ones if scales is None else scales.contiguous(), None
    if bags is None:
        return None, torch.empty(0, dtype=torch.float32, device="cpu"), None
    weights = bags.per_sample_weights
    bags = Bags(bags.offsets.contiguous(), bags.layout, None if weights is None else weights.contiguous())
    positions = torch.empty(num, dtype=torch.int64, device="cpu")
    return positions, torch.empty(num, dtype=torch.float32, device="cpu"), bags


def _bags_view(rows: torch.Tensor, bags: Bags | None) -> BagsView:
    """Return the addresses of bags; without bags nothing but the rows, and no bag."""
    if bags is None:
        return BagsView(rows.data_ptr(), rows.numel(), 0, 0, 0, 0, 0, 0, 0, 0)
    return bags_view(rows, bags.offsets, bags.layout, bags.per_sample_weights)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _update(store, rule, gradient, bags, num_parts):
    if bags.num_bags:
        for part in prange(num_parts):
            _locate_part(bags, gradient, part, num_parts)
    for part in prange(num_parts):
        _update_part(store, rule, gradient, (bags.rows, part, num_parts))


@njit(error_model="numpy")
def _locate_part(bags, gradient, part, num_parts):
    """Write where the gradient of each occurrence is, and its factor."""
    size = item_size(gradient.dtype)
    first = split_point(bags.offsets, 1, bags.num_bags, part, num_parts)
    for k in range(first, split_point(bags.offsets, 1, bags.num_bags, part + 1, num_parts)):
        begin = read_i64(bags.offsets, k)
        count = read_i64(bags.offsets, k + 1) - begin
        scale = bag_scale(bags, np.int64(0), count)
        position = bag_position(bags, k, k // bags.batch_size) * size
        positions = i64_at(gradient.positions + 8 * begin, count)
        scales = f32_at(gradient.scales + 4 * begin, count)
        for i in range(count):
            positions[i] = position
            scales[i] = scale
        if bags.weights:
            weights = f32_at(bags.weights + 4 * begin, count)
            for i in range(count):
                scales[i] = scale * weights[i]


@njit(error_model="numpy")
def _update_part(store, rule, gradient, share):
    rows, part, num_parts = share
    sums = gradient.scratch + part * 3 * gradient.scratch_dim * 4
    weights = sums + gradient.scratch_dim * 4
    last = gradient.num_segments - 1
    table = np.int64(0)
    first = split_point(gradient.starts, 0, gradient.num_segments, part, num_parts)
    for u in range(first, split_point(gradient.starts, 0, gradient.num_segments, part + 1, num_parts)):
        begin = read_i32(gradient.starts, u)
        i = np.int64(read_i32(gradient.order, begin))
        table = _table_of(gradient.table_ranges, i, table)
        dim = np.int64(read_i32(store.dims, table))
        ahead = np.int64(read_i32(gradient.order, read_i32(gradient.starts, min(u + _AHEAD, last))))
        # The row ahead may be of another table; a wrong prefetch is harmless.
        prefetch_row(store, read_i32(rows, ahead), table, read_i64(store.row_bytes, table))
        prefetch_span(_gradient_of(gradient, ahead, dim), dim * item_size(gradient.dtype))
        grad = _sum_gradients(gradient, begin, read_i32(gradient.starts, u + 1), dim, sums)
        address = row_address(store, read_i32(rows, i), table)
        state = address + read_i64(store.state_offsets, table)
        if store.dtype == F32:
            apply_rule(rule, address, grad, state, dim)
            continue
        load(weights, address, dim, store.dtype)
        apply_rule(rule, weights, grad, state, dim)
        if gradient.keys:
            randomness = (read_i64(gradient.keys, table), read_i64(gradient.ids, i), gradient.step)
            store_stochastic(address, weights, dim, store.dtype, randomness)
        else:
            store_scaled(address, weights, dim, store.dtype, np.float32(1.0))


@njit(error_model="numpy", inline="always")
def _gradient_of(gradient, i, dim):
    """Return the address of the gradient of occurrence ``i``."""
    if gradient.positions:
        return gradient.grad + read_i64(gradient.positions, i)
    return gradient.grad + i * dim * item_size(gradient.dtype)


@njit(error_model="numpy")
def _table_of(table_ranges, i, guess):
    """Return the table of occurrence ``i``; rows ascend, so it is mostly that of the row before."""
    if read_i64(table_ranges, guess) <= i < read_i64(table_ranges, guess + 1):
        return guess
    table = np.int64(0)
    while read_i64(table_ranges, table + 1) <= i:
        table += 1
    return table


@njit(error_model="numpy")
def _sum_gradients(gradient, begin, end, dim, sums):
    """Return the address of the fp32 gradient of the row of ``order[begin:end]``: ``sums``, or the only one."""
    only = np.int64(read_i32(gradient.order, begin))
    plain = gradient.clip == 0 and gradient.dtype == F32
    if plain and end - begin == 1 and (gradient.positions == 0 or read_f32(gradient.scales, only) == 1):
        return _gradient_of(gradient, only, dim)
    fill(sums, dim, np.float32(0.0))
    for j in range(begin, end):
        i = np.int64(read_i32(gradient.order, j))
        scale = np.float32(1.0)
        if gradient.positions:
            scale = read_f32(gradient.scales, i)
        address = _gradient_of(gradient, i, dim)
        if gradient.clip == 0:
            add_scaled(sums, address, dim, gradient.dtype, scale)
        else:
            clipped = sums + 8 * gradient.scratch_dim
            load(clipped, address, dim, gradient.dtype)
            _clamp(clipped, dim, gradient.clip)
            add_scaled(sums, clipped, dim, F32, scale)
    return sums


@njit(error_model="numpy")
def _clamp(address, n, bound):
    """Clamp ``n`` floats to +-bound; NaN stays NaN."""
    values = f32_at(address, n)
    for d in range(n):
        value = values[d]
        value = bound if value > bound else value
        values[d] = -bound if value < -bound else value
