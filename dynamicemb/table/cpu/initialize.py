"""Fill new rows: weights from (seed, table, id, column), optimizer state from a constant, padding with zeros.

The arithmetic is specified in ``docs/random.md``. Nothing here may be compiled with fastmath: a fused
``lower + range * u`` changes the last bit (``tests/table/test_initializers.py::test_uniform_is_not_fused``).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange

from dynamicemb.table.cpu.memory import BF16, F16, F32, f32_at, f32_to_bf16, f32_to_f16, u16_at
from dynamicemb.table.cpu.philox import philox4x32
from dynamicemb.table.cpu.threads import launcher
from dynamicemb.table.initializers import CONSTANT, DEBUG_MODULUS, NORMAL, TRUNCATED_NORMAL, UNIFORM, InitializerTable
from dynamicemb.table.rows import RowStore

INITIAL_STREAM = np.uint32(0)
_DTYPE_CODES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
# Rows that share one scratch buffer.
_BLOCK_ROWS = 32

_TWO_PI = 2.0 * math.pi
_2_POW_M32 = 2.0**-32
_2_POW_M24 = np.float32(2.0**-24)

# Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37 (1988), PPND16.
# Highest power first.
_A = (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
      13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080)  # fmt: skip
_B = (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
      5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0)  # fmt: skip
_C = (7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258,
      3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734)  # fmt: skip
_D = (1.05075007164441684324e-9, 5.47593808499534494600e-4, 0.0151986665636164571966, 0.148103976427480074590,
      0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0)  # fmt: skip
_E = (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 0.0265321895265761230930,
      0.296560571828504891230, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720)  # fmt: skip
_F = (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
      0.0148753612908506148525, 0.136929880922735805310, 0.599832206555887937690, 1.0)  # fmt: skip


class _Store(NamedTuple):
    """``RowStore`` as the kernel reads it."""

    chunk_bases: np.ndarray
    dims: np.ndarray
    num_states: np.ndarray
    row_bytes: np.ndarray
    state_offsets: np.ndarray
    chunk_shift: int
    dtype: int
    max_dim: int


class _Initializers(NamedTuple):
    """``InitializerTable`` as the kernel reads it."""

    modes: np.ndarray
    params: np.ndarray
    keys: np.ndarray


@njit(inline="always")
def _ratio(x, numerator, denominator):
    top = numerator[0]
    bottom = denominator[0]
    for i in range(1, 8):
        top = top * x + numerator[i]
        bottom = bottom * x + denominator[i]
    return top / bottom


@njit(nogil=True)
def normal_quantile(p):
    """Return the standard normal quantile of ``0 < p < 1`` in float64 (AS 241, PPND16)."""
    q = p - 0.5
    if abs(q) <= 0.425:
        return q * _ratio(0.180625 - q * q, _A, _B)
    r = math.sqrt(-math.log(p if q < 0.0 else 1.0 - p))
    z = _ratio(r - 1.6, _C, _D) if r <= 5.0 else _ratio(r - 5.0, _E, _F)
    return -z if q < 0.0 else z


@njit(inline="always")
def _unit64(x):
    """Return ``(x + 1/2) / 2**32``: inside (0, 1) and exact."""
    return (np.float64(x) + 0.5) * _2_POW_M32


@njit(inline="always")
def _unit32(x):
    """Return the top 24 bits as a float32 in [0, 1), exact."""
    return np.float32(np.int32(x >> np.uint32(8))) * _2_POW_M24


@njit(inline="always")
def _normal_pair(x, y, mean, std):
    """Return two normal values (Box and Muller 1958) from two words."""
    radius = math.sqrt(-2.0 * math.log(_unit64(x)))
    angle = _TWO_PI * _unit64(y)
    return np.float32(mean + std * (radius * math.cos(angle))), np.float32(mean + std * (radius * math.sin(angle)))


@njit(inline="always")
def _truncated(x, params):
    value = params[0] + params[1] * normal_quantile(params[2] + params[3] * _unit64(x))
    return np.float32(min(max(value, params[4]), params[5]))


@njit(nogil=True)
def _fill_uniform(values, lower, span, k0, k1, c0, c1):
    for block in range(values.size >> 2):
        x0, x1, x2, x3 = philox4x32(k0, k1, c0, c1, np.uint32(block), INITIAL_STREAM)
        values[4 * block] = lower + span * _unit32(x0)
        values[4 * block + 1] = lower + span * _unit32(x1)
        values[4 * block + 2] = lower + span * _unit32(x2)
        values[4 * block + 3] = lower + span * _unit32(x3)


@njit(nogil=True)
def _fill_normal(values, mean, std, k0, k1, c0, c1):
    for block in range(values.size >> 2):
        x0, x1, x2, x3 = philox4x32(k0, k1, c0, c1, np.uint32(block), INITIAL_STREAM)
        values[4 * block], values[4 * block + 1] = _normal_pair(x0, x1, mean, std)
        values[4 * block + 2], values[4 * block + 3] = _normal_pair(x2, x3, mean, std)


@njit(nogil=True)
def _fill_truncated(values, params, k0, k1, c0, c1):
    for block in range(values.size >> 2):
        x0, x1, x2, x3 = philox4x32(k0, k1, c0, c1, np.uint32(block), INITIAL_STREAM)
        values[4 * block] = _truncated(x0, params)
        values[4 * block + 1] = _truncated(x1, params)
        values[4 * block + 2] = _truncated(x2, params)
        values[4 * block + 3] = _truncated(x3, params)


@njit(nogil=True)
def _fill(values, mode, params, key, id_):
    """Fill float32 ``values``, D rounded up to a multiple of 4, with an id's initial values."""
    k0 = np.uint32(key)
    k1 = np.uint32(key >> 32)
    c0 = np.uint32(id_)
    c1 = np.uint32(id_ >> 32)
    if mode == UNIFORM:
        _fill_uniform(values, np.float32(params[0]), np.float32(params[1]), k0, k1, c0, c1)
    elif mode == NORMAL:
        _fill_normal(values, params[0], params[1], k0, k1, c0, c1)
    elif mode == TRUNCATED_NORMAL:
        _fill_truncated(values, params, k0, k1, c0, c1)
    elif mode == CONSTANT:
        values[:] = np.float32(params[0])
    else:
        # Python's remainder: never negative.
        values[:] = np.float32(id_ % DEBUG_MODULUS)


# The two writers must not say inline="always": in a parallel function numba then takes the last store to a raw-memory
# view for dead code and drops it (test_c09_every_byte_of_new_rows_is_written_and_no_other).
@njit(nogil=True)
def _write_weights(address, values, dim, dtype):
    """Round the weights into the row's dtype and zero the gap before the state."""
    if dtype == F32:
        weights = f32_at(address, dim)
        for i in range(dim):
            weights[i] = values[i]
        return
    words = u16_at(address, dim + (dim & 1))
    for i in range(dim):
        words[i] = f32_to_f16(values[i]) if dtype == F16 else f32_to_bf16(values[i])
    if dim & 1:
        words[dim] = np.uint16(0)


@njit(nogil=True)
def _write_state(address, num_floats, num_state, value):
    """Set the optimizer state and zero the row's tail."""
    state = f32_at(address, num_floats)
    for i in range(num_floats):
        state[i] = value if i < num_state else np.float32(0.0)


@njit(parallel=True, cache=True, nogil=True)
def _initialize(store, initializers, rows, ids, tables, state_values):
    mask = (1 << store.chunk_shift) - 1
    for block in prange((rows.size + _BLOCK_ROWS - 1) // _BLOCK_ROWS):
        scratch = np.empty((store.max_dim + 3) & ~3, dtype=np.float32)
        for i in range(block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, rows.size)):
            row = np.int64(rows[i])
            if row < 0:
                continue
            t = tables[i]
            dim = np.int64(store.dims[t])
            values = scratch[: (dim + 3) & ~3]
            _fill(values, initializers.modes[t], initializers.params[t], initializers.keys[t], ids[i])
            address = store.chunk_bases[row >> store.chunk_shift] + (row & mask) * store.row_bytes[t]
            _write_weights(address, values, dim, store.dtype)
            num_floats = (store.row_bytes[t] - store.state_offsets[t]) >> 2
            _write_state(address + store.state_offsets[t], num_floats, store.num_states[t], state_values[t])


@njit(parallel=True, cache=True, nogil=True)
def _initial_values(initializers, t, ids, output):
    dim = output.shape[1]
    for block in prange((ids.size + _BLOCK_ROWS - 1) // _BLOCK_ROWS):
        values = np.empty((dim + 3) & ~3, dtype=np.float32)
        for i in range(block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, ids.size)):
            _fill(values, initializers.modes[t], initializers.params[t], initializers.keys[t], ids[i])
            output[i] = values[:dim]


def _numpy_views(initializers: InitializerTable) -> _Initializers:
    return _Initializers(initializers.modes.numpy(), initializers.params.numpy(), initializers.keys.numpy())


@launcher("rows")
def initialize(
    store: RowStore,
    initializers: InitializerTable,
    rows: torch.Tensor,
    ids: torch.Tensor,
    tables: torch.Tensor,
    state_values: torch.Tensor,
) -> None:
    """Write every byte of new rows: weights, optimizer state, padding.

    Args:
        store: rows of the group, changed in place.
        initializers: of the same tables.
        rows: i32 ``[M]``, where each id lives; -1 is skipped. A row may appear twice only with the same id.
        ids: i64 ``[M]``.
        tables: i32 ``[M]``, the table of each row.
        state_values: f32 ``[T]``, the value every optimizer state float of a table starts with.

    Concurrency: blocks of 32 entries run on any thread; a row is written by the thread that holds its entry.
    Bytes moved: ``row_bytes`` written and 16 read for each row.
    """
    assert rows.dtype == tables.dtype == torch.int32 and ids.dtype == torch.int64
    assert state_values.dtype == torch.float32
    assert rows.shape == ids.shape == tables.shape and state_values.shape == store.dims.shape
    kernel_store = _Store(
        chunk_bases=store.chunk_bases.numpy(),
        dims=store.dims.numpy(),
        num_states=store.num_states.numpy(),
        row_bytes=store.row_bytes.numpy(),
        state_offsets=store.state_offsets.numpy(),
        chunk_shift=store.chunk_shift,
        dtype=_DTYPE_CODES[store.dtype],
        max_dim=max(row_format.dim for row_format in store.formats),
    )
    _initialize(
        kernel_store, _numpy_views(initializers), rows.numpy(), ids.numpy(), tables.numpy(), state_values.numpy()
    )


@launcher("ids")
def initial_values(initializers: InitializerTable, table: int, ids: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the initial weights of ids, before rounding to the table's dtype.

    Args:
        initializers: of the group.
        table: index of the table in the group.
        ids: i64 ``[N]``.
        dim: D, columns wanted. Column d does not depend on it.

    Returns:
        f32 ``[N, D]``.
    """
    output = torch.empty(ids.numel(), dim, dtype=torch.float32, device="cpu")
    _initial_values(_numpy_views(initializers), table, ids.numpy(), output.numpy())
    return output
