"""Modules that hold a collection: feature processors around dynamic tables, and any of them around static ones."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import RankError, RankPool, ranks  # noqa: F401
from tests.support.sharded_model import dynamic_modules

DIMS = {"a": 4, "b": 8}
FEATURES = {"a": ["f", "g"], "b": ["h"]}
KEYS = ["h", "f", "g"]
NUM_ROWS = 24
MAX_LENGTH = 6
LEARNING_RATE = 0.2
# Samples of a rank in a step: different ones, and a rank without any.
BATCH_SIZES = [(3, 3), (2, 4), (3, 0)]


@dataclass(frozen=True)
class Processed:
    """A collection in a feature processor; sharding None makes a table dynamic."""

    sharding: dict[str, str | None] = field(default_factory=lambda: {"a": None, "b": None})
    as_collection: bool = False
    pipelined: bool = False
    our_sharder: bool = True


def first_row(name: str) -> torch.Tensor:
    """Return ``[NUM_ROWS, D]``, a hash of (table, id, column)."""
    cells = torch.arange(NUM_ROWS * DIMS[name], dtype=torch.float64).view(NUM_ROWS, DIMS[name])
    return torch.sin(cells * 12.9898 + ord(name)).float() / 2


def bag_configs() -> list[Any]:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    return [
        EmbeddingBagConfig(name=name, num_embeddings=NUM_ROWS, embedding_dim=dim, feature_names=FEATURES[name])
        for name, dim in DIMS.items()
    ]


def make_batch(step: int, rank: int) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 * step + rank)
    batch_size = BATCH_SIZES[step][rank]
    lengths = torch.randint(0, MAX_LENGTH + 1, (len(KEYS) * batch_size,), generator=generator)
    ids = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths, stride=batch_size)


class ProcessedModel(nn.Module):
    """Position weights in front of pooled tables, and a sum behind them."""

    def __init__(self, as_collection: bool, device: str) -> None:
        from torchrec.modules.embedding_modules import EmbeddingBagCollection
        from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
        from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

        super().__init__()
        bags = EmbeddingBagCollection(tables=bag_configs(), is_weighted=True, device=torch.device(device))
        processor: Any = (
            PositionWeightedModuleCollection(dict.fromkeys(KEYS, MAX_LENGTH))
            if as_collection
            else {key: PositionWeightedModule(MAX_LENGTH) for key in KEYS}
        )
        self.processed = FeatureProcessedEmbeddingBagCollection(bags, processor)
        with torch.no_grad():
            for weights in self.position_weights().values():
                weights.copy_(torch.linspace(0.5, 1.5, MAX_LENGTH))

    def position_weights(self) -> dict[str, Any]:
        """Return the parameters of the feature processor, by feature."""
        found: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            if "position_weight" in name:
                found[next(part for part in reversed(name.split(".")) if part in KEYS)] = parameter
        return found

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.processed(batch)
        # In the order of the unsharded collection.
        out = torch.cat([pooled["f"], pooled["g"], pooled["h"]], dim=1)
        return ((out - 0.3) ** 2).sum(), out.detach()


def shard_processed(case: Processed, world_size: int) -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder

    model = ProcessedModel(case.as_collection, "meta")
    kind = DynamicEmbeddingBagCollectionSharder if case.our_sharder else EmbeddingBagCollectionSharder
    sharders = [FeatureProcessedEmbeddingBagCollectionSharder(kind(fused_params={"learning_rate": LEARNING_RATE}))]
    constraints = {
        name: ParameterConstraints(sharding_types=[sharding])
        if sharding
        else DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions())
        for name, sharding in case.sharding.items()
    }
    topology = Topology(world_size=world_size, compute_device="cpu")
    planner = DynamicEmbeddingShardingPlanner(bag_configs(), topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    with torch.no_grad():
        for weights in model.position_weights().values():
            weights.copy_(torch.linspace(0.5, 1.5, MAX_LENGTH))
    return sharded


def write_first_rows(model: Any, rank: int, world_size: int) -> None:
    for tables in dynamic_modules(model):
        for name in tables.table_names:
            ids = torch.arange(rank, NUM_ROWS, world_size)
            assert bool(tables.insert(name, ids, first_row(name)[ids]).all())
    for key, value in model.state_dict().items():
        if key.endswith(".weight"):
            name = key.split(".")[-2]
            for shard in value.local_shards():
                begin, size = shard.metadata.shard_offsets, shard.tensor.shape
                shard.tensor.copy_(first_row(name)[begin[0] : begin[0] + size[0]])


def train_processed(rank: int, world_size: int, case: Processed) -> dict[str, Any]:
    """Train a few steps; return what there is afterwards."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model = shard_processed(case, world_size)
    write_first_rows(model, rank, world_size)
    weights = model.module.position_weights()
    optimizer = torch.optim.SGD(list(weights.values()), lr=LEARNING_RATE)
    batches = [make_batch(step, rank) for step in range(len(BATCH_SIZES))]
    outputs = []
    if case.pipelined:
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
        remaining = iter(batches)
        outputs = [pipeline.progress(remaining) for _ in batches]
    else:
        for batch in batches:
            optimizer.zero_grad()
            loss, out = model(batch)
            loss.backward()
            optimizer.step()
            outputs.append(out)
    rows = {
        name: dict(zip(ids.tolist(), values))
        for tables in dynamic_modules(model)
        for name in tables.table_names
        for ids, values in [tables.export_keys_values(name, torch.device("cpu"))]
    }
    return {"outputs": outputs, "rows": rows, "weights": {key: value.detach() for key, value in weights.items()}}


def train_unsharded(world_size: int) -> dict[str, Any]:
    """Do the same in one process, with the loss of all ranks divided by their number."""
    model = ProcessedModel(True, "cpu")
    tables = model.processed._embedding_bag_collection.embedding_bags
    with torch.no_grad():
        for name in DIMS:
            tables[name].weight.copy_(first_row(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    outputs = []
    for step in range(len(BATCH_SIZES)):
        optimizer.zero_grad()
        # Unsharded collections know no batch without samples.
        batches = [make_batch(step, rank) for rank in range(world_size) if BATCH_SIZES[step][rank]]
        results = [model(batch) for batch in batches]
        (sum(loss for loss, _ in results) / world_size).backward()
        optimizer.step()
        outputs.append([out for _, out in results])
    weights = {key: value.detach() for key, value in model.position_weights().items()}
    return {"outputs": outputs, "rows": {name: tables[name].weight.detach() for name in DIMS}, "weights": weights}


def compare(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank, result in enumerate(results):
        for step, out in enumerate(result["outputs"]):
            assert out.shape[0] == BATCH_SIZES[step][rank]
            if out.shape[0]:
                torch.testing.assert_close(out, expected["outputs"][step][rank], rtol=2e-5, atol=1e-6)
        for key, weights in expected["weights"].items():
            assert not torch.equal(weights, torch.linspace(0.5, 1.5, MAX_LENGTH))
            torch.testing.assert_close(result["weights"][key], weights, rtol=2e-5, atol=1e-6)
        for name, rows in result["rows"].items():
            for id_, row in rows.items():
                torch.testing.assert_close(row, expected["rows"][name][id_], rtol=2e-5, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("as_collection", "pipelined"), [(False, False), (True, True)])
def test_position_weights_train_with_dynamic_tables(
    ranks: RankPool,  # noqa: F811
    world_size: int,
    as_collection: bool,
    pipelined: bool,
) -> None:
    results = ranks.run(world_size, train_processed, Processed(as_collection=as_collection, pipelined=pipelined))
    assert sum(len(result["rows"]["a"]) for result in results) == NUM_ROWS
    compare(results, train_unsharded(world_size))


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", [{"a": "table_wise", "b": "table_wise"}, {"a": "row_wise", "b": None}])
def test_position_weights_train_with_static_tables(ranks: RankPool, sharding: dict[str, str | None]) -> None:  # noqa: F811
    compare(ranks.run(2, train_processed, Processed(sharding=sharding)), train_unsharded(2))


def look_up_without_weights(rank: int, world_size: int) -> None:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder

    model = nn.Sequential(EmbeddingBagCollection(tables=bag_configs(), is_weighted=True, device=torch.device("meta")))
    sharders: Any = [DynamicEmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(Topology(world_size, "cpu")).collective_plan(model, sharders)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    sharded(make_batch(0, rank))


@pytest.mark.distributed
def test_c04_static_tables_without_a_feature_processor_need_weights(ranks: RankPool) -> None:  # noqa: F811
    with pytest.raises(RankError, match=r"(all: \[\d, \d\])(.|\n)*the collection is weighted, but the batch has no"):
        ranks.run(2, look_up_without_weights)


class Managed(nn.Module):
    """A managed collision in front of one table."""

    def __init__(self, pooled: bool) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
        from torchrec.modules.mc_embedding_modules import (
            ManagedCollisionEmbeddingBagCollection,
            ManagedCollisionEmbeddingCollection,
        )
        from torchrec.modules.mc_modules import (
            DistanceLFU_EvictionPolicy,
            ManagedCollisionCollection,
            MCHManagedCollisionModule,
        )

        super().__init__()
        self.pooled = pooled
        meta, kind = torch.device("meta"), EmbeddingBagConfig if pooled else EmbeddingConfig
        configs: Any = [kind(name="a", num_embeddings=NUM_ROWS, embedding_dim=4, feature_names=["f"], init_fn=fill)]
        module = MCHManagedCollisionModule(
            zch_size=NUM_ROWS,
            device=torch.device("cpu"),
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            input_hash_size=1000,
        )
        collisions = ManagedCollisionCollection({"a": module}, configs)
        self.managed: Any = (
            ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=configs, device=meta), collisions)
            if pooled
            else ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=configs, device=meta), collisions)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        out, _ = self.managed(batch)
        return out["f"] if self.pooled else out["f"].values()


def fill(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return weight.fill_(0.5)


def managed_sharder(pooled: bool, ours: bool) -> Any:
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder

    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

    params = {"learning_rate": LEARNING_RATE}
    if pooled:
        bags = DynamicEmbeddingBagCollectionSharder if ours else EmbeddingBagCollectionSharder
        return ManagedCollisionEmbeddingBagCollectionSharder(bags(fused_params=params))
    rows = DynamicEmbeddingCollectionSharder if ours else EmbeddingCollectionSharder
    return ManagedCollisionEmbeddingCollectionSharder(rows(fused_params=params))


def train_managed(rank: int, world_size: int, pooled: bool, ours: bool) -> list[torch.Tensor]:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    model, sharder = Managed(pooled), managed_sharder(pooled, ours)
    entries = construct_module_sharding_plan(
        model.managed,
        {"a": row_wise(compute_kernel="fused")},
        sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    plan = ShardingPlan({"managed": entries})
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    outputs = []
    for _ in range(5):
        # As many samples on each rank: TorchRec's own exchange needs that on gloo.
        batch = make_batch(0, rank)
        # Ids that the table has no row for.
        batch = type(batch)(batch.keys(), 30 * batch.values(), lengths=batch.lengths(), stride=batch.stride())
        out = sharded(batch)
        (out**2).sum().backward()
        outputs.append(out.detach())
    return outputs


@pytest.mark.distributed
@pytest.mark.parametrize("pooled", [True, False])
def test_managed_collisions_train_static_tables(ranks: RankPool, pooled: bool) -> None:  # noqa: F811
    theirs = ranks.run(2, train_managed, pooled, False)
    ours = ranks.run(2, train_managed, pooled, True)
    for expected, outputs in zip(theirs, ours, strict=True):
        assert [out.tolist() for out in outputs] == [out.tolist() for out in expected]
    # The ids have rows by now, and these have been trained.
    assert ours[0][0].tolist() != ours[0][-1].tolist()


@pytest.mark.parametrize("pooled", [True, False])
def test_c04_a_managed_collision_of_a_dynamic_table_is_refused(pooled: bool) -> None:
    from torchrec.distributed.planner import Topology

    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints

    model = Managed(pooled)
    configs = model.managed._managed_collision_collection.embedding_configs()
    planner = DynamicEmbeddingShardingPlanner(
        configs, Topology(1, "cpu"), constraints={"a": DynamicEmbParameterConstraints(use_dynamicemb=True)}
    )
    for sharders in ([managed_sharder(pooled, True)], managed_sharder(pooled, True)._e_sharder):
        with pytest.raises(ValueError, match=r"\['a'\] are in module 'managed', .* needs no managed collision"):
            planner.plan(model, sharders if isinstance(sharders, list) else [sharders])


def look_up_behind_a_managed_collision(rank: int, world_size: int) -> None:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.types import ShardingPlan

    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints

    model, sharder = Managed(True), managed_sharder(True, True)
    configs = model.managed._managed_collision_collection.embedding_configs()
    planner = DynamicEmbeddingShardingPlanner(
        configs, Topology(world_size, "cpu"), constraints={"a": DynamicEmbParameterConstraints(use_dynamicemb=True)}
    )
    entries = planner.plan(model.managed._embedding_module, [sharder._e_sharder]).plan[""]
    plan = ShardingPlan({"managed": entries})
    DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])(make_batch(0, rank))


@pytest.mark.distributed
def test_c04_a_plan_that_puts_a_dynamic_table_behind_a_managed_collision_is_refused(ranks: RankPool) -> None:  # noqa: F811
    with pytest.raises(RankError, match=r"(all: \[\d, \d\])(.|\n)*ids of dynamic tables \['a'\] were not exchanged by"):
        ranks.run(2, look_up_behind_a_managed_collision)
