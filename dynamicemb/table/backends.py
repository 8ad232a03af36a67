"""Which kernels serve a device: numba on the CPU, Triton on a GPU. Same names, same signatures."""

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """Return the module of kernels for tables on a device.

    Raises:
        NotImplementedError: there are no kernels for this kind of device yet.
    """
    if device.type == "cpu":
        from dynamicemb.table import cpu

        return cpu
    raise NotImplementedError(
        f"device: {device} has no table kernels in this version; use torch.device('cpu') (GPU kernels are in the works)"
    )
