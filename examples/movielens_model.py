"""The ranking model of the MovieLens example, and how its tables are distributed.

Letters: B samples of one rank, F features, D embedding dim, W processes.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbTableOptions, get_table_value_bytes
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder
from dynamicemb.sharding.exchange.bucketize import bucketize
from dynamicemb.types import DynamicEmbInitializerArgs

# Both ways of pooling a bag are in use; for a feature with one id per sample they are the same.
MEAN_POOLED = ("genre", "user_genre")
OPTIMIZER = EmbOptimType.EXACT_ROWWISE_ADAGRAD
STATS = ("size", "capacity", "inserted", "evicted", "failed")


@dataclass(frozen=True)
class Table:
    """One embedding table. rows: capacity over all ranks; initial values are uniform in +-init_bound."""

    feature: str
    rows: int
    init_bound: float


@dataclass(frozen=True)
class Rates:
    """Row-wise Adagrad of the tables. A large eps keeps the first steps of rare ids small: they overfit less."""

    learning_rate: float
    eps: float

    def fused_params(self) -> dict[str, object]:
        return {"optimizer": OPTIMIZER, "learning_rate": self.learning_rate, "eps": self.eps}


class RankingModel(nn.Module):
    """DLRM: bottom MLP on dense features, pairwise dot products, top MLP on these and all vectors."""

    def __init__(self, tables: EmbeddingBagCollection, num_dense: int, dim: int, hidden: int = 64) -> None:
        super().__init__()
        num_vectors = len(tables.embedding_bag_configs()) + 1
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(num_dense, dim), nn.ReLU(), nn.Linear(dim, dim))
        pairs = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", pairs, persistent=False)
        width = num_vectors * dim + pairs.shape[1]
        self.top = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Return the logits f32[B] for dense f32[B, 3] and ids of F features."""
        bottom = self.bottom(dense)
        flat = torch.cat([bottom, self.tables(ids).values()], dim=1)
        vectors = flat.view(dense.shape[0], -1, bottom.shape[1])
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([flat, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)


def _bag_config(table: Table, dim: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.feature,
        feature_names=[table.feature],
        num_embeddings=table.rows,
        embedding_dim=dim,
        pooling=PoolingType.MEAN if table.feature in MEAN_POOLED else PoolingType.SUM,
        weight_init_min=-table.init_bound,
        weight_init_max=table.init_bound,
    )


def build_model(tables: list[Table], num_dense: int, dim: int) -> RankingModel:
    """Build the model with tables that hold no memory yet (device "meta")."""
    configs = [_bag_config(table, dim) for table in tables]
    return RankingModel(EmbeddingBagCollection(tables=configs, device=torch.device("meta")), num_dense, dim)


def distribute_static(model: RankingModel, rates: Rates, device: torch.device) -> DistributedModelParallel:
    """Shard every table by rows with TorchRec's own static tables."""
    sharder = EmbeddingBagCollectionSharder(fused_params=rates.fused_params())
    # TorchRec's planner offers no row-wise tables on a CPU, so the plan is written down. Without the kernel's name it
    # would take the dense one, which leaves the tables to the optimizer of the dense layers.
    plan = construct_module_sharding_plan(
        model.tables,
        {
            config.name: row_wise(compute_kernel=EmbeddingComputeKernel.FUSED.value)
            for config in model.tables.embedding_bag_configs()
        },
        sharder,
        local_size=get_local_size(),
        world_size=dist.get_world_size(),
        device_type=device.type,
    )
    return DistributedModelParallel(model, device=device, plan=ShardingPlan({"tables": plan}), sharders=[sharder])


def distribute_dynamic(
    model: RankingModel, tables: list[Table], rates: Rates, device: torch.device, seed: int
) -> DistributedModelParallel:
    """Shard every table by rows with dynamic tables. The seed is that of the initial values of rows."""
    configs = model.tables.embedding_bag_configs()
    constraints = {
        config.name: DynamicEmbParameterConstraints(
            use_dynamicemb=True, dynamicemb_options=_table_options(table, config, device)
        )
        for table, config in zip(tables, configs)
    }
    planner = DynamicEmbeddingShardingPlanner(
        configs,
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        constraints=constraints,
        debug=False,
    )
    sharders = [DynamicEmbeddingBagCollectionSharder(fused_params={**rates.fused_params(), "seed": seed})]
    plan = planner.collective_plan(model, sharders)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def _table_options(table: Table, config: EmbeddingBagConfig, device: torch.device) -> DynamicEmbTableOptions:
    """Set what a static table does not need; the planner fills in dim, dtype and the rows of one rank."""
    value_bytes = get_table_value_bytes(config, OPTIMIZER, dist.get_world_size())
    return DynamicEmbTableOptions(
        global_hbm_for_values=value_bytes if device.type == "cuda" else 0,
        initializer_args=DynamicEmbInitializerArgs(lower=-table.init_bound, upper=table.init_bound),
    )


def compile_kernels(dim: int, device: torch.device) -> None:
    """Train and evaluate tables of this process alone, so that the kernels are compiled or loaded."""
    ids, offsets = torch.tensor([1, 2, 1], device=device), torch.tensor([0, 2, 3], device=device)
    options = DynamicEmbTableOptions(
        dim=dim, max_capacity=128, initializer_args=DynamicEmbInitializerArgs(lower=-1.0, upper=1.0)
    )
    tables = BatchedDynamicEmbeddingTablesV2([options], optimizer=OPTIMIZER, device=device, seed=0)
    tables(ids, offsets).sum().backward()
    tables.eval()(ids, offsets)
    bucketize(torch.tensor([1, 0, 1], device=device), torch.tensor([2, 1], device=device), 2)


def table_stats(model: DistributedModelParallel) -> dict[str, dict[str, float]]:
    """Return size, capacity, inserted, evicted and failed of every dynamic table, summed over all ranks."""
    tables = model.module.tables
    local = {name: stats for module in tables.dynamic_embedding_modules for name, stats in module.stats().items()}
    gathered: list[dict[str, dict[str, float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, local)
    return {name: {key: sum(stats[name][key] for stats in gathered) for key in STATS} for name in sorted(local)}


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the exact area under the ROC curve: P(score of a positive > score of a negative), ties count one half.

    Args:
        scores: [N], any floating type.
        labels: [N], 1 for positives, 0 for negatives.

    Raises:
        ValueError: there are no positives or no negatives.

    Example: scores [0.1, 0.4, 0.4, 0.8], labels [0, 0, 1, 1] -> (1 + 0.5 + 1 + 1) / 4 = 0.875.
    """
    positive = labels > 0.5
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if num_positive == 0 or num_negative == 0:
        raise ValueError(f"AUC needs both classes, got {num_positive} positives and {num_negative} negatives")
    _, level, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    # Mean rank (from 1) of the samples that share a score.
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2
    rank_sum = float(mean_rank[level][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
