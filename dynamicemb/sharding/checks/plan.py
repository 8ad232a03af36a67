"""Check the plan of a collection against its embedding configs, and take over what the configs say of a table."""

import copy
import dataclasses
from typing import Any

from torchrec.distributed.types import ParameterSharding

from dynamicemb.config_initializer import given_initializers, initializer_of_config
from dynamicemb.dynamicemb_config import (
    DynamicEmbKernel,
    DynamicEmbTableOptions,
    complete_initializer_args,
    data_type_to_dtype,
)
from dynamicemb.sharding.checks.fields import CONFIG_FIELDS, PLAN_FIELDS
from dynamicemb.sharding.planning.constraints import DynamicEmbParameterSharding, is_dynamic
from dynamicemb.sharding.planning.table_sizes import check_config
from dynamicemb.sharding.torchrec_compat import CUSTOMIZED_KERNEL
from dynamicemb.types import DynamicEmbInitializerArgs
from dynamicemb.warn import warn


def checked_plan(plan: dict[str, ParameterSharding], configs: list[Any]) -> dict[str, ParameterSharding]:
    """Return a plan in which the entries of dynamic tables are complete and hold nothing without an effect.

    What a planner made is complete. What is written by hand gets dim, dtype and first values from the configs.

    Args:
        plan: by table name; not changed.
        configs: EmbeddingConfig or EmbeddingBagConfig of each table.

    Raises:
        ValueError: an entry contradicts itself or its config.
    """
    checked = copy.copy(plan)
    for config in configs:
        entry = plan.get(config.name)
        if entry is not None and is_dynamic(entry):
            check_config(config)
            CONFIG_FIELDS.warn(config, f"dynamic table {config.name!r}")
            checked[config.name] = _checked_entry(entry, config)
    return checked


def _checked_entry(entry: Any, config: Any) -> DynamicEmbParameterSharding:
    for field, expected in (("compute_kernel", CUSTOMIZED_KERNEL), ("customized_compute_kernel", DynamicEmbKernel)):
        if getattr(entry, field) != expected:
            raise ValueError(
                f"{field} of dynamic table {config.name!r} must be {expected!r}, got {getattr(entry, field)!r}; "
                "leave the default of DynamicEmbParameterSharding"
            )
    PLAN_FIELDS.warn(entry, f"the plan entry of dynamic table {config.name!r}")
    options = _checked_options(entry.dynamicemb_options, config)
    _check_shards(entry, options, config.name)
    # TorchRec would hand them to the tables.
    idle = dict.fromkeys(PLAN_FIELDS.idle)
    return dataclasses.replace(entry, dynamicemb_options=options, **idle)  # type: ignore[arg-type]


def _checked_options(options: DynamicEmbTableOptions, config: Any) -> DynamicEmbTableOptions:
    _warn_about_initializers(options.initializer_args, config)
    facts = {"dim": config.embedding_dim, "embedding_dtype": data_type_to_dtype(config.data_type)}
    for field, value in facts.items():
        if getattr(options, field) not in (None, value):
            raise ValueError(
                f"{field}={getattr(options, field)} in the plan of dynamic table {config.name!r} differs from {value} "
                "of its embedding config; leave it None, or plan again"
            )
    initializer = complete_initializer_args(options.initializer_args, embedding_config=config)
    if initializer is options.initializer_args and all(getattr(options, f) is not None for f in facts):
        return options
    return dataclasses.replace(options, initializer_args=initializer, **facts)


def _warn_about_initializers(args: DynamicEmbInitializerArgs, config: Any) -> None:
    """Warn about what a config asks for in vain."""
    given = given_initializers(config)
    if not given:
        return
    overruled = "init_fn"
    if args != DynamicEmbInitializerArgs() and not _is_of_config(args, config):
        overruled = "initializer_args of its options"
    elif given[0] == "init_fn":
        given = given[1:]
    else:
        return
    if given:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in given)
        warn(f"dynamic table {config.name!r} ignores {values}: {overruled} decides about first values; give only one")


def _is_of_config(args: DynamicEmbInitializerArgs, config: Any) -> bool:
    try:
        return args == initializer_of_config(config)
    except ValueError:
        return False


def _check_shards(entry: DynamicEmbParameterSharding, options: DynamicEmbTableOptions, name: str) -> None:
    """Refuse shards that are not those of the table: one a rank, in order, with the slots of its options."""
    ranks = list(entry.ranks or [])
    if ranks != list(range(len(ranks))):
        raise ValueError(
            f"ranks={ranks} of dynamic table {name!r}: it is on all ranks, in order; set {sorted(ranks)}, or plan with "
            "DynamicEmbeddingShardingPlanner"
        )
    shards = getattr(entry.sharding_spec, "shards", None)
    sizes = None if shards is None else [list(shard.shard_sizes) for shard in shards]
    rows = None if not sizes else options.max_capacity or sizes[0][0]
    if sizes != [[rows, options.dim]] * len(ranks):
        raise ValueError(
            f"sharding_spec of dynamic table {name!r} has shards of {sizes}, but must have one of "
            f"[max_capacity, dim] = [{options.max_capacity}, {options.dim}] for each of its ranks {ranks}; "
            "plan with DynamicEmbeddingShardingPlanner"
        )
