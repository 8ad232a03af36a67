"""Which entries of a checkpoint belong to which dynamic table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamicemb.checkpoint.static.keys import (
    Key,
    common_suffix,
    listed,
    raw_ids_of,
    state_of,
    stateless_of,
    weights_of,
    without_wrappers,
)
from dynamicemb.checkpoint.tables import Table

# Of a managed-collision module: the ids of rows, in two layouts.
SORTED_IDS, ROWS_OF_IDS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"
IDENTITIES = "_hash_zch_identities"
# How often a module has seen the id of a row.
COUNTS = "_mch_counts"


@dataclass(frozen=True)
class Match:
    """What a checkpoint has of a table.

    Attributes:
        table: the dynamic table.
        weights: the key of its weights.
        state: keys of optimizer state, by what they hold.
        raw_ids: keys of buffers of its managed-collision module, by their names.
        has_sgd: whether the checkpoint says that an optimizer without state trained it.
    """

    table: Table
    weights: Key
    state: Mapping[str, Key] = field(default_factory=dict)
    raw_ids: Mapping[str, Key] = field(default_factory=dict)
    has_sgd: bool = False


def named_sources(table_names: Any) -> dict[tuple[str, str], str]:
    """Return the keys that a user gave for tables, by path and name of the table.

    Raises:
        TypeError: a key is no string.
    """
    named: dict[tuple[str, str], str] = {}
    for path, names in (table_names or {}).items():
        if not isinstance(names, Mapping):
            continue
        for table, key in names.items():
            if not isinstance(key, str):
                raise TypeError(f"table_names[{path!r}][{table!r}] must be a key of the checkpoint, got {key!r}")
            named[path, table] = key
    return named


def match_tables(
    tables: list[Table], keys: Iterable[str], optimizer_keys: Iterable[str], named: Mapping[tuple[str, str], str]
) -> list[Match]:
    """Find what belongs to each table; tables of which there is nothing are left out.

    A key belongs to a table if its path ends with the path of the table's collection, whatever stands before, which is
    the same for all tables. Where no path fits, a name that only one static table has is enough.

    Args:
        tables: dynamic tables.
        keys: of the checkpoint, flattened.
        optimizer_keys: among which the state of optimizers is; those that name weights have an empty state.
        named: keys of weights that the user gave, which go before all rules.

    Raises:
        ValueError: more than one key fits a table, or a key that was given is not there.
    """
    texts = list(keys)
    weights = [key for text in texts if (key := weights_of(text)) is not None]
    raw_ids = [key for text in texts if (key := raw_ids_of(text)) is not None]
    states = [key for text in optimizer_keys if (key := state_of(text) or stateless_of(text)) is not None]
    prefixes = _common_prefixes([table for table in tables if (table.folder, table.name) not in named], weights)
    matches = []
    for table in tables:
        given = named.get((table.folder, table.name))
        key = _given(table, given, weights) if given is not None else _fitting(table, weights, prefixes)
        if key is not None:
            state, has_sgd = _state(key, states)
            matches.append(Match(table, key, state, _raw_ids(key, raw_ids), has_sgd))
    return matches


def _path(table: Table) -> tuple[str, ...]:
    """Return the path of a table's collection below the model, as keys have it."""
    return without_wrappers(table.folder.split(".")[1:])


def _prefix(key: Key, path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return what stands before a collection's path, None if the key is of another one."""
    begin = len(key.path) - len(path)
    return key.path[:begin] if begin >= 0 and key.path[begin:] == path else None


def _common_prefixes(tables: list[Table], weights: list[Key]) -> set[tuple[str, ...]]:
    """Return the prefixes under which all tables are that have any; the empty one alone if it is one of them."""
    common: set[tuple[str, ...]] | None = None
    for table in tables:
        found = {_prefix(key, _path(table)) for key in weights if key.table == table.name} - {None}
        if found:
            common = found if common is None else common & found  # type: ignore[assignment]
    if common and () in common:
        return {()}
    return common or set()


def _given(table: Table, text: str, weights: list[Key]) -> Key:
    for key in weights:
        if key.text == text:
            return key
    raise ValueError(
        f"table_names: the checkpoint has no weights {text!r} for table {table}; it has those of {listed(weights)}"
    )


def _fitting(table: Table, weights: list[Key], prefixes: set[tuple[str, ...]]) -> Key | None:
    of_name = [key for key in weights if key.table == table.name]
    with_path = [key for key in of_name if _prefix(key, _path(table)) is not None]
    found = [key for key in with_path if _prefix(key, _path(table)) in prefixes] or with_path or of_name
    if len(found) > 1:
        raise ValueError(
            f"table {table}: several static tables of the checkpoint may be meant: {listed(found)}; name one with "
            f"table_names={{{table.folder!r}: {{{table.name!r}: {found[0].text!r}}}}}"
        )
    return found[0] if found else None


def _state(weights: Key, states: list[Key]) -> tuple[dict[str, Key], bool]:
    """Return the state of a table by what it holds, and whether an optimizer without state is known."""
    best: dict[tuple[int, int], list[Key]] = {}
    for key in states:
        length = common_suffix(key.path, weights.path)
        if key.table == weights.table and length is not None:
            # The path that agrees farthest; of equal ones that with the least before it.
            best.setdefault((length, length - len(key.path)), []).append(key)
    found = best[max(best)] if best else []
    state: dict[str, Key] = {}
    for key in found:
        if key.item and key.item in state:
            raise ValueError(
                f"optimizer: both {state[key.item]} and {key} may be the state of {weights}; pass the optimizer's "
                "state_dict of one of them as optimizer="
            )
        if key.item:
            state[key.item] = key
    return state, bool(found) and not state


def _raw_ids(weights: Key, raw_ids: list[Key]) -> dict[str, Key]:
    """Return the buffers of the managed-collision module that remaps the ids of a table."""
    of_name = [key for key in raw_ids if key.table == weights.table]
    found = [key for key in of_name if key.path == weights.path]
    if not found and weights.is_managed:
        found = of_name
    result: dict[str, Key] = {}
    for key in found:
        if key.item in (SORTED_IDS, ROWS_OF_IDS, IDENTITIES, COUNTS):
            if key.item in result:
                raise ValueError(
                    f"both {result[key.item]} and {key} may have the raw ids of {weights}; pass id_maps for the table"
                )
            result[key.item] = key
    return result
