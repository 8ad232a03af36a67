"""Which id each row of a static table has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynamicemb.checkpoint.static.match import COUNTS, IDENTITIES, ROWS_OF_IDS, SORTED_IDS
from dynamicemb.checkpoint.tables import Table
from dynamicemb.table.ids import as_int64

# What managed-collision modules write where a row has no id.
_FREE_SORTED = 2**63 - 1
_FREE_IDENTITY = -1


@dataclass(frozen=True)
class RowIds:
    """The ids of the rows of a table.

    Attributes:
        num_rows: N.
        ids: i64 ``[N]``, None where the id of a row is its number.
        has: bool ``[N]``, which rows have an id; None: all.
        num_repeated: rows whose id another row has, behind them; they have none.
        counts: i64 ``[N]``, how often each id has occurred, where that is known.
    """

    num_rows: int
    ids: torch.Tensor | None = None
    has: torch.Tensor | None = None
    num_repeated: int = 0
    counts: torch.Tensor | None = None

    def of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(ids i64[n], which of them are there, bool[n], None for all)`` of rows i64 ``[n]``."""
        return (
            rows if self.ids is None else self.ids[rows],
            None if self.has is None else self.has[rows],
        )

    @property
    def num_ids(self) -> int:
        """How many rows have an id."""
        return self.num_rows if self.has is None else int(self.has.sum())

    def described(self) -> tuple[int, int, int]:
        """Return what ranks compare: rows, those with an id, and a sum over ids and rows."""
        if self.ids is None:
            return self.num_rows, self.num_ids, 0
        # Modulo 2^64, as integers of torch are.
        mixed = self.ids * (2 * torch.arange(self.num_rows) + 1)
        return self.num_rows, self.num_ids, int(mixed.sum() if self.has is None else mixed[self.has].sum())


def given_ids(id_maps: Any, tables: list[Table]) -> dict[Table, tuple[str, Any]]:
    """Return what a user gave for each table, and by which name.

    Args:
        id_maps: by ``path.table``, as in ``model.ebc.user``, or by the name of a table.
        tables: the dynamic tables.

    Raises:
        TypeError: it is no mapping.
        ValueError: a name is that of no table, or of several, or a table is named twice.
    """
    if id_maps is None:
        return {}
    if not isinstance(id_maps, Mapping):
        raise TypeError(f"id_maps must map names of tables to ids, got {type(id_maps).__name__}")
    found: dict[Table, tuple[str, Any]] = {}
    for name, value in id_maps.items():
        exact = [table for table in tables if f"{table.folder}.{table.name}" == name]
        named = exact or [table for table in tables if table.name == name]
        if len(named) != 1:
            what = "none" if not named else "several"
            names = sorted(f"{table.folder}.{table.name}" for table in tables)
            raise ValueError(f"id_maps: {name!r} names {what} of the tables that are imported; they are {names}")
        if named[0] in found:
            raise ValueError(f"id_maps: {name!r} and {found[named[0]][0]!r} are one table; name it once")
        found[named[0]] = (name, value)
    return found


def row_ids_of_map(value: Any, num_rows: int, name: str) -> RowIds:
    """Return ids as a user gave them.

    Args:
        value: ids int64 ``[N]`` of all rows, or a pair ``(rows [K], ids [K])`` where some rows have none.
        num_rows: N.
        name: of the table, for messages.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, a row outside of the table, or an id or row that is there twice.
    """
    if isinstance(value, list) and not any(isinstance(part, torch.Tensor) for part in value):
        raise TypeError(f"id_maps[{name!r}] is a list of numbers; pass torch.as_tensor(ids)")
    pair = tuple(value) if isinstance(value, tuple | list) else None
    if pair is None:
        ids = _integers(value, f"id_maps[{name!r}]")
        if ids.shape != (num_rows,):
            raise ValueError(
                f"id_maps[{name!r}] must have an id for each of the {num_rows} rows, got the shape {list(ids.shape)}; "
                "where rows have no id, give a pair (rows, ids)"
            )
        _check_distinct(ids, f"id_maps[{name!r}]: id")
        return RowIds(num_rows, ids)
    if len(pair) != 2:
        raise ValueError(f"id_maps[{name!r}] must be ids or a pair (rows, ids), got {len(pair)} values")
    rows, ids = (_integers(part, f"id_maps[{name!r}]") for part in pair)
    if rows.dim() != 1 or rows.shape != ids.shape:
        raise ValueError(
            f"id_maps[{name!r}]: rows and ids must be of one length, got {list(rows.shape)}, {list(ids.shape)}"
        )
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
        raise ValueError(
            f"id_maps[{name!r}]: rows must be in 0..{num_rows - 1}, got {int(rows.min())}..{int(rows.max())}"
        )
    _check_distinct(rows, f"id_maps[{name!r}]: row")
    _check_distinct(ids, f"id_maps[{name!r}]: id")
    return _scattered(num_rows, rows, ids)


def row_ids_of_collisions(keys: Mapping[str, Any], num_rows: int, read: Callable[[str], torch.Tensor]) -> RowIds:
    """Return the ids that a managed-collision module has given rows to.

    Args:
        keys: keys of its buffers, by their names.
        num_rows: N.
        read: reads the tensor of a key, whole.

    Raises:
        ValueError: the buffers do not fit the table.
    """
    if IDENTITIES in keys:
        name = str(keys[IDENTITIES])
        ids = as_int64(read(name)).reshape(-1)
        if ids.numel() != num_rows:
            raise ValueError(f"checkpoint: {name} has {ids.numel()} ids, the table {num_rows} rows")
        return _last_of_each(RowIds(num_rows, ids, ids != _FREE_IDENTITY))
    keys = dict(keys)
    of_counts = keys.pop(COUNTS, None)
    missing = {SORTED_IDS, ROWS_OF_IDS} - set(keys)
    if missing:
        raise ValueError(
            f"checkpoint: beside {', '.join(map(str, keys.values()))} {sorted(missing)} is missing; pass the "
            "state_dict of the whole collection, or id_maps for the table"
        )
    ids, rows = (as_int64(read(str(keys[item]))).reshape(-1) for item in (SORTED_IDS, ROWS_OF_IDS))
    if ids.shape != rows.shape or ids.numel() != num_rows:
        raise ValueError(
            f"checkpoint: {keys[SORTED_IDS]} has {ids.numel()} ids, {keys[ROWS_OF_IDS]} {rows.numel()} rows, the table "
            f"{num_rows}; they must be as many"
        )
    taken = ids != _FREE_SORTED
    counts = None if of_counts is None else read(str(of_counts)).reshape(-1)
    if counts is not None and counts.shape != ids.shape:
        raise ValueError(f"checkpoint: {of_counts} has {counts.numel()} counts for {ids.numel()} ids")
    counts = None if counts is None else counts[taken]
    rows, ids = rows[taken], ids[taken]
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
        raise ValueError(f"checkpoint: {keys[ROWS_OF_IDS]} names rows outside of 0..{num_rows - 1}")
    _check_distinct(rows, f"checkpoint: {keys[ROWS_OF_IDS]}: row")
    found = _last_of_each(_scattered(num_rows, rows, ids))
    if counts is None:
        return found
    dense = torch.ones(num_rows, dtype=torch.int64)
    dense[rows] = counts.clamp(min=1)
    return replace(found, counts=dense)


def _integers(value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be made of tensors of int64, got {type(value).__name__}; pass torch.as_tensor(ids)"
        )
    try:
        return as_int64(value.detach()).cpu()
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _scattered(num_rows: int, rows: torch.Tensor, ids: torch.Tensor) -> RowIds:
    """Return the ids of rows, each named once."""
    dense, has = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.bool)
    dense[rows], has[rows] = ids, True
    return RowIds(num_rows, dense, has)


def _check_distinct(values: torch.Tensor, what: str) -> None:
    ordered = values.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]].unique()
    if twice.numel():
        others = {1: "", 2: ", as is 1 other"}.get(twice.numel(), f", as are {twice.numel() - 1} others")
        raise ValueError(f"{what} {twice[0]} is there more than once{others}; give each once")


def _last_of_each(row_ids: RowIds) -> RowIds:
    """Leave a repeated id to its last row."""
    assert row_ids.ids is not None and row_ids.has is not None
    rows = row_ids.has.nonzero().flatten()
    ids = row_ids.ids[rows]
    order = torch.argsort(ids, stable=True)
    last = torch.ones(ids.numel(), dtype=torch.bool)
    ordered = ids[order]
    last[order[:-1]] = ordered[1:] != ordered[:-1]
    has = row_ids.has.clone()
    has[rows[~last]] = False
    return RowIds(row_ids.num_rows, row_ids.ids, has, int((~last).sum()))
