"""Loading rows with ``torch.distributed.checkpoint``, which by itself only fills tensors of the size that was saved."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from dynamicemb.checkpoint.state_dict.entries import IDS, TABLE, TENSORS
from dynamicemb.checkpoint.state_dict.shards import evenly_sharded, ranks_of
from dynamicemb.warn import warn


class DynamicEmbLoadPlanner(DefaultLoadPlanner):
    """The planner with which a checkpoint of a model with dynamic tables is loaded.

    A table has any number of rows. So that those of the checkpoint find room, this planner puts tensors of their size
    into the state_dict, in the place of those of the table's present rows, and shares the rows evenly over the ranks::

        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder, planner=DynamicEmbLoadPlanner())
        model.load_state_dict(state["model"])

    All else, the arguments too, is as with ``DefaultLoadPlanner``.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state_dict to fill and what the checkpoint says of its contents."""
        self._absent: list[str] = []
        self._holds_rows = False
        if metadata is not None:
            for entries, key, path in list(_tables(state_dict, "")):
                self._make_room(entries, key, path, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Plan to read all that the checkpoint has of a table; what it lacks, ``load_state_dict`` judges."""
        if not self._holds_rows:
            return super().create_local_plan()
        for path in self._absent:
            self.state_dict.pop(path, None)
        # The base class would take a rank without a part of some tensor for one that reads a checkpoint of torch 2.3.
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)

    def _make_room(self, entries: MutableMapping[Any, Any], key: str, path: str, metadata: Metadata) -> None:
        saved = metadata.state_dict_metadata
        if path + TABLE not in saved:
            # Without allow_partial_load the keys that are missing are an error.
            if self.allow_partial_load:
                warn(
                    f"the checkpoint holds no rows of {path.rstrip('.')!r}: the table stays as it is",
                )
            return
        self._holds_rows = True
        ranks = ranks_of(entries.get(key + IDS))
        for name in TENSORS:
            if key + name not in entries:
                continue
            stored = saved.get(path + name)
            if not isinstance(stored, TensorStorageMetadata):
                entries[key + name] = None
                self._absent.append(path + name)
            elif ranks is None:
                entries[key + name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            else:
                entries[key + name] = evenly_sharded(list(stored.size), stored.properties.dtype, ranks)


def _tables(entries: Any, path: str) -> Iterator[tuple[MutableMapping[Any, Any], str, str]]:
    """Yield ``(the mapping that holds a table's entries, their prefix in it, and in the flattened state_dict)``."""
    pairs = enumerate(entries) if isinstance(entries, list) else entries.items()
    for key, value in pairs:
        if isinstance(value, MutableMapping | list):
            yield from _tables(value, f"{path}{key}.")
        elif isinstance(entries, MutableMapping) and isinstance(value, str) and str(key).endswith(TABLE):
            begin = str(key).removesuffix(TABLE)
            yield entries, begin, path + begin
