"""The move of a table's index entries: into more buckets, or into the same ones without erased slots.

The number of buckets is multiplied by a power of two, or by 1. Bucket b of n is divided among b, b + n, ...; index
entries move, rows stay with their ids, and so do the row numbers that a step in flight has saved. Left-over rows and
new ones go to the empty slots. Erased slots become empty, but for those that a step still protects.
"""

import torch

from dynamicemb.capacity import MAX_GROUP_SLOTS
from dynamicemb.host_memory import require_host_memory
from dynamicemb.table.backends import Kernels
from dynamicemb.table.index import KEPT, OLDEST, Index
from dynamicemb.table.layout import DIGEST_EMPTY, DIGEST_ERASED
from dynamicemb.table.memory import allocate
from dynamicemb.table.rows import RowStore

# What growth takes for each slot of the larger table beside the old index: positions of entries and the like; measured.
GROWTH_BYTES_PER_SLOT = 20
# Arrays with an entry for each slot.
_COLUMNS = ("keys", "digests", "scores", "stamps", "rows", "tags")


def grow(index: Index, store: RowStore, kernels: Kernels, table: int, factor: int) -> None:
    """Multiply the buckets of a table.

    Args:
        index: the group's index; its arrays are replaced.
        store: the group's rows; gets a chunk for the new ones.
        kernels: of the device.
        table: which table.
        factor: a power of two.

    Raises:
        MemoryError, torch.OutOfMemoryError: nothing has changed.
        RuntimeError: the same from torch's allocator on the CPU, see ``is_out_of_memory``.

    Host sync: yes. Moves about 50 bytes of index for each slot of the group.
    """
    slots = index.slots_of(table)
    begin, end = slots.start, slots.stop
    added = (factor - 1) * (end - begin)
    if index.num_slots + added > MAX_GROUP_SLOTS or not store.can_add(table, added):
        raise MemoryError(f"the tables of one module have at most {MAX_GROUP_SLOTS} slots")
    kept = _kept(index, begin, end)
    if store.device.type == "cpu":
        # Rows that no id has had yet were allocated, but the system has not given their memory.
        unused = added + int((~kept).sum())
        require_host_memory(unused * store.formats[table].num_bytes(store.dtype) + 2 * index.num_bytes())
    grown = {name: _enlarged(getattr(index, name), begin, end, added) for name in _columns(index)}
    chunk = store.allocate_chunk(table, added)
    new = {name: column[begin : end + added] for name, column in grown.items()}
    fresh = torch.arange(store.next_row, store.next_row + added, dtype=torch.int32, device=store.device)
    _move(index, kernels, (begin, end), kept, new, fresh)
    # Only now does anything change: all memory has been found.
    _release(store.chunk_bases)
    store.add_chunk(table, chunk)
    for tensor in index.prepared.get(KEPT, ()):
        _release(tensor)
    for name, column in grown.items():
        _release(getattr(index, name))
        setattr(index, name, column)
    index.bucket_offsets[table + 1 :] += added // index.bucket_capacity
    index.entries_moved()


def rebuild(index: Index, kernels: Kernels, table: int) -> None:
    """Place every id of a table anew, so that erased slots become empty.

    Every bucket keeps its rows. Takes a copy of the table's part of the index.

    Host sync: yes. Not on the path of a training step.
    """
    slots = index.slots_of(table)
    begin, end = slots.start, slots.stop
    kept = _kept(index, begin, end)
    new = {name: torch.zeros_like(getattr(index, name)[begin:end]) for name in _columns(index)}
    _move(index, kernels, (begin, end), kept, new, torch.empty(0, dtype=torch.int32, device=kept.device))
    for name, column in new.items():
        getattr(index, name)[begin:end] = column
    index.entries_moved()


def _release(column: torch.Tensor) -> None:
    """Let the kernels of this stream end before the memory of an array goes to those of the stream that made it."""
    if column.is_cuda:
        column.record_stream(torch.cuda.current_stream(column.device))


def _columns(index: Index) -> list[str]:
    """Return the arrays with an entry for each slot; stamps have none where nothing needs them."""
    return [name for name in _COLUMNS if getattr(index, name).numel()]


def _kept(index: Index, begin: int, end: int) -> torch.Tensor:
    """Return which slots do not become empty: those of ids, and erased ones that a step protects; bool."""
    digests = index.digests[begin:end]
    protected = (digests == DIGEST_ERASED) & (index.tags[begin:end] >= index.clock[OLDEST])
    return (digests > DIGEST_ERASED) | protected


def _move(
    index: Index,
    kernels: Kernels,
    slots: tuple[int, int],
    kept: torch.Tensor,
    new: dict[str, torch.Tensor],
    fresh: torch.Tensor,
) -> None:
    """Fill the new arrays of a table.

    Args:
        index: the group's index; not changed.
        kernels: of the device.
        slots: the table's first one and the one after its last.
        kept: bool ``[S]``.
        new: zeros ``[f * S]`` by column.
        fresh: i32 ``[(f - 1) * S]``, new rows.
    """
    old = {name: getattr(index, name)[slice(*slots)] for name in new}
    targets = kernels.relocate(old["keys"], old["digests"], kept, new["digests"], index.bucket_capacity)
    # Positions found once: a mask as an index is searched every time.
    positions = kept.nonzero().flatten()
    targets = targets[positions]
    for name in new:
        if name != "digests":
            new[name].index_copy_(0, targets, old[name].index_select(0, positions))
    # Tables are large: what is not needed any more goes first.
    del positions, targets
    # Without growth as many slots of every bucket are empty as rows are left over, so the two lists run in parallel.
    empty = (new["digests"] == DIGEST_EMPTY).nonzero().flatten()
    new["rows"].index_copy_(0, empty, torch.cat([old["rows"].index_select(0, (~kept).nonzero().flatten()), fresh]))


def _enlarged(column: torch.Tensor, begin: int, end: int, added: int) -> torch.Tensor:
    """Return a copy of an array in which the entries ``begin..end`` are zero and followed by ``added`` zeros."""
    out = allocate(column.numel() + added, column.dtype, column.device, zero=True)
    out[:begin] = column[:begin]
    out[end + added :] = column[end:]
    return out
