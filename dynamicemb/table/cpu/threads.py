"""Threads of the CPU kernels: as many as torch uses, in a layer that survives several callers."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# numba's fall-back threading layer aborts the process when two threads launch at once; one launch at a time is safe
# in all.
_LAUNCH = threading.Lock()

# Below this many items a second thread costs more than it brings.
_PARALLEL_FROM = 16384


def num_threads() -> int:
    """Return how many threads a kernel may use: ``torch.get_num_threads()``, at most what numba was started with.

    ``torchrun`` starts every rank with one thread; ``torch.set_num_threads`` changes both libraries at once.
    """
    return max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def num_parts(size: int, smallest: int) -> int:
    """Return into how many parts to cut ``size`` items so that no part is much smaller than ``smallest``."""
    return max(1, min(num_threads() * 4, size // smallest))


def launcher(size_of: str) -> Callable[[_Function], _Function]:
    """Decorate a launcher: it holds the launch lock and gives numba its number of threads.

    Args:
        size_of: the parameter that tells how much work there is, by the elements of a tensor or the slots of an index;
            little work runs on one thread, which spares it the barrier.
    """

    def decorate(function: _Function) -> _Function:
        position = list(inspect.signature(function).parameters).index(size_of)

        @functools.wraps(function)
        def launch(*args: Any, **kwargs: Any) -> Any:
            work = args[position] if position < len(args) else kwargs[size_of]
            size = work.numel() if isinstance(work, torch.Tensor) else work.num_slots
            threads = num_threads() if size >= _PARALLEL_FROM else 1
            with _LAUNCH:
                if numba.get_num_threads() != threads:
                    numba.set_num_threads(threads)
                return function(*args, **kwargs)

        return launch  # type: ignore[return-value]

    return decorate
