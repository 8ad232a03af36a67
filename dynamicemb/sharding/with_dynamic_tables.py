"""What both sharded collections share: static tables stay TorchRec's business, dynamic ones are kept out of it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.distributed.types import ShardingEnv

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.state_dict.module import RowsInStateDict
from dynamicemb.checkpoint.tables import Table
from dynamicemb.embedding.averaging import REMEDY, never_averaged
from dynamicemb.embedding.module import BatchedDynamicEmbeddingTablesV2
from dynamicemb.errors import UnsupportedOptionError
from dynamicemb.sharding.compute_kernels import DynamicKernel
from dynamicemb.sharding.exchange.send_batch import SendsBatches
from dynamicemb.sharding.planning.constraints import is_dynamic, row_wise
from dynamicemb.table.placement import Placement
from dynamicemb.warn import warn


@never_averaged
class WithDynamicTables(SendsBatches, RowsInStateDict):
    """What both sharded collections share; comes before TorchRec's class in the bases.

    Attributes:
        CONFIGS: attribute under which TorchRec keeps the embedding configs.
        PREFIX: where tables stand in a state_dict.
    """

    CONFIGS: str
    PREFIX: str
    _device: torch.device | None
    _env: ShardingEnv
    _lookups: list[Any]
    module_sharding_plan: dict[str, Any]

    def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        """Shard a collection; arguments are those of TorchRec's class."""
        super().__init__(module, *args, **kwargs)  # type: ignore[call-arg]
        # TorchRec forgets which weights were frozen; for dynamic tables it is kept.
        self._was_trained = {path: weight.requires_grad for path, weight in module.named_parameters()}

    @property
    def dynamic_embedding_modules(self) -> list[BatchedDynamicEmbeddingTablesV2]:
        """The dynamic tables of this rank. Dump and load find tables by this name, without knowing torchrec."""
        return [kernel.emb_module for kernel in self._dynamic_kernels()]

    def _dynamic_kernels(self) -> list[DynamicKernel]:
        modules = [module for lookup in self._lookups for module in lookup.modules()]
        return [module for module in modules if isinstance(module, DynamicKernel)]

    @property
    def dynamic_table_sizes(self) -> dict[str, int]:
        """How many rows each table has over all ranks, which dumps record."""
        return {config.name: config.num_embeddings for config in getattr(self, self.CONFIGS)}

    @property
    def dynamic_table_placements(self) -> dict[str, Placement]:
        """Where each dynamic table is, by its name."""
        plans, world_size = self.module_sharding_plan, self._env.world_size
        return {
            config.name: row_wise(plans[config.name].dist_type, config, world_size)
            for config in getattr(self, self.CONFIGS)
            if is_dynamic(plans[config.name])
        }

    def finish_building(self) -> None:
        """Show the weights of dynamic tables, and their rows in the state_dict; the last thing a constructor does."""
        for kernel in self._dynamic_kernels():
            kernel.show_weights(getattr(self, self.PREFIX), self.PREFIX, self._was_trained)
            # A dump of one of them must not take this rank for the only one once the process group is destroyed.
            kernel.emb_module.num_owning_ranks = self._env.world_size
        self._is_built = True

    def dynamic_table_names(self) -> list[str]:
        """Return the names of the dynamic tables."""
        return [name for name, plan in self.module_sharding_plan.items() if is_dynamic(plan)]

    def static_table_names(self) -> list[str]:
        """Return the names of the static tables."""
        return [name for name, plan in self.module_sharding_plan.items() if not is_dynamic(plan)]

    def static_configs(self) -> list[Any]:
        """Return the configs of the static tables."""
        static = set(self.static_table_names())
        return [config for config in getattr(self, self.CONFIGS) if config.name in static]

    def update_shards(self, changed_sharding_params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Move tables to other ranks; see TorchRec's method.

        Raises:
            UnsupportedOptionError: the collection has dynamic tables: TorchRec builds all of its tables anew, and would
                carry over dense weights only.
        """
        dynamic = self.dynamic_table_names()
        if dynamic:
            raise UnsupportedOptionError(
                f"a collection with dynamic tables {dynamic} cannot be resharded in this version, nor can the static "
                "tables beside them; shard a new model with the new plan, or move the static tables to a collection of "
                "their own"
            )
        super().update_shards(changed_sharding_params, *args, **kwargs)  # type: ignore[misc]

    def reset_parameters(self) -> None:
        """Initialise static tables; rows of dynamic ones are initialised when their id comes."""
        with self._only_static_configs():
            super().reset_parameters()  # type: ignore[misc]

    @contextmanager
    def _only_static_configs(self) -> Iterator[None]:
        configs = getattr(self, self.CONFIGS)
        dynamic = set(self.dynamic_table_names())
        setattr(self, self.CONFIGS, [config for config in configs if config.name not in dynamic])
        try:
            yield
        finally:
            setattr(self, self.CONFIGS, configs)

    def state_dict_tables(self) -> dict[str, Table]:
        """Return the dynamic tables by where they stand in the state_dict."""
        # The constructor loads the unsharded module, whose dynamic tables are placeholders.
        if not self.__dict__.get("_is_built"):
            return {}
        sizes, placements = self.dynamic_table_sizes, self.dynamic_table_placements
        return {
            f"{self.PREFIX}.{name}": Table("", name, module, t, sizes[name], placements[name])
            for module in self.dynamic_embedding_modules
            for t, name in enumerate(module.table_names)
        }

    def state_dict_ranks(self) -> Ranks:
        """Return the ranks over which the tables are spread."""
        return Ranks(self._env.process_group)

    @staticmethod
    def _pre_load_state_dict_hook(module: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        module.drop_dynamic_weights(state_dict, prefix)
        super()._pre_load_state_dict_hook(module, state_dict, prefix, *args)  # type: ignore[misc]

    def drop_dynamic_weights(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Remove dense weights of dynamic tables from a state_dict that is about to be loaded."""
        found = []
        for name in self.dynamic_table_names():
            if state_dict.pop(f"{prefix}{self.PREFIX}.{name}.weight", None) is not None:
                found.append(name)
        # The constructor loads the unsharded module, whose dynamic tables are placeholders.
        if found and self.__dict__.get("_is_built"):
            warn(
                f"load_state_dict ignores the weights of dynamic tables {found}, whose rows are other entries; "
                "import dense rows with insert() of dynamic_embedding_modules",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy, which a process group does not allow unless torchrec's ``sharded_model_copy`` makes it.

        Raises:
            TypeError: as Python does for what cannot be copied.
        """
        state = self.__reduce_ex__(4)[2]
        memo[id(self)] = copied = type(self).__new__(type(self))
        try:
            copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[attr-defined]
        except TypeError as error:
            if not self._has_dynamic_tables:
                raise
            raise TypeError(
                f"a sharded collection with dynamic tables {self.dynamic_table_names()} cannot be copied ({error}); "
                f"{REMEDY}. To make a second model, shard it and load a dump or a state_dict"
            ) from error
        for kernel in copied._dynamic_kernels():
            kernel.ask_weights(getattr(copied, self.PREFIX))
        return copied
