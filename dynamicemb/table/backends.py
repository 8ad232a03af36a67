"""Which kernels serve a device: numba on the CPU, Triton on a GPU. Same names, same signatures."""

from functools import cache
from types import ModuleType, SimpleNamespace

import torch


def kernels_for(device: torch.device) -> SimpleNamespace:
    """Return the kernels for tables on a device.

    Raises:
        NotImplementedError: there are no kernels for this kind of device.
    """
    if device.type == "cpu":
        from dynamicemb.table import cpu

        return _exported(cpu)
    if device.type == "cuda":
        from dynamicemb.table import triton

        return _exported(triton)
    raise NotImplementedError(
        f"device: there are no table kernels for {device}; use torch.device('cpu') or a CUDA device"
    )


@cache
def _exported(package: ModuleType) -> SimpleNamespace:
    """Return what a package exports and nothing else: its modules are named like kernels, also like those it lacks."""
    return SimpleNamespace(**{name: getattr(package, name) for name in package.__all__})
