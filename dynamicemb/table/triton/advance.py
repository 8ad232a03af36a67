"""Begin a step: advance the clock that all kernels of the step read."""

import time

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dynamicemb.table.index import Touches
from dynamicemb.table.triton.constants import (
    NOW,
    OLDEST,
    SCORE_MIXED,
    SCORE_NO_EVICTION,
    SCORE_STEP,
    SCORE_TIMESTAMP,
    SEEN,
    STEP,
)
from dynamicemb.table.triton.launch import launch, padded_tables


def advance(touches: Touches, lag: int, training: bool = True) -> None:
    """Begin a step without a batch; ``open_batch`` does it with one.

    Args:
        touches: of the group's index; ``clock`` and, for strategies that move by themselves, ``score_values`` change.
        lag: how many steps before the new one the oldest protected step is.
        training: whether it is a training forward, which STEP scores count.

    Host sync: none. In a CUDA graph every replay is a new step with its own time: the GPU's global timer counts Unix
    nanoseconds.
    """
    on_gpu = touches.clock.device.type == "cuda"
    host_time = 0 if on_gpu else time.time_ns()
    args = (touches.clock, touches.score_values, touches.strategies, lag, host_time, touches.num_tables)
    constants = {
        "DEVICE_TIME": on_gpu,
        "STRATEGY": touches.strategy,
        "TRAINING": training,
        "TABLES": padded_tables(touches.num_tables),
    }
    launch(_advance_kernel, (1,), args, constants, num_warps=1)


def observe_time(touches: Touches, lag: int) -> None:
    """Let ids expire that are too old by now; for whoever looks without a step.

    Args:
        touches: of the group's index; its ``clock`` changes.
        lag: how many steps before a next one the oldest protected step would be.

    Host sync: none; in a CUDA graph every replay has its own time.
    """
    on_gpu = touches.clock.device.type == "cuda"
    args = (touches.clock, lag, 0 if on_gpu else time.time_ns())
    launch(_observe_kernel, (1,), args, {"DEVICE_TIME": on_gpu}, num_warps=1)


def rebase(touches: Touches, shift: int) -> None:
    """Lower all tags, at least to 0, and the step number by ``shift``."""
    touches.clock[STEP.value] -= shift
    torch.clamp(touches.tags.sub_(shift), min=0, out=touches.tags)


@triton.jit
def advance_clock(
    clock_ptr, score_values_ptr, strategies_ptr, lag, host_time, num_tables, DEVICE_TIME: tl.constexpr,
    STRATEGY: tl.constexpr, TRAINING: tl.constexpr, TABLES: tl.constexpr,
):  # fmt: skip
    """Begin a step; for one program to call."""
    step = tl.load(clock_ptr + STEP) + 1
    if DEVICE_TIME:
        time = globaltimer()
    else:
        time = host_time
    now = tl.maximum(tl.load(clock_ptr + SEEN) + 1, time)
    tl.store(clock_ptr + STEP, step)
    tl.store(clock_ptr + OLDEST, tl.maximum(step - lag, 1))
    tl.store(clock_ptr + NOW, now)
    tl.store(clock_ptr + SEEN, now)
    t = tl.arange(0, TABLES)
    if (STRATEGY == SCORE_TIMESTAMP) | (STRATEGY == SCORE_NO_EVICTION):
        tl.store(score_values_ptr + t, tl.zeros([TABLES], tl.int64) + now, mask=t < num_tables)
    if (STRATEGY == SCORE_STEP) & TRAINING:
        value = tl.load(score_values_ptr + t, mask=t < num_tables, other=0)
        tl.store(score_values_ptr + t, value + 1, mask=t < num_tables)
    if STRATEGY >= SCORE_MIXED:
        strategy = tl.load(strategies_ptr + t, mask=t < num_tables, other=-1)
        value = tl.load(score_values_ptr + t, mask=strategy == SCORE_STEP, other=0)
        if TRAINING:
            value += 1
        timed = (strategy == SCORE_TIMESTAMP) | (strategy == SCORE_NO_EVICTION)
        tl.store(score_values_ptr + t, tl.where(timed, now, value), mask=timed | (strategy == SCORE_STEP))


@triton.jit(do_not_specialize=["lag", "host_time"])
def _observe_kernel(clock_ptr, lag, host_time, DEVICE_TIME: tl.constexpr):
    oldest = tl.load(clock_ptr + STEP) + 1 - lag
    tl.store(clock_ptr + OLDEST, tl.maximum(tl.load(clock_ptr + OLDEST), oldest))
    if DEVICE_TIME:
        time = globaltimer()
    else:
        time = host_time
    tl.store(clock_ptr + SEEN, tl.maximum(tl.load(clock_ptr + SEEN), time))


@triton.jit(do_not_specialize=["lag", "host_time", "num_tables"])
def _advance_kernel(
    clock_ptr,
    score_values_ptr,
    strategies_ptr,
    lag,
    host_time,
    num_tables,
    DEVICE_TIME: tl.constexpr,
    STRATEGY: tl.constexpr,
    TRAINING: tl.constexpr,
    TABLES: tl.constexpr,
):
    advance_clock(
        clock_ptr, score_values_ptr, strategies_ptr, lag, host_time, num_tables, DEVICE_TIME, STRATEGY, TRAINING, TABLES
    )
