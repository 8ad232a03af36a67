"""Check the model and its sharders before TorchRec plans: where dynamic tables are, and who shards them."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from dynamicemb.sharding.bag_collection import DynamicEmbeddingBagCollectionSharder
from dynamicemb.sharding.collection import DynamicEmbeddingCollectionSharder
from dynamicemb.sharding.planning.plan_mark import title_of_module
from dynamicemb.warn import warn

# What the planner sizes a dynamic table by.
_FIELDS = ("num_embeddings", "embedding_dim", "data_type")


def check_sharders(module: nn.Module, sharders: list[ModuleSharder[nn.Module]], dynamic: dict[str, Any]) -> None:
    """Check that every dynamic table is in a module that can hold it, with a sharder that knows it.

    Modules with a sharder of the user's own are left to it.

    Args:
        module: the model.
        sharders: one per type of module; of two for one type TorchRec takes the last.
        dynamic: the planner's embedding configs of dynamic tables, by name.

    Raises:
        ValueError: names tables, module and remedy.
    """
    of_type = {sharder.module_type: sharder for sharder in sharders}
    for path, holder in _holders("", module, set(of_type)):
        tables = sorted(dynamic.keys() & _tables_of(holder, of_type.get(type(holder))))
        if not tables:
            continue
        found = of_type.get(type(holder))
        if isinstance(holder, FeatureProcessedEmbeddingBagCollection):
            collection = holder._embedding_bag_collection
            found = _sharder_inside(path, tables, holder, found)
        elif isinstance(holder, EmbeddingBagCollection | EmbeddingCollection):
            collection = holder
        else:
            raise ValueError(_refusal(path, holder, tables))
        _check_sharder(path, collection, found, tables)
        _check_configs(path, collection, dynamic)


def check_planned(plan: ShardingPlan, dynamic: Collection[str]) -> None:
    """Check that a plan has every dynamic table.

    Raises:
        ValueError: names the tables that are missing, and what is there.
    """
    planned = {path: sorted(module_plan) for path, module_plan in plan.plan.items()}
    missing = sorted(set(dynamic) - {name for names in planned.values() for name in names})
    if missing:
        raise ValueError(
            f"dynamic tables {missing} are in no collection that the sharders shard (those have {planned}, by module); "
            "build the model with the configs that the planner got, and pass a DynamicEmbeddingBagCollectionSharder "
            "for an EmbeddingBagCollection, a DynamicEmbeddingCollectionSharder for an EmbeddingCollection"
        )


def configs_of(module: nn.Module) -> list[Any]:
    """Return the embedding configs of a collection, or of the collections inside another module."""
    for method in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(module, method):
            configs: list[Any] = list(getattr(module, method)())
            return configs
    return [config for child in module.children() for config in configs_of(child)]


def _holders(path: str, module: nn.Module, sharded_types: set[type]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold tables, with their paths: those that are sharded, or that nobody shards."""
    if type(module) in sharded_types or isinstance(module, BaseManagedCollisionEmbeddingCollection):
        yield path, module
    elif hasattr(module, "embedding_bag_configs") or hasattr(module, "embedding_configs"):
        yield path, module
    else:
        for name, child in module.named_children():
            yield from _holders(f"{path}.{name}" if path else name, child, sharded_types)


def _tables_of(holder: nn.Module, sharder: Any) -> set[str]:
    names = {config.name for config in configs_of(holder)}
    known = isinstance(
        holder,
        EmbeddingBagCollection
        | EmbeddingCollection
        | FeatureProcessedEmbeddingBagCollection
        | BaseManagedCollisionEmbeddingCollection,
    )
    if known or sharder is None:
        return names
    # Who wrote a sharder for a module of his own may put ours inside.
    return (
        names | set(sharder.shardable_parameters(holder)) if type(sharder).__module__.startswith("torchrec") else set()
    )


def _refusal(path: str, holder: nn.Module, tables: list[str]) -> str:
    # In full: the quantized collections have the names of the others.
    kind = f"{type(holder).__module__}.{type(holder).__name__}"
    where = f"dynamic tables {tables} are in {title_of_module(path)}, of type {kind}"
    if any(isinstance(module, BaseManagedCollisionEmbeddingCollection) for module in holder.modules()):
        return (
            f"{where}, but a dynamic table needs no managed collision: every int64 id gets a row of its own; use the "
            "EmbeddingBagCollection or EmbeddingCollection without it, or leave the tables static"
        )
    return (
        f"{where}, which cannot hold dynamic tables; put them into an "
        "EmbeddingBagCollection, EmbeddingCollection or FeatureProcessedEmbeddingBagCollection, or leave them static"
    )


def _sharder_inside(path: str, tables: list[str], holder: FeatureProcessedEmbeddingBagCollection, sharder: Any) -> Any:
    """Return the sharder of the collection inside, and warn about what the one around it leaves undone."""
    inside = getattr(sharder, "_ebc_sharder", None)
    outer_codecs = getattr(sharder, "qcomm_codecs_registry", None)
    if outer_codecs and inside is not None and inside.qcomm_codecs_registry != outer_codecs:
        warn(
            f"qcomm_codecs_registry of the {type(sharder).__name__} has no effect on dynamic tables {tables} of "
            f"{title_of_module(path)}; pass it to the {type(inside).__name__} inside"
        )
    processors = holder._feature_processors
    parts = processors.values() if isinstance(processors, nn.ModuleDict) else [processors]
    blind = sorted({type(part).__name__ for part in parts if not hasattr(part, "pre_process_input")})
    if blind:
        warn(
            f"feature processors {blind} of {title_of_module(path)} have no pre_process_input: with dynamic tables "
            f"{tables}, on several ranks, they see only those ids of a bag that one rank owns; compute what depends on "
            "the whole bag in pre_process_input, as PositionWeightedModule does"
        )
    return inside


def _check_sharder(path: str, collection: nn.Module, found: Any, tables: list[str]) -> None:
    bags = isinstance(collection, EmbeddingBagCollection)
    wanted: type = DynamicEmbeddingBagCollectionSharder if bags else DynamicEmbeddingCollectionSharder
    if not isinstance(found, wanted):
        given = f"sharders have {type(found).__name__}" if found else "sharders have none"
        raise ValueError(
            f"dynamic tables {tables} are in an {type(collection).__name__}, {title_of_module(path)}, for which "
            f"{given}; pass a {wanted.__name__} to the planner and to DistributedModelParallel"
        )


def _check_configs(path: str, collection: nn.Module, dynamic: dict[str, Any]) -> None:
    for config in configs_of(collection):
        planned = dynamic.get(config.name, config)
        differing = [name for name in _FIELDS if getattr(planned, name) != getattr(config, name)]
        if differing:
            theirs = ", ".join(f"{name}={getattr(config, name)}" for name in differing)
            ours = ", ".join(f"{name}={getattr(planned, name)}" for name in differing)
            raise ValueError(
                f"dynamic table {config.name!r} of {title_of_module(path)} has {theirs}, but eb_configs of the planner "
                f"have {ours}; give the planner the configs that the model is built with"
            )
