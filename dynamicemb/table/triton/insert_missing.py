"""Insert the missing ids of a lookup in one kernel, which ends at once where nothing is missing.

Most steps of a training run miss little, so that the four kernels of an insert cost the host their launches and nothing
else. Here their work is done by one kernel, in which all programs wait for each other twice: until all leaders are
elected, and until all are placed. No more programs are launched than the device holds at once (a cooperative launch,
which the driver otherwise refuses), and no more take part than there are missing ids.

Such a kernel begins when the device has room for all of its programs at once. Beside kernels that wait for other ranks,
as NCCL's do, two ranks could then wait for each other for ever: where torch.distributed has several ranks, the four
kernels run.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dynamicemb.table.admission import Newcomers
from dynamicemb.table.index import KEPT, Index
from dynamicemb.table.rows import RowStore
from dynamicemb.table.triton.constants import ARRIVED, COUNT_NONE, LEADERS_LENGTH, MISSING_LENGTH
from dynamicemb.table.triton.elect import BLOCK, elect_missed
from dynamicemb.table.triton.initialize import initialize_rows
from dynamicemb.table.triton.initialize import tile_of as rows_of
from dynamicemb.table.triton.insert import insert_leaders, tile_of, warps_of
from dynamicemb.table.triton.launch import FULL_PROCESSOR, Launcher, programs_at_once
from dynamicemb.table.triton.missing import (
    LEADER_IDS,
    LEADER_ROWS,
    LEADER_TABLES,
    Missing,
    lengths_of,
    list_part,
)
from dynamicemb.table.triton.rows import row_shape
from dynamicemb.table.triton.score_function import compile_score
from dynamicemb.table.triton.settle import count_outcomes, settle_missed

# Programs of one warp that a multiprocessor holds at once if a thread has FULL_PROCESSOR registers. Normal values take
# twice as many registers, and half as many programs.
_PROGRAMS = 32
_NORMAL_MODES = 0b11


class _Rule(NamedTuple):
    """What the kernel is compiled for, beside the rows and the score function.

    Attributes:
        bucket: slots of a bucket.
        tile: how many of them a program looks at together.
        counting: COUNT_*.
        stamps: touches are stamped with their time.
        frequencies: occurrences count as often as they say.
        modes: initializers of the tables, one bit each.
        rows: rows that a program fills at a time.
        calls: calls of Philox for a row.
        block: missing occurrences that a program takes at a time.
    """

    bucket: int
    tile: int
    counting: int
    stamps: bool
    frequencies: bool
    modes: int
    rows: int
    calls: int
    block: int


def insert_missing(
    index: Index,
    store: RowStore,
    newcomers: Newcomers,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    frequencies: torch.Tensor | None,
    rows: torch.Tensor,
    missing: Missing,
) -> bool:
    """Do what ``elect``, ``insert``, ``initialize_leaders`` and ``settle`` do one after the other, if that may be.

    Args:
        index: the group's index, in which no id expires.
        store: the group's rows.
        newcomers: first values; all ids are admitted.
        ids: i64 ``[N]``, N > 0.
        table_ranges: i64 ``[T+1]``.
        frequencies: i64 ``[N]`` or None; only tables that count read it.
        rows: i32 ``[N]``, -1 for missing occurrences, which become rows, or stay -1 where a bucket is full.
        missing: the scratch memory, with the missing occurrences noted; not ``ordered``.

    Returns:
        Whether it was done. It was not, and nothing was launched, where there are several ranks, where buckets are so
        large that ``insert`` takes several warps for each, where initializers do not know their modes, and where a CUDA
        graph captures the first lookup of its kind: what is prepared for it must be there also before the graph is
        replayed.

    Host sync: none; capturable. Bytes moved: those of the four kernels, of which ``settle`` reads missing occurrences
    only.
    """
    initializers = newcomers.initializers
    if (
        not initializers.mode_mask
        or warps_of(index) > 1
        or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    ):
        return False
    key = ("insert_missing", frequencies is not None, initializers.mode_mask)
    prepared = index.prepared.get(key)
    if prepared is None or prepared[0] is not store.dims:
        if store.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        launcher = _prepare(index, store, frequencies is not None, initializers.mode_mask)
        prepared = index.prepared[key] = (store.dims, launcher)
    launcher = prepared[1]
    launcher(
        min(ids.numel(), launcher.fill),
        (ids, table_ranges, ids if frequencies is None else frequencies, rows, missing.claims, missing.amounts,
         missing.lists, store.chunk_bases, initializers.modes, initializers.params, initializers.keys,
         newcomers.state_values),
        (missing.num_claims - 1, missing.num_lists, missing.stride),
    )  # fmt: skip
    return True


def _prepare(index: Index, store: RowStore, has_frequencies: bool, modes: int) -> Launcher:
    """Prepare launches for an index and its store."""
    shape, device = row_shape(store), store.device
    rows_each, calls = rows_of(shape)
    arrays = (
        index.keys, index.digests, index.scores, index.rows, index.tags, index.score_values, index.strategies,
        index.times(), index.clock, index.bucket_offsets, index.tallies,
    )  # fmt: skip
    formats = (store.dims, store.num_states, store.row_bytes, store.state_offsets)
    # Made on the device one by one: a list of the host would be a copy, for which the host waits.
    addresses = torch.empty(len(arrays) + len(formats), dtype=torch.int64, device=device)
    for number, array in enumerate((*arrays, *formats)):
        addresses[number].fill_(array.data_ptr())
    rule = _Rule(
        index.bucket_capacity, tile_of(index), index.counting, index.has_stamps, has_frequencies, modes, rows_each,
        calls, BLOCK,
    )  # fmt: skip
    function = None if index.score_function is None else compile_score(index.score_function)
    factor = 2 if modes & _NORMAL_MODES else 1
    stays = (addresses, store.chunk_shift, shape.max_dim, shape.max_tail)
    launcher = Launcher(
        device, _insert_missing_kernel, {"RULE": rule, "ROW": shape, "FUNCTION": function}, stays,
        num_warps=1, enable_fp_fusion=False, maxnreg=factor * FULL_PROCESSOR, launch_cooperative_grid=True,
    )  # fmt: skip
    index.prepared.setdefault(KEPT, []).append(addresses)
    launcher.fill = programs_at_once(device, _PROGRAMS // factor)
    return launcher


@triton.jit
def _array(addresses_ptr, NUMBER: tl.constexpr, DTYPE: tl.constexpr):
    """Return a pointer to the array with this number; all begin at multiples of 16 bytes."""
    return tl.multiple_of(tl.load(addresses_ptr + NUMBER).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _wait_for_all(lists_ptr, num_lists, last):
    """Wait until as many programs have arrived, and see what they have written.

    ``last`` is one less than their number; programs that arrive at a second place count on.
    """
    arrived_ptr = lengths_of(lists_ptr, num_lists) + ARRIVED
    # All threads of this program have written what they write.
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    arrived = tl.load(arrived_ptr, volatile=True)
    while arrived < last:
        # Without a rest, thousands of programs that look keep others from arriving.
        tl.inline_asm_elementwise(
            "nanosleep.u32 100; mov.u32 $0, $1;", "=r,r", [arrived], dtype=tl.int32, is_pure=False, pack=1
        )
        arrived = tl.load(arrived_ptr, volatile=True)
    tl.atomic_add(arrived_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["claims_mask", "num_lists", "stride", "chunk_shift", "max_dim", "max_tail"])
def _insert_missing_kernel(
    ids_ptr,
    table_ranges_ptr,
    frequencies_ptr,
    rows_ptr,
    claims_ptr,
    amounts_ptr,
    lists_ptr,
    chunk_bases_ptr,
    modes_ptr,
    params_ptr,
    table_keys_ptr,
    state_values_ptr,
    claims_mask,
    num_lists,
    stride,
    addresses_ptr,
    chunk_shift,
    max_dim,
    max_tail,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    FUNCTION: tl.constexpr,
):
    num_missing = tl.load(lengths_of(lists_ptr, num_lists) + MISSING_LENGTH) + 1
    program = tl.program_id(0)
    # Leaders and lists are no more than missing occurrences.
    num_programs = tl.minimum(tl.num_programs(0), num_missing)
    if program < num_programs:
        score_values_ptr = _array(addresses_ptr, 5, tl.int64)
        strategies_ptr = _array(addresses_ptr, 6, tl.int32)
        clock_ptr = _array(addresses_ptr, 8, tl.int64)
        tallies_ptr = _array(addresses_ptr, 10, tl.int64)
        elect_missed(
            program, num_programs, num_missing, ids_ptr, table_ranges_ptr, frequencies_ptr, rows_ptr, claims_ptr,
            amounts_ptr, lists_ptr, claims_mask, num_lists, stride, _array(addresses_ptr, 9, tl.int64),
            RULE.counting != COUNT_NONE, RULE.frequencies, False, True, RULE.block,
        )  # fmt: skip
        _wait_for_all(lists_ptr, num_lists, num_programs - 1)
        insert_leaders(
            program, num_programs, rows_ptr, amounts_ptr, lists_ptr, num_lists, stride,
            _array(addresses_ptr, 0, tl.int64), _array(addresses_ptr, 1, tl.uint8), _array(addresses_ptr, 2, tl.int64),
            _array(addresses_ptr, 3, tl.int32), _array(addresses_ptr, 4, tl.int32), score_values_ptr, strategies_ptr,
            _array(addresses_ptr, 7, tl.int64), clock_ptr, clock_ptr, RULE.bucket, RULE.tile, RULE.counting,
            RULE.stamps, False, FUNCTION,
        )  # fmt: skip
        _wait_for_all(lists_ptr, num_lists, 2 * num_programs - 1)
        num_leaders = tl.load(lengths_of(lists_ptr, num_lists) + LEADERS_LENGTH) + 1
        initialize_rows(
            program, num_programs, num_leaders, chunk_bases_ptr, modes_ptr, params_ptr, table_keys_ptr,
            list_part(lists_ptr, num_lists, stride, LEADER_ROWS), list_part(lists_ptr, num_lists, stride, LEADER_IDS),
            list_part(lists_ptr, num_lists, stride, LEADER_TABLES), state_values_ptr,
            _array(addresses_ptr, 11, tl.int32), _array(addresses_ptr, 12, tl.int32),
            _array(addresses_ptr, 13, tl.int64), _array(addresses_ptr, 14, tl.int64), chunk_shift, max_dim, max_tail,
            RULE.modes, ROW, RULE.rows, RULE.calls,
        )  # fmt: skip
        settle_missed(
            program, num_programs, num_missing, rows_ptr, claims_ptr, lists_ptr, num_lists, stride, tallies_ptr,
            RULE.block,
        )  # fmt: skip
        count_outcomes(program, num_programs, lists_ptr, num_lists, stride, tallies_ptr, False, RULE.block)
