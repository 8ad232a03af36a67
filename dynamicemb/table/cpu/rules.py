"""Optimizer rules on one row, and stochastic rounding of fp16 and bf16 weights."""

from typing import NamedTuple

import numpy as np
from numba import njit

from dynamicemb.optimizer import OptimizerKind, OptimizerSpec
from dynamicemb.table.cpu.memory import BF16, bits_to_f32, f32_at, f32_to_bf16, f32_to_bits, f32_to_f16, u16_at
from dynamicemb.table.cpu.philox import philox4x32
from dynamicemb.table.cpu.vectors import dot

_SGD = int(OptimizerKind.SGD)
_ADAM = int(OptimizerKind.ADAM)
_ADAGRAD = int(OptimizerKind.ADAGRAD)


class Rule(NamedTuple):
    """An optimizer step as kernels read it; everything that depends only on the step is computed here, in fp64.

    Attributes:
        kind: ``OptimizerKind``.
        step_size: learning rate, for Adam / (1 - beta1^t).
        eps: added to the denominator.
        beta1, rest1, beta2, rest2: Adam's decays and 1 minus them.
        root_correction: 1 / sqrt(1 - beta2^t).
        decay: learning rate x weight decay.
    """

    kind: int
    step_size: np.float32
    eps: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    root_correction: np.float32
    decay: np.float32


def rule_of(spec: OptimizerSpec, learning_rate: float, iteration: int) -> Rule:
    """Return the constants of step ``iteration``, counted from 1."""
    step_size, root_correction, decay = learning_rate, 1.0, 0.0
    if spec.kind == OptimizerKind.ADAM:
        step_size /= 1.0 - spec.beta1**iteration
        root_correction = (1.0 - spec.beta2**iteration) ** -0.5
        decay = learning_rate * spec.weight_decay
    values = (step_size, spec.eps, spec.beta1, 1 - spec.beta1, spec.beta2, 1 - spec.beta2, root_correction, decay)
    return Rule(int(spec.kind), *(np.float32(value) for value in values))


@njit(error_model="numpy")
def apply_rule(rule, weights_address, grad_address, state_address, n):
    """Update ``n`` fp32 weights and their fp32 state in place.

    SGD:              w -= lr g
    Adam:             m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
                      w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    Adagrad:          s += g^2;  w -= lr g / (sqrt(s) + eps)
    row-wise Adagrad: s += mean(g^2), one s per row; w as Adagrad
    """
    if rule.kind == _SGD:
        _sgd(rule, weights_address, grad_address, n)
    elif rule.kind == _ADAM:
        _adam(rule, weights_address, grad_address, state_address, n)
    elif rule.kind == _ADAGRAD:
        _adagrad(rule, weights_address, grad_address, state_address, n)
    else:
        _rowwise_adagrad(rule, weights_address, grad_address, state_address, n)


@njit(error_model="numpy")
def _sgd(rule, weights_address, grad_address, n):
    w = f32_at(weights_address, n)
    g = f32_at(grad_address, n)
    step_size = rule.step_size
    for d in range(n):
        w[d] -= step_size * g[d]


@njit(error_model="numpy")
def _adam(rule, weights_address, grad_address, state_address, n):
    w = f32_at(weights_address, n)
    g = f32_at(grad_address, n)
    m = f32_at(state_address, n)
    v = f32_at(state_address + 4 * n, n)
    for d in range(n):
        first = rule.beta1 * m[d] + rule.rest1 * g[d]
        second = rule.beta2 * v[d] + rule.rest2 * (g[d] * g[d])
        m[d] = first
        v[d] = second
        change = rule.step_size * first / (np.sqrt(second) * rule.root_correction + rule.eps)
        w[d] -= change + rule.decay * w[d]


@njit(error_model="numpy")
def _adagrad(rule, weights_address, grad_address, state_address, n):
    w = f32_at(weights_address, n)
    g = f32_at(grad_address, n)
    s = f32_at(state_address, n)
    for d in range(n):
        total = s[d] + g[d] * g[d]
        s[d] = total
        w[d] -= rule.step_size * g[d] / (np.sqrt(total) + rule.eps)


@njit(error_model="numpy")
def _rowwise_adagrad(rule, weights_address, grad_address, state_address, n):
    s = f32_at(state_address, 1)
    total = s[0] + dot(grad_address, grad_address, n) / np.float32(n)
    s[0] = total
    w = f32_at(weights_address, n)
    g = f32_at(grad_address, n)
    step_size = rule.step_size / (np.sqrt(total) + rule.eps)
    for d in range(n):
        w[d] -= step_size * g[d]


@njit(error_model="numpy")
def round_bf16(value, random):
    """Round to one of the two nearest bfloat16, up with probability = distance from the lower one.

    Adds the low 16 bits of ``random`` below the kept mantissa and truncates. A finite value becomes infinite only where
    rounding to nearest makes it so.

    Example: 1 + 2^-9 is a quarter of the way from 1 to 1 + 2^-7: it rounds up for ``random & 0xFFFF >= 0xC000``.
    """
    nearest = f32_to_bf16(value)
    if (nearest & np.uint16(0x7F80)) == np.uint16(0x7F80):
        return nearest
    bits = np.uint32(f32_to_bits(value) + (random & np.uint32(0xFFFF)))
    if (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000):
        return nearest
    return np.uint16(bits >> np.uint32(16))


@njit(error_model="numpy")
def round_f16(value, random):
    """Round to one of the two nearest halves, up with probability = distance from the lower one.

    Adds the low 13 bits of ``random`` below the kept mantissa and truncates. Below 2^-14, where halves are multiples of
    2^-24, the value is first cut to a multiple of 2^-37, which leaves the same 13 bits. A finite value becomes infinite
    only where rounding to nearest makes it so.
    """
    nearest = f32_to_f16(value)
    if (nearest & np.uint16(0x7C00)) == np.uint16(0x7C00):
        return nearest
    bits = f32_to_bits(value)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    noise = np.uint32(random & np.uint32(0x1FFF))
    if magnitude < np.uint32(0x38800000):
        fixed = np.uint32(bits_to_f32(magnitude) * np.float32(2.0**37))
        return np.uint16(sign | ((fixed + noise) >> np.uint32(13)))
    rounded = np.uint32((magnitude + noise - np.uint32(0x38000000)) >> np.uint32(13))
    return np.uint16(sign | min(rounded, np.uint32(0x7BFF)))


@njit(error_model="numpy")
def store_stochastic(address, values_address, n, dtype, randomness):
    """Write ``n`` floats as bf16 or fp16 at an address, rounded stochastically.

    ``randomness`` is ``(table key, id, step)``: column ``c`` uses word ``c % 4`` of Philox with the table's key and the
    counter (id low, id high, c // 4, step).
    """
    key, row_id, step = randomness
    words = u16_at(address, n)
    values = f32_at(values_address, n)
    k0 = np.uint32(key)
    k1 = np.uint32(np.uint64(key) >> np.uint64(32))
    c0 = np.uint32(row_id)
    c1 = np.uint32(np.uint64(row_id) >> np.uint64(32))
    for column in range(0, n, 4):
        draws = philox4x32(k0, k1, c0, c1, np.uint32(column >> 2), np.uint32(step))
        for j in range(min(4, n - column)):
            if dtype == BF16:
                words[column + j] = round_bf16(values[column + j], draws[j])
            else:
                words[column + j] = round_f16(values[column + j], draws[j])
