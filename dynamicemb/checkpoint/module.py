"""The module of dynamic tables with its files: dump and load of one module, without a model around it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dynamicemb.checkpoint.disk.io import AnyPath, as_chain, as_paths, as_string
from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
from dynamicemb.checkpoint.load import LoadRequest, TableReport, load_tables
from dynamicemb.checkpoint.ranks import Ranks, check_reachable
from dynamicemb.checkpoint.rows_since import incremental_dump
from dynamicemb.checkpoint.state_dict.module import RowsInStateDict
from dynamicemb.checkpoint.tables import Table, tables_of_module
from dynamicemb.checkpoint.writing.background import DumpHandle
from dynamicemb.embedding.module import BatchedDynamicEmbeddingTablesV2 as _Module


class _Path:
    """Stands for the module that would hold a table's entries of the state_dict, whatever the table's name."""

    def __getattr__(self, name: str) -> "_Path":
        # The second is asked of every module on the way.
        if name.startswith("__") or name == "_fqn_modifiers":
            raise AttributeError(name)
        return self


class BatchedDynamicEmbeddingTablesV2(RowsInStateDict, _Module):  # noqa: D101
    __doc__ = _Module.__doc__

    # Over how many ranks a sharded collection spreads these tables; a module that stands alone knows of itself only.
    num_owning_ranks = 1

    @property
    def dynamic_tables(self) -> _Path:
        """Where the state_dict has the tables: ``get_model_state_dict`` looks at the modules that its keys name."""
        return _Path()

    def state_dict_tables(self) -> dict[str, Table]:
        """Return the tables by where they stand in the state_dict."""
        return {f"dynamic_tables.{name}": Table("", name, self, t, None) for t, name in enumerate(self.table_names)}

    def state_dict_ranks(self) -> Ranks:
        """Return all ranks, over which a dump takes the tables to be spread too."""
        return self._ranks(None)

    def _ranks(self, pg: Any) -> Ranks:
        ranks = Ranks(pg)
        if ranks.group is None:
            check_reachable(self.num_owning_ranks)
        return ranks

    def __getstate__(self) -> dict[str, Any]:
        # A copy stands alone.
        return super().__getstate__() | {"num_owning_ranks": 1}

    def dump(
        self,
        save_dir: AnyPath,
        optim: bool = False,
        counter: bool = False,
        table_names: Iterable[str] | None = None,
        pg: Any = None,
        allow_overwrite: bool = False,
        base: AnyPath | Sequence[AnyPath] | None = None,
        blocking: bool = True,
    ) -> DumpHandle | None:
        """Write the tables of this module into a folder, whose files then have no sub-folder.

        Arguments, what is returned and errors are those of ``DynamicEmbDump``, but ``table_names`` lists names.
        """
        ranks = self._ranks(pg)
        request, tables = ranks.each(
            lambda: (
                DumpRequest(as_string(save_dir), optim, counter, allow_overwrite, as_chain(base), blocking),
                tables_of_module(self, table_names),
            )
        )
        return dump_tables(request, tables, ranks)

    def load(
        self,
        save_dir: AnyPath | Sequence[AnyPath],
        optim: bool = False,
        counter: bool = False,
        table_names: Iterable[str] | None = None,
        pg: Any = None,
        merge: bool = False,
        fresh_scores: bool = False,
    ) -> dict[str, TableReport]:
        """Fill the tables of this module from a folder: one that ``dump`` wrote, or a collection's folder of a dump.

        Arguments and errors are those of ``DynamicEmbLoad``, but ``table_names`` lists names, and what happened is
        returned per table.
        """
        ranks = self._ranks(pg)
        request, tables = ranks.each(
            lambda: (
                LoadRequest(as_paths(save_dir), optim, counter, merge, fresh_scores, table_names is None),
                tables_of_module(self, table_names),
            )
        )
        return load_tables(request, tables, ranks).get("", {})

    def incremental_dump(
        self, named_thresholds: Mapping[str, int] | None = None, pg: Any = None
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, int]]:
        """Return the ids and weights of tables whose score is at least a threshold, and the next thresholds.

        Without thresholds that is all ids of all tables, with which a sequence of such calls begins. Arguments and
        errors are those of ``dynamicemb.incremental_dump.incremental_dump``, but all by table name.
        """
        found = incremental_dump(self, 0 if named_thresholds is None else {"model": named_thresholds}, pg)
        assert found is not None
        rows, thresholds = found
        return rows.get("model", {}), thresholds.get("model", {})
