"""How kernels are launched: grids, and a way past most of Triton's launch overhead."""

import functools
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

# Programs of one warp that one multiprocessor holds at once.
_PROGRAMS_PER_PROCESSOR = 32
# The interpreter runs programs one after another; two are enough to test that they share the work.
_INTERPRETED_PROGRAMS = 2

# Kernels compiled for pointers that are all multiples of this many bytes.
_ALIGNMENT = 16
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int], args: tuple[torch.Tensor | int, ...], constants: dict[str, Any], **options: Any
) -> None:
    """Launch a kernel, as ``kernel[grid](*args, **constants, **options)`` does, in a fraction of the host's time.

    Triton looks at every argument of every launch to choose a compiled kernel. Here the choice depends on the constants
    and on whether all pointers are aligned, so the kernel is chosen once and then called with plain addresses.

    Args:
        kernel: a ``@triton.jit`` function whose integers are all in ``do_not_specialize``; their types, and the dtypes
            of its tensors, are the same in every launch.
        grid: programs.
        args: tensors and integers below 2**31, in the order of the kernel's parameters.
        constants: the constexpr parameters that follow, in order.
        options: ``num_warps`` and other options of Triton.
    """
    if not isinstance(kernel, JITFunction):
        kernel[grid](*args, **constants, **options)
        return
    words = []
    pointers = 0
    for arg in args:
        word = arg
        if not isinstance(arg, int):
            word = arg.data_ptr()
            pointers |= word
        words.append(word)
    values = tuple(constants.values())
    key = (kernel, torch.cuda.current_device(), values, *options.values())
    compiled = _compiled.get(key) if pointers % _ALIGNMENT == 0 else None
    if compiled is not None:
        compiled[(grid[0], 1, 1)](*words, *values)
        return
    assert kernel.arg_names[len(args) :] == list(constants)
    compiled = kernel[grid](*args, **constants, **options)
    if pointers % _ALIGNMENT == 0:
        _compiled[key] = compiled


@functools.cache
def _num_processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def persistent_grid(device: torch.device, most: int, num_warps: int = 1) -> tuple[int]:
    """Return a grid that fills the device once, or has ``most`` programs if that is less.

    Args:
        device: where the kernel runs; the CPU means the interpreter.
        most: programs that can have work, known on the host.
        num_warps: warps of a program.
    """
    programs = _INTERPRETED_PROGRAMS
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        programs = _num_processors(index) * max(1, _PROGRAMS_PER_PROCESSOR // num_warps)
    return (max(1, min(most, programs)),)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return triton.next_power_of_2(max(1, n))


def padded_tables(num_tables: int) -> int:
    """Return T rounded up to a power of two; at least 16, so that small groups share their compiled kernels."""
    return max(16, power_of_two(num_tables))
