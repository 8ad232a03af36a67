"""Optimizer rules on one row, and stochastic rounding of fp16 and bf16 weights, for Triton kernels."""

import triton
import triton.language as tl

from dynamicemb.optimizer import OptimizerKind
from dynamicemb.table.index import UPDATES
from dynamicemb.table.triton.rows import bf16_bits

_SGD = tl.constexpr(int(OptimizerKind.SGD))
_ADAM = tl.constexpr(int(OptimizerKind.ADAM))
_ADAGRAD = tl.constexpr(int(OptimizerKind.ADAGRAD))
_ROWWISE_ADAGRAD = tl.constexpr(int(OptimizerKind.ROWWISE_ADAGRAD))
_UPDATES = tl.constexpr(UPDATES)


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
    clock_ptr, learning_rate_ptr, weight_decay, KIND: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr
):
    """Return what depends on the step alone, in fp32: step size, root correction, decay.

    Step size is the learning rate, for Adam / (1 - beta1^t); root correction 1 / sqrt(1 - beta2^t); decay the learning
    rate x weight decay. The clock and the learning rate are read on the device, so a captured graph sees them change.
    """
    rate = tl.load(learning_rate_ptr)
    step_size = rate
    root_correction = rate
    decay = rate * weight_decay
    if KIND == _ADAM:
        t = tl.load(clock_ptr + _UPDATES)
        step_size = (rate.to(tl.float64) / (1.0 - _power(BETA1, t))).to(tl.float32)
        root_correction = (1.0 / tl.sqrt(1.0 - _power(BETA2, t))).to(tl.float32)
    return step_size, root_correction, decay


@triton.jit
def load_state(state, column, dim, limit, KIND: tl.constexpr):
    """Read the optimizer state of a row: two vectors of fp32, or one, or a scalar; what a rule lacks is a zero.

    ``state`` points to it, ``limit`` is the row's dim, or 0 to read nothing.
    """
    first = tl.zeros([1], tl.float32)
    second = tl.zeros([1], tl.float32)
    inside = column < limit
    if KIND == _ADAM:
        first = tl.load(state + column, mask=inside, other=0.0)
        second = tl.load(state + dim + column, mask=inside, other=0.0)
    elif KIND == _ADAGRAD:
        first = tl.load(state + column, mask=inside, other=0.0)
    elif KIND == _ROWWISE_ADAGRAD:
        one = tl.arange(0, 1)
        first = tl.load(state + one, mask=one < limit, other=0.0)
    return first, second


@triton.jit
def apply_rule(w, g, state, loaded, column, dim, inside, constants, settings, KIND: tl.constexpr):
    """Return the updated fp32 weights of a row; write its state.

    SGD:              w -= lr g
    Adam:             m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
                      w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    Adagrad:          s += g^2;  w -= lr g / (sqrt(s) + eps)
    row-wise Adagrad: s += mean(g^2), one s per row; w as Adagrad

    ``loaded`` is from ``load_state``, ``constants`` from ``step_constants``; ``settings`` is
    ``(eps, beta1, 1 - beta1, beta2, 1 - beta2)``.
    """
    step_size, root_correction, decay = constants
    eps, beta1, rest1, beta2, rest2 = settings
    if KIND == _SGD:
        return w - step_size * g
    elif KIND == _ADAM:
        first = beta1 * loaded[0] + rest1 * g
        second = beta2 * loaded[1] + rest2 * (g * g)
        tl.store(state + column, first, mask=inside)
        tl.store(state + dim + column, second, mask=inside)
        change = tl.div_rn(step_size * first, tl.sqrt_rn(second) * root_correction + eps)
        return w - (change + decay * w)
    elif KIND == _ADAGRAD:
        total = loaded[0] + g * g
        tl.store(state + column, total, mask=inside)
        return w - tl.div_rn(step_size * g, tl.sqrt_rn(total) + eps)
    else:
        # Columns outside the row have a zero gradient.
        total = loaded[0] + tl.div_rn(tl.sum(g * g, 0), dim * 1.0)
        tl.store(state + tl.arange(0, 1), total)
        return w - tl.div_rn(step_size, tl.sqrt_rn(total) + eps) * g


@triton.jit
def philox4x32(k0, k1, c0, c1, c2, c3):
    """Return four random uint32 for a key and a counter of uint32: Philox4x32-10, ``docs/random.md``."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def row_words(key, row_id, step, BLOCK_DIM: tl.constexpr):
    """Return a random uint32 for each of ``BLOCK_DIM >= 4`` columns: word ``c % 4`` of counter (id, c // 4, step)."""
    NUM_CALLS: tl.constexpr = BLOCK_DIM // 4
    call = tl.arange(0, NUM_CALLS).to(tl.uint32)
    zero = call ^ call
    key = key.to(tl.uint64, bitcast=True)
    row_id = row_id.to(tl.uint64, bitcast=True)
    k0 = zero + key.to(tl.uint32)
    k1 = zero + (key >> 32).to(tl.uint32)
    c0 = zero + row_id.to(tl.uint32)
    c1 = zero + (row_id >> 32).to(tl.uint32)
    x0, x1, x2, x3 = philox4x32(k0, k1, c0, c1, call, zero + step.to(tl.uint64, bitcast=True).to(tl.uint32))
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(NUM_CALLS * 4)


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
