"""Modules whose ``state_dict`` holds the rows of their dynamic tables."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dynamicemb.checkpoint.load import TableReport
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.state_dict.entries import ENTRIES, TABLE, entries_of, rows_are_left_out
from dynamicemb.checkpoint.state_dict.load import load_tables_state
from dynamicemb.checkpoint.state_dict.save import state_of_tables
from dynamicemb.checkpoint.tables import Table
from dynamicemb.warn import warn


class RowsInStateDict:
    """Adds the entries of dynamic tables to ``state_dict()``, and takes them in ``load_state_dict()``.

    Comes before the module's own class in the bases. Where tables are spread over several ranks both calls are
    collectives.

    Attributes:
        load_report: what the last ``load_state_dict`` did, per table.
    """

    load_report: Mapping[str, TableReport] = MappingProxyType({})

    def state_dict_tables(self) -> dict[str, Table]:
        """Return the tables by where their entries stand below this module, in the same order on all ranks."""
        raise NotImplementedError

    def state_dict_ranks(self) -> Ranks:
        """Return the ranks over which the tables are spread."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        tables = {} if rows_are_left_out() else self.state_dict_tables()
        if not tables:
            return
        states = state_of_tables(list(tables.values()), self.state_dict_ranks())
        for path, state in zip(tables, states, strict=True):
            destination.update({f"{prefix}{path}.{name}": value for name, value in state.items()})

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tables = self.state_dict_tables()
        found = {path: _taken(state_dict, f"{prefix}{path}.") for path in tables}
        if not rows_are_left_out():
            absent = [path for path, entries in found.items() if not entries]
            # An error if load_state_dict is strict, which modules are not told.
            missing_keys += [f"{prefix}{path}.{name}" for path in absent for name in entries_of(tables[path])]
            if absent:
                _warn(absent, prefix)
            self._load(tables, {path: entries for path, entries in found.items() if entries})
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _load(self, tables: dict[str, Table], found: dict[str, dict[str, Any]]) -> None:
        if not tables:
            return
        ranks = self.state_dict_ranks()
        if any(ranks.gather(bool(found))):
            self.load_report = load_tables_state([tables[path] for path in found], list(found.values()), ranks)


def _taken(state_dict: Any, prefix: str) -> dict[str, Any]:
    """Remove the entries of a table from a state_dict and return them; those that are None stand for absent ones."""
    found = {name: state_dict.pop(prefix + name) for name in ENTRIES if prefix + name in state_dict}
    return {name: value for name, value in found.items() if value is not None}


def _warn(absent: list[str], prefix: str) -> None:
    paths = [prefix + path for path in absent]
    warn(
        f"load_state_dict: the state_dict holds no rows of dynamic tables {paths}, which stay as they are ({TABLE!r} "
        "and the entries beside it are missing); load a dump with DynamicEmbLoad, or a checkpoint with these entries",
    )
