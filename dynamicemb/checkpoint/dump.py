"""Write the tables of a model to disk, every rank its own."""

import json
import uuid
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from dynamicemb.checkpoint.format import (
    COUNTER_FREQUENCIES,
    COUNTER_KEYS,
    KEYS,
    OPT_VALUES,
    SCORES,
    TOMBSTONES,
    VALUES,
    FileEntry,
    Manifest,
    TableEntry,
    inside,
    meta_file,
    rank_file,
)
from dynamicemb.checkpoint.increment import Chain, open_chain
from dynamicemb.checkpoint.io import DISK, AnyPath, FileSystem, as_string, join
from dynamicemb.checkpoint.own_counter import dump_own
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.read import FileReader
from dynamicemb.checkpoint.sources import Table, check_routing_known, describe, tables_of_model
from dynamicemb.checkpoint.target import Target
from dynamicemb.checkpoint.writer import FileWriter
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.errors import DynamicEmbError
from dynamicemb.score_strategy import DynamicEmbScoreStrategy, get_evict_strategy, score_dump_permutation
from dynamicemb.table.index import UPDATES
from dynamicemb.table.touched import Mark, next_change, slot_ranges, touched_slots
from dynamicemb.version import __version__

# Rows are copied in batches of at most so many bytes, so that a dump needs little memory beside the table.
_BATCH_BYTES = 2**24


def DynamicEmbDump(
    path: AnyPath,
    model: nn.Module,
    table_names: Mapping[str, list[str]] | None = None,
    optim: bool = False,
    counter: bool = False,
    pg: Any = None,
    allow_overwrite: bool = False,
    base: AnyPath | Sequence[AnyPath] | None = None,
) -> None:
    """Write the dynamic tables of a model into a folder; a collective on the ranks of ``pg``.

    The folder appears, or takes the place of the dump before, only when everything is on the disk. Call it between two
    steps.

    Args:
        path: the folder, on a file system that all ranks share.
        model: the model; its collections become sub-folders named by their path, ``model.a.b``.
        table_names: tables to write, per collection path; all of a collection that is not named.
        optim: whether to write optimizer state.
        counter: whether to write admission counters; an increment has all of them.
        pg: the ranks over which the tables are sharded; None is all.
        allow_overwrite: whether a dump may be replaced that is there already.
        base: the full dump, or the list of it and its increments so far, that these tables were dumped to or loaded
            from last: only what changed since is written, and which ids are gone. Load it with the list of all.

    Raises:
        DynamicEmbError: ``base`` is not what the tables were dumped to or loaded from last.
        FileExistsError: the folder is not empty, and ``allow_overwrite`` is False or it holds other files.
        OSError: the disk failed; what was there before is still there. A failure of one rank raises on all.
        ValueError: ``table_names`` has a name that is not in the model.
    """
    request = DumpRequest(as_string(path), optim, counter, allow_overwrite, as_chain(base))
    ranks = Ranks(pg)
    tables = ranks.each(lambda: tables_of_model(model, table_names))
    dump_tables(request, tables, ranks)


@dataclass(frozen=True)
class DumpRequest:
    """What to write where; see ``DynamicEmbDump``."""

    path: str
    optim: bool = False
    counter: bool = False
    allow_overwrite: bool = False
    base: tuple[str, ...] = ()


def as_chain(base: AnyPath | Sequence[AnyPath] | None) -> tuple[str, ...]:
    """Return the paths of a chain of dumps, none for None."""
    if base is None:
        return ()
    return tuple(map(as_string, base if isinstance(base, list | tuple) else (base,)))


def dump_tables(request: DumpRequest, tables: list[Table], ranks: Ranks, disk: FileSystem = DISK) -> None:
    """Write tables, in the same order on all ranks."""
    if not any(ranks.gather(bool(tables))):
        return
    ranks.each(lambda: _check(tables, request, ranks))
    chain = ranks.each(lambda: open_chain(tables, request.base, request.optim, disk))
    target = ranks.each(lambda: _target(request, disk))
    folders = sorted({table.folder for table in tables})
    ranks.on_first(lambda: _prepare(target, folders, request.allow_overwrite))
    try:
        # Times on the disk go on from those of the chain, which a load may have moved.
        now = max(ranks.together(lambda: max(observed_time(table) for table in tables)))
        writing = _Writing(target, request, ranks, disk, chain, now - chain.time_shift)
        marks: list[int] = []
        parts = ranks.together(lambda: writing.write(tables, marks))
        manifest = ranks.on_first(lambda: writing.commit(parts))
    except BaseException:
        if ranks.rank == 0:
            target.abort()
        raise
    for table, first_step in zip(tables, marks, strict=True):
        table.group.marks[table.index] = Mark(manifest.dump_id, first_step, chain.time_shift)


def _check(tables: list[Table], request: DumpRequest, ranks: Ranks) -> None:
    """Refuse what cannot be dumped, before anything is written."""
    for kind, descriptions in (("tables", ranks.gather(describe(tables))), ("options", ranks.gather(request))):
        if any(description != descriptions[0] for description in descriptions):
            raise DynamicEmbError(f"the ranks disagree about the {kind} to dump: {descriptions}")
    for table in tables:
        check_routing_known(table, ranks.world_size)
    if request.counter and ranks.rank == 0 and not any(table.has_counter for table in tables):
        warnings.warn("counter=True has no effect: no table has an admission counter", UserWarning, stacklevel=4)


def observed_time(table: Table) -> int:
    """Return the present time, by which ids of the table are expired or not for the whole of a dump."""
    table.group.observe_time()
    return table.group.now()


@dataclass
class _RankPart:
    """What one rank wrote."""

    collections: dict[str, dict[str, TableEntry]]
    files: dict[str, FileEntry]


def _prepare(target: Target, folders: list[str], allow_overwrite: bool) -> None:
    if target.prepare(folders, allow_overwrite):
        warnings.warn(f"the dump in {target.path!r} is replaced", UserWarning, stacklevel=7)


def _target(request: DumpRequest, disk: FileSystem) -> Target:
    target = Target(request.path, disk)
    if target.path in map(disk.real_path, request.base):
        raise ValueError(f"path {request.path!r} is part of base: an increment needs a folder of its own")
    return target


@dataclass
class _Writing:
    """A dump in progress on one rank."""

    target: Target
    request: DumpRequest
    ranks: Ranks
    disk: FileSystem
    chain: Chain
    clock: int

    def write(self, tables: list[Table], marks: list[int]) -> _RankPart:
        """Write this rank's files; appends to ``marks`` the step from which each table's next increment begins."""
        part = _RankPart({}, {})
        rows = sum(table.group.size(table.index) for table in tables)
        # None: only where somebody watches.
        disable = None if self.ranks.rank == 0 else True
        with tqdm(total=rows, desc="dump", unit=" rows", disable=disable) as progress:
            for table in tables:
                with table.group.lock:
                    marks.append(next_change(table.group.steps))
                    entry = self._write_table(table, part, progress)
                part.collections.setdefault(table.folder, {})[table.name] = entry
                if self.ranks.rank == 0:
                    path, data = inside(table.folder, meta_file(table.name)), table_meta(table)
                    self.target.write_file(path, data)
                    part.files[path] = FileEntry(len(data), zlib.crc32(data))
        return part

    def _write_table(self, table: Table, part: _RankPart, progress: Any) -> TableEntry:
        entry = table_entry(table, self.request)
        first_step = self.chain.first_step(table)
        with ExitStack() as stack:
            writers = {}
            for item in entry.items(self.chain.kind):
                # A counter that the user wrote writes its files itself.
                if table.own_counter is None or item not in (COUNTER_KEYS, COUNTER_FREQUENCIES):
                    path = self._path(table, item)
                    writers[item] = stack.enter_context(FileWriter(self.disk, self.target.writing, path))
            for batch in row_batches(table, entry.num_state > 0, self.clock, self.chain.time_shift, first_step):
                check_owner(table, batch[KEYS], self.ranks)
                for item, values in batch.items():
                    if item in writers:
                        writers[item].write(values)
                entry.counts[0] += len(batch[KEYS])
                progress.update(len(batch[KEYS]))
            if entry.has_counter:
                self._write_counts(table, entry, writers, part)
            if TOMBSTONES in writers:
                gone = self.chain.gone(table, self.ranks, self.disk)
                writers[TOMBSTONES].write(gone)
                entry.num_tombstones[0] = gone.size
            for writer in writers.values():
                part.files[writer.path] = writer.finish()
        return entry

    def _path(self, table: Table, item: str) -> str:
        return inside(table.folder, rank_file(table.name, item, self.ranks.rank, self.ranks.world_size))

    def _write_counts(self, table: Table, entry: TableEntry, writers: dict[str, FileWriter], part: _RankPart) -> None:
        own = table.own_counter
        if own is not None:
            paths = self._path(table, COUNTER_KEYS), self._path(table, COUNTER_FREQUENCIES)
            part.files |= dict(zip(paths, dump_own(own, table, self.target.writing, paths, self.disk), strict=True))
            entry.num_counters[0] = part.files[paths[0]].size // 8
            with FileReader(self.disk, join(self.target.writing, paths[0]), np.int64, 1) as reader:
                for begin in range(0, entry.num_counters[0], BATCH_SIZE_PER_DUMP):
                    size = min(BATCH_SIZE_PER_DUMP, entry.num_counters[0] - begin)
                    check_owner(table, reader.read(begin, size)[:, 0], self.ranks)
            return
        for batch in count_batches(table):
            check_owner(table, batch[COUNTER_KEYS], self.ranks)
            for item, values in batch.items():
                writers[item].write(values)
            entry.num_counters[0] += len(batch[COUNTER_KEYS])

    def commit(self, parts: list[_RankPart]) -> Manifest:
        """Put together what the ranks wrote, and give the dump its place; returns its manifest."""
        files = {path: entry for part in parts for path, entry in part.files.items()}
        collections = {
            folder: {name: joined_entries([part.collections[folder][name] for part in parts]) for name in tables}
            for folder, tables in parts[0].collections.items()
        }
        manifest = Manifest(
            __version__, self.chain.kind, uuid.uuid4().hex, self.chain.ids, len(parts), self.clock, collections, files
        )
        self.target.commit(manifest)
        return manifest


def table_entry(table: Table, request: DumpRequest) -> TableEntry:
    """Describe a table; the lists have the entry of this rank alone, and no rows are counted yet."""
    group, options = table.group, table.options
    begin, end = group.index.bucket_offsets[table.index : table.index + 2].tolist()
    size = sum(
        touched_slots(group.index, group.steps, table.index, slots).numel()
        for slots in slot_ranges(group.index, table.index, BATCH_SIZE_PER_DUMP)
    )
    return TableEntry(
        dim=table.dim,
        dtype=str(table.module.embedding_dtype).removeprefix("torch."),
        optimizer=table.module.optimizer.name,
        num_state=table.num_state if request.optim else -1,
        score_strategy=table.strategy_names,
        dist_type=options.dist_type,
        num_embeddings=table.num_embeddings,
        seed=group.seeds[table.index] % 2**64,
        updates=int(group.index.clock[UPDATES]),
        has_counter=request.counter and table.has_counter,
        counts=[0],
        sizes=[size],
        num_buckets=[end - begin],
        capacities=[group.capacities[table.index]],
        num_counters=[0],
        num_tombstones=[0],
    )


def row_batches(
    table: Table, with_state: bool, clock: int, time_shift: int, first_step: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows touched since ``first_step`` in the order of their slots, per item of the format."""
    group, t = table.group, table.index
    index = group.index
    size = min(BATCH_SIZE_PER_DUMP, max(1, _BATCH_BYTES // (4 * (table.dim + table.num_state))))
    for part in slot_ranges(index, t, size):
        slots = touched_slots(index, group.steps, t, part, first_step)
        if not slots.numel():
            continue
        weights, state = group.read(t, index.rows[slots])
        scores = scores_to_file(table, group.scores(t, slots), clock, time_shift)
        batch = {KEYS: index.keys[slots], VALUES: weights, SCORES: scores}
        batch[OPT_VALUES] = state if with_state else state[:, :0]
        yield {item: np.ascontiguousarray(values.cpu().numpy()) for item, values in batch.items()}


def count_batches(table: Table) -> Iterator[dict[str, np.ndarray]]:
    """Yield the ids that are not admitted yet with their occurrences, per item of the format."""
    counter = table.counter
    assert counter is not None
    for part in slot_ranges(counter, table.index, BATCH_SIZE_PER_DUMP):
        slots = touched_slots(counter, table.group.steps, table.index, part)
        batch = {COUNTER_KEYS: counter.keys[slots], COUNTER_FREQUENCIES: counter.scores[slots]}
        yield {item: values.cpu().numpy() for item, values in batch.items()}


def scores_to_file(table: Table, scores: list[torch.Tensor], clock: int, time_shift: int) -> torch.Tensor:
    """Return scores as files have them, i64 ``[M, columns]``: TIMESTAMP as an age, columns as the user's."""
    if table.strategy is DynamicEmbScoreStrategy.TIMESTAMP:
        return (clock + time_shift - scores[0])[:, None]
    if table.strategy is DynamicEmbScoreStrategy.NO_EVICTION:
        scores = [scores[0] - time_shift]
    elif isinstance(table.strategy, tuple):
        scores = [scores[0] - time_shift, scores[1]]
    return torch.stack(scores, 1)[:, score_dump_permutation(table.strategy)]


def check_owner(table: Table, keys: np.ndarray, ranks: Ranks) -> None:
    """Refuse to write ids that a load would look for in another rank's files.

    Raises:
        DynamicEmbError: this rank holds ids of other ranks.
    """
    ids = torch.from_numpy(keys)
    foreign = ids[table.owners(ids, ranks.world_size) != ranks.rank]
    if foreign.numel():
        raise DynamicEmbError(
            f"table {table} holds ids on rank {ranks.rank} that {table.options.dist_type!r} routing over "
            f"{ranks.world_size} ranks gives to others, such as {int(foreign[0])}: no lookup finds them there. Import "
            "rows on the rank that owns_of names, and dump with the ranks over which the tables are sharded"
        )


def table_meta(table: Table) -> bytes:
    """Return the contents of a table's JSON file, which the reference implementation reads too."""
    group = table.group
    values = table.module.optimizer.to_dict(int(group.index.clock[UPDATES]))
    values["evict_strategy"] = str(get_evict_strategy(table.strategy).value)
    values["dist_type"] = table.options.dist_type
    times = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.NO_EVICTION)
    timed = table.strategy in times or isinstance(table.strategy, tuple)
    values["step_score"] = 0 if timed else group.get_score(table.index)
    return json.dumps(values, indent=4).encode()


def joined_entries(entries: list[TableEntry]) -> TableEntry:
    """Put the lists of all ranks together."""
    return replace(
        entries[0],
        updates=max(entry.updates for entry in entries),
        counts=[entry.counts[0] for entry in entries],
        sizes=[entry.sizes[0] for entry in entries],
        num_buckets=[entry.num_buckets[0] for entry in entries],
        capacities=[entry.capacities[0] for entry in entries],
        num_counters=[entry.num_counters[0] for entry in entries],
        num_tombstones=[entry.num_tombstones[0] for entry in entries],
    )
