"""The sharding planner: TorchRec plans the static tables around the memory that the dynamic ones take."""

import dataclasses
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    Proposer,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders, placement
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ModuleSharder,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from dynamicemb.capacity import MAX_GROUP_SLOTS
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.sharding.checks.constraints import check_constraint, warn_about_capacities
from dynamicemb.sharding.checks.sharders import check_planned, check_sharders
from dynamicemb.sharding.planning.constraints import (
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
    has_idle_options,
    row_wise,
)
from dynamicemb.sharding.planning.enumerator import DynamicEmbeddingEnumerator
from dynamicemb.sharding.planning.plan_mark import DynamicTableMark
from dynamicemb.sharding.planning.table_sizes import TableMemory, slots_on_rank, table_options_on_rank
from dynamicemb.sharding.planning.written_options import given_options, write_options
from dynamicemb.sharding.torchrec_compat import make_topology
from dynamicemb.warn import warn

logger = logging.getLogger(__name__)

_DEFAULT_BATCH_SIZE = 512


class DynamicEmbeddingShardingPlanner:
    """Plans a model with dynamic and static tables.

    Args:
        eb_configs: embedding configs of all tables of the model.
        topology: devices and their memory; default: this process group, on GPUs if there are any, each with the
            memory of the present one, and otherwise TorchRec's default sizes.
        batch_size: bags per feature and rank in a step.
        enumerator: default: a `DynamicEmbeddingEnumerator`; another kind sizes dynamic tables as dense ones (warning).
        storage_reservation: as in TorchRec.
        proposer: as in TorchRec.
        partitioner: as in TorchRec.
        performance_model: as in TorchRec.
        stats: as in TorchRec.
        constraints: per table name; tables without one, or without ``use_dynamicemb``, are static. Into the
            ``dynamicemb_options`` of dynamic tables the planner writes what a rank has of the table: ``dim``,
            ``embedding_dtype``, ``index_type``, ``bucket_capacity``, ``max_capacity`` (not of NO_EVICTION),
            ``init_capacity``, ``local_hbm_for_values`` and ``initializer_args``. See `DynamicEmbParameterConstraints`.
        debug: as in TorchRec.

    Raises:
        ValueError: unknown or repeated table names, or options that do not fit a table; on every rank alike.
    """

    def __init__(
        self,
        eb_configs: list[Any],
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
    ) -> None:
        constraints = constraints or {}
        configs = _check_names(eb_configs, constraints)
        self._configs = configs
        self._topology = topology or _default_topology()
        self._batch_size = batch_size or _DEFAULT_BATCH_SIZE
        self._options: dict[str, DynamicEmbTableOptions] = {}
        # Of each dynamic table, on one rank.
        self._slots: dict[str, int] = {}
        for name, constraint in constraints.items():
            if isinstance(constraint, DynamicEmbParameterConstraints) and constraint.use_dynamicemb:
                check_constraint(name, constraint, self._topology.compute_device)
                given = given_options(constraint.dynamicemb_options)
                options = table_options_on_rank(configs[name], given, self._topology.world_size)
                warn_about_capacities(name, given, options)
                self._options[name] = options
                _, self._slots[name], _ = slots_on_rank(configs[name], given, self._topology.world_size)
            elif has_idle_options(constraint):
                warn(
                    f"table {name!r} is static and ignores dynamicemb_options; set use_dynamicemb=True",
                )
        if enumerator is None:
            enumerator = DynamicEmbeddingEnumerator(self._topology, self._batch_size, constraints)
        else:
            _check_enumerator(enumerator, constraints, set(self._options), self._topology.world_size)
        self._enumerator = enumerator
        self._planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=stats,
            constraints={name: c for name, c in constraints.items() if name not in self._options},
            debug=debug,
        )
        # The last thing that happens here: a planner that raises has changed nothing.
        write_options((_options_of(constraints[name]), planned) for name, planned in self._options.items())

    @property
    def memory(self) -> dict[str, TableMemory]:
        """Return what each dynamic table takes on one rank; filled on the rank that planned."""
        return dict(getattr(self._enumerator, "memory", {}))

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 and return the same plan on every rank.

        Args:
            module: the model.
            sharders: default: TorchRec's; they must include the sharders of dynamic tables.
            pg: default: all ranks.

        Raises:
            ValueError: the topology has another number of ranks than the process group.
            Exception: what rank 0 raised, on every rank; nobody waits for a plan that does not come.
        """
        group = pg or dist.GroupMember.WORLD
        if group is None:
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group() first, or use plan() in one process"
            )
        if self._topology.world_size != dist.get_world_size(group):
            raise ValueError(
                f"topology has world_size={self._topology.world_size} but the process group has "
                f"{dist.get_world_size(group)} ranks; give the planner a topology of the ranks that share the tables"
            )
        plan = Ranks(group).on_first(lambda: self._plan_static(module, sharders))
        return self._with_dynamic_tables(plan)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]] | None = None) -> ShardingPlan:
        """Plan in this process alone; ranks that call it with the same arguments get the same plan.

        Raises:
            ValueError: a dynamic table is not in `module`, or `sharders` lack the sharder of its collection.
        """
        return self._with_dynamic_tables(self._plan_static(module, sharders))

    def _plan_static(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]] | None) -> ShardingPlan:
        sharders = sharders or get_default_sharders()
        check_sharders(module, sharders, {name: self._configs[name] for name in self._options})
        plan = self._planner.plan(module, sharders)
        check_planned(plan, self._options)
        if self.memory:
            logger.info(memory_report(self.memory))
        return plan

    def _with_dynamic_tables(self, plan: ShardingPlan) -> ShardingPlan:
        """Replace the entries of dynamic tables."""
        for path, module_plan in plan.plan.items():
            group, slots_in_group = 0, 0
            for name in [name for name in module_plan if name in self._options]:
                slots = self._slots[name]
                if slots_in_group + slots > MAX_GROUP_SLOTS:
                    group, slots_in_group = group + 1, 0
                slots_in_group += slots
                entry = self._parameter_sharding(name, group, module_plan[name])
                entry.cache_params = DynamicTableMark(name, path, planned=True)
                module_plan[name] = entry
        return plan

    def _parameter_sharding(self, name: str, group: int, planned: Any) -> DynamicEmbParameterSharding:
        # A copy: modules may complete their options.
        options = dataclasses.replace(self._options[name])
        where, rows = row_wise(options.dist_type, self._configs[name], self._topology.world_size), self._slots[name]
        shards = [
            ShardMetadata(
                shard_sizes=[rows, options.dim],
                shard_offsets=[rows * part, 0],
                placement=placement(self._topology.compute_device, rank, self._topology.local_world_size),
            )
            for part, rank in enumerate(where.ranks)
        ]
        return DynamicEmbParameterSharding(
            sharding_type=ShardingType.ROW_WISE.value,
            ranks=list(where.ranks),
            sharding_spec=EnumerableShardingSpec(shards),
            stochastic_rounding=planned.stochastic_rounding,
            output_dtype=planned.output_dtype,
            dist_type=options.dist_type,
            dynamicemb_options=options,
            group=group,
        )


def memory_report(memory: dict[str, TableMemory]) -> str:
    """Return a table of what the dynamic tables take on one rank, in MiB."""
    columns = ("index", "score", "row", "state", "scratch", "growth")
    lines = [f"{'dynamic table':<32}{'slots':>14}" + "".join(f"{c:>12}" for c in (*columns, "HBM", "host")) + "  MiB"]
    for table in memory.values():
        sizes = [*(getattr(table, f"{column}_bytes") for column in columns), table.hbm_bytes, table.host_bytes]
        lines.append(f"{table.name:<32}{table.num_slots:>14}" + "".join(f"{size / 2**20:>12.1f}" for size in sizes))
    return "memory of one rank\n" + "\n".join(lines)


def _check_names(eb_configs: list[Any], constraints: dict[str, ParameterConstraints]) -> dict[str, Any]:
    """Return the configs by name."""
    configs = {config.name: config for config in eb_configs}
    if len(configs) != len(eb_configs):
        names = [config.name for config in eb_configs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"eb_configs has repeated table names {repeated}; name each table once")
    unknown = sorted(set(constraints) - set(configs))
    if unknown:
        raise ValueError(
            f"constraints has keys {unknown} that are no table of eb_configs ({sorted(configs)}); "
            "use the names of the embedding configs"
        )
    return configs


def _check_enumerator(
    enumerator: Enumerator, constraints: dict[str, ParameterConstraints], dynamic: set[str], world_size: int
) -> None:
    """Check that an enumerator takes the same tables for dynamic as the planner, of the same size."""
    if not isinstance(enumerator, DynamicEmbeddingEnumerator):
        if dynamic:
            warn(
                f"enumerator is a {type(enumerator).__name__}: the plan counts dynamic tables as dense ones; "
                "pass a DynamicEmbeddingEnumerator or None",
            )
        return
    options = enumerator.dynamic_options
    differing = sorted(
        name
        for name in dynamic | options.keys()
        if name not in dynamic
        or name not in options
        or given_options(options[name]) != given_options(_options_of(constraints[name]))
    )
    if differing:
        raise ValueError(
            f"constraints of the enumerator and of the planner differ for dynamic tables {differing}; pass the same "
            "constraints to both, or leave enumerator None"
        )
    if enumerator.world_size != world_size:
        raise ValueError(
            f"enumerator has a topology with world_size={enumerator.world_size}, the planner one with {world_size}; "
            "pass the same topology to both, or leave enumerator None"
        )


def _options_of(constraint: ParameterConstraints) -> DynamicEmbTableOptions:
    assert isinstance(constraint, DynamicEmbParameterConstraints)
    return constraint.dynamicemb_options


def _default_topology() -> Topology:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {"world_size": world_size, "local_world_size": get_local_size(world_size)}
    if not torch.cuda.is_available():
        return make_topology(compute_device="cpu", **sizes)
    hbm_cap = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return make_topology(compute_device="cuda", hbm_cap=hbm_cap, **sizes)
