"""Fill new rows with their initial values; ``docs/random.md`` is the specification."""

import torch
import triton
import triton.language as tl

from dynamicemb.table.initializers import DEBUG_MODULUS, NUM_PARAMS, InitializerTable
from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.launch import Launcher, cdiv, power_of_two
from dynamicemb.table.triton.missing import Leaders
from dynamicemb.table.triton.philox import philox4x32, words_of
from dynamicemb.table.triton.rows import RowShape, pointers, row_addresses, row_shape

# Philox calls of one program at a time, each for four columns: as wide as the widest row, up to 256 columns. On an H200
# 32 and 128 take 19 % and 8 % longer for rows of 128 floats.
_CALLS = 64
_MOST_CALLS_PER_ROW = 64

# The word of the count where the host knows it.
_ALL = -1

_NUM_PARAMS = tl.constexpr(NUM_PARAMS)
_MODULUS = tl.constexpr(DEBUG_MODULUS)


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

    Host sync: none; one if the ``InitializerTable`` does not know which modes it has. Bytes moved:
    ``row_bytes`` written and 16 read for each row.
    """
    _initialize(store, initializers, Leaders(rows, ids, tables, rows, _ALL, rows.numel()), state_values)


def initialize_leaders(
    store: RowStore, initializers: InitializerTable, leaders: Leaders, state_values: torch.Tensor
) -> None:
    """Initialise the rows that the leaders of a lookup got; how many there are is read on the device."""
    _initialize(store, initializers, leaders, state_values)


def _initialize(store: RowStore, initializers: InitializerTable, leaders: Leaders, state_values: torch.Tensor) -> None:
    num_rows = leaders.most
    if num_rows == 0:
        return
    modes = initializers.mode_mask or sum(1 << mode for mode in set(initializers.modes.tolist()))
    key = ("initialize", leaders.word, modes)
    launcher, tile = store.prepared.get(key) or store.prepared.setdefault(key, _prepare(store, leaders.word, modes))
    launcher(
        min(cdiv(num_rows, tile), launcher.fill),
        (store.chunk_bases, initializers.modes, initializers.params, initializers.keys, leaders.rows, leaders.ids,
         leaders.tables, state_values, leaders.lengths),
        (num_rows,),
    )  # fmt: skip


def _prepare(store: RowStore, word: int, modes: int) -> tuple[Launcher, int]:
    """Prepare launches for a store; also return how many rows a program has at a time."""
    shape = row_shape(store)
    tile, calls = tile_of(shape)
    stays = (
        store.dims, store.num_states, store.row_bytes, store.state_offsets, store.chunk_shift, shape.max_dim,
        shape.max_tail,
    )  # fmt: skip
    constants = {"COUNT": word, "MODES": modes, "ROW": shape, "TILE": tile, "CALLS": calls}
    return Launcher(store.device, _initialize_kernel, constants, stays, num_warps=1, enable_fp_fusion=False), tile


def tile_of(shape: RowShape) -> tuple[int, int]:
    """Return how many rows a program fills at a time, and how many calls of Philox, four columns each, a row takes."""
    calls = min(power_of_two(cdiv(shape.max_dim, 4)), _MOST_CALLS_PER_ROW)
    return max(1, _CALLS // calls), calls


@triton.jit
def _unit32(x):
    """Return the top 24 bits of uint32 words as float32 in [0, 1), exact."""
    return (x >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _unit64(x):
    """Return ``(x + 1/2) / 2**32`` in float64: inside (0, 1) and exact."""
    return (x.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _normal_pair(x, y, mean, std):
    """Return two normal values (Box and Muller 1958) from two words."""
    radius = tl.sqrt(-2.0 * tl.log(_unit64(x)))
    angle = 6.283185307179586 * _unit64(y)
    even = (mean + std * (radius * tl.cos(angle))).to(tl.float32)
    return even, (mean + std * (radius * tl.sin(angle))).to(tl.float32)


@triton.jit
def _horner(r, c0, c1, c2, c3, c4, c5, c6, c7):
    """Return the polynomial with these coefficients, highest power first."""
    return ((((((c0 * r + c1) * r + c2) * r + c3) * r + c4) * r + c5) * r + c6) * r + c7


@triton.jit
def _normal_quantile(p):
    """Return the standard normal quantile of ``0 < p < 1`` in float64 (Wichura, Algorithm AS 241, PPND16)."""
    q = p - 0.5
    r = 0.180625 - q * q
    centre = q * (
        _horner(
            r, 2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
            13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080,
        )
        / _horner(
            r, 5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
            5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0,
        )
    )  # fmt: skip
    s = tl.sqrt(-tl.log(tl.where(q < 0.0, p, 1.0 - p)))
    r = s - 1.6
    near = _horner(
        r, 7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258,
        3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734,
    ) / _horner(
        r, 1.05075007164441684324e-9, 5.47593808499534494600e-4, 0.0151986665636164571966, 0.148103976427480074590,
        0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0,
    )  # fmt: skip
    r = s - 5.0
    far = _horner(
        r, 2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 0.0265321895265761230930,
        0.296560571828504891230, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720,
    ) / _horner(
        r, 2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
        7.86869131145613259100e-4, 0.0148753612908506148525, 0.136929880922735805310, 0.599832206555887937690, 1.0,
    )  # fmt: skip
    z = tl.where(s <= 5.0, near, far)
    z = tl.where(q < 0.0, -z, z)
    return tl.where(tl.abs(q) <= 0.425, centre, z)


@triton.jit
def _truncated(x, mean, std, cdf_lower, cdf_width, lower, upper):
    """Return truncated normal values, one per word."""
    value = mean + std * _normal_quantile(cdf_lower + cdf_width * _unit64(x))
    return tl.minimum(tl.maximum(value, lower), upper).to(tl.float32)


@triton.jit
def _interleave4(a, b, c, d):
    """Return columns ``a0 b0 c0 d0 a1 b1 ...`` of four ``[rows, calls]`` tensors."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _round(values, ELEMENT: tl.constexpr):
    """Round float32 values to nearest-even into the table's dtype.

    For bfloat16 in integers: Triton's interpreter truncates.
    """
    if ELEMENT == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(ELEMENT)


@triton.jit
def _values(x0, x1, x2, x3, ids, p0, p1, p2, p3, p4, p5, MODE: tl.constexpr):
    """Return the float32 values ``[rows, 4 * calls]`` of one mode from the words of Philox calls ``[rows, calls]``."""
    if MODE == 0:
        a, b = _normal_pair(x0, x1, p0, p1)
        c, d = _normal_pair(x2, x3, p0, p1)
    elif MODE == 1:
        a = _truncated(x0, p0, p1, p2, p3, p4, p5)
        b = _truncated(x1, p0, p1, p2, p3, p4, p5)
        c = _truncated(x2, p0, p1, p2, p3, p4, p5)
        d = _truncated(x3, p0, p1, p2, p3, p4, p5)
    elif MODE == 2:
        lower = p0.to(tl.float32)
        span = p1.to(tl.float32)
        a = lower + span * _unit32(x0)
        b = lower + span * _unit32(x1)
        c = lower + span * _unit32(x2)
        d = lower + span * _unit32(x3)
    else:
        if MODE == 3:
            value = p0.to(tl.float32)
        else:
            remainder = ids % _MODULUS
            value = tl.where(remainder < 0, remainder + _MODULUS, remainder).to(tl.float32)
        a = tl.broadcast_to(value, x0.shape)
        b = a
        c = a
        d = a
    return _interleave4(a, b, c, d)


@triton.jit
def initialize_rows(
    program, num_programs, num_rows, chunk_bases_ptr, modes_ptr, params_ptr, table_keys_ptr, rows_ptr, ids_ptr,
    tables_ptr, state_values_ptr, dims_ptr, num_states_ptr, row_bytes_ptr, state_offsets_ptr, chunk_shift, max_dim,
    max_tail, MODES: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Fill the rows of which this program, one of ``num_programs``, takes a share."""
    begin = program * TILE
    while begin < num_rows:
        k = begin + tl.arange(0, TILE)
        row = tl.load(rows_ptr + k, mask=k < num_rows, other=-1)
        wanted = row >= 0
        ids = tl.load(ids_ptr + k, mask=wanted, other=0)
        table = tl.load(tables_ptr + k, mask=wanted, other=0)
        address = row_addresses(row, table, wanted, chunk_bases_ptr, row_bytes_ptr, chunk_shift, ROW.row_bytes)
        # Where all tables have one format its numbers are constants: masks then fall away and stores are wide.
        DIM: tl.constexpr = ROW.dim
        dim = DIM
        if DIM == 0:
            dim = tl.load(dims_ptr + table)[:, None]
        STATE_OFFSET: tl.constexpr = ROW.state_offset
        state_offset = STATE_OFFSET
        if STATE_OFFSET < 0:
            state_offset = tl.load(state_offsets_ptr + table)[:, None]
        ROW_BYTES: tl.constexpr = ROW.row_bytes
        row_bytes = ROW_BYTES
        if ROW_BYTES == 0:
            row_bytes = tl.load(row_bytes_ptr + table)[:, None]
        _fill_weights(
            address, ids, table, wanted, dim, state_offset // ROW.weight_bytes, modes_ptr, params_ptr, table_keys_ptr,
            max_dim, MODES, ROW, CALLS,
        )  # fmt: skip
        _fill_tail(
            address, state_offset // 4, row_bytes // 4, tl.load(num_states_ptr + table),
            tl.load(state_values_ptr + table), wanted, max_tail, CALLS * 4,
        )  # fmt: skip
        begin += num_programs * TILE


@triton.jit(do_not_specialize=["chunk_shift", "num_rows", "max_dim", "max_tail"])
def _initialize_kernel(
    chunk_bases_ptr,
    modes_ptr,
    params_ptr,
    table_keys_ptr,
    rows_ptr,
    ids_ptr,
    tables_ptr,
    state_values_ptr,
    lengths_ptr,
    num_rows,
    dims_ptr,
    num_states_ptr,
    row_bytes_ptr,
    state_offsets_ptr,
    chunk_shift,
    max_dim,
    max_tail,
    COUNT: tl.constexpr,
    MODES: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    CALLS: tl.constexpr,
):
    if COUNT >= 0:
        num_rows = tl.load(lengths_ptr + COUNT) + 1
    initialize_rows(
        tl.program_id(0), tl.num_programs(0), num_rows, chunk_bases_ptr, modes_ptr, params_ptr, table_keys_ptr,
        rows_ptr, ids_ptr, tables_ptr, state_values_ptr, dims_ptr, num_states_ptr, row_bytes_ptr, state_offsets_ptr,
        chunk_shift, max_dim, max_tail, MODES, ROW, TILE, CALLS,
    )  # fmt: skip


@triton.jit
def _fill_weights(
    address, ids, table, wanted, dim, padded_dim, modes_ptr, params_ptr, table_keys_ptr, max_dim, MODES: tl.constexpr,
    ROW: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Write the weights of a tile of rows, and zeros up to the optimizer state."""
    weights_ptr = pointers(address, ROW.weight)[:, None]
    mode = tl.load(modes_ptr + table)
    params = params_ptr + table[:, None] * _NUM_PARAMS
    k0, k1 = words_of(tl.load(table_keys_ptr + table))
    c0, c1 = words_of(ids)
    for first_call in range(0, (max_dim + 3) // 4, CALLS):
        call = first_call + tl.arange(0, CALLS)
        zero = tl.zeros([address.shape[0], CALLS], tl.uint32)
        x0, x1, x2, x3 = philox4x32(
            k0[:, None] + zero, k1[:, None] + zero, c0[:, None] + zero, c1[:, None] + zero,
            call.to(tl.uint32)[None, :] + zero, zero,
        )  # fmt: skip
        column = (first_call * 4 + tl.arange(0, CALLS * 4))[None, :]
        # Outside of the branches: inside them, Triton 3.6 fails to compile some shapes (two calls, all modes).
        has_weight = column < dim
        written = column < padded_dim
        for m in tl.static_range(5):
            if (MODES >> m) & 1:
                mine = wanted & (mode == m)
                if tl.max(mine.to(tl.int32), 0) > 0:
                    values = _values(
                        x0, x1, x2, x3, ids[:, None], tl.load(params), tl.load(params + 1), tl.load(params + 2),
                        tl.load(params + 3), tl.load(params + 4), tl.load(params + 5), m,
                    )  # fmt: skip
                    values = _round(tl.where(has_weight, values, 0.0), ROW.weight)
                    tl.store(weights_ptr + column, values, mask=mine[:, None] & written)


@triton.jit
def _fill_tail(address, begin, end, num_states, value, wanted, max_tail, FLOATS: tl.constexpr):
    """Write floats ``begin`` to ``end`` of a tile of rows: the optimizer state, then zeros."""
    state_ptr = pointers(address, tl.float32)[:, None] + begin
    for first in range(0, max_tail, FLOATS):
        place = (first + tl.arange(0, FLOATS))[None, :]
        state = tl.where(place < num_states[:, None], value[:, None], 0.0)
        tl.store(state_ptr + place, state, mask=wanted[:, None] & (place < end - begin))
