"""The numbers of a module's optimizer: one place that keeps them, and that tells the device."""

from dataclasses import replace
from numbers import Real
from typing import Any

import torch

from dynamicemb.errors import DynamicEmbError
from dynamicemb.optimizer import OptimizerSpec

# Whoever else keeps a copy of a number, as a table does of initial_accumulator_value, cannot be told.
CHANGEABLE = ("beta1", "beta2", "eps", "learning_rate", "weight_decay")


class OptimizerSettings:
    """The optimizer of one module.

    Who sets a learning rate sets it here, whatever name he calls it by, and who saves or shows one asks here. Kernels
    read it from the device, so that a captured CUDA graph sees it change; nobody else writes it there.

    A learning rate may be a tensor of one element, which its owner changes in place. Then the tensor is what counts: it
    is looked at before each update, and a number that is set later is written into it.
    """

    def __init__(self, spec: OptimizerSpec, on_device: torch.Tensor) -> None:
        """Take the settings.

        Args:
            spec: the optimizer.
            on_device: f32 ``[1]``, what kernels read.
        """
        self._spec = spec
        self._on_device = on_device
        self._tensor: torch.Tensor | None = None
        on_device.fill_(spec.learning_rate)

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer with its present numbers; waits for a GPU if the learning rate is a tensor there."""
        if self._tensor is not None:
            self._take(float(self._tensor))
        return self._spec

    @property
    def name(self) -> str:
        """The optimizer's name in dumps."""
        return self._spec.name

    @property
    def learning_rate(self) -> float | torch.Tensor:
        """The learning rate as it was given, a number or a tensor."""
        return self._spec.learning_rate if self._tensor is None else self._tensor

    def hand_on(self) -> OptimizerSpec:
        """Bring what a tensor has become to the device; return what an update needs beside it. Host sync: none."""
        tensor = self._tensor
        if tensor is not None:
            if tensor.device.type == "cpu":
                self._take(float(tensor))
            else:
                self._on_device.copy_(tensor.detach().reshape(1))
        return self._spec

    def set_learning_rate(self, learning_rate: float | torch.Tensor) -> None:
        """Set the learning rate of updates from now on. Host sync: none.

        Raises:
            TypeError: it is no number, and no floating tensor.
            ValueError: it is negative or not finite, or a tensor of several elements.
            DynamicEmbError: a CUDA graph is being captured, whose replays would set it again and again.
        """
        if isinstance(learning_rate, torch.Tensor):
            self._follow(learning_rate)
            return
        rate = _plain(learning_rate)
        if self._tensor is None:
            self._take(rate)
            return
        spec = self._spec.with_learning_rate(rate)
        self._refuse_capture(rate)
        with torch.no_grad():
            self._tensor.fill_(rate)
        self._spec = spec
        self._on_device.fill_(rate)

    def replace_learning_rate(self, learning_rate: float | torch.Tensor) -> None:
        """Do what ``set_learning_rate`` does, but let go of a tensor rather than change it."""
        if isinstance(learning_rate, torch.Tensor):
            self._follow(learning_rate)
            return
        rate = _plain(learning_rate)
        spec = self._spec.with_learning_rate(rate)
        if self._tensor is None:
            self._take(rate)
            return
        self._refuse_capture(rate)
        self._tensor, self._spec = None, spec
        self._on_device.fill_(rate)

    def adopt(self, spec: OptimizerSpec) -> None:
        """Take all numbers of another description of the same optimizer."""
        self.set_learning_rate(spec.learning_rate)
        self._spec = replace(spec, learning_rate=self._spec.learning_rate)

    def change(self, **numbers: Any) -> None:
        """Change numbers by their names, all or none. Captured CUDA graphs keep those they were captured with.

        Raises:
            TypeError: a value that is no number.
            ValueError: a name that this optimizer does not read, or a value out of range.
        """
        known = [name for name in CHANGEABLE if self._spec.reads(name)]
        for name in numbers:
            if name not in known:
                raise ValueError(
                    f"optimizer {self._spec.name} has no {name!r} that can be changed; it has {', '.join(known)}"
                )
        rate = numbers.pop("learning_rate", None)
        spec = replace(self._spec, **{name: _plain(value) for name, value in numbers.items()})
        if rate is not None:
            self.replace_learning_rate(rate)
        self._spec = replace(spec, learning_rate=self._spec.learning_rate)

    def _follow(self, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            raise TypeError(f"learning_rate must be a number or a floating tensor, got a tensor of {tensor.dtype}")
        if tensor.numel() != 1:
            raise ValueError(f"learning_rate must have one element, got a tensor of shape {tuple(tensor.shape)}")
        if tensor.device.type == "cpu":
            # Refused here rather than in a backward.
            self._spec.with_learning_rate(float(tensor))
        self._tensor = tensor
        self.hand_on()

    def _take(self, rate: float) -> None:
        """Keep a number, here and on the device."""
        if rate == self._spec.learning_rate:
            return
        spec = self._spec.with_learning_rate(rate)
        self._refuse_capture(rate)
        self._spec = spec
        self._on_device.fill_(rate)

    def _refuse_capture(self, rate: float) -> None:
        if self._on_device.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise DynamicEmbError(
                f"learning_rate: set it to {rate} outside of the capture of a CUDA graph, whose replays would set it "
                "again and again; replays read the learning rate of their moment"
            )


def _plain(value: Any) -> Any:
    """Return a number as a Python float, which JSON can hold; leave to the checks what is none."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
