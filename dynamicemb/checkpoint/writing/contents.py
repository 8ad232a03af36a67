"""What a dump writes of a table: read from the table while it is written, or from a copy in host memory."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from dynamicemb.checkpoint.format import KEYS, OPT_VALUES, SCORES, VALUES, TableEntry
from dynamicemb.checkpoint.own_counter import own_counts
from dynamicemb.checkpoint.tables import Table
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.score_strategy import DynamicEmbScoreStrategy, get_evict_strategy, score_dump_permutation
from dynamicemb.table.index import UPDATES
from dynamicemb.table.placement import Placement, Rule
from dynamicemb.table.rows import RowFormat, RowStore
from dynamicemb.table.touched import next_change, slot_ranges, touched_slots

T = TypeVar("T")

# Rows are read in blocks of at most so many bytes, so that a dump needs little memory beside the table.
_BLOCK_BYTES = 2**24
# Of a copy: also a third of it, as Adam's weights are, is more than malloc keeps for itself, so that the memory of a
# block goes back as soon as it is written.
_COPY_BLOCK_BYTES = 2**27


@dataclass(frozen=True)
class Selected:
    """What of a table is dumped.

    Attributes:
        state: whether optimizer state is.
        counts: whether ids that are not admitted yet are.
        first_step: only rows that a step from this one on touched, 0 for all.
        increment: whether somebody will ask which ids the table holds.
    """

    state: bool
    counts: bool
    first_step: int = 0
    increment: bool = False


@dataclass(frozen=True)
class Block:
    """Rows of a table in the order of their slots, in host memory.

    Attributes:
        keys: i64 ``[M]``.
        scores: as ``TableGroup.scores`` returns them, each i64 ``[M]``.
        weights: the bytes of the weights as they are in the table, as f32 ``[M, W]``.
        state: f32 ``[M, num_state]``, or ``[M, 0]`` where it is not dumped.
    """

    keys: torch.Tensor
    scores: list[torch.Tensor]
    weights: torch.Tensor
    state: torch.Tensor

    def parts(self) -> Iterator["Block"]:
        """Yield the rows in blocks of at most ``_BLOCK_BYTES``."""
        size = max(1, _BLOCK_BYTES // (4 * (self.weights.shape[1] + self.state.shape[1])))
        columns = [self.keys, self.weights, self.state, *self.scores]
        for keys, weights, state, *scores in zip(*(column.split(size) for column in columns), strict=True):
            yield Block(keys, scores, weights, state)


@dataclass
class Contents:
    """A table of this rank at one moment. Use it as a context; what it holds can be read once.

    Attributes:
        table: of which only what never changes may be used.
        entry: describes it; the lists have the entry of this rank alone, and no rows are counted yet.
        meta: contents of its JSON file.
        next_step: the step from which its next increment begins.
        num_rows: rows of all blocks.
        blocks: its rows.
        counts: ids that are not admitted yet, i64 ``[M]`` on the CPU, and their occurrences.
        holds: which of some ids i64 ``[M]`` on the CPU the table has, bool ``[M]``.
        resources: what is held until the context is left.
    """

    table: Table
    entry: TableEntry
    meta: bytes
    next_step: int
    num_rows: int
    blocks: Iterable[Block]
    counts: Iterable[tuple[torch.Tensor, torch.Tensor]]
    holds: Callable[[torch.Tensor], torch.Tensor]
    resources: ExitStack

    def __enter__(self) -> "Contents":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what it holds."""
        self.blocks, self.counts, self.holds = (), (), _nothing_held
        self.resources.close()


def live(table: Table, selected: Selected) -> Contents:
    """Return a table as it is; the caller has its turn until the context is left."""
    with ExitStack() as stack:
        stack.enter_context(table.group.turn())
        contents = _contents(table, selected, _BLOCK_BYTES, stack)
        contents.resources = stack.pop_all()
    return contents


def copied(tables: list[Table], selected: list[Selected]) -> list[Contents]:
    """Return tables as they are at one moment, copied to host memory; it is freed as it is read."""
    with ExitStack() as copies, ExitStack() as locks:
        for table in tables:
            locks.enter_context(table.group.turn())
        found = [copies.enter_context(_copy(*pair)) for pair in zip(tables, selected, strict=True)]
        # From here on each of them is a context of its own.
        copies.pop_all()
    return found


def _copy(table: Table, selected: Selected) -> Contents:
    with ExitStack() as stack:
        contents = _contents(table, selected, _COPY_BLOCK_BYTES, stack)
        contents.blocks = drained(contents.blocks)
        # The files of a counter that the user wrote are there already; they are read when they are written.
        if table.own_counter is None:
            contents.counts = drained(contents.counts)
        contents.holds = _Held(table) if selected.increment else _nothing_held
        contents.resources = stack.pop_all()
    return contents


def num_copied_bytes(table: Table, selected: Selected) -> int:
    """Return how much memory a copy of a table takes."""
    group, num_scores = table.group, 2 if isinstance(table.strategy, tuple) else 1
    row = 8 + 8 * num_scores + 4 * _num_words(table, selected.state)
    found = row * _num_touched(table, selected.first_step)
    if selected.increment:
        found += 8 * _num_touched(table, 0)
    if selected.counts and table.counter is not None:
        ranges = slot_ranges(table.counter, table.index, BATCH_SIZE_PER_DUMP)
        counted = sum(touched_slots(table.counter, group.steps, table.index, part).numel() for part in ranges)
        found += 16 * counted
    return found


def drained(items: Iterable[T]) -> Iterator[T]:
    """Take all items now, yield them later; each is forgotten as the next one is asked for."""
    taken = deque(items)

    def yielded() -> Iterator[T]:
        while taken:
            yield taken.popleft()

    return yielded()


def _contents(table: Table, selected: Selected, block_bytes: int, stack: ExitStack) -> Contents:
    counts: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()
    if selected.counts and table.own_counter is not None:
        counts = stack.enter_context(own_counts(table.own_counter, table))
    elif selected.counts and table.counter is not None:
        counts = _counts(table)
    size = _num_touched(table, 0)
    return Contents(
        table,
        _entry(table, selected, size),
        _meta(table),
        next_change(table.group.steps),
        _num_touched(table, selected.first_step) if selected.first_step else size,
        _blocks(table, selected, block_bytes),
        counts,
        lambda ids: _find(table, ids),
        ExitStack(),
    )


def _num_words(table: Table, state: bool) -> int:
    """Return how many 4-byte words of a row are dumped."""
    words = table.row_format.state_offset(table.module.embedding_dtype) // 4
    return words + table.num_state if state else words


def _num_touched(table: Table, first_step: int) -> int:
    index, steps = table.group.index, table.group.steps
    if first_step == 0 and not index.expires:
        return table.group.size(table.index)
    return sum(
        touched_slots(index, steps, table.index, part, first_step).numel()
        for part in slot_ranges(index, table.index, BATCH_SIZE_PER_DUMP)
    )


def _blocks(table: Table, selected: Selected, block_bytes: int) -> Iterator[Block]:
    group, t = table.group, table.index
    index, rows = group.index, _as_words(group.store)
    row_format = rows.formats[t]
    for part in slot_ranges(index, t, max(1, block_bytes // (4 * (row_format.dim + row_format.num_state)))):
        slots = touched_slots(index, group.steps, t, part, selected.first_step)
        if not slots.numel():
            continue
        weights, state = group.kernels.read_rows(rows, t, index.rows[slots])
        if not selected.state:
            state = weights.new_empty(slots.numel(), 0)
        scores = [column.cpu() for column in group.scores(t, slots)]
        yield Block(index.keys[slots].cpu(), scores, weights.cpu(), state.cpu())


def _as_words(store: RowStore) -> RowStore:
    """Return the same rows with weights as 4-byte words, copied as they are."""
    formats = [RowFormat(f.state_offset(store.dtype) // 4, f.num_state) for f in store.formats]
    return RowStore.attach(store.chunks, formats, torch.float32, store.chunk_shift, store.chunk_tables)


def _counts(table: Table) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    counter = table.counter
    assert counter is not None
    for part in slot_ranges(counter, table.index, BATCH_SIZE_PER_DUMP):
        slots = touched_slots(counter, table.group.steps, table.index, part)
        yield counter.keys[slots].cpu(), counter.scores[slots].cpu()


def _find(table: Table, ids: torch.Tensor) -> torch.Tensor:
    # By the time that the dump observed: one that expires now is neither here nor in the rows of the dump gone.
    group = table.group
    return (group.find(ids.to(group.device), group.ranges_of(table.index, ids.numel())) >= 0).cpu()


def _nothing_held(ids: torch.Tensor) -> torch.Tensor:
    raise AssertionError("only an increment asks which ids a table holds")


class _Held:
    """The ids that a table holds, 8 bytes each."""

    def __init__(self, table: Table) -> None:
        index, steps = table.group.index, table.group.steps
        self._ids = torch.empty(_num_touched(table, 0), dtype=torch.int64, device="cpu").numpy()
        begin = 0
        for part in slot_ranges(index, table.index, BATCH_SIZE_PER_DUMP):
            ids = index.keys[touched_slots(index, steps, table.index, part)].cpu().numpy()
            self._ids[begin : begin + ids.size] = ids
            begin += ids.size
        self._sorted = False

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if not self._sorted:
            # Not while the table waits.
            self._ids.sort()
            self._sorted = True
        places = np.searchsorted(self._ids, ids.numpy())
        inside = places < self._ids.size
        places[~inside] = 0
        return torch.from_numpy(inside & (self._ids[places] == ids.numpy() if self._ids.size else inside))


def _entry(table: Table, selected: Selected, size: int) -> TableEntry:
    group, options = table.group, table.options
    begin, end = group.index.bucket_offsets[table.index : table.index + 2].tolist()
    return TableEntry(
        dim=table.dim,
        dtype=str(table.module.embedding_dtype).removeprefix("torch."),
        optimizer=table.module.optimizer.name,
        num_state=table.num_state if selected.state else -1,
        score_strategy=table.strategy_names,
        dist_type=options.dist_type,
        num_embeddings=table.num_embeddings,
        seed=group.seeds[table.index] % 2**64,
        updates=int(group.index.clock[UPDATES]),
        has_counter=selected.counts and table.has_counter,
        counts=[0],
        sizes=[size],
        num_buckets=[end - begin],
        capacities=[group.capacities[table.index]],
        num_counters=[0],
        num_tombstones=[0],
        placement=Placement.row_wise(Rule(options.dist_type, table.num_embeddings), 1, table.dim),
    )


def _meta(table: Table) -> bytes:
    """Return the contents of a table's JSON file, which the reference implementation reads too."""
    group = table.group
    values = table.module.optimizer.to_dict(int(group.index.clock[UPDATES]))
    values["evict_strategy"] = str(get_evict_strategy(table.strategy).value)
    values["dist_type"] = table.options.dist_type
    times = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.NO_EVICTION)
    timed = table.strategy in times or isinstance(table.strategy, tuple)
    values["step_score"] = 0 if timed else group.get_score(table.index)
    return json.dumps(values, indent=4).encode()


def to_file(table: Table, block: Block, clock: int, time_shift: int) -> dict[str, np.ndarray]:
    """Return rows as files have them, per item of the format.

    Args:
        table: whose they are.
        block: the rows.
        clock: from which ages count, in the time of the chain.
        time_shift: by how much times in memory are later.
    """
    batch = {
        KEYS: block.keys,
        VALUES: block.weights.view(table.module.embedding_dtype)[:, : table.dim].float(),
        SCORES: _scores_to_file(table, block.scores, clock, time_shift),
        OPT_VALUES: block.state,
    }
    return {item: np.ascontiguousarray(values.numpy()) for item, values in batch.items()}


def _scores_to_file(table: Table, scores: list[torch.Tensor], clock: int, time_shift: int) -> torch.Tensor:
    """Return scores as files have them, i64 ``[M, columns]``: TIMESTAMP as an age, columns as the user's."""
    if table.strategy is DynamicEmbScoreStrategy.TIMESTAMP:
        return (clock + time_shift - scores[0])[:, None]
    if table.strategy is DynamicEmbScoreStrategy.NO_EVICTION:
        scores = [scores[0] - time_shift]
    elif isinstance(table.strategy, tuple):
        scores = [scores[0] - time_shift, scores[1]]
    return torch.stack(scores, 1)[:, score_dump_permutation(table.strategy)]
