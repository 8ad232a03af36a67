"""What a constraint says of a dynamic table without an effect."""

from torchrec.distributed.types import ShardingType

from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.sharding.constraints import DynamicEmbParameterConstraints
from dynamicemb.warn import warn


def check_constraint(name: str, constraint: DynamicEmbParameterConstraints) -> None:
    row_wise = ShardingType.ROW_WISE.value
    if constraint.sharding_types and row_wise not in constraint.sharding_types:
        raise ValueError(
            f"sharding_types={constraint.sharding_types} of dynamic table {name!r} lacks {row_wise!r}, the only one a "
            "dynamic table has; use None"
        )
    idle = {
        "compute_kernels": constraint.compute_kernels,
        "min_partition": constraint.min_partition,
        "cache_params": constraint.cache_params,
        "key_value_params": constraint.key_value_params,
        # Rows are not cached, and every id is legal.
        "enforce_hbm": constraint.enforce_hbm or None,
        "bounds_check_mode": constraint.bounds_check_mode,
    }
    given = [f"{key}={value}" for key, value in idle.items() if value is not None]
    if given:
        warn(f"dynamic table {name!r} ignores {', '.join(given)}; leave it None")


def warn_about_capacities(name: str, given: DynamicEmbTableOptions, planned: DynamicEmbTableOptions) -> None:
    """Warn about capacities that the embedding config overrules."""
    if given.max_capacity not in (None, planned.max_capacity):
        warn(
            f"max_capacity={given.max_capacity} of dynamic table {name!r} has no effect: num_embeddings makes it "
            f"{planned.max_capacity} on each rank; leave max_capacity None and set num_embeddings",
        )
    if given.init_capacity is not None and planned.max_capacity and given.init_capacity > planned.max_capacity:
        warn(
            f"init_capacity={given.init_capacity} of dynamic table {name!r} is lowered to {planned.max_capacity}, the "
            "most rows that num_embeddings allows on each rank; lower init_capacity",
        )
