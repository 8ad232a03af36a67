"""What a module of dynamic tables holds: import, erase and export of rows."""

from collections.abc import Iterable

import torch

from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.embedding.checks import InsertChecks
from dynamicemb.embedding.inputs import check_ids, check_rows
from dynamicemb.score_strategy import score_dump_permutation
from dynamicemb.table.group import TableGroup


class TableContents:
    """The part of a module that changes and shows rows outside of lookups."""

    dims: list[int]
    table_options: list[DynamicEmbTableOptions]
    insert_checks: InsertChecks
    _group: TableGroup

    def _check_scores(self, tables: Iterable[int]) -> None:
        """Refuse to touch CUSTOMIZED tables that have no score yet."""
        raise NotImplementedError

    def insert(self, table_name: str, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Import rows, for example of a pretrained table; ids already there are overwritten, new ones are admitted.

        Args:
            table_name: which table.
            ids: int64, int32 or uint64 ``[N]``; of repeated ids the last counts.
            rows: floating ``[N, D]`` weights. Optimizer state of new ids starts at its initial value, that of others
                stays. The ids are touched as by a lookup; STEP gives them the number of the next training forward.

        Returns:
            bool ``[N]``: False where the id's bucket had no place for it.

        Raises:
            InsertFailedError: there are such ids and the table has ``safe_check_mode`` ERROR; nothing has changed.
        """
        table = self._group.number_of(table_name)
        ids = check_ids(ids, self._group.device, "ids")
        check_rows(rows, ids.numel(), self.dims[table], self._group.device)
        self._check_scores([table])
        with self._group.turn():
            self.insert_checks.before_import(table, ids)
            inserted = self._group.assign(table, ids, rows.detach())
            self.insert_checks.after_insert()
        return inserted

    def contains(self, table_name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return bool ``[N]``: which ids a table holds; changes nothing."""
        return self._group.contains(self._group.number_of(table_name), check_ids(ids, self._group.device, "ids"))

    def erase(self, table_name: str, ids: torch.Tensor) -> int:
        """Remove ids from a table; returns how many were there. An erased id that returns starts fresh."""
        return self._group.erase(self._group.number_of(table_name), check_ids(ids, self._group.device, "ids"))

    def erase_expired(self, table_name: str) -> int:
        """Free the places of ids that have outlived a table's ``ttl``; returns how many, 0 where it has none."""
        return self._group.erase_expired(self._group.number_of(table_name))

    def export_keys_values(
        self, table_name: str, device: torch.device | str, batch_size: int = 65536
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all ids and weights of a table.

        Args:
            table_name: which table.
            device: where the result goes.
            batch_size: rows copied at a time, at least 1.

        Returns:
            ``(ids i64[M], weights f32[M, D])``, in slot order.

        Raises:
            TypeError: ``batch_size`` is not an int.
            ValueError: ``batch_size`` is below 1, or the table is unknown.
        """
        table = self._group.number_of(table_name)
        if not isinstance(batch_size, int) or isinstance(batch_size, bool):
            raise TypeError(f"batch_size must be an int, got {batch_size!r}; use for example 65536")
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}; use for example 65536")
        with self._group.turn():
            slots = self._group.scan(table)
            ids = self._group.index.keys[slots].to(device)
            weights = torch.empty(slots.numel(), self.dims[table], dtype=torch.float32, device=device)
            for begin in range(0, slots.numel(), batch_size):
                rows = self._group.index.rows[slots[begin : begin + batch_size]]
                weights[begin : begin + batch_size] = self._group.read(table, rows)[0].to(device)
        return ids, weights

    def export_scores(self, table_name: str, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all ids and scores of a table; ids as ``export_keys_values`` lists them.

        Args:
            table_name: which table.
            device: where the result goes.

        Returns:
            ``(ids i64[M], scores i64[M])``; scores are ``[M, 2]`` for a compound strategy, in the order of its tuple.
        """
        table = self._group.number_of(table_name)
        group = self._group
        with group.turn():
            slots = group.scan(table)
            columns = torch.stack(group.scores(table, slots), 1).to(device)
            ids = group.index.keys[slots].to(device)
        ordered = columns[:, score_dump_permutation(self.table_options[table].score_strategy)]
        return ids, ordered if ordered.shape[1] > 1 else ordered[:, 0]
