"""Optimizer rules on rows, and stochastic rounding of fp16 and bf16 weights, for Triton kernels."""

import triton
import triton.language as tl

from dynamicemb.table.triton.constants import ADAGRAD, ADAM, ROWWISE_ADAGRAD, SGD, UPDATES
from dynamicemb.table.triton.philox import philox4x32, words_of
from dynamicemb.table.triton.rows import bf16_bits, load_float, pointers, store_float


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
def step_constants(
    clock_ptr, learning_rate_ptr, KIND: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
):  # fmt: skip
    """Return what depends on the step alone, in fp32: step size, root correction, decay.

    Step size is the learning rate, for Adam / (1 - beta1^t); root correction 1 / sqrt(1 - beta2^t); decay the learning
    rate x weight decay. The clock and the learning rate are read on the device, so a captured graph sees them change.
    """
    rate = tl.load(learning_rate_ptr)
    step_size = rate
    root_correction = rate
    decay = rate * WEIGHT_DECAY
    if KIND == ADAM:
        t = tl.load(clock_ptr + UPDATES)
        step_size = (rate.to(tl.float64) / (1.0 - _power(BETA1, t))).to(tl.float32)
        root_correction = (1.0 / tl.sqrt(1.0 - _power(BETA2, t))).to(tl.float32)
    return step_size, root_correction, decay


@triton.jit
def open_rows(
    address, table, valid, column, places, KIND: tl.constexpr, DIM: tl.constexpr, STATE_OFFSET: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr, ALIGNMENT: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Read the weights and the state of rows: a tuple for ``close_rows``.

    ``address``, ``table`` and ``valid`` are ``[R]``, ``column`` is ``[1, D]``; rows that are not valid read as zero.
    ``places`` is ``(dims_ptr, state_offsets_ptr)``.
    """
    dim = DIM
    inside = valid[:, None] & (column < DIM)
    if DIM == 0:
        dim = tl.multiple_of(tl.load(places[0] + table), ALIGNMENT)[:, None]
        inside = valid[:, None] & (column < dim)
    # Added to the aligned pointer: Triton loses what it knows of an address when a constant is added before the cast.
    state = pointers(address, tl.float32)
    if STATE_OFFSET >= 0:
        state += STATE_OFFSET // 4
    else:
        state += tl.multiple_of(tl.load(places[1] + table) // 4, STATE_ALIGNMENT // 4)
    state = state[:, None]
    weights = pointers(address, WEIGHT)[:, None] + column
    old = load_float(weights, inside)
    first = tl.zeros([1, 1], tl.float32)
    second = tl.zeros([1, 1], tl.float32)
    if KIND == ADAM:
        first = tl.load(state + column, mask=inside, other=0.0)
        second = tl.load(state + dim + column, mask=inside, other=0.0)
    elif KIND == ADAGRAD:
        first = tl.load(state + column, mask=inside, other=0.0)
    elif KIND == ROWWISE_ADAGRAD:
        first = tl.load(state, mask=valid[:, None], other=0.0)
    return weights, state, dim, inside, old, first, second


@triton.jit
def apply_rule(row, g, column, valid, constants, settings, KIND: tl.constexpr):
    """Return the updated fp32 weights of rows; write their state.

    SGD:              w -= lr g
    Adam:             m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
                      w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    Adagrad:          s += g^2;  w -= lr g / (sqrt(s) + eps)
    row-wise Adagrad: s += mean(g^2), one s per row; w as Adagrad

    ``row`` is from ``open_rows``, ``constants`` from ``step_constants``, ``g`` is ``[R, D]`` and zero outside the rows;
    ``settings`` is ``(eps, beta1, 1 - beta1, beta2, 1 - beta2)``.
    """
    _, state, dim, inside, w, first, second = row
    step_size, root_correction, decay = constants
    eps, beta1, rest1, beta2, rest2 = settings
    if KIND == SGD:
        return w - step_size * g
    elif KIND == ADAM:
        first = beta1 * first + rest1 * g
        second = beta2 * second + rest2 * (g * g)
        tl.store(state + column, first, mask=inside)
        tl.store(state + dim + column, second, mask=inside)
        change = tl.div_rn(step_size * first, tl.sqrt_rn(second) * root_correction + eps)
        return w - (change + decay * w)
    elif KIND == ADAGRAD:
        total = first + g * g
        tl.store(state + column, total, mask=inside)
        return w - tl.div_rn(step_size * g, tl.sqrt_rn(total) + eps)
    else:
        total = first + tl.div_rn(tl.sum(g * g, 1)[:, None], dim * 1.0)
        tl.store(state, total, mask=valid[:, None])
        return w - tl.div_rn(step_size, tl.sqrt_rn(total) + eps) * g


@triton.jit
def close_rows(
    row, g, i, table, column, valid, constants, settings, random, KIND: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Apply the rule to rows and write them.

    ``i [R]`` are occurrences of the rows' ids; ``random`` is ``(ids_ptr, keys_ptr, clock_ptr)``.
    """
    new = apply_rule(row, g, column, valid, constants, settings, KIND)
    if STOCHASTIC:
        row_id = tl.load(random[0] + i, mask=valid, other=0)
        words = row_words(tl.load(random[1] + table), row_id, tl.load(random[2] + UPDATES), BLOCK_DIM)
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
