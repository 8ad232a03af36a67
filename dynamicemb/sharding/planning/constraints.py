"""What a user says about a table, and what the plan says about it."""

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, ParameterSharding

from dynamicemb.dynamicemb_config import DynamicEmbKernel, DynamicEmbTableOptions
from dynamicemb.sharding.planning.plan_mark import DynamicTableMark, not_planned_by_us, title_of_table
from dynamicemb.sharding.torchrec_compat import CUSTOMIZED_KERNEL
from dynamicemb.table.placement import Placement, Rule

# Keys of fused_params that are ours: they never reach FBGEMM.
OPTIONS_PARAM = "dynamicemb_options"
DIST_TYPE_PARAM = "dist_type"
KERNEL_PARAM = "customized_compute_kernel"
GROUP_PARAM = "dynamicemb_group"
SEED_PARAM = "seed"


def _default_options() -> DynamicEmbTableOptions:
    options = DynamicEmbTableOptions()
    # Tells options that nobody gave from those that a user gave.
    options.__dict__["_is_default"] = True
    return options


@dataclass
class DynamicEmbParameterConstraints(ParameterConstraints):
    """Constraints of one table for the planner.

    Attributes:
        use_dynamicemb: True makes the table dynamic; False leaves it to TorchRec. A planner of TorchRec takes such a
            constraint, but its plan is refused when the table is sharded: it would be a static one.
        dynamicemb_options: options of a dynamic table. The planner completes this object, for whoever reads it later;
            the plan has a copy. An object for several tables gets the values in which all of these agree, and keeps
            what was given otherwise; capacities and bucket size are written together or not at all. Whoever plans again
            with the object, for other tables or ranks, plans by what was given: what a planner wrote is no wish, unless
            it has been changed since.
    """

    use_dynamicemb: bool = False
    dynamicemb_options: DynamicEmbTableOptions = field(default_factory=_default_options)

    def __post_init__(self) -> None:
        if not isinstance(self.dynamicemb_options, DynamicEmbTableOptions):
            raise TypeError(f"dynamicemb_options must be DynamicEmbTableOptions, got {self.dynamicemb_options!r}")

    @property
    def cache_params(self) -> CacheParams | None:  # type: ignore[override]
        """What TorchRec's planner copies into a plan: the mark of a dynamic table, else what was given."""
        given = self.given_cache_params
        return DynamicTableMark(given=given) if self.use_dynamicemb else given

    @cache_params.setter
    def cache_params(self, value: CacheParams | None) -> None:
        # A copy of a constraint passes on what it read.
        self.given_cache_params = value.given if isinstance(value, DynamicTableMark) else value

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.use_dynamicemb, self.dynamicemb_options))


@dataclass
class DynamicEmbParameterSharding(ParameterSharding):
    """The plan of one dynamic table.

    Attributes:
        compute_kernel: ``customized_kernel``, which makes TorchRec ask for the additional parameters below.
        customized_compute_kernel: ``DynamicEmb``.
        dist_type: which rank owns an id, see `dynamicemb.table.placement`.
        dynamicemb_options: options of this table on one rank.
        group: tables of different groups are not fused; the planner splits tables of more than 2^31 - 1 slots.
        cache_params: a mark that TorchRec's own sharders raise for; a dynamic table has no cache.
    """

    compute_kernel: str = CUSTOMIZED_KERNEL
    customized_compute_kernel: str = DynamicEmbKernel
    dist_type: str = "roundrobin"
    dynamicemb_options: DynamicEmbTableOptions = field(default_factory=DynamicEmbTableOptions)
    group: int = 0
    cache_params: CacheParams | None = field(default_factory=lambda: DynamicTableMark(planned=True))

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Return what TorchRec adds to the table's fused_params."""
        return {
            KERNEL_PARAM: self.customized_compute_kernel,
            DIST_TYPE_PARAM: self.dist_type,
            OPTIONS_PARAM: self.dynamicemb_options,
            GROUP_PARAM: self.group,
        }

    @staticmethod
    def pop_additional_fused_params(fused_params: dict[str, Any]) -> None:
        """Remove in place what `get_additional_fused_params` adds."""
        for name in (KERNEL_PARAM, DIST_TYPE_PARAM, OPTIONS_PARAM, GROUP_PARAM):
            fused_params.pop(name, None)


def has_idle_options(constraint: Any) -> bool:
    """Say whether a constraint has options of a dynamic table that somebody gave, but not ``use_dynamicemb``."""
    return (
        isinstance(constraint, DynamicEmbParameterConstraints)
        and not constraint.use_dynamicemb
        and "_is_default" not in constraint.dynamicemb_options.__dict__
    )


def row_wise(dist_type: str, config: Any, world_size: int) -> Placement:
    """Return where a dynamic table is: its rows are on all ranks.

    Args:
        dist_type: see `dynamicemb.table.placement`.
        config: TorchRec's config of the table.
        world_size: ranks that share the table.

    Raises:
        ValueError: an argument is out of range.
    """
    return Placement.row_wise(Rule(dist_type, config.num_embeddings), world_size, config.embedding_dim)


def is_dynamic(parameter_sharding: ParameterSharding) -> bool:
    """Say whether a plan entry is a dynamic table."""
    return isinstance(parameter_sharding, DynamicEmbParameterSharding)


def plan_for_our_tables(plan: dict[str, ParameterSharding], module: str | None) -> dict[str, ParameterSharding]:
    """Return the plan of a collection as our sharders hand it to TorchRec's code: without the mark.

    Args:
        plan: by table name; not changed.
        module: path of the collection in the model, if it is known.

    Raises:
        ValueError: a table was meant to be dynamic, but its entry is somebody else's.
    """
    ours = copy.copy(plan)
    for table, entry in plan.items():
        if is_dynamic(entry):
            ours[table] = dataclasses.replace(entry, cache_params=None)
        elif isinstance(entry.cache_params, DynamicTableMark):
            raise not_planned_by_us(table, module)
        elif entry.compute_kernel == CUSTOMIZED_KERNEL:
            raise ValueError(
                f"{title_of_table(table, module)} has a plan entry of type {type(entry).__name__} with the "
                f"compute kernel {CUSTOMIZED_KERNEL!r}, which is none of ours; plan with "
                "DynamicEmbeddingShardingPlanner, or make the entry a DynamicEmbParameterSharding"
            )
    return ours
