"""What a table has in a ``state_dict``: the names of its entries, and what is said there about its rows.

Of a table "users" behind a weight ``model.ebc.embedding_bags.users.weight``::

    model.ebc.embedding_bags.users.dynamic_ids              i64 [N]
    model.ebc.embedding_bags.users.dynamic_values           [N, D], in the dtype of the table
    model.ebc.embedding_bags.users.dynamic_scores           i64 [N, columns], as the files of a dump have them
    model.ebc.embedding_bags.users.dynamic_state            f32 [N, S], if rows have optimizer state
    model.ebc.embedding_bags.users.dynamic_counter_ids      i64 [K], ids without a row, if there is a counter
    model.ebc.embedding_bags.users.dynamic_counter_counts   i64 [K], their occurrences
    model.ebc.embedding_bags.users.dynamic_table            JSON, what ``Description`` holds

N and K are those of all ranks. Tensors are in host memory: ``ShardedTensor``s of one shard for each rank, or plain ones
where there is one rank. A load takes plain ones on several ranks too: the rows of each rank, as ``torch.save`` writes
them, or all rows on every rank, as a single process saved them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dynamicemb.checkpoint.format import TableEntry, add_placement, typed
from dynamicemb.checkpoint.reading.opened import Stored
from dynamicemb.checkpoint.tables import Table
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.ids import fmix64
from dynamicemb.table.scores import MAX_SCORE
from dynamicemb.version import __version__

STATE_VERSION = 2
# Ids whose hashes are added up at a time.
_IDS_AT_A_TIME = 2**20

IDS = "dynamic_ids"
VALUES = "dynamic_values"
SCORES = "dynamic_scores"
STATE = "dynamic_state"
COUNTER_IDS = "dynamic_counter_ids"
COUNTER_COUNTS = "dynamic_counter_counts"
TABLE = "dynamic_table"
TENSORS = (IDS, VALUES, SCORES, STATE, COUNTER_IDS, COUNTER_COUNTS)
ENTRIES = (*TENSORS, TABLE)

_without_rows: ContextVar[bool] = ContextVar("without_rows", default=False)


@contextmanager
def state_dict_without_rows() -> Iterator[None]:
    """Leave dynamic tables out of ``state_dict()`` and ``load_state_dict()`` meanwhile.

    For who writes rows with ``DynamicEmbDump``: only the rest of the model is copied, and loaded. Neither call is a
    collective then; entries of dynamic tables that ``load_state_dict`` is given are ignored.
    """
    token = _without_rows.set(True)
    try:
        yield
    finally:
        _without_rows.reset(token)


def rows_are_left_out() -> bool:
    """Return whether dynamic tables are left out at present."""
    return _without_rows.get()


def sum_of(ids: torch.Tensor) -> int:
    """Return a number of 64 bits that tells other ids i64 ``[n]`` from these, in any order.

    torch puts a ``ShardedTensor`` together (``full_state_dict``) as if all shards but the last were of one size. What
    it makes of others, of which rows have gone, has the right size.
    """
    total = 0
    for part in ids.split(_IDS_AT_A_TIME):
        total += int(fmix64(part).sum())
    return total % 2**64


def entries_of(table: Table) -> list[str]:
    """Return the names of the entries that a table has."""
    left_out = set() if table.num_state else {STATE}
    left_out |= set() if table.has_counter else {COUNTER_IDS, COUNTER_COUNTS}
    return [name for name in ENTRIES if name not in left_out]


@dataclass(frozen=True)
class Description:
    """What a state_dict says about a table beside its rows; equal on all ranks.

    Attributes:
        clock: Unix nanoseconds; ages count from here.
        entry: as in the manifest of a dump; its lists have an entry for each rank that saved.
        meta: as in the JSON file of a dump: optimizer, strategy, step.
        ids_sum: ``sum_of`` the ids of all rows.
        counter_ids_sum: ``sum_of`` the ids that are counted.
    """

    clock: int
    entry: TableEntry
    meta: dict[str, Any]
    ids_sum: int
    counter_ids_sum: int

    @property
    def num_rows(self) -> int:
        """N."""
        return sum(self.entry.counts)

    @property
    def num_counts(self) -> int:
        """K."""
        return sum(self.entry.num_counters)

    def to_json(self) -> str:
        """Return the entry of the state_dict."""
        head = {"format_version": STATE_VERSION, "package_version": __version__}
        return json.dumps(head | asdict(self))

    @classmethod
    def from_json(cls, text: Any, table: Table) -> "Description":
        """Read the entry of a state_dict.

        Raises:
            DynamicEmbError: it is damaged, or a later version of the package wrote it.
        """
        try:
            values = json.loads(text)
            version = values["format_version"]
            if version > STATE_VERSION:
                raise DynamicEmbError(
                    f"table {table}: its entries in the state_dict have version {version}, this package reads up to "
                    f"{STATE_VERSION}; load them with dynamicemb {values.get('package_version')} or later"
                )
            if "placement" not in values["entry"]:
                # Version 1 had none.
                add_placement(values["entry"], len(values["entry"]["counts"]))
            entry: TableEntry = typed(TableEntry, values["entry"], "entry")
            clock, *sums = (typed(int, values[name], name) for name in ("clock", "ids_sum", "counter_ids_sum"))
            if not 0 <= clock <= MAX_SCORE:
                raise ValueError(f"clock is {clock}")
            return cls(clock, entry, dict(values["meta"]), *sums)
        except (TypeError, ValueError, KeyError) as error:
            raise DynamicEmbError(f"table {table}: entry {TABLE!r} of the state_dict is damaged: {error!r}") from None

    def stored(self, table: Table) -> Stored:
        """Return what a load asks about a table in a dump."""
        # Without state there is no entry, as without a file.
        entry = replace(self.entry, num_state=self.entry.num_state or -1)
        columns = len(entry.score_strategy)
        return Stored("", table.name, len(entry.counts), columns, self.meta, entry, self.clock, {})
