"""Check that the sharders of a model are those of its dynamic tables, before TorchRec plans with them."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dynamicemb.sharding.bag_collection import DynamicEmbeddingBagCollectionSharder
from dynamicemb.sharding.collection import DynamicEmbeddingCollectionSharder


def check_sharders(module: nn.Module, sharders: list[ModuleSharder[nn.Module]], dynamic: set[str]) -> None:
    """Check that every collection with dynamic tables has a sharder that knows them.

    Args:
        module: the model.
        sharders: one per type of module; of two for one type TorchRec takes the last.
        dynamic: names of the dynamic tables.

    Raises:
        ValueError: names the sharder that is needed.
    """
    of_type = {sharder.module_type: sharder for sharder in sharders}
    for collection in _collections(module, set(of_type)):
        wanted, configs = _sharder_and_configs(collection)
        names = [config.name for config in configs if config.name in dynamic]
        found = of_type.get(type(collection))
        if names and not isinstance(found, wanted):
            given = f"sharders have {type(found).__name__}" if found else "sharders have none"
            raise ValueError(
                f"dynamic tables {names} are in an {type(collection).__name__}, for which {given}; "
                f"pass a {wanted.__name__} to the planner and to DistributedModelParallel"
            )


def check_planned(plan: ShardingPlan, dynamic: set[str]) -> None:
    """Check that a plan has every dynamic table.

    Raises:
        ValueError: names the tables that are missing.
    """
    missing = sorted(dynamic - {name for module_plan in plan.plan.values() for name in module_plan})
    if missing:
        raise ValueError(
            f"dynamic tables {missing} are in no collection that the sharders shard; build the model with the configs "
            "that the planner got, and pass a DynamicEmbeddingBagCollectionSharder for an EmbeddingBagCollection, "
            "a DynamicEmbeddingCollectionSharder for an EmbeddingCollection"
        )


def _collections(module: nn.Module, sharded_types: set[type]) -> Iterator[EmbeddingBagCollection | EmbeddingCollection]:
    """Yield the collections of a model, but none inside a module that has a sharder of its own."""
    if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        yield module
    elif type(module) not in sharded_types:
        for child in module.children():
            yield from _collections(child, sharded_types)


def _sharder_and_configs(collection: EmbeddingBagCollection | EmbeddingCollection) -> tuple[type, list[Any]]:
    if isinstance(collection, EmbeddingBagCollection):
        return DynamicEmbeddingBagCollectionSharder, collection.embedding_bag_configs()
    return DynamicEmbeddingCollectionSharder, collection.embedding_configs()
