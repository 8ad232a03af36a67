"""Raw memory for numba kernels: typed views at an address, 16-bit floats, atomic add, prefetch.

Rows live in chunks known to kernels only by address (``RowStore``), and numba has neither fp16/bf16 nor atomics on the
CPU, so these few intrinsics fill the gap.
"""

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Weight dtypes as kernels see them.
F32 = 0
F16 = 1
BF16 = 2


def _pointer_cast(dtype):
    pointer = types.CPointer(dtype)

    @intrinsic
    def cast(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.int64), codegen

    return cast


def _reader(numba_type, llvm_type):
    @intrinsic
    def read(typingctx, address, index):
        def codegen(context, builder, signature, args):
            pointer = builder.inttoptr(args[0], llvm_type.as_pointer())
            return builder.load(builder.gep(pointer, [args[1]]))

        return numba_type(types.int64, types.int64), codegen

    return read


# ``read_i64(address, i)`` is element ``i`` of the int64 array at an address, and so on.
read_i64 = _reader(types.int64, ir.IntType(64))
read_u64 = _reader(types.uint64, ir.IntType(64))
read_i32 = _reader(types.int32, ir.IntType(32))
read_f32 = _reader(types.float32, ir.FloatType())
read_u8 = _reader(types.uint8, ir.IntType(8))


def _writer(numba_type, llvm_type):
    @intrinsic
    def write(typingctx, address, index, value):
        def codegen(context, builder, signature, args):
            pointer = builder.inttoptr(args[0], llvm_type.as_pointer())
            builder.store(args[2], builder.gep(pointer, [args[1]]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return write


# ``write_i64(address, i, value)`` sets element ``i`` of the int64 array at an address.
write_i64 = _writer(types.int64, ir.IntType(64))
write_i32 = _writer(types.int32, ir.IntType(32))
write_u8 = _writer(types.uint8, ir.IntType(8))

_as_f32 = _pointer_cast(types.float32)
_as_u16 = _pointer_cast(types.uint16)


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an int64 address; never faults."""

    def codegen(context, builder, signature, args):
        byte_pointer = ir.IntType(8).as_pointer()
        i32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        pointer = builder.inttoptr(args[0], byte_pointer)
        builder.call(function, [pointer, ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def atomic_add_i64(typingctx, address, value):
    """Add ``value`` to the int64 at ``address`` atomically; returns the old value."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen


@njit(inline="always")
def f32_at(address, n):
    """View ``n`` floats at an address."""
    return carray(_as_f32(address), (n,))


@njit(inline="always")
def u16_at(address, n):
    """View ``n`` 16-bit words at an address."""
    return carray(_as_u16(address), (n,))


@intrinsic
def bits_to_f32(typingctx, bits):
    """Reinterpret a uint32 as float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def f32_to_bits(typingctx, value):
    """Reinterpret a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@njit(inline="always")
def bf16_to_f32(word):
    """Widen a bfloat16 bit pattern (uint16)."""
    return bits_to_f32(np.uint32(np.uint32(word) << np.uint32(16)))


@njit(inline="always")
def f32_to_bf16(value):
    """Round a float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = f32_to_bits(np.float32(value))
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(bits >> np.uint32(16))


@njit(inline="always")
def f16_to_f32(word):
    """Widen an IEEE half bit pattern (uint16)."""
    w = np.uint32(word)
    sign = np.uint32((w & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(w & np.uint32(0x7FFF))
    if magnitude >= np.uint32(0x7C00):
        return bits_to_f32(np.uint32(sign | np.uint32(0x7F800000) | ((magnitude & np.uint32(0x3FF)) << np.uint32(13))))
    # Scaling by 2^112 turns a half's exponent bias into a float's and is exact, also for subnormals.
    scaled = bits_to_f32(np.uint32(magnitude << np.uint32(13))) * np.float32(2.0**112)
    return bits_to_f32(np.uint32(f32_to_bits(scaled) | sign))


@njit(inline="always")
def f32_to_f16(value):
    """Round a float32 to the nearest IEEE half, ties to even; overflow gives infinity, NaN stays NaN."""
    bits = f32_to_bits(np.float32(value))
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x477FF000):
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):
        # Below the smallest normal half: adding 0.5 aligns the mantissa so that the hardware rounds to even.
        shifted = f32_to_bits(bits_to_f32(magnitude) + np.float32(0.5))
        return np.uint16(sign | np.uint32(shifted - np.uint32(0x3F000000)))
    rounded = np.uint32(magnitude + np.uint32(0xC8000FFF) + ((magnitude >> np.uint32(13)) & np.uint32(1)))
    return np.uint16(sign | (rounded >> np.uint32(13)))
