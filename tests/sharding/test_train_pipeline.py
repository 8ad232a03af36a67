"""TorchRec's TrainPipelineSparseDist: batches are sent ahead while earlier ones train, and the result is the same."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import GpuRanks, RankPool, local_world_size, ranks  # noqa: F401
from tests.support.sharded_model import dynamic_modules

pytestmark = pytest.mark.distributed

SCORES = {"a": "LFU", "b": "TIMESTAMP", "c": "STEP", "d": "LFU"}
NUM_BATCHES = 5


class SequencesAndBags(nn.Module):
    """Two collections and a dense layer."""

    def __init__(self) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

        def common(name: str) -> dict[str, Any]:
            return {"name": name, "num_embeddings": 64, "embedding_dim": 4, "feature_names": [f"f_{name}"]}

        super().__init__()
        meta = torch.device("meta")
        self.sequences = EmbeddingCollection(tables=[EmbeddingConfig(**common(n)) for n in "ab"], device=meta)
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(pooling=PoolingType.SUM, **common("c")),
                EmbeddingBagConfig(pooling=PoolingType.MEAN, **common("d")),
            ],
            device=meta,
        )
        self.dense = nn.Linear(8, 1, device=meta)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # Traced by the pipeline: no loop over what a collection returns.
        sequences = self.sequences(batch)
        squares = (sequences["f_a"].values() ** 2).sum() + (sequences["f_b"].values() ** 3).sum()
        loss = self.dense(self.bags(batch).values()).sum() + squares
        return loss, loss.detach()


def shard_model(world_size: int, device: torch.device, dedup: bool = True) -> Any:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology

    from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy, DynamicEmbTableOptions
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

    torch.manual_seed(0)
    model = SequencesAndBags()
    configs = [*model.sequences.embedding_configs(), *model.bags.embedding_bag_configs()]
    constraints = {
        name: DynamicEmbParameterConstraints(
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy[score]),
        )
        for name, score in SCORES.items()
    }
    fused_params = {"learning_rate": 0.1, "seed": 3}
    sharders = [
        DynamicEmbeddingCollectionSharder(fused_params=dict(fused_params), use_index_dedup=dedup),
        DynamicEmbeddingBagCollectionSharder(fused_params=dict(fused_params)),
    ]
    topology = Topology(world_size, device.type, local_world_size=local_world_size())
    plan = DynamicEmbeddingShardingPlanner(configs, topology, constraints=constraints).collective_plan(model, sharders)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def make_batches(rank: int, device: torch.device, counted: bool = False) -> list[Any]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(rank)
    batches = []
    for step in range(NUM_BATCHES):
        # The last rank has nothing in one step.
        batch_size = 0 if rank and step == 2 else 4
        lengths = torch.randint(0, 4, (4 * batch_size,), generator=generator)
        ids = torch.randint(-5, 5, (int(lengths.sum()),), generator=generator)
        # How often each occurrence counts; rank 0 says so in every other step only.
        counts = torch.randint(1, 9, ids.shape, generator=generator) if counted and (rank or step % 2) else None
        keys = ["f_d", "f_c", "f_b", "f_a"]
        batch = KeyedJaggedTensor(keys=keys, values=ids, weights=counts, lengths=lengths, stride=batch_size)
        batches.append(batch.to(device))
    return batches


def contents(model: Any) -> dict[str, dict[int, tuple[int, list[float]]]]:
    """Return score (0 for timestamps) and row of every id of this rank, by table."""
    out = {}
    for tables in dynamic_modules(model):
        group = tables.tables
        for t, name in enumerate(tables.table_names):
            slots = group.scan(t)
            scores = group.index.scores[slots] * (SCORES[name] != "TIMESTAMP")
            rows = group.read(t, group.index.rows[slots])[0].tolist()
            out[name] = dict(zip(group.index.keys[slots].tolist(), zip(scores.tolist(), rows)))
        assert group.steps.num_outstanding == 0
    return out


def train(
    rank: int, world_size: int, pipelined: bool, kind: str, dedup: bool = True, counted: bool = False
) -> tuple[list[float], dict[str, Any]]:
    # Without it the gradients of repeated ids are added in any order on a GPU.
    torch.use_deterministic_algorithms(kind == "cuda", warn_only=True)
    try:
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        where = torch.device("cpu") if pipelined else device
        return train_on(shard_model(world_size, device, dedup), device, pipelined, make_batches(rank, where, counted))
    finally:
        torch.use_deterministic_algorithms(False)


def train_on(model: Any, device: torch.device, pipelined: bool, given: list[Any]) -> tuple[list[float], dict[str, Any]]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    optimizer = torch.optim.SGD([parameter for _, parameter in model.named_parameters()], lr=0.1)
    losses = []
    if pipelined:
        pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
        batches = iter(given)
        losses = [float(pipeline.progress(batches)) for _ in range(NUM_BATCHES)]
        with pytest.raises(StopIteration):
            pipeline.progress(batches)
    else:
        for batch in given:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return losses, contents(model)


def check(pool: RankPool | GpuRanks, world_size: int, kind: str, dedup: bool = True, counted: bool = False) -> None:
    plain = pool.run(world_size, train, False, kind, dedup, counted)
    assert pool.run(world_size, train, True, kind, dedup, counted) == plain
    assert len(plain[0][0]) == NUM_BATCHES and all(rows for _, tables in plain for rows in tables.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_c10_c14_a_pipeline_changes_nothing(ranks: RankPool, world_size: int) -> None:  # noqa: F811
    check(ranks, world_size, "cpu")


def break_a_batch(rank: int, world_size: int, kind: str) -> tuple[int, str]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    model = shard_model(world_size, device)
    optimizer = torch.optim.SGD([parameter for _, parameter in model.named_parameters()], lr=0.1)
    pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    batches = make_batches(rank, torch.device("cpu"))
    if rank == 1:
        third = batches[3]
        batches[3] = KeyedJaggedTensor(third.keys(), third.values().float(), lengths=third.lengths())
    remaining, steps = iter(batches), 0
    try:
        while True:
            pipeline.progress(remaining)
            steps += 1
    except (TypeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    # The group is usable.
    sum_of_ranks = torch.ones(1, device=device)
    torch.distributed.all_reduce(sum_of_ranks)
    assert int(sum_of_ranks) == world_size
    return steps, message


def check_refusal(pool: RankPool | GpuRanks, kind: str) -> None:
    (steps, first), (same_steps, second) = pool.run(2, break_a_batch, kind)
    assert steps == same_steps < NUM_BATCHES - 1
    assert first == "ValueError: features: another rank refuses its batch; its own error says why"
    assert second.startswith("TypeError: features: ids must be int64")


def test_c04_a_bad_batch_on_one_rank_raises_on_all(ranks: RankPool) -> None:  # noqa: F811
    check_refusal(ranks, "cpu")


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_c10_counts_of_batches_survive_a_pipeline(ranks: RankPool, world_size: int, dedup: bool) -> None:  # noqa: F811
    check(ranks, world_size, "cpu", dedup, True)
