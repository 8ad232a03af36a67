"""Copy the rows of tables into a state_dict."""

import json
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynamicemb.checkpoint.agreement import check_everywhere, check_placement, describe
from dynamicemb.checkpoint.dump import observed_time
from dynamicemb.checkpoint.format import KEYS, OPT_VALUES
from dynamicemb.checkpoint.format import SCORES as SCORES_FILE
from dynamicemb.checkpoint.format import VALUES as VALUES_FILE
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.state_dict.entries import (
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
from dynamicemb.checkpoint.state_dict.shards import sharded
from dynamicemb.checkpoint.tables import Table
from dynamicemb.checkpoint.writing.contents import Contents, Selected, live, to_file
from dynamicemb.checkpoint.writing.files import check_owner, joined_entries
from dynamicemb.errors import DynamicEmbError

_FILE_OF = {IDS: KEYS, VALUES: VALUES_FILE, STATE: OPT_VALUES, SCORES: SCORES_FILE}
_OF_COUNTER = (COUNTER_IDS, COUNTER_COUNTS)

# All that a table has.
_EVERYTHING = Selected(state=True, counts=True)


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
    ranks.each(lambda: check_everywhere(tables, "state_dict()"))
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
            name: sharded(tensor, entry.num_counters if name in _OF_COUNTER else entry.counts, ranks)
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
    check_placement(table, ranks)
    with live(table, _EVERYTHING) as contents:
        entry = contents.entry
        tensors = _rows(contents, clock, ranks)
        if entry.has_counter:
            tensors |= _counts(contents, ranks)
            entry.num_counters[0] = tensors[COUNTER_IDS].numel()
        sums = [sum_of(tensors[name]) if name in tensors else 0 for name in (IDS, COUNTER_IDS)]
        entry = replace(entry, placement=table.placement(ranks.world_size))
        return _Packed(Description(clock, entry, json.loads(contents.meta), *sums), tensors)


def _rows(contents: Contents, clock: int, ranks: Ranks) -> dict[str, torch.Tensor]:
    table, entry, number = contents.table, contents.entry, contents.num_rows
    tensors = {
        IDS: torch.empty(number, dtype=torch.int64),
        VALUES: torch.empty(number, table.dim, dtype=table.module.embedding_dtype),
        SCORES: torch.empty(number, len(entry.score_strategy), dtype=torch.int64),
    }
    if entry.num_state > 0:
        tensors[STATE] = torch.empty(number, entry.num_state)
    for block in contents.blocks:
        for rows in block.parts():
            check_owner(table, rows.keys, ranks)
            part = slice(entry.counts[0], entry.counts[0] + rows.keys.numel())
            batch = to_file(table, rows, clock, 0)
            for name, tensor in tensors.items():
                tensor[part] = torch.from_numpy(batch[_FILE_OF[name]])
            entry.counts[0] = part.stop
    assert entry.counts[0] == number, "a table changed while it was copied"
    return tensors


def _counts(contents: Contents, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the ids that are not admitted yet and their occurrences."""
    nothing = torch.empty(0, dtype=torch.int64)
    ids, occurrences = zip((nothing, nothing), *contents.counts, strict=True)
    tensors = {COUNTER_IDS: torch.cat(ids), COUNTER_COUNTS: torch.cat(occurrences)}
    check_owner(contents.table, tensors[COUNTER_IDS], ranks)
    return tensors
