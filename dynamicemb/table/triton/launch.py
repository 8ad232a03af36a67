"""How launchers choose their grids."""

import functools

import torch
import triton

# Programs of one warp that one multiprocessor holds at once.
_PROGRAMS_PER_PROCESSOR = 32
# The interpreter runs programs one after another; two are enough to test that they share the work.
_INTERPRETED_PROGRAMS = 2


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
