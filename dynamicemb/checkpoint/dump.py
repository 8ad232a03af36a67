"""Write the tables of a model to disk, every rank its own."""

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from tqdm import tqdm

from dynamicemb.checkpoint.agreement import check_agreement, check_placement, describe, shapes
from dynamicemb.checkpoint.disk.io import DISK, AnyPath, FileSystem, as_chain, as_string
from dynamicemb.checkpoint.flags import check_flags
from dynamicemb.checkpoint.place import Target
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.ranks_apart import apart
from dynamicemb.checkpoint.tables import Table, here, tables_of_model
from dynamicemb.checkpoint.writing.background import DumpHandle, settle, start
from dynamicemb.checkpoint.writing.chain import marks_of, open_chain
from dynamicemb.checkpoint.writing.contents import Contents, Selected, copied, drained, live, num_copied_bytes
from dynamicemb.checkpoint.writing.files import Writing
from dynamicemb.host_memory import available_host_memory
from dynamicemb.table.touched import Mark
from dynamicemb.warn import warn

logger = logging.getLogger(__name__)

# Threads that dump to one place would write into one folder. Several ranks cannot hold it, since each may let another
# thread go first; but over one process group only one thread may dump, or do anything, at a time.
_writing_alone = threading.RLock()


def DynamicEmbDump(
    path: AnyPath,
    model: nn.Module,
    table_names: Mapping[str, list[str]] | None = None,
    optim: bool = False,
    counter: bool = False,
    pg: Any = None,
    allow_overwrite: bool = False,
    base: AnyPath | Sequence[AnyPath] | None = None,
    blocking: bool = True,
) -> DumpHandle | None:
    """Write the dynamic tables of a model into a folder; a collective on the ranks of ``pg``.

    The folder appears, or takes the place of the dump before, only when everything is on the disk. Call it between two
    steps, on all ranks and with the same arguments: where one does not call, the others wait. A model without dynamic
    tables gives a warning, and no folder.

    Args:
        path: the folder, on a file system that all ranks share, and not inside another dump. A URL is not understood.
        model: the model; its collections become sub-folders named by their path, ``model.a.b``.
        table_names: tables to write, per collection path, as in ``{"model.ebc": ["user"]}``; all of a collection that
            is not named.
        optim: whether to write optimizer state, which a load with ``optim=True`` wants.
        counter: whether to write admission counters; an increment has all of them.
        pg: the ranks over which the tables are sharded; None is all.
        allow_overwrite: whether a dump may be replaced that is there already.
        base: the full dump, or the list of it and its increments so far, that these tables were dumped to or loaded
            from last: only what changed since is written, and which ids are gone. Load it with the list of all. None,
            or an empty list: a full dump.
        blocking: whether to return when everything is on the disk. False copies the rows to host memory, which must
            have room for them, and returns; a thread writes the copy while training goes on.

    Returns:
        None, or with ``blocking=False`` a handle: ``wait()`` on it returns, or raises, as a blocking dump does. Errors
        of disk, path and ``base`` come from there. The next dump waits for the one before.

    Raises:
        DynamicEmbError: ``base`` is not what the tables were dumped to or loaded from last.
        FileExistsError: the folder is not empty, and ``allow_overwrite`` is False or it holds other files.
        MemoryError: ``blocking=False``, and the host has no room for the copy.
        OSError: the disk failed; what was there before is still there. A failure of one rank raises on all.
        ValueError: ``table_names`` has a name that is not in the model.
    """
    ranks = Ranks(pg)
    request, tables = ranks.each(
        lambda: (
            DumpRequest(as_string(path), optim, counter, allow_overwrite, as_chain(base), blocking),
            tables_of_model(model, table_names, ranks),
        )
    )
    return dump_tables(request, tables, ranks)


@dataclass(frozen=True)
class DumpRequest:
    """What to write where; see ``DynamicEmbDump``."""

    path: str
    optim: bool = False
    counter: bool = False
    allow_overwrite: bool = False
    base: tuple[str, ...] = ()
    blocking: bool = True

    def __post_init__(self) -> None:
        check_flags(self)


def dump_tables(request: DumpRequest, tables: list[Table], ranks: Ranks, disk: FileSystem = DISK) -> DumpHandle | None:
    """Write tables, in the same order on all ranks; returns a handle if the request is not to block."""
    # Warnings that are errors are those of all ranks.
    ranks.each(settle)
    if any(ranks.gather(bool(tables))):
        _check(tables, request, ranks)
        marks = ranks.each(lambda: marks_of(here(tables), request.base))
        if not request.blocking:
            # The thread must not ask what the working folder, or a link, is by then.
            request = ranks.each(lambda: _resolved(request, disk))
            return _write_in_background(_dump_of(request, tables, marks, ranks, disk))
        _write_now(_dump_of(request, tables, marks, ranks, disk))
    return None if request.blocking else start(request.path, disk, 0, lambda advance: None)


def _resolved(request: DumpRequest, disk: FileSystem) -> DumpRequest:
    """Return a request with absolute paths behind links."""
    base = tuple(map(disk.real_path, request.base))
    return replace(request, path=disk.real_path(request.path), base=base)


def _check(tables: list[Table], request: DumpRequest, ranks: Ranks) -> None:
    """Refuse what cannot be dumped, before anything is written; a collective."""
    answers = ranks.together(lambda: (describe(tables), request))
    descriptions = [described for described, _ in answers]

    def check() -> None:
        check_agreement(descriptions, [of_rank for _, of_rank in answers], "dump")
        for table in tables:
            check_placement(table, ranks)
        counted = [shape is not None and shape.has_counter for shape in shapes(descriptions)]
        if request.counter and ranks.rank == 0 and not any(counted):
            warn("counter=True has no effect: no table has an admission counter")

    ranks.each(check)


@dataclass(frozen=True)
class _Dump:
    """A dump that is to be written.

    Attributes:
        request: what and where.
        folders: of all tables.
        tables: those of which this rank has a part.
        marks: of an increment, since when each table may differ from the last dump; of a full dump none.
        ranks: who dumps; a thread has its own connections.
        disk: the file system.
        dump_id: random, the same on all ranks.
        now: Unix nanoseconds by which ids are there or not, the same on all ranks.
        time_shift: by how much times in memory are later than those of the chain, which a load may have moved.
    """

    request: DumpRequest
    folders: list[str]
    tables: list[Table]
    marks: list[Mark]
    ranks: Ranks
    disk: FileSystem
    dump_id: str
    now: int
    time_shift: int

    @property
    def selected(self) -> list[Selected]:
        """What of each table is written."""
        first_steps = [mark.first_step for mark in self.marks] or [0] * len(self.tables)
        request = self.request
        return [Selected(request.optim, request.counter, first, bool(request.base)) for first in first_steps]

    def write(self, ranks: Ranks, contents: Iterator[Contents], advance: Callable[[int], object]) -> bool:
        """Write the contents of the tables; returns whether a dump was replaced. Nothing else touches the disk."""
        with _writing_alone if ranks.world_size == 1 else nullcontext():
            return self._write(ranks, contents, advance)

    def _write(self, ranks: Ranks, contents: Iterator[Contents], advance: Callable[[int], object]) -> bool:
        request = self.request
        chain = ranks.each(lambda: open_chain(self.tables, self.marks, request.base, request.optim, self.disk))
        target = ranks.each(lambda: _target(request, self.disk))
        replaced = ranks.on_first(lambda: target.prepare(self.folders, request.allow_overwrite))
        try:
            clock = self.now - self.time_shift
            writing = Writing(target, chain, self.dump_id, clock, ranks, self.disk, advance)
            parts = ranks.together(lambda: writing.write(contents))
            ranks.on_first(lambda: writing.commit(parts))
        except BaseException:
            if ranks.rank == 0:
                target.abort()
            raise
        return replaced

    def mark(self, next_steps: list[int]) -> list[Mark]:
        """Let increments continue this dump."""
        marks = [Mark(self.dump_id, step, self.time_shift) for step in next_steps]
        for table, mark in zip(self.tables, marks, strict=True):
            table.group.marks[table.index] = mark
        return marks


def _dump_of(request: DumpRequest, tables: list[Table], marks: list[Mark], ranks: Ranks, disk: FileSystem) -> _Dump:
    own, folders = here(tables), sorted({table.folder for table in tables})
    shift = marks[0].time_shift if marks else None

    def state() -> tuple[int, str, int | None]:
        return max((observed_time(table) for table in own), default=0), uuid.uuid4().hex, shift

    found = ranks.together(state)
    shifts = [of_rank for _, _, of_rank in found if of_rank is not None]
    now = max(of_rank for of_rank, _, _ in found)
    return _Dump(request, folders, own, marks, ranks, disk, found[0][1], now, shifts[0] if shifts else 0)


def observed_time(table: Table) -> int:
    """Return the present time, by which ids of the table are expired or not for the whole of a dump."""
    table.group.observe_time()
    return table.group.now()


def _target(request: DumpRequest, disk: FileSystem) -> Target:
    target = Target(request.path, disk)
    if target.path in map(disk.real_path, request.base):
        raise ValueError(f"path {request.path!r} is part of base: an increment needs a folder of its own")
    return target


def _write_now(dump: _Dump) -> None:
    next_steps: list[int] = []

    def contents() -> Iterator[Contents]:
        for table, selected in zip(dump.tables, dump.selected, strict=True):
            of_table = live(table, selected)
            next_steps.append(of_table.next_step)
            yield of_table

    rows = sum(table.group.size(table.index) for table in dump.tables)
    # None: only where somebody watches.
    disable = None if dump.ranks.rank == 0 else True
    with tqdm(total=rows, desc="dump", unit=" rows", disable=disable) as progress:
        replaced = dump.write(dump.ranks, contents(), progress.update)
    dump.mark(next_steps)
    _warn_if(replaced, dump)


def _warn_if(replaced: bool, dump: _Dump) -> None:
    if replaced and dump.ranks.rank == 0:
        warn(f"the dump in {dump.request.path!r} is replaced")


def _write_in_background(dump: _Dump) -> DumpHandle:
    """Copy the tables and start the thread that writes the copy."""
    ranks = apart(dump.ranks)
    _require_memory(dump)
    copies = dump.ranks.each(lambda: copied(dump.tables, dump.selected))
    num_rows = sum(copy.num_rows for copy in copies)
    before = [table.group.marks.get(table.index) for table in dump.tables]
    # Already now: a load meanwhile takes them away, and an increment waits until this dump is complete.
    marks = dump.mark([copy.next_step for copy in copies])
    waiting = drained(copies)
    del copies
    all_started, answered = False, threading.Event()

    def work(advance: Callable[[int], None]) -> None:
        try:
            answered.wait()
            if not all_started:
                return
            _warn_if(dump.write(ranks, waiting, advance), dump)
        except BaseException:
            _restore_marks(dump.tables, marks, before)
            raise
        finally:
            # What an error left.
            for copy in waiting:
                copy.close()

    try:
        handle = dump.ranks.each(lambda: start(dump.request.path, dump.disk, num_rows, work))
        all_started = True
        return handle
    except BaseException:
        _restore_marks(dump.tables, marks, before)
        raise
    finally:
        # A thread would wait for the others in vain if one rank has none.
        answered.set()


def _restore_marks(tables: list[Table], marks: list[Mark], before: list[Mark | None]) -> None:
    """Give tables the marks that they had, unless a load has changed them since."""
    for table, mark, old in zip(tables, marks, before, strict=True):
        with table.group.turn():
            if table.group.marks.get(table.index) is not mark:
                continue
            del table.group.marks[table.index]
            if old is not None:
                table.group.marks[table.index] = old


def _require_memory(dump: _Dump) -> None:
    """Check that the host has room for the copies of all its ranks.

    Raises:
        MemoryError: it has not.
    """
    wanted = dump.ranks.each(lambda: sum(map(num_copied_bytes, dump.tables, dump.selected)))
    host = socket.gethostname()
    here = [number for name, number in dump.ranks.gather((host, wanted)) if name == host]

    def check() -> None:
        free = available_host_memory()
        if free is not None and sum(here) > free:
            raise MemoryError(
                f"blocking=False copies the tables to host memory first: that wants {sum(here)} bytes on {host} "
                f"({len(here)} ranks), free are {free}; dump with blocking=True"
            )
        logger.info("a dump in the background copies %d bytes to host memory, %s are free", wanted, free)

    dump.ranks.each(check)
