"""Name the phases of a step for ``torch.profiler``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NO_RANGE = nullcontext()


def phase(name: str) -> AbstractContextManager[Any]:
    """Return a range called ``dynamicemb::<name>`` while a profiler runs, else one that does nothing."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"dynamicemb::{name}")
    return _NO_RANGE
