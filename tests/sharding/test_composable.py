"""`torchrec.distributed.shard`: `shard` and `shard_modules` put dynamic tables into a model as DMP does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import (
    LEARNING_RATE,
    SEED,
    STEPS,
    Case,
    Model,
    Table,
    build,
    dynamic_modules,
    embedding_configs,
    exported,
    loss_of,
    make_batch,
    make_kjt,
    outputs_of,
)

pytestmark = pytest.mark.distributed

TABLES = (
    Table("a", ("f0", "f1")),
    # In one group with "a".
    Table("c", ("f3",)),
    Table("b", ("f2",), dist_type="hash_roundrobin", score="LFU"),
    Table("s", ("g0",), sharding="row_wise", num_embeddings=12),
)
CASES = pytest.mark.parametrize("pooled", [False, True], ids=["ec", "ebc"])


def unsharded(case: Case) -> nn.Module:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    kind = EmbeddingBagCollection if case.pooled else EmbeddingCollection
    return kind(tables=embedding_configs(case), device=torch.device("cpu"))


def sharder_of(case: Case) -> Any:
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

    params = {"learning_rate": LEARNING_RATE, "seed": SEED}
    kind = DynamicEmbeddingBagCollectionSharder if case.pooled else DynamicEmbeddingCollectionSharder
    return kind(fused_params=params)


def train(model: nn.Module, case: Case, rank: int) -> list[bytes]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(outputs_of(case, model(make_kjt(make_batch(case, step, rank), case))))
        loss.backward()
        losses.append(loss.detach().numpy().tobytes())
    return losses


def bits(model: nn.Module) -> dict[str, dict[int, bytes]]:
    return {name: {i: row.numpy().tobytes() for i, row in rows.items()} for name, rows in exported(model).items()}


def shard_and_train(rank: int, world_size: int, pooled: bool, path: str) -> None:
    from torch.distributed.optim import _get_in_backward_optimizers
    from torchrec.distributed.shard import shard, shard_modules
    from torchrec.distributed.types import ShardingEnv

    from dynamicemb import DynamicEmbDump, DynamicEmbLoad

    case = Case(TABLES, pooled=pooled)
    reference = build(case, world_size)
    wanted = train(reference, case, rank), bits(reference)
    plan, sharder, cpu = reference.plan, sharder_of(case), torch.device("cpu")
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    alone = shard(unsharded(case), dict(plan.plan["collection"]), env=env, device=cpu, sharder=sharder)
    inside = shard_modules(Model(unsharded(case)), env=env, device=cpu, plan=plan, sharders=[sharder])
    again = shard(unsharded(case), dict(plan.plan["collection"]), env=env, device=cpu, sharder=sharder)
    assert [tables.table_names for tables in dynamic_modules(alone)] == [["a", "c"], ["b"]]
    for model in (alone, inside):
        assert (train(model, case, rank), bits(model)) == wanted
        # Parameters lead to the optimizers where no DistributedModelParallel lists them: to each group of tables once.
        for optimizer in _get_in_backward_optimizers(model):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / 2
        assert {tables.optimizer.learning_rate for tables in dynamic_modules(model)} == {LEARNING_RATE / 2}
    for number, (model, other) in enumerate(((alone, again), (inside, Model(again)))):
        DynamicEmbDump(f"{path}/{number}", model, optim=True)
        for tables in dynamic_modules(other):
            tables.erase("a" if "a" in tables.table_names else "b", torch.arange(-6, 13))
        DynamicEmbLoad(f"{path}/{number}", other, optim=True)
        assert bits(other) == wanted[1]
        assert {tables.optimizer.learning_rate for tables in dynamic_modules(other)} == {LEARNING_RATE / 2}
    again.load_state_dict(alone.state_dict())


@CASES
@pytest.mark.parametrize("world_size", [1, 2])
def test_shard_and_shard_modules_train_dump_and_load(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    pooled: bool,
    world_size: int,
) -> None:
    ranks.run(world_size, shard_and_train, pooled, str(tmp_path))


def shard_frozen(rank: int, world_size: int, pooled: bool) -> None:
    from torchrec.distributed.shard import shard

    case = Case(TABLES[:3], pooled=pooled)
    plan = build(case, world_size).plan.plan["collection"]
    for frozen in (("a",), ("a", "b", "c")):
        collection = unsharded(case)
        for name, weight in collection.named_parameters():
            weight.requires_grad_(name.split(".")[1] not in frozen)
        sharded = shard(collection, dict(plan), device=torch.device("cpu"), sharder=sharder_of(case))
        assert {name.split(".")[1] for name, p in sharded.named_parameters() if not p.requires_grad} == set(frozen)
        with torch.no_grad():
            outputs_of(case, sharded(make_kjt(make_batch(case, 0, rank), case)))
        before = bits(sharded)
        result = outputs_of(case, sharded(make_kjt(make_batch(case, 0, rank), case)))
        loss = loss_of(result)
        if loss.requires_grad:
            loss.backward()
        after = bits(sharded)
        assert {name for name in after if after[name] == before[name]} == set(frozen)


@CASES
def test_tables_that_were_frozen_before_they_are_sharded_stay_frozen(ranks: RankPool, pooled: bool) -> None:  # noqa: F811
    ranks.run(2, shard_frozen, pooled)
