"""Planner, enumerator, sharder and module in combinations that nobody meant: dynamic tables, or one clear error."""

import copy
import dataclasses
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer, GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import FeatureProcessor, PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.types import DataType

from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
)
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from tests.support.ranks import RankPool, ranks  # noqa: F401

META = torch.device("meta")
PATH = "model.tables"


def bag_config(name: str = "t", **arguments: Any) -> EmbeddingBagConfig:
    common = {"num_embeddings": 64, "embedding_dim": 8, **arguments}
    return EmbeddingBagConfig(name=name, feature_names=[f"f_{name}"], **common)


def config(name: str = "t") -> EmbeddingConfig:
    return EmbeddingConfig(name=name, num_embeddings=64, embedding_dim=8, feature_names=[f"f_{name}"])


def dynamic(**options: Any) -> DynamicEmbParameterConstraints:
    return DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions(**options))


def topology(world_size: int = 1) -> Topology:
    return Topology(world_size=world_size, compute_device="cpu")


class Above(nn.Module):
    """A module at `PATH`."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.tables = tables


class DerivedBags(EmbeddingBagCollection):
    """A user's own kind of collection, for which nobody has a sharder."""


class Interaction(nn.Module):
    def forward(self, features: Any) -> Any:
        return features


def bags(weighted: bool = False, **arguments: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[bag_config(**arguments)], device=META, is_weighted=weighted)


def processed_bags(processor: FeatureProcessor | None = None) -> FeatureProcessedEmbeddingBagCollection:
    return FeatureProcessedEmbeddingBagCollection(bags(True), {"f_t": processor or PositionWeightedModule(3, META)})


def tower() -> EmbeddingTower:
    return EmbeddingTower(bags(), Interaction())


def quantized() -> QuantEmbeddingBagCollection:
    return QuantEmbeddingBagCollection(
        tables=[bag_config(data_type=DataType.INT8)], is_weighted=False, device=torch.device("cpu")
    )


def fused_bags() -> FusedEmbeddingBagCollection:
    return FusedEmbeddingBagCollection([bag_config()], torch.optim.SGD, {"lr": 0.1}, device=META)


def fused_rows() -> FusedEmbeddingCollection:
    return FusedEmbeddingCollection([config()], torch.optim.SGD, {"lr": 0.1}, device=META)


OURS = [DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder]


@pytest.mark.parametrize(
    ("module", "sharder", "message"),
    [
        (
            fused_bags,
            FusedEmbeddingBagCollectionSharder,
            "of type .*FusedEmbeddingBagCollection, which cannot",
        ),
        (fused_rows, FusedEmbeddingCollectionSharder, "of type .*FusedEmbeddingCollection, which cannot"),
        (tower, EmbeddingTowerSharder, "of type .*EmbeddingTower, which cannot"),
        (
            lambda: EmbeddingTowerCollection([tower()]),
            EmbeddingTowerCollectionSharder,
            "of type .*EmbeddingTowerCollection, which cannot",
        ),
        (
            quantized,
            QuantEmbeddingBagCollectionSharder,
            "of type .*quant.*.EmbeddingBagCollection, which cannot",
        ),
        (lambda: DerivedBags(tables=[bag_config()], device=META), None, "for which sharders have none"),
        (bags, EmbeddingBagCollectionSharder, "sharders have EmbeddingBagCollectionSharder; pass a Dynamic"),
        (processed_bags, FeatureProcessedEmbeddingBagCollectionSharder, "sharders have EmbeddingBagCollectionSharder"),
        # Without their sharders TorchRec would look inside.
        (fused_bags, None, "of type .*FusedEmbeddingBagCollection, which cannot"),
        (quantized, None, "of type .*quant.*.EmbeddingBagCollection, which cannot"),
    ],
)
def test_c04_modules_and_sharders_that_cannot_hold_a_dynamic_table_are_refused(
    module: Any, sharder: Any, message: str
) -> None:
    planner = DynamicEmbeddingShardingPlanner([bag_config()], topology(), constraints={"t": dynamic()})
    sharders = [kind() for kind in OURS] + ([sharder()] if sharder else [])
    with pytest.raises(ValueError, match=rf"dynamic tables \['t'\] are in .*module '{PATH}',.* {message}"):
        planner.plan(Above(module()), sharders)


def test_c04_an_embedding_bag_of_torch_is_refused() -> None:
    bag = nn.EmbeddingBag(64, 8, mode="sum", device="meta")
    planner = DynamicEmbeddingShardingPlanner([bag_config("weight")], topology(), constraints={"weight": dynamic()})
    with pytest.raises(ValueError, match=rf"\['weight'\] are in module '{PATH}', of type torch.*EmbeddingBag, which"):
        planner.plan(Above(bag), [EmbeddingBagSharder()])


def test_a_collection_in_an_unsharded_module_is_dynamic() -> None:
    planner = DynamicEmbeddingShardingPlanner([bag_config()], topology(), constraints={"t": dynamic()})
    plan = planner.plan(Above(tower()), [kind() for kind in OURS]).plan
    assert isinstance(plan[f"{PATH}.embedding"]["t"], DynamicEmbParameterSharding)


def test_a_table_name_in_two_modules_is_dynamic_in_both() -> None:
    planner = DynamicEmbeddingShardingPlanner([bag_config()], topology(), constraints={"t": dynamic()})
    plan = planner.plan(nn.ModuleDict({"one": bags(), "two": bags()}), [kind() for kind in OURS]).plan
    assert all(isinstance(plan[path]["t"], DynamicEmbParameterSharding) for path in ("one", "two"))
    with pytest.raises(ValueError, match="'t' of module 'two' has embedding_dim=16, but eb_configs .*embedding_dim=8"):
        planner.plan(nn.ModuleDict({"one": bags(), "two": bags(embedding_dim=16)}), [kind() for kind in OURS])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_embeddings": 640}, "has num_embeddings=640, but eb_configs of the planner have num_embeddings=64;"),
        ({"data_type": DataType.FP16}, "has data_type=FP16, but"),
        ({"name": "u"}, r"\['t'\] are in no collection that the sharders shard \(those have .*\['u'\]"),
    ],
)
def test_c04_a_planner_with_other_configs_than_the_model_is_refused(arguments: Any, message: str) -> None:
    planner = DynamicEmbeddingShardingPlanner([bag_config()], topology(), constraints={"t": dynamic()})
    with pytest.raises(ValueError, match=message):
        planner.plan(Above(bags(**arguments)), [DynamicEmbeddingBagCollectionSharder()])


@pytest.mark.parametrize("foreign", [False, True])
def test_our_planner_makes_dynamic_tables_with_either_enumerator(foreign: bool) -> None:
    kind = EmbeddingEnumerator if foreign else DynamicEmbeddingEnumerator
    constraints = {"t": dynamic()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DynamicEmbeddingShardingPlanner(
            [bag_config()], topology(), enumerator=kind(topology(), 8, constraints), constraints=constraints
        )
    plan = planner.plan(Above(bags()), [DynamicEmbeddingBagCollectionSharder()]).plan
    assert isinstance(plan[PATH]["t"], DynamicEmbParameterSharding)


@pytest.mark.parametrize("proposer", [EmbeddingOffloadScaleupProposer, GreedyProposer, UniformProposer])
def test_proposers_of_torchrec_plan_beside_dynamic_tables(proposer: Any) -> None:
    configs = [bag_config(), bag_config("s")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DynamicEmbeddingShardingPlanner(
            configs, topology(), proposer=proposer(), constraints={"t": dynamic()}
        )
    model = Above(EmbeddingBagCollection(tables=configs, device=META))
    plan = planner.plan(model, [DynamicEmbeddingBagCollectionSharder()]).plan[PATH]
    assert isinstance(plan["t"], DynamicEmbParameterSharding)
    assert not isinstance(plan["s"], DynamicEmbParameterSharding)


@pytest.mark.parametrize(
    ("constraints", "world_size", "message"),
    [
        (None, 1, r"differ for dynamic tables \['t'\]"),
        ({"t": dynamic(bucket_capacity=256)}, 1, r"differ for dynamic tables \['t'\]"),
        ({"t": dynamic(), "u": dynamic()}, 1, r"differ for dynamic tables \['u'\]"),
        ({"t": dynamic()}, 2, "world_size=2, the planner one with 1"),
    ],
)
def test_c04_an_enumerator_of_other_tables_is_refused(constraints: Any, world_size: int, message: str) -> None:
    enumerator = DynamicEmbeddingEnumerator(topology(world_size), constraints=constraints)
    with pytest.raises(ValueError, match=message):
        DynamicEmbeddingShardingPlanner(
            [bag_config(), bag_config("u")], topology(), enumerator=enumerator, constraints={"t": dynamic()}
        )


def test_c27_what_a_feature_processor_and_its_sharder_leave_undone_warns() -> None:
    class Blind(FeatureProcessor):
        def forward(self, features: Any) -> Any:
            return features

    planner = DynamicEmbeddingShardingPlanner([bag_config()], topology(), constraints={"t": dynamic()})
    outer = FeatureProcessedEmbeddingBagCollectionSharder(DynamicEmbeddingBagCollectionSharder())
    with pytest.warns(UserWarning, match=rf"\['Blind'\] of module '{PATH}' have no pre_process_input"):
        planner.plan(Above(processed_bags(Blind())), [outer])
    codecs: Any = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16), device=torch.device("cpu"))
    outer = FeatureProcessedEmbeddingBagCollectionSharder(DynamicEmbeddingBagCollectionSharder(), codecs)
    with pytest.warns(UserWarning, match="has no effect on dynamic tables .*; pass it to the Dynamic"):
        planner.plan(Above(processed_bags()), [outer])


def test_constraints_keep_what_they_were_given() -> None:
    given = CacheParams(load_factor=0.5)
    for constraint in (dynamic(), DynamicEmbParameterConstraints(cache_params=given)):
        copies = (copy.deepcopy(constraint), pickle.loads(pickle.dumps(constraint)), dataclasses.replace(constraint))
        for same in copies:
            assert same == constraint and hash(same) == hash(constraint)
    assert dataclasses.replace(dynamic(), cache_params=given).given_cache_params == given
    # Static again.
    constraint = dataclasses.replace(dynamic(), cache_params=given)
    assert dataclasses.replace(constraint, use_dynamicemb=False).cache_params == given


# What happens when a plan meets a sharder


def plan_with_torchrec(kind: str, model: nn.Module, sharders: list[Any]) -> ShardingPlan:
    constraints = {"t": dynamic(), "s": ParameterConstraints(sharding_types=["table_wise"])}
    size = torch.distributed.get_world_size()
    enumerator = DynamicEmbeddingEnumerator(topology(size), constraints=constraints) if kind == "enumerator" else None
    planner = EmbeddingShardingPlanner(topology(size), constraints=constraints, enumerator=enumerator)
    return planner.collective_plan(model, sharders, torch.distributed.group.WORLD)


def plan_with_ours(model: nn.Module) -> ShardingPlan:
    size = torch.distributed.get_world_size()
    configs = [bag_config(), bag_config("s")]
    planner = DynamicEmbeddingShardingPlanner(configs, topology(size), constraints={"t": dynamic()})
    return planner.collective_plan(model, [DynamicEmbeddingBagCollectionSharder()])


def make_plan(kind: str, model: nn.Module, sharders: list[Any]) -> ShardingPlan:
    if kind in ("constraints", "enumerator"):
        return plan_with_torchrec(kind, model, sharders)
    plan = plan_with_ours(model)
    if kind == "pickled":
        plan = pickle.loads(pickle.dumps(plan))
    if kind == "foreign entry":
        entry = plan.plan[PATH]["t"]
        plan.plan[PATH]["t"] = ParameterSharding("row_wise", "customized_kernel", entry.ranks, entry.sharding_spec)
    return plan


def apply_plan(api: str, plan: ShardingPlan, model: Any, sharders: list[Any]) -> Any:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.shard import shard, shard_modules

    device = torch.device("cpu")
    if api == "shard":
        return shard(model.model.tables, plan.plan[PATH], device=device, sharder=sharders[0])
    if api == "shard_modules":
        return shard_modules(model, device=device, plan=plan, sharders=sharders)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def outcome(kind: str, api: str, ours: bool) -> str:
    """Return the error, or the dynamic tables of the model."""
    model = Above(EmbeddingBagCollection(tables=[bag_config(), bag_config("s")], device=META))
    sharder: Any = DynamicEmbeddingBagCollectionSharder() if ours else EmbeddingBagCollectionSharder()
    try:
        plan = make_plan(kind, model, [sharder])
        sharded = apply_plan(api, plan, model, [sharder])
    except ValueError as error:
        return str(error)
    except KeyError as error:
        return repr(error)
    found = [module for module in sharded.modules() if hasattr(module, "dynamic_embedding_modules")]
    return str([tables.table_names for module in found for tables in module.dynamic_embedding_modules])


UNPLANNED = "'t' of module 'model.tables' is marked with use_dynamicemb=True, but its plan is not"
NO_SHARDER = "'t' of module 'model.tables' came to a sharder that does not know dynamic tables"
COMBINATIONS = [
    ("constraints", "DistributedModelParallel", True, UNPLANNED),
    ("enumerator", "DistributedModelParallel", True, UNPLANNED),
    ("constraints", "shard_modules", True, UNPLANNED),
    # Only the plan's entry is there, and that knows no names.
    ("constraints", "DistributedModelParallel", False, "a dynamic table is marked with use_dynamicemb=True"),
    ("ours", "DistributedModelParallel", True, "[['t']]"),
    ("pickled", "DistributedModelParallel", True, "[['t']]"),
    ("ours", "DistributedModelParallel", False, NO_SHARDER),
    ("pickled", "DistributedModelParallel", False, NO_SHARDER),
    ("ours", "shard", False, NO_SHARDER),
    ("ours", "shard_modules", False, NO_SHARDER),
    ("foreign entry", "DistributedModelParallel", True, "has a plan entry of type ParameterSharding with the compute"),
]


def all_outcomes(rank: int, world_size: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [outcome(kind, api, ours) for kind, api, ours, _ in COMBINATIONS]


@pytest.mark.distributed
def test_c04_a_plan_is_dynamic_or_refused_on_every_rank(ranks: RankPool) -> None:  # noqa: F811
    first, second = ranks.run(2, all_outcomes)
    assert first == second
    for (kind, api, ours, expected), found in zip(COMBINATIONS, first, strict=True):
        assert expected in found, (kind, api, ours, found)
