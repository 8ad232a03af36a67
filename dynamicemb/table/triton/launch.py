"""How kernels are launched: grids, and a way past most of Triton's launch overhead.

A small training step is bound by the host, and on a busy server a launch through Triton's front door takes as long as
the kernel of a thousand ids. So integers that Triton offers as functions of its own language (``cdiv``,
``next_power_of_2``) are computed here in Python, and compiled kernels are called directly.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton import knobs

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

# What parts of scratch memory hold, by the names of kernels' parameters: on a GPU parts are plain addresses.
_SCRATCH_DTYPES = {
    "amounts_ptr": torch.int64,
    "claims_ptr": torch.int32,
    "counts_ptr": torch.int32,
    "ids_ptr": torch.int64,
    "judged_ptr": torch.int32,
    "lengths_ptr": torch.int32,
    "lists_ptr": torch.int32,
    "missing_ptr": torch.int64,
    "order_ptr": torch.int64,
    "partials_ptr": torch.float32,
    "places_ptr": torch.int64,
    "rows_ptr": torch.int32,
    "scales_ptr": torch.float32,
    "sorted_places_ptr": torch.int64,
    "sorted_scales_ptr": torch.float32,
    "tables_ptr": torch.int32,
    "words_ptr": torch.int64,
}

# A tensor, an address of a part of scratch memory, or an integer.
Argument = torch.Tensor | int


def carve(scratch: torch.Tensor, begin: int, count: int, dtype: torch.dtype) -> Any:
    """Return a part of scratch memory as kernels take it: an address on a GPU, elsewhere a view.

    A view would cost the host ten times as much as an address. The parameter that takes it has a name that is in
    ``_SCRATCH_DTYPES``.

    Args:
        scratch: i32, the whole.
        begin: first element of the part, a multiple of 4, which keeps it a multiple of 16 bytes.
        count: elements of the part.
        dtype: int32, int64 or float32; ``begin`` counts int32 all the same.
    """
    if scratch.is_cuda:
        return scratch.data_ptr() + 4 * begin
    words = count * (dtype.itemsize // 4)
    return scratch[begin : begin + words].view(dtype)


class _Pointer:
    """What Triton wants to see of a pointer when it compiles a kernel for it: a dtype, and whether it is aligned."""

    def __init__(self, dtype: torch.dtype, aligned: bool):
        self.dtype = dtype
        self._address = 0 if aligned else 8

    def data_ptr(self) -> int:
        return self._address


class Launcher:
    """A kernel with its constants and those arguments that stay the same; it is called with the others.

    Triton looks at every argument of every launch to choose a compiled kernel. Here the choice depends on the constants
    and on whether all pointers are aligned, so a kernel is compiled at its first launch, and once more at the first
    with a pointer that is not aligned. A launch then looks at the arguments that change and at no others.
    """

    __slots__ = ("_aligned", "_compiled", "_constants", "_device", "_kernel", "_options", "_stays", "_types", "fill")

    def __init__(
        self,
        device: torch.device,
        kernel: Any,
        constants: dict[str, Any],
        stays: Sequence[Argument] = (),
        **options: Any,
    ) -> None:
        """Prepare launches; compiles nothing yet.

        Args:
            device: where the tensors are; the CPU means the interpreter.
            kernel: a ``@triton.jit`` function. Its parameters are pointers that change, integers that change, what
                stays, and the constants. Its integers are all in ``do_not_specialize``; their types, and the dtypes of
                its tensors, are the same in every launch.
            constants: the constexpr parameters, in order.
            stays: tensors and integers. The tensors must outlive the launcher, which remembers their addresses.
            options: ``num_warps`` and other options of Triton.
        """
        self._kernel, self._constants, self._options = kernel, constants, options
        self._device = -1
        self._stays: Sequence[Argument] = stays
        self._types: list[torch.dtype | int] = []
        self._aligned = True
        # What launches, its first and last arguments, and the compiled kernel; first for pointers that are not all
        # aligned, then for those that are.
        self._compiled: list[tuple[Any, ...] | None] = [None, None]
        # Programs that fill the device.
        self.fill = persistent_grid(device, 2**31 - 1, options.get("num_warps", 4))[0]
        if device.type == "cuda":
            self._device = torch._C._cuda_getDevice() if device.index is None else device.index
            self._types = [arg if isinstance(arg, int) else arg.dtype for arg in stays]
            self._stays = [arg if isinstance(arg, int) else arg.data_ptr() for arg in stays]
            tensors = [word for word, kind in zip(self._stays, self._types, strict=True) if not isinstance(kind, int)]
            self._aligned = all(word % _ALIGNMENT == 0 for word in tensors)

    def __call__(self, programs: int, pointers: tuple[Argument, ...], integers: tuple[int, ...] = ()) -> None:
        """Launch.

        Args:
            programs: the grid.
            pointers: tensors, and addresses that ``carve`` returned.
            integers: below 2**31.
        """
        device = self._device
        if device < 0:
            self._kernel[(programs,)](*pointers, *integers, *self._stays, **self._constants, **self._options)
            return
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(programs, pointers, integers)
            return
        words = [pointer if isinstance(pointer, int) else pointer.data_ptr() for pointer in pointers]
        together = 0
        for word in words:
            together |= word
        aligned = self._aligned and together % _ALIGNMENT == 0
        compiled = self._compiled[aligned]
        if compiled is None:
            compiled = self._compile(aligned, pointers, integers)
        run, head, tail, found = compiled
        hook = knobs.runtime.launch_enter_hook
        if hook is not None and getattr(hook, "calls", hook):
            # Somebody, as Triton's profiler, wants to hear of launches.
            found[(programs, 1, 1)](*words, *integers, *tail)
            return
        run(programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), *head, *words, *integers, *tail)

    def _compile(self, aligned: bool, pointers: tuple[Argument, ...], integers: tuple[int, ...]) -> tuple[Any, ...]:
        """Compile the kernel for arguments like these; return what launches it."""
        kernel, names = self._kernel, self._kernel.arg_names
        num_given = len(pointers) + len(integers) + len(self._stays)
        assert names[num_given:] == list(self._constants), f"{kernel} takes {names}"
        types: list[Any] = [
            _Pointer(_SCRATCH_DTYPES[name] if isinstance(pointer, int) else pointer.dtype, aligned)
            for name, pointer in zip(names, pointers, strict=False)
        ]
        types += integers
        types += [kind if isinstance(kind, int) else _Pointer(kind, aligned) for kind in self._types]
        found = kernel.warmup(*types, **self._constants, **self._options, grid=(1,))
        head: tuple[Any, ...]
        # Reading ``run`` loads the kernel.
        run, tail = found.run, (*self._stays, *self._constants.values())
        if _LAUNCHES_DIRECTLY and not (run.global_scratch_size or run.profile_scratch_size):
            metadata = found.packed_metadata
            head = (found.function, run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, None, None, None)
            run = run.launch
        else:
            head = (found.function, found.packed_metadata, None, None, None)
        compiled = self._compiled[aligned] = (run, head, tail, found)
        return compiled


# The launcher of this series takes its arguments one by one, and the function around it costs the host 1.5 us.
_LAUNCHES_DIRECTLY = triton.__version__.startswith("3.6.")

# By kernel (``id``, as hashing a kernel takes longer than finding it), device, constants and options.
_launchers: dict[tuple[Any, ...], Launcher] = {}


def launch(
    kernel: Any, grid: tuple[int], args: tuple[Argument, ...], constants: dict[str, Any], **options: Any
) -> None:
    """Launch a kernel whose arguments all may change; for kernels that not every lookup needs.

    Args:
        kernel: a ``@triton.jit`` function, as for a ``Launcher``.
        grid: programs.
        args: pointers, then integers, in the order of the kernel's parameters. The first is a tensor: its device runs
            the kernel.
        constants: the constexpr parameters that follow, in order.
        options: ``num_warps`` and other options of Triton.
    """
    device = args[0].device  # type: ignore[union-attr]
    key = (id(kernel), device, *constants.values(), *options.values())
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = Launcher(device, kernel, constants, (), **options)
    num_pointers = sum(name.endswith("_ptr") for name in kernel.arg_names)
    launcher(grid[0], args[:num_pointers], args[num_pointers:])  # type: ignore[arg-type]


@functools.cache
def _num_processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _most_programs(capability: tuple[int, int]) -> int:
    """Return how many programs a multiprocessor holds, however small they are (CUDA's guide, technical specifications).

    Those of data centres since Ampere hold 32, the others 16 or more.
    """
    return 32 if capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else 16


def programs_at_once(device: torch.device, for_each: int) -> int:
    """Return how many programs a device holds at once, of which a multiprocessor holds ``for_each``.

    The CPU means the interpreter, which ends one program before the next begins: 1.
    """
    if device.type != "cuda":
        return 1
    for_each = min(for_each, _most_programs(torch.cuda.get_device_capability(device)))
    return for_each * _num_processors(torch._C._cuda_getDevice() if device.index is None else device.index)


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
