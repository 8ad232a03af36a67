"""Which kernels serve a device: numba on the CPU, Triton on a GPU. Same names, same signatures."""

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """Return the module of kernels for tables on a device.

    Raises:
        NotImplementedError: there are no kernels for this kind of device.
    """
    if device.type == "cpu":
        from dynamicemb.table import cpu

        return cpu
    if device.type == "cuda":
        from dynamicemb.table import triton

        return triton
    raise NotImplementedError(
        f"device: there are no table kernels for {device}; use torch.device('cpu') or a CUDA device"
    )
