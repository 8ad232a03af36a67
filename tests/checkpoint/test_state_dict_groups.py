"""``state_dict`` of a model that lives on some of the ranks: nobody waits for the others (contract 29)."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamicemb.errors import DynamicEmbError
from tests.support.checkpoints import without_scores
from tests.support.ranks import RankPool, ranks  # noqa: F401

pytestmark = pytest.mark.distributed

IDS = [1, 2, 3, -1, -7, 2**63 - 1, -(2**63)]


def build(group: Any) -> Any:
    """Return a collection of one table, sharded over a process group."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection

    from dynamicemb import DynamicEmbTableOptions
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingCollectionSharder

    size = dist.get_world_size(group)
    tables = [EmbeddingConfig(name="users", embedding_dim=4, num_embeddings=300, feature_names=["u"])]
    model = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    sharders = [DynamicEmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM, "seed": 7})]
    constraints = {
        "users": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions())
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DynamicEmbeddingShardingPlanner(
            tables, topology=Topology(world_size=size, compute_device="cpu"), constraints=constraints
        )
        # TorchRec makes its device mesh of the first ranks, whatever the group is, and waits for them.
        env = ShardingEnv(size, dist.get_rank(group))
        env.process_group = group
        plan = planner.plan(model, sharders)
        return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)


def train(model: Any, ids: list[int]) -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = torch.ones(len(ids), dtype=torch.int64)
    model(KeyedJaggedTensor(keys=["u"], values=torch.tensor(ids), lengths=lengths))["u"].values().sum().backward()


def save_and_load(rank: int, world_size: int, path: str, members: list[int]) -> int:
    """Copy a model of some ranks by its state_dict, and by DCP; returns how many ids this rank holds."""
    import torch.distributed.checkpoint as dcp

    from dynamicemb import DynamicEmbLoadPlanner
    from tests.support.state_dict_model import held

    groups = [dist.new_group(members)]
    # A group of no interest moves the names and numbers that torch gives to groups.
    groups.append(dist.new_group([0, 2]))
    if rank not in members:
        return 0
    model = build(groups[0])
    train(model, [*IDS, 100 + rank])
    found = without_scores(held(model)["users"])
    copy = build(groups[0])
    copy.load_state_dict(dict(model.state_dict()))
    assert without_scores(held(copy)["users"]) == found
    with warnings.catch_warnings():
        # Of torch, about ShardedTensor.
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=path, process_group=groups[0])
        copy = build(groups[0])
        state = {"model": copy.state_dict()}
        dcp.load(state, checkpoint_id=path, process_group=groups[0], planner=DynamicEmbLoadPlanner())
    copy.load_state_dict(state["model"])
    assert without_scores(held(copy)["users"]) == found
    # The error of one of them is that of both, and of nobody else.
    broken = dict(model.state_dict())
    if rank == members[-1]:
        broken["embeddings.users.dynamic_table"] += "}"
    with pytest.raises(DynamicEmbError, match="'dynamic_table' of the state_dict is damaged"):
        copy.load_state_dict(broken)
    assert without_scores(held(copy)["users"]) == found
    return len(found)


@pytest.mark.parametrize("members", [[0, 1], [1, 2], [1]])
def test_c29_some_of_the_ranks_save_and_load_without_the_others(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    members: list[int],
) -> None:
    numbers = ranks.run(3, save_and_load, str(tmp_path / "checkpoint"), members)
    assert sum(numbers) == len(IDS) + len(members)
