"""The planner's search space: dynamic tables have one option, row-wise, at their true size."""

import copy
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.optimizer import EmbOptimType
from dynamicemb.sharding.checks.constraints import occurrences_per_step
from dynamicemb.sharding.checks.sharders import configs_of
from dynamicemb.sharding.planning.constraints import DynamicEmbParameterConstraints
from dynamicemb.sharding.planning.table_sizes import (
    TableMemory,
    grows,
    slots_on_rank,
    table_memory,
    table_options_on_rank,
)
from dynamicemb.sharding.planning.written_options import given_options
from dynamicemb.sharding.torchrec_compat import optimizer_of_parameter, remember_search_space


class DynamicEmbeddingEnumerator(EmbeddingEnumerator):
    """Enumerates sharding options for static tables as TorchRec does, and one row-wise option per dynamic table.

    A dynamic table counts with what it takes: index, scores, rows, optimizer state and scratch. `memory` lists it.

    Args:
        topology: devices and their memory.
        batch_size: bags per feature and rank in a step.
        constraints: per table; tables with ``use_dynamicemb`` are dynamic.
        estimator: TorchRec's estimators for static tables.
        use_exact_enumerate_order: as in TorchRec.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = 512,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool = False,
    ) -> None:
        self._user_constraints = constraints or {}
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints={name: _for_torchrec(c) for name, c in self._user_constraints.items()},
            estimator=estimator,
            use_exact_enumerate_order=use_exact_enumerate_order,
        )
        self.memory: dict[str, TableMemory] = {}

    @property
    def dynamic_options(self) -> dict[str, DynamicEmbTableOptions]:
        """The options of the tables that it takes for dynamic, by name."""
        return {
            name: constraint.dynamicemb_options
            for name, constraint in self._user_constraints.items()
            if isinstance(constraint, DynamicEmbParameterConstraints) and constraint.use_dynamicemb
        }

    @property
    def world_size(self) -> int:
        """Over how many ranks it spreads a table."""
        return self._world_size

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Return the sharding options of a module; see TorchRec's method."""
        options = super().enumerate(module, sharders)
        fused_params = {sharder.module_type: getattr(sharder, "fused_params", None) or {} for sharder in sharders}
        for option in options:
            constraint = self._user_constraints.get(option.name)
            if isinstance(constraint, DynamicEmbParameterConstraints) and constraint.use_dynamicemb:
                self._size(option, constraint, fused_params.get(type(option.module[1]), {}))
        remember_search_space(self, copy.deepcopy(options))
        return options

    def _size(
        self, option: ShardingOption, constraint: DynamicEmbParameterConstraints, fused_params: dict[str, Any]
    ) -> None:
        """Replace the storage of a dynamic table's shards by what they take."""
        optimizer_class = optimizer_of_parameter(option.tensor)
        optimizer = (
            optimizer_type_to_emb_opt_type(optimizer_class)
            if optimizer_class
            else fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
        )
        config = _config_of(option.module[1], option.name)
        options = table_options_on_rank(config, constraint.dynamicemb_options, self._world_size)
        occurrences = occurrences_per_step(constraint, option.input_lengths, self._batch_size)
        _, slots, _ = slots_on_rank(config, constraint.dynamicemb_options, self._world_size)
        grown = self._grows_beside(option.module[1], constraint.dynamicemb_options)
        memory = table_memory(option.name, options, optimizer, occurrences, self._compute_device, slots, grown)
        self.memory[option.name] = memory
        for rank, shard in enumerate(option.shards):
            shard.size = [slots, options.dim]
            shard.offset = [rank * slots, 0]
            shard.storage = Storage(hbm=memory.hbm_bytes, ddr=memory.host_bytes)

    def _grows_beside(self, collection: Any, options: DynamicEmbTableOptions) -> bool:
        """Say whether a table grows that shares a module with one of these options, or is it."""
        for config in configs_of(collection):
            constraint = self._user_constraints.get(config.name)
            if isinstance(constraint, DynamicEmbParameterConstraints) and constraint.use_dynamicemb:
                # Options are equal where TorchRec gives tables to one module.
                others = constraint.dynamicemb_options
                if given_options(others) == given_options(options) and grows(config, others, self._world_size):
                    return True
        return False


def _for_torchrec(constraint: ParameterConstraints) -> ParameterConstraints:
    """Return the constraint under which TorchRec enumerates exactly one option for a dynamic table."""
    if not isinstance(constraint, DynamicEmbParameterConstraints) or not constraint.use_dynamicemb:
        return constraint
    constraint = copy.copy(constraint)
    constraint.sharding_types = [ShardingType.ROW_WISE.value]
    constraint.compute_kernels = [EmbeddingComputeKernel.FUSED.value]
    # The mark stays: should another planner ask, it goes into the plan.
    constraint.cache_params = None
    return constraint


def _config_of(module: Any, table: str) -> Any:
    return next(config for config in configs_of(module) if config.name == table)
