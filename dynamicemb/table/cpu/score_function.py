"""A user's score function, compiled by numba."""

import functools
import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@njit
def _number(value):
    return value


@njit
def _where(condition, a, b):
    return a if condition else b


@njit
def _maximum(a, b):
    # A number beats NaN, as on a GPU.
    return a if a > b or b != b else b


@njit
def _minimum(a, b):
    return a if a < b or b != b else b


# numba's math.floor makes an int64, which does not hold every float.
_NAMES = {
    "number": _number, "where": _where, "maximum": _maximum, "minimum": _minimum, "exp": math.exp, "log": math.log,
    "log2": math.log2, "sqrt": math.sqrt, "sin": math.sin, "cos": math.cos, "erf": math.erf, "floor": np.floor,
    "ceil": np.ceil, "abs": math.fabs,
}  # fmt: skip


@functools.cache
def compile_score(source: str) -> Any:
    """Return the compiled function of what ``translate`` returned; it stays, and with it the ``address``."""
    namespace: dict[str, Any] = dict(_NAMES)
    exec(source, namespace)
    # Division by zero and the like give inf or NaN, as on a GPU.
    return numba.cfunc("float64(float64, float64, float64)", error_model="numpy")(namespace["score"])


@intrinsic
def _call(typing_context, address, timestamp, frequency, now):
    """Call the function at an address; returns the bits of its result as int64."""
    double = types.float64
    signature = types.int64(types.int64, double, double, double)

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.DoubleType(), [ir.DoubleType()] * 3)
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.bitcast(builder.call(function, args[1:]), ir.IntType(64))

    return signature, codegen


@njit
def rank(address, timestamp, frequency, now):
    """Return an int64 that orders as the function's results do; NaN is lowest, and zeros are equal."""
    bits = _call(address, float(timestamp), float(frequency), float(now))
    magnitude = bits & 0x7FFFFFFFFFFFFFFF
    if magnitude > 0x7FF0000000000000:
        return -0x8000000000000000
    return bits if bits >= 0 else -magnitude


def ranks_of(source: str, stamps: np.ndarray, counts: np.ndarray, now: int) -> np.ndarray:
    """Return what evictions compare, i64 ``[M]``, for stamps and frequencies i64 ``[M]`` at a time."""
    ranks = np.empty(counts.size, np.int64)
    _rank_kernel(compile_score(source).address, stamps, counts, now, ranks)
    return ranks


@njit(cache=True, nogil=True)
def _rank_kernel(address, stamps, counts, now, ranks):
    for i in range(ranks.size):
        ranks[i] = rank(address, stamps[i], counts[i], now)
