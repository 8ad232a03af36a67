"""Rows of one lookup for ids that own none: a chunk behind all others, so that reading needs no second path.

An id that was not admitted reads a value of its own in this step. The value is written to a staged row, whose number
lies beyond the rows of the tables; a copy of the chunk table says where it is. ``gather``, ``pool`` and the gradient of
pooling weights follow it as they follow any row. When the lookup is over the memory goes back to its allocator.

Staged row ``i`` of table ``t`` has the number ``first_row + t * stride + i``. What ``i`` counts is up to the caller, as
long as those of a table lie in its part of ``ranges``: tables whose rows differ in size then never overlap::

    address = memory + sum of the sizes of the parts before + (i - ranges[t]) * row_bytes[t]
"""

from dataclasses import dataclass

import torch

from dynamicemb.table.memory import allocate
from dynamicemb.table.rows import MAX_ROWS, RowStore


@dataclass(frozen=True)
class Stage:
    """Memory for the staged rows of one lookup.

    Attributes:
        store: rows of the tables, and the staged ones once ``bases`` are written; a view, its memory is the tables'.
        memory: u8, the staged rows.
        first_row: see above.
        stride: row numbers from one table's staged rows to the next; 0 where the rows of all tables are equally large.
        num_entries: entries of the chunk table for each table, or for all if ``stride`` is 0.
    """

    store: RowStore
    memory: torch.Tensor
    first_row: int
    stride: int
    num_entries: int

    @classmethod
    def allocate(cls, store: RowStore, num_rows: int) -> "Stage":
        """Allocate ``num_rows`` rows of the largest size; the new entries of ``store.chunk_bases`` are not written.

        Raises:
            ValueError: there are not so many row numbers left.
        """
        num_entries = max(1, -(-num_rows >> store.chunk_shift))
        stride = num_entries << store.chunk_shift if len(store.sizes) > 1 else 0
        num_parts = store.num_tables if stride else 1
        first_row = store.next_row
        if first_row + num_parts * (num_entries << store.chunk_shift) > MAX_ROWS:
            raise ValueError(
                f"admission: a lookup of up to {num_rows} new ids needs more row numbers than the {MAX_ROWS} of a "
                "module; lower max_capacity or give the tables to several modules"
            )
        num_bases = (first_row >> store.chunk_shift) + num_parts * num_entries
        view = store.view(torch.empty(num_bases, dtype=torch.int64, device=store.device))
        memory = allocate(num_rows * store.sizes[-1], torch.uint8, store.device)
        return cls(view, memory, first_row, stride, num_entries)

    def write_bases(self, store: RowStore, ranges: torch.Tensor) -> "Stage":
        """Write the chunk table; on a GPU a kernel of the lookup does it.

        Args:
            store: rows of the tables.
            ranges: i64 ``[T+1]``, the part of each table.
        """
        row_bytes = store.row_bytes
        sizes = ranges.diff() * row_bytes
        starts = self.memory.data_ptr() + sizes.cumsum(0) - sizes - ranges[:-1] * row_bytes
        if not self.stride:
            starts, row_bytes = starts[:1], row_bytes[:1]
        within = torch.arange(self.num_entries, device=store.device) << store.chunk_shift
        entries = starts[:, None] + within * row_bytes[:, None]
        torch.cat([store.chunk_bases, entries.flatten()], out=self.store.chunk_bases)
        return self

    def rows(self, tables: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the row numbers, i32 ``[M]``, of staged rows ``places`` i64 ``[M]`` of ``tables`` ``[M]``."""
        return (self.first_row + tables * self.stride + places).to(torch.int32)


@dataclass(frozen=True)
class Staged:
    """What a lookup reads where ids were not admitted.

    Attributes:
        store: rows of the tables and staged rows.
        rows: i32 ``[N]``, the row of every occurrence, staged ones included.
        first_row: rows from here on are staged.
        memory: keeps the staged rows alive.
    """

    store: RowStore
    rows: torch.Tensor
    first_row: int
    memory: torch.Tensor
