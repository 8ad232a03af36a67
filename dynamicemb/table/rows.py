"""Value rows of a group's tables: one allocation per chunk, found by address.

A row holds ``D`` weights in the table's dtype, padding to 4 bytes, the optimizer state in fp32, and padding to 16
bytes. Row ids are unique in the group. Kernels translate an id to an address with a small table of chunk bases::

    address(row, t) = chunk_bases[row >> chunk_shift] + (row & (1 << chunk_shift) - 1) * row_bytes[t]

Example: two tables of 48 and 16 rows give ``chunk_shift = 6``; table 0 owns rows 0..47, table 1 rows 64..79. Row ids
48..63 do not exist: an entry of the chunk table need not be full, and only rows that exist take memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynamicemb.dynamicemb_config import row_bytes as bytes_of_row
from dynamicemb.table.index import unshared
from dynamicemb.table.memory import allocate

MAX_ROWS = 2**31 - 1
# Where a table has no limit, at most this share of all row ids is lost to entries that are not full.
_LOST_SHARE = 32


@dataclass(frozen=True)
class RowFormat:
    """What a row of one table holds: ``dim`` weights and ``num_state`` fp32 optimizer values."""

    dim: int
    num_state: int

    def state_offset(self, dtype: torch.dtype) -> int:
        """Return the bytes from the row's start to its optimizer state."""
        return (self.dim * dtype.itemsize + 3) // 4 * 4

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a row, a multiple of 16."""
        return bytes_of_row(dtype, self.dim, self.num_state)


class RowStore:
    """Rows of the tables of one group on one device.

    Attributes:
        dtype: dtype of the weights: float32, float16 or bfloat16.
        formats: one ``RowFormat`` per table.
        dims: i32 ``[T]``.
        num_states: i32 ``[T]``.
        row_bytes: i64 ``[T]``.
        state_offsets: i64 ``[T]``, bytes from a row's start to its state.
        chunk_bases: i64 ``[C]``, addresses.
        chunk_shift: log2 of the row ids behind one entry of ``chunk_bases``.
        chunks: the memory itself, u8, kept alive here; one per table, and one more each time a table grows.
        chunk_tables: the table of each chunk.
        first_rows: the first row id of each table's first chunk.
        sizes: the different sizes of rows in bytes, ascending.
    """

    def __init__(
        self,
        capacities: list[int],
        formats: list[RowFormat],
        dtype: torch.dtype,
        device: torch.device,
        max_capacities: Sequence[int | None] | None = None,
    ):
        """Allocate rows for every table; their contents are undefined until initialised.

        Args:
            capacities: rows of each table.
            formats: format of each table's rows.
            dtype: dtype of the weights.
            device: where the rows live.
            max_capacities: rows to which each table may grow, each None where there is no limit; None: none grows.

        Raises:
            ValueError: the row ids of the group do not fit in 31 bits.
        """
        self._describe(formats, dtype, device, _chunk_shift(capacities, max_capacities or capacities))
        sizes = [rows * row_format.num_bytes(dtype) for rows, row_format in zip(capacities, formats, strict=True)]
        self._take([allocate(size, torch.uint8, device) for size in sizes], list(range(len(formats))))

    @classmethod
    def attach(
        cls,
        chunks: list[torch.Tensor],
        formats: list[RowFormat],
        dtype: torch.dtype,
        chunk_shift: int,
        chunk_tables: list[int] | None = None,
    ) -> "RowStore":
        """Return a store over memory that exists, as another store's ``chunks``; None is one chunk per table."""
        store = cls.__new__(cls)
        store._describe(formats, dtype, chunks[0].device, chunk_shift)
        store._take(chunks, list(range(len(formats))) if chunk_tables is None else list(chunk_tables))
        return store

    def _describe(self, formats: list[RowFormat], dtype: torch.dtype, device: torch.device, chunk_shift: int) -> None:
        self.dtype = dtype
        self.device = device
        self.formats = formats
        # What a backend has prepared for launches; nothing of it depends on the chunks, which may become more.
        self.prepared: dict[Any, Any] = {}
        self.chunk_shift = chunk_shift
        self.dims = torch.tensor([f.dim for f in formats], dtype=torch.int32, device=device)
        self.num_states = torch.tensor([f.num_state for f in formats], dtype=torch.int32, device=device)
        row_bytes = [f.num_bytes(dtype) for f in formats]
        self.sizes = sorted(set(row_bytes))
        self.row_bytes = torch.tensor(row_bytes, dtype=torch.int64, device=device)
        self.state_offsets = torch.tensor([f.state_offset(dtype) for f in formats], dtype=torch.int64, device=device)

    def view(self, chunk_bases: torch.Tensor) -> "RowStore":
        """Return a store of the same rows that finds them, and others, by ``chunk_bases``; for the time of a lookup."""
        view = RowStore.__new__(RowStore)
        view.__dict__.update(self.__dict__, chunk_bases=chunk_bases)
        return view

    def _take(self, chunks: list[torch.Tensor], tables: list[int]) -> None:
        """Number the rows of each chunk and list the bases that cover them."""
        self.chunks: list[torch.Tensor] = []
        self.chunk_tables: list[int] = []
        self.first_rows: list[int] = []
        self._bases: list[int] = []
        # Of each chunk: its first row id and how many there are.
        self._spans: list[tuple[int, int]] = []
        for chunk, table in zip(chunks, tables, strict=True):
            self._append(chunk, table)
        self.chunk_bases = torch.tensor(self._bases, dtype=torch.int64, device=self.device)

    def _append(self, chunk: torch.Tensor, table: int) -> None:
        num_bytes = self.formats[table].num_bytes(self.dtype)
        first_row = self.next_row
        bases = range(chunk.data_ptr(), chunk.data_ptr() + chunk.numel(), num_bytes << self.chunk_shift)
        if (len(self._bases) + len(bases)) << self.chunk_shift > MAX_ROWS:
            raise ValueError(
                f"capacity: the tables of one group need more than {MAX_ROWS} row ids; "
                "lower max_capacity or give the tables to several modules"
            )
        self._bases += bases
        self._spans.append((first_row, chunk.numel() // num_bytes))
        self.chunks.append(chunk)
        self.chunk_tables.append(table)
        if table == len(self.first_rows):
            self.first_rows.append(first_row)

    def can_add(self, table: int, num_rows: int) -> bool:
        """Return whether row ids are left for so many more rows of a table."""
        return (len(self._bases) + -(-num_rows >> self.chunk_shift)) << self.chunk_shift <= MAX_ROWS

    def allocate_chunk(self, table: int, num_rows: int) -> torch.Tensor:
        """Return memory for more rows of a table, for ``add_chunk``; changes nothing.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is none.
        """
        return allocate(num_rows * self.formats[table].num_bytes(self.dtype), torch.uint8, self.device)

    @property
    def next_row(self) -> int:
        """The first row id of the next chunk; the others follow it."""
        return len(self._bases) << self.chunk_shift

    def add_chunk(self, table: int, chunk: torch.Tensor) -> None:
        """Give a table the rows of a chunk."""
        self._append(chunk, table)
        self.chunk_bases = torch.tensor(self._bases, dtype=torch.int64, device=self.device)

    def row_ids(self, table: int) -> torch.Tensor:
        """Return the ids of a table's rows, i64 ``[capacity]``, ascending, on the CPU."""
        spans = [span for span, owner in zip(self._spans, self.chunk_tables, strict=True) if owner == table]
        return torch.cat([torch.arange(first, first + number, device="cpu") for first, number in spans])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["chunk_bases"], state["prepared"]
        state["chunks"] = [unshared(chunk) for chunk in self.chunks]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy lives elsewhere: take aligned memory and find every base again.
        self.__dict__.update(state, prepared={})
        chunks = [torch.as_tensor(chunk) for chunk in self.chunks]
        copies = [allocate(chunk.numel(), torch.uint8, self.device).copy_(chunk) for chunk in chunks]
        self._take(copies, self.chunk_tables)

    @property
    def num_tables(self) -> int:
        """T."""
        return len(self.formats)

    def num_bytes(self) -> int:
        """Return the bytes allocated for rows."""
        return sum(chunk.untyped_storage().nbytes() for chunk in self.chunks)


def _chunk_shift(capacities: list[int], max_capacities: Sequence[int | None]) -> int:
    """Choose the largest chunk that covers the largest table and still gives every chunk to come its own entries.

    Tables without a limit take what row ids there are, in whichever shares. What they may lose is bounded instead: each
    doubling ends in an entry that is not full, and a table doubles at most until it has all row ids.

    Example: ten tables of 2^20 rows without a limit double 11 times at most, 120 chunks in all; with 2^19 rows to an
    entry they lose fewer than 2^26 of the 2^31 row ids.
    """
    shift = max(4, (max(capacities) - 1).bit_length())
    limited = [(now, most) for now, most in zip(capacities, max_capacities, strict=True) if most is not None]
    unlimited = [now for now, most in zip(capacities, max_capacities, strict=True) if most is None]
    chunks = sum(1 + (MAX_ROWS // now).bit_length() for now in unlimited)
    while shift > 4 and (_num_entries(limited, shift) << shift > MAX_ROWS or chunks << shift > MAX_ROWS // _LOST_SHARE):
        shift -= 1
    return shift


def _num_entries(capacities: list[tuple[int, int]], shift: int) -> int:
    """Return how many entries of the chunk table fully grown tables need, if each grows by doubling.

    Args:
        capacities: rows of each table now and at most.
        shift: log2 of the rows of an entry.
    """
    entries = 0
    for capacity, most in capacities:
        entries += -(-capacity >> shift)
        while capacity < most:
            entries += -(-capacity >> shift)
            capacity *= 2
    return entries
