"""Begin a step: advance the clock that all kernels of the step read."""

import time

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dynamicemb.table.index import NOW, OLDEST, STEP, UPDATES, Index
from dynamicemb.table.scores import SCORE_STEP, SCORE_TIMESTAMP
from dynamicemb.table.triton.launch import launch, padded_tables


def advance(index: Index, lag: int, strategy: int) -> None:
    """Begin a step.

    Args:
        index: the group's index; ``clock`` and, for strategies that move by themselves, ``score_values`` change.
        lag: how many steps before the new one the oldest protected step is.
        strategy: SCORE_*, see ``table/scores.py``.

    Host sync: none. In a CUDA graph every replay is a new step with its own time: the GPU's global timer counts Unix
    nanoseconds.
    """
    on_gpu = index.clock.device.type == "cuda"
    args = (index.clock, index.score_values, lag, 0 if on_gpu else time.time_ns(), index.num_tables)
    constants = {
        "DEVICE_TIME": on_gpu,
        "STRATEGY": strategy,
        "TIMESTAMP": SCORE_TIMESTAMP,
        "STEP": SCORE_STEP,
        "STEP_INDEX": STEP,
        "OLDEST_INDEX": OLDEST,
        "NOW_INDEX": NOW,
        "TABLES": padded_tables(index.num_tables),
    }
    launch(_advance_kernel, (1,), args, constants, num_warps=1)


def begin_update(index: Index) -> None:
    """Count an optimizer application; ``clock[UPDATES]`` is then the number of this one, from 1."""
    index.clock[UPDATES] += 1


def rebase(index: Index, shift: int) -> None:
    """Lower all tags, at least to 0, and the step number by ``shift``."""
    index.clock[STEP] -= shift
    torch.clamp(index.tags.sub_(shift), min=0, out=index.tags)


@triton.jit(do_not_specialize=["lag", "host_time", "num_tables"])
def _advance_kernel(
    clock_ptr,
    score_values_ptr,
    lag,
    host_time,
    num_tables,
    DEVICE_TIME: tl.constexpr,
    STRATEGY: tl.constexpr,
    TIMESTAMP: tl.constexpr,
    STEP: tl.constexpr,
    STEP_INDEX: tl.constexpr,
    OLDEST_INDEX: tl.constexpr,
    NOW_INDEX: tl.constexpr,
    TABLES: tl.constexpr,
):
    step = tl.load(clock_ptr + STEP_INDEX) + 1
    if DEVICE_TIME:
        time = globaltimer()
    else:
        time = host_time
    now = tl.maximum(tl.load(clock_ptr + NOW_INDEX) + 1, time)
    tl.store(clock_ptr + STEP_INDEX, step)
    tl.store(clock_ptr + OLDEST_INDEX, tl.maximum(step - lag, 1))
    tl.store(clock_ptr + NOW_INDEX, now)
    t = tl.arange(0, TABLES)
    if STRATEGY == TIMESTAMP:
        tl.store(score_values_ptr + t, tl.zeros([TABLES], tl.int64) + now, mask=t < num_tables)
    if STRATEGY == STEP:
        value = tl.load(score_values_ptr + t, mask=t < num_tables, other=0)
        tl.store(score_values_ptr + t, value + 1, mask=t < num_tables)
