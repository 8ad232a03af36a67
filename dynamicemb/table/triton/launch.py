"""How kernels are launched: grids, and a way past most of Triton's launch overhead.

A small training step is bound by the host, and on a busy server a launch through Triton's front door takes as long as
the kernel of a thousand ids. So integers that Triton offers as functions of its own language (``cdiv``,
``next_power_of_2``) are computed here in Python, and compiled kernels are called directly.
"""

import functools
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

# Programs of one warp that one multiprocessor holds at once.
_PROGRAMS_PER_PROCESSOR = 32
# The interpreter runs programs one after another; two are enough to test that they share the work.
_INTERPRETED_PROGRAMS = 2

# Registers of a thread with which 32 warps fit a multiprocessor. A kernel that waits for memory, and would take a few
# more, is faster with this limit: on an H200 find 4 to 12 %, units of the update 7 %. With still fewer both are slower;
# no other kernel gains by a limit of 32 to 96.
FULL_PROCESSOR = 64

# Kernels compiled for pointers that are all multiples of this many bytes.
_ALIGNMENT = 16
# By kernel (``id``, as hashing a kernel takes longer than finding it), device, constants and options.
_compiled: dict[tuple[Any, ...], Any] = {}


class Int32Address(int):
    """An address inside of scratch memory on a GPU, where a view would cost the host ten times as much."""

    dtype = torch.int32


class Int64Address(int):
    """As ``Int32Address``, of 64-bit integers."""

    dtype = torch.int64


class Float32Address(int):
    """As ``Int32Address``, of floats."""

    dtype = torch.float32


Address = Int32Address | Int64Address | Float32Address
_ADDRESSES = {torch.int32: Int32Address, torch.int64: Int64Address, torch.float32: Float32Address}


class _Typed:
    """What Triton wants to see of an address when it compiles a kernel for it."""

    def __init__(self, address: Any):
        self._address = int(address)
        self.dtype = address.dtype

    def data_ptr(self) -> int:
        return self._address


# Anything that a kernel takes: addresses stand for tensors.
Argument = torch.Tensor | int


def carve(scratch: torch.Tensor, begin: int, count: int, dtype: torch.dtype) -> Any:
    """Return a part of scratch memory as kernels take it: an address on a GPU, elsewhere a view.

    Args:
        scratch: i32, the whole.
        begin: first element of the part, a multiple of 4, which keeps it a multiple of 16 bytes.
        count: elements of the part.
        dtype: int32, int64 or float32; ``begin`` counts int32 all the same.
    """
    if scratch.is_cuda:
        return _ADDRESSES[dtype](scratch.data_ptr() + 4 * begin)
    words = count * (dtype.itemsize // 4)
    return scratch[begin : begin + words].view(dtype)


def launch(
    kernel: Any, grid: tuple[int], args: tuple[Argument, ...], constants: dict[str, Any], **options: Any
) -> None:
    """Launch a kernel, as ``kernel[grid](*args, **constants, **options)`` does, in a fraction of the host's time.

    Triton looks at every argument of every launch to choose a compiled kernel. Here the choice depends on the constants
    and on whether all pointers are aligned, so the kernel is chosen once and then called with plain addresses.

    Args:
        kernel: a ``@triton.jit`` function whose integers are all in ``do_not_specialize``; their types, and the dtypes
            of its tensors, are the same in every launch.
        grid: programs.
        args: tensors or their addresses, and integers below 2**31, in the order of the kernel's parameters. The first
            is a tensor: its device runs the kernel.
        constants: the constexpr parameters that follow, in order.
        options: ``num_warps`` and other options of Triton.
    """
    if not isinstance(kernel, JITFunction):
        kernel[grid](*args, **constants, **options)
        return
    device = args[0].get_device()  # type: ignore[union-attr]
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, args, constants, **options)
        return
    words: list[int] = []
    pointers = 0
    for arg in args:
        if isinstance(arg, int):
            words.append(arg)
        else:
            word = arg.data_ptr()
            pointers |= word
            words.append(word)
    values = (*constants.values(),)
    key = (id(kernel), device, values, *options.values())
    compiled = _compiled.get(key) if pointers % _ALIGNMENT == 0 else None
    if compiled is None:
        assert kernel.arg_names[len(args) :] == list(constants)
        typed = [_Typed(arg) if isinstance(arg, Address) else arg for arg in args]
        compiled = kernel[grid](*typed, **constants, **options)
        if pointers % _ALIGNMENT == 0:
            _compiled[key] = compiled
    elif _is_profiled():
        compiled[(grid[0], 1, 1)](*words, *values)
    else:
        stream = torch._C._cuda_getCurrentRawStream(device)
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        run(grid[0], 1, 1, stream, function, metadata, None, None, None, *words, *values)


def _is_profiled() -> bool:
    """Say whether somebody, as Triton's profiler, wants to hear of launches."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


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
        index = torch._C._cuda_getDevice() if device.index is None else device.index
        programs = _num_processors(index) * max(1, _PROGRAMS_PER_PROCESSOR // num_warps)
    return (max(1, min(most, programs)),)


def cdiv(n: int, by: int) -> int:
    """Return ``n / by`` rounded up."""
    return -(-n // by)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` and 1."""
    return 1 << max(0, n - 1).bit_length()


def padded_tables(num_tables: int) -> int:
    """Return T rounded up to a power of two; at least 16, so that small groups share their compiled kernels."""
    return max(16, power_of_two(num_tables))
