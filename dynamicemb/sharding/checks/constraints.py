"""What a constraint says of a dynamic table: checked, and named where it has no effect."""

from typing import Any

from torchrec.distributed.types import ShardingType

from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.sharding.checks.fields import CONSTRAINT_FIELDS
from dynamicemb.sharding.planning.constraints import DynamicEmbParameterConstraints
from dynamicemb.warn import warn


def check_constraint(name: str, constraint: DynamicEmbParameterConstraints, compute_device: str) -> None:
    """Check the constraint of a dynamic table, and warn about what has no effect.

    Args:
        name: of the table.
        constraint: its constraint.
        compute_device: of the topology, for example "cuda".

    Raises:
        ValueError: it allows no sharding by rows, or names another kind of device than the topology.
    """
    row_wise = ShardingType.ROW_WISE.value
    if constraint.sharding_types and row_wise not in constraint.sharding_types:
        raise ValueError(
            f"sharding_types={constraint.sharding_types} of dynamic table {name!r} lacks {row_wise!r}, the only one a "
            "dynamic table has; use None"
        )
    group = constraint.device_group
    if group not in (None, compute_device):
        raise ValueError(
            f"device_group={group!r} of dynamic table {name!r}: the plan is for {compute_device!r}, the "
            "compute_device of the topology; leave it None, or plan with another topology"
        )
    CONSTRAINT_FIELDS.warn(constraint, f"dynamic table {name!r}")


def warn_about_capacities(name: str, given: DynamicEmbTableOptions, planned: DynamicEmbTableOptions) -> None:
    """Warn about capacities that the embedding config overrules."""
    if given.max_capacity is not None and planned.max_capacity is None:
        warn(
            f"max_capacity={given.max_capacity} of dynamic table {name!r} has no effect: num_embeddings decides about "
            "its first size, unless init_capacity asks for more; leave max_capacity None",
        )
    elif given.max_capacity not in (None, planned.max_capacity):
        warn(
            f"max_capacity={given.max_capacity} of dynamic table {name!r} has no effect: num_embeddings makes it "
            f"{planned.max_capacity} on each rank; leave max_capacity None and set num_embeddings",
        )
    if given.init_capacity is not None and planned.max_capacity and given.init_capacity > planned.max_capacity:
        warn(
            f"init_capacity={given.init_capacity} of dynamic table {name!r} is lowered to {planned.max_capacity}, the "
            "most rows that num_embeddings allows on each rank; lower init_capacity",
        )


def occurrences_per_step(constraint: Any, input_lengths: list[float], batch_size: int) -> float:
    """Return how many occurrences of its ids a table sees in a step of one rank, as a constraint describes it.

    Args:
        constraint: its ``batch_sizes`` and ``num_poolings``, one for each feature, replace `batch_size` and 1.
        input_lengths: ids of a bag, for each feature.
        batch_size: bags of a feature.
    """
    sizes = constraint.batch_sizes or [batch_size] * len(input_lengths)
    poolings = constraint.num_poolings or [1.0] * len(input_lengths)
    return float(sum(n * size * times for n, size, times in zip(input_lengths, sizes, poolings, strict=True)))
