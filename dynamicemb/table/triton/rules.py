"""Optimizer rules on rows, and stochastic rounding of fp16 and bf16 weights, for Triton kernels."""

from typing import NamedTuple

import triton
import triton.language as tl

from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.triton.constants import ADAGRAD, ADAM, ROWWISE_ADAGRAD, SGD, UPDATES
from dynamicemb.table.triton.philox import philox4x32, words_of
from dynamicemb.table.triton.rows import bf16_bits, load_evicting, pointers, store_float


class Rule(NamedTuple):
    """An optimizer as kernels are compiled for it; their parameter RULE.

    Attributes:
        kind: an ``OptimizerKind``.
        beta1: of Adam.
        beta2: of Adam.
        eps: of all but SGD.
        weight_decay: of Adam.
        clip: gradients are clamped to +- this; 0: they are not.
        stochastic: weights of 16 bits are rounded stochastically.
    """

    kind: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float
    stochastic: bool

    @classmethod
    def of(cls, spec: OptimizerSpec, stochastic: bool) -> "Rule":
        """Return the rule of an optimizer."""
        clip = float(spec.max_gradient) if spec.gradient_clipping else 0.0
        numbers = (float(spec.beta1), float(spec.beta2), float(spec.eps), float(spec.weight_decay), clip)
        return cls(int(spec.kind), *numbers, stochastic)


@triton.jit
def _power(BASE: tl.constexpr, exponent):
    """Return ``BASE ** exponent`` in float64 by squaring; ``exponent`` is an int64 scalar >= 0."""
    result = tl.full((), 1.0, tl.float64)
    square = tl.full((), BASE, tl.float64)
    while exponent > 0:
        if exponent % 2 == 1:
            result *= square
        square *= square
        exponent = exponent // 2
    return result


@triton.jit
def step_constants(clock_ptr, learning_rate_ptr, RULE: tl.constexpr):
    """Return what depends on the step alone, in fp32: step size, root correction, decay.

    Step size is the learning rate, for Adam / (1 - beta1^t); root correction 1 / sqrt(1 - beta2^t); decay the learning
    rate x weight decay. The clock and the learning rate are read on the device, so a captured graph sees them change.
    """
    rate = tl.load(learning_rate_ptr)
    step_size = rate
    root_correction = rate
    decay = rate * RULE.weight_decay
    if RULE.kind == ADAM:
        t = tl.load(clock_ptr + UPDATES)
        step_size = (rate.to(tl.float64) / (1.0 - _power(RULE.beta1, t))).to(tl.float32)
        root_correction = (1.0 / tl.sqrt(1.0 - _power(RULE.beta2, t))).to(tl.float32)
    return step_size, root_correction, decay


@triton.jit
def open_rows(address, table, valid, column, formats, RULE: tl.constexpr, ROW: tl.constexpr):
    """Read the weights and the state of rows: a tuple for ``close_rows``.

    ``address``, ``table`` and ``valid`` are ``[R]``, ``column`` is ``[1, D]``; rows that are not valid read as zero.
    ``formats`` is ``(dims_ptr, state_offsets_ptr)``.
    """
    # Attributes are plain integers, which not all of Triton takes for constants.
    DIM: tl.constexpr = ROW.dim
    ALIGNMENT: tl.constexpr = ROW.alignment
    STATE_ALIGNMENT: tl.constexpr = ROW.state_alignment // 4
    dim = DIM
    inside = valid[:, None] & (column < ROW.dim)
    if ROW.dim == 0:
        dim = tl.multiple_of(tl.load(formats[0] + table), ALIGNMENT)[:, None]
        inside = valid[:, None] & (column < dim)
    # Added to the aligned pointer: Triton loses what it knows of an address when a constant is added before the cast.
    state = pointers(address, tl.float32)
    if ROW.state_offset >= 0:
        state += ROW.state_offset // 4
    else:
        state += tl.multiple_of(tl.load(formats[1] + table) // 4, STATE_ALIGNMENT)
    state = state[:, None]
    weights = pointers(address, ROW.weight)[:, None] + column
    # Nobody reads the row again in this step; gradients of bags shall stay in the cache.
    old = load_evicting(weights, inside, "evict_first")
    first = tl.zeros([1, 1], tl.float32)
    second = tl.zeros([1, 1], tl.float32)
    if RULE.kind == ADAM:
        first = tl.load(state + column, mask=inside, other=0.0)
        second = tl.load(state + dim + column, mask=inside, other=0.0)
    elif RULE.kind == ADAGRAD:
        first = tl.load(state + column, mask=inside, other=0.0)
    elif RULE.kind == ROWWISE_ADAGRAD:
        first = tl.load(state, mask=valid[:, None], other=0.0)
    return weights, state, dim, inside, old, first, second


@triton.jit
def apply_rule(row, g, column, valid, constants, RULE: tl.constexpr):
    """Return the updated fp32 weights of rows; write their state.

    SGD:              w -= lr g
    Adam:             m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
                      w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    Adagrad:          s += g^2;  w -= lr g / (sqrt(s) + eps)
    row-wise Adagrad: s += mean(g^2), one s per row; w as Adagrad

    ``row`` is from ``open_rows``, ``constants`` from ``step_constants``, ``g`` is ``[R, D]`` and zero outside the rows.
    """
    _, state, dim, inside, w, first, second = row
    step_size, root_correction, decay = constants
    if RULE.kind == SGD:
        return w - step_size * g
    elif RULE.kind == ADAM:
        first = RULE.beta1 * first + (1 - RULE.beta1) * g
        second = RULE.beta2 * second + (1 - RULE.beta2) * (g * g)
        tl.store(state + column, first, mask=inside)
        tl.store(state + dim + column, second, mask=inside)
        change = tl.div_rn(step_size * first, tl.sqrt_rn(second) * root_correction + RULE.eps)
        return w - (change + decay * w)
    elif RULE.kind == ADAGRAD:
        total = first + g * g
        tl.store(state + column, total, mask=inside)
        return w - tl.div_rn(step_size * g, tl.sqrt_rn(total) + RULE.eps)
    else:
        total = first + tl.div_rn(tl.sum(g * g, 1)[:, None], dim * 1.0)
        tl.store(state, total, mask=valid[:, None])
        return w - tl.div_rn(step_size, tl.sqrt_rn(total) + RULE.eps) * g


@triton.jit
def close_rows(row, g, i, table, column, valid, constants, random, RULE: tl.constexpr, ROW: tl.constexpr):
    """Apply the rule to rows and write them.

    ``i [R]`` are occurrences of the rows' ids; ``random`` is ``(ids_ptr, keys_ptr, clock_ptr)``.
    """
    new = apply_rule(row, g, column, valid, constants, RULE)
    if RULE.stochastic:
        row_id = tl.load(random[0] + i, mask=valid, other=0)
        words = row_words(tl.load(random[1] + table), row_id, tl.load(random[2] + UPDATES), ROW.block_dim)
        store_stochastic(row[0], new, row[3], words)
    else:
        store_float(row[0], new, row[3], "")


@triton.jit
def row_words(key, row_id, step, BLOCK_DIM: tl.constexpr):
    """Return random uint32 ``[R, BLOCK_DIM]``, ``BLOCK_DIM >= 4``: word ``c % 4`` of the counter (id, c // 4, step)."""
    ROWS: tl.constexpr = key.shape[0]
    NUM_CALLS: tl.constexpr = BLOCK_DIM // 4
    zero = tl.zeros([ROWS, NUM_CALLS], tl.uint32)
    k0, k1 = words_of(key)
    c0, c1 = words_of(row_id)
    c3, _ = words_of(step)
    call = tl.arange(0, NUM_CALLS).to(tl.uint32)[None, :]
    x0, x1, x2, x3 = philox4x32(
        zero + k0[:, None], zero + k1[:, None], zero + c0[:, None], zero + c1[:, None], zero + call, zero + c3
    )
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(ROWS, BLOCK_DIM)


@triton.jit
def round_bf16(values, random):
    """Round fp32 to one of the two nearest bfloat16, up with probability = distance from the lower one; uint16 bits.

    Adds the low 16 bits of ``random`` below the kept mantissa and truncates. A finite value becomes infinite only where
    rounding to nearest makes it so.

    Example: 1 + 2^-9 is a quarter of the way from 1 to 1 + 2^-7: it rounds up for ``random & 0xFFFF >= 0xC000``.
    """
    nearest = bf16_bits(values)
    bits = values.to(tl.uint32, bitcast=True)
    # Where nearest is finite the value is, so the sum does not wrap.
    moved = bits + (random & 0xFFFF)
    keep = ((nearest & 0x7F80) == 0x7F80) | ((moved & 0x7F800000) == 0x7F800000)
    return tl.where(keep, nearest, (moved >> 16).to(tl.uint16))


@triton.jit
def round_f16(values, random):
    """Round fp32 to one of the two nearest halves, up with probability = distance from the lower one; uint16 bits.

    Adds the low 13 bits of ``random`` below the kept mantissa and truncates. Below 2^-14, where halves are multiples of
    2^-24, the value is first cut to a multiple of 2^-37, which leaves the same 13 bits. A finite value becomes infinite
    only where rounding to nearest makes it so.
    """
    nearest = values.to(tl.float16).to(tl.uint16, bitcast=True)
    bits = values.to(tl.uint32, bitcast=True)
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    noise = random & 0x1FFF
    tiny = magnitude < 0x38800000
    small = tl.where(tiny, magnitude, 0).to(tl.float32, bitcast=True)
    fixed = (small * 137438953472.0).to(tl.int32).to(tl.uint32, bitcast=True)
    normal = tl.minimum((tl.where(tiny, 0x38800000, magnitude) + noise - 0x38000000) >> 13, 0x7BFF)
    rounded = sign | tl.where(tiny, (fixed + noise) >> 13, normal)
    return tl.where((nearest & 0x7C00) == 0x7C00, nearest, rounded.to(tl.uint16))


@triton.jit
def store_stochastic(pointer, values, mask, words):
    """Write fp32 values as bf16 or fp16, rounded stochastically with one random uint32 each."""
    if pointer.dtype.element_ty == tl.bfloat16:
        rounded = round_bf16(values, words)
    else:
        rounded = round_f16(values, words)
    tl.store(pointer.to(tl.pointer_type(tl.uint16), bitcast=True), rounded, mask=mask)
