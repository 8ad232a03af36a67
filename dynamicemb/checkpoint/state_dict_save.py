"""Copy the rows of tables into a state_dict."""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dynamicemb.checkpoint.dump import (
    DumpRequest,
    check_owner,
    count_batches,
    joined_entries,
    observed_time,
    row_batches,
    table_entry,
    table_meta,
)
from dynamicemb.checkpoint.format import COUNTER_FREQUENCIES, COUNTER_KEYS, KEYS, OPT_VALUES, TableEntry
from dynamicemb.checkpoint.format import SCORES as SCORES_FILE
from dynamicemb.checkpoint.format import VALUES as VALUES_FILE
from dynamicemb.checkpoint.io import DISK, join, temporary_folder
from dynamicemb.checkpoint.own_counter import dump_own
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.read import FileReader
from dynamicemb.checkpoint.sources import Table, check_routing_known, describe
from dynamicemb.checkpoint.state_dict import (
    COUNTER_COUNTS,
    COUNTER_IDS,
    IDS,
    SCORES,
    STATE,
    TABLE,
    VALUES,
    Description,
    sum_of,
)
from dynamicemb.checkpoint.state_dict_shards import sharded
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.touched import slot_ranges, touched_slots

_FILE_OF = {IDS: KEYS, VALUES: VALUES_FILE, STATE: OPT_VALUES, SCORES: SCORES_FILE}
_COUNTER_FILE_OF = {COUNTER_IDS: COUNTER_KEYS, COUNTER_COUNTS: COUNTER_FREQUENCIES}

# All that a table has.
_EVERYTHING = DumpRequest("", optim=True, counter=True)


@dataclass(frozen=True)
class _Packed:
    """The rows of one table on this rank, and what is to be said of them."""

    description: Description
    tensors: dict[str, torch.Tensor]


def state_of_tables(tables: list[Table], ranks: Ranks) -> list[dict[str, Any]]:
    """Return the entries of tables, in host memory; a collective, with the same tables on all ranks.

    Raises:
        DynamicEmbError: the ranks disagree about the tables, or one holds ids of others.
        ValueError: where the ids of a table belong is unknown.
    """
    descriptions = ranks.together(lambda: (describe(tables), max(map(observed_time, tables))))
    if any(description != descriptions[0][0] for description, _ in descriptions):
        raise DynamicEmbError(f"state_dict(): the ranks disagree about the tables: {[d for d, _ in descriptions]}")
    clock = max(time for _, time in descriptions)
    packed: list[_Packed] = []

    def pack() -> list[Description]:
        packed.extend(_packed(table, clock, ranks) for table in tables)
        return [of_table.description for of_table in packed]

    parts = ranks.together(pack)
    states = []
    for t, of_table in enumerate(packed):
        description = _joined([of_rank[t] for of_rank in parts])
        entry = description.entry
        state: dict[str, Any] = {
            name: sharded(tensor, entry.num_counters if name in _COUNTER_FILE_OF else entry.counts, ranks)
            for name, tensor in of_table.tensors.items()
        }
        states.append(state | {TABLE: description.to_json()})
    return states


def _joined(parts: list[Description]) -> Description:
    """Put what the ranks say of a table together; what is not sharded must be the same on all of them."""
    return replace(
        parts[0],
        entry=joined_entries([part.entry for part in parts]),
        ids_sum=sum(part.ids_sum for part in parts) % 2**64,
        counter_ids_sum=sum(part.counter_ids_sum for part in parts) % 2**64,
    )


def _packed(table: Table, clock: int, ranks: Ranks) -> _Packed:
    """Copy what this rank holds of a table."""
    check_routing_known(table, ranks.world_size)
    with table.group.lock:
        entry = table_entry(table, _EVERYTHING)
        tensors = _rows(table, entry, clock, ranks)
        if entry.has_counter:
            tensors |= _counts(table, ranks) if table.own_counter is None else _own_counts(table)
            check_owner(table, tensors[COUNTER_IDS].numpy(), ranks)
            entry.num_counters[0] = tensors[COUNTER_IDS].numel()
        sums = [sum_of(tensors[name]) if name in tensors else 0 for name in (IDS, COUNTER_IDS)]
        return _Packed(Description(clock, entry, json.loads(table_meta(table)), *sums), tensors)


def _rows(table: Table, entry: TableEntry, clock: int, ranks: Ranks) -> dict[str, torch.Tensor]:
    number = entry.sizes[0]
    tensors = {
        IDS: torch.empty(number, dtype=torch.int64),
        VALUES: torch.empty(number, table.dim, dtype=table.module.embedding_dtype),
        SCORES: torch.empty(number, len(entry.score_strategy), dtype=torch.int64),
    }
    if entry.num_state > 0:
        tensors[STATE] = torch.empty(number, entry.num_state)
    for batch in row_batches(table, entry.num_state > 0, clock, 0, 0):
        check_owner(table, batch[KEYS], ranks)
        part = slice(entry.counts[0], entry.counts[0] + len(batch[KEYS]))
        for name, tensor in tensors.items():
            tensor[part] = torch.from_numpy(batch[_FILE_OF[name]])
        entry.counts[0] = part.stop
    assert entry.counts[0] == number, "a table changed while it was copied"
    return tensors


def _counts(table: Table, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the ids that are not admitted yet and their occurrences."""
    counter = table.counter
    assert counter is not None
    number = sum(
        touched_slots(counter, table.group.steps, table.index, part).numel()
        for part in slot_ranges(counter, table.index, BATCH_SIZE_PER_DUMP)
    )
    tensors = {name: torch.empty(number, dtype=torch.int64) for name in _COUNTER_FILE_OF}
    begin = 0
    for batch in count_batches(table):
        part = slice(begin, begin + len(batch[COUNTER_KEYS]))
        for name, tensor in tensors.items():
            tensor[part] = torch.from_numpy(batch[_COUNTER_FILE_OF[name]])
        begin = part.stop
    return tensors


def _own_counts(table: Table) -> dict[str, torch.Tensor]:
    """Return what a counter that the user wrote puts into its files."""
    assert table.own_counter is not None
    with temporary_folder() as folder:
        files = dump_own(table.own_counter, table, folder, (COUNTER_KEYS, COUNTER_FREQUENCIES), DISK)
        tensors = {}
        for (name, item), file in zip(_COUNTER_FILE_OF.items(), files, strict=True):
            with FileReader(DISK, join(folder, item), np.int64, 1) as reader:
                tensors[name] = torch.from_numpy(reader.read(0, file.size // 8)[:, 0])
    return tensors
