"""A user's score function, compiled by Triton into the kernel that evicts."""

import functools
import hashlib
import linecache
import re
from typing import Any

import triton
import triton.language as tl

from dynamicemb.score_function import MATH_FUNCTIONS


@triton.jit
def _number(VALUE: tl.constexpr):
    # A plain literal would be fp32 beside another one.
    return tl.full([], VALUE, tl.float64)


# What a translated source calls beside ``number`` has the same name in Triton's language.
_CALLS = re.compile(rf"\b({'|'.join({'where', 'maximum', 'minimum', *MATH_FUNCTIONS.values()})})\(")


@functools.cache
def compile_score(source: str) -> Any:
    """Return the ``@triton.jit`` function of what ``translate`` returned."""
    source = _CALLS.sub(r"tl.\1(", source)
    # Triton reads the source of what it compiles: here it is in no file, but where Python looks for lines of files.
    name = f"<score function {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"tl": tl, "number": _number, "__name__": __name__}
    exec(compile(source, name, "exec"), namespace)
    return triton.jit(namespace["score"])


@triton.jit
def ranks(timestamp, frequency, now, FUNCTION: tl.constexpr):
    """Return int64 values that order, as unsigned ones, as the function's results do; NaN is lowest."""
    value = FUNCTION(timestamp.to(tl.float64), frequency.to(tl.float64), now.to(tl.float64))
    # The function may have returned a constant; and zeros are equal.
    value = value + tl.zeros(frequency.shape, tl.float64)
    bits = value.to(tl.int64, bitcast=True)
    flipped = bits ^ ((bits >> 63) | tl.full([], -0x8000000000000000, tl.int64))
    return tl.where(value != value, 0, flipped)
