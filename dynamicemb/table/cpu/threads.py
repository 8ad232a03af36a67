"""Threads of the CPU kernels: as many as torch uses, in a layer that survives several callers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch

# numba's fall-back threading layer aborts the process when two threads launch at once; one launch at a time is safe in all.
_LAUNCH = threading.Lock()

# Below this many items a second thread costs more than it brings.
_PARALLEL_FROM = 4096


def num_threads() -> int:
    """Return how many threads a kernel may use: ``torch.get_num_threads()``, at most what numba was started with.

    ``torchrun`` starts every rank with one thread; ``torch.set_num_threads`` changes both libraries at once.
    """
    return max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def num_parts(size: int, smallest: int) -> int:
    """Return into how many parts to cut ``size`` items so that no part is much smaller than ``smallest``."""
    return max(1, min(num_threads() * 4, size // smallest))


@contextmanager
def launch(size: int) -> Iterator[None]:
    """Hold the launch lock and give numba its number of threads.

    Args:
        size: items of work; few items run on one thread, which spares them the barrier.
    """
    threads = num_threads() if size >= _PARALLEL_FROM else 1
    with _LAUNCH:
        if numba.get_num_threads() != threads:
            numba.set_num_threads(threads)
        yield
