"""Row-wise sharding of dynamic tables: TorchRec's, with our input dist and our compute kernels."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist, RwSequenceEmbeddingSharding
from torchrec.distributed.types import CommOp, ShardingEnv, ShardingEnv2D, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.sharding.checks.params import drop_own_params
from dynamicemb.sharding.compute_kernels import BatchedDynamicEmbedding, BatchedDynamicEmbeddingBag
from dynamicemb.sharding.exchange.input_dist import DynamicFeaturesDist
from dynamicemb.sharding.exchange.insert_plans import PlansInserts
from dynamicemb.sharding.exchange.pooled_output import PooledOutputDist, RwPooledSharding
from dynamicemb.sharding.exchange.sent_batch import Sending
from dynamicemb.sharding.planning.constraints import (
    DIST_TYPE_PARAM,
    SEED_PARAM,
    DynamicEmbParameterSharding,
    is_dynamic,
    row_wise,
)
from dynamicemb.table.placement import Placement
from dynamicemb.warn import warn

# Dynamic tables form a sharding of their own beside TorchRec's row-wise one, which keeps its input dist.
DYNAMIC_ROW_WISE = "dynamic_row_wise"

ShardingInfos = dict[str, list[EmbeddingShardingInfo]]


class NothingToPrefetch:
    """What a prefetching pipeline asks of a lookup; comes before TorchRec's class in the bases."""

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Do nothing: all rows of a dynamic table are in the memory of its device."""


class DynamicSequenceLookup(NothingToPrefetch, PlansInserts, GroupedEmbeddingsLookup):
    """Sequence lookup in groups of dynamic tables."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None, *args: Any
    ) -> BatchedDynamicEmbedding:
        return BatchedDynamicEmbedding(config, pg, device)


class DynamicPooledLookup(NothingToPrefetch, PlansInserts, GroupedPooledEmbeddingsLookup):
    """Pooled lookup in groups of dynamic tables."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: torch.device | None, pg: Any, *args: Any
    ) -> BatchedDynamicEmbeddingBag:
        return BatchedDynamicEmbeddingBag(config, pg, device)


class DynamicRwSequenceSharding(RwSequenceEmbeddingSharding):
    """Row-wise sharding of sequence tables."""

    # Whether weights carry counts, and the batch that is sent, None if nobody watches it. The collection sets both
    # before the input dist is made.
    carries_counts = False
    sending: Sending | None = None

    def create_input_dist(self, device: torch.device | None = None) -> DynamicFeaturesDist:
        """Make the exchange of ids."""
        device = device or self._device
        sending = self.sending or Sending()
        return DynamicFeaturesDist(
            self._pg, placements_of(self), device, True, keep_weights=self.carries_counts, sending=sending
        )

    def create_lookup(self, device: torch.device | None = None, *args: Any, **kwargs: Any) -> DynamicSequenceLookup:
        """Make the tables of this rank."""
        lookup = DynamicSequenceLookup(
            grouped_configs=self._grouped_embedding_configs, pg=self._pg, device=device or self._device, env=self._env
        )
        lookup.ranks = self._pg
        return lookup

    def create_output_dist(self, device: torch.device | None = None) -> RwSequenceEmbeddingDist:
        """Make the exchange of results; warns of a codec that it has no use for."""
        _check_codecs(self, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
        return super().create_output_dist(device)


class DynamicRwPooledSharding(RwPooledSharding):
    """Row-wise sharding of pooled tables."""

    # The batch that is sent, None if nobody watches it; the collection sets it before the input dist is made.
    sending: Sending | None = None

    def create_input_dist(self, device: torch.device | None = None) -> DynamicFeaturesDist:
        """Make the exchange of ids."""
        weighted = any(config.is_weighted for config in self._grouped_embedding_configs)
        sending = self.sending or Sending()
        return DynamicFeaturesDist(
            self._pg, placements_of(self), device or self._device, False, keep_weights=weighted, sending=sending
        )

    def create_lookup(self, device: torch.device | None = None, *args: Any, **kwargs: Any) -> DynamicPooledLookup:
        """Make the tables of this rank."""
        lookup = DynamicPooledLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device or self._device,
            sharding_type=ShardingType.ROW_WISE,
            env=self._env,
        )
        lookup.ranks = self._pg
        return lookup

    def create_output_dist(self, device: torch.device | None = None) -> PooledOutputDist:
        """Make the exchange of results; warns of a codec that it has no use for."""
        _check_codecs(self, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
        return super().create_output_dist(device)


def _check_codecs(sharding: Any, exchange: CommOp) -> None:
    """Warn if codecs were given, but none for the exchange of dynamic tables."""
    registry = sharding.qcomm_codecs_registry
    if registry and registry.get(exchange.name) is None:
        tables = [table.name for table in sharding.embedding_tables()]
        warn(
            f"qcomm_codecs_registry has codecs for {sorted(registry)}, but the results of dynamic tables {tables} "
            f"travel by {exchange.name}, and without a codec; add one for it"
        )


def placements_of(sharding: Any) -> list[Placement]:
    """Return where the table of every feature of a sharding is."""
    world_size = dist.get_world_size(sharding._pg)
    return [
        row_wise(table.fused_params[DIST_TYPE_PARAM], table, world_size)
        for config in sharding._grouped_embedding_configs
        for table in config.embedding_tables
        for _ in table.feature_names
    ]


def split_off_dynamic(infos: ShardingInfos) -> ShardingInfos:
    """Move dynamic tables into a sharding of their own.

    Raises:
        ValueError: a plan entry of a dynamic table contradicts itself.
    """
    result: ShardingInfos = {}
    for sharding_type, tables in infos.items():
        for info in tables:
            dynamic = is_dynamic(info.param_sharding)
            if dynamic:
                _check_plan(info)
            else:
                drop_own_params(info.fused_params)
            result.setdefault(DYNAMIC_ROW_WISE if dynamic else sharding_type, []).append(info)
    return result


def _check_plan(info: EmbeddingShardingInfo) -> None:
    plan, name = info.param_sharding, info.embedding_config.name
    assert isinstance(plan, DynamicEmbParameterSharding)
    if plan.sharding_type != ShardingType.ROW_WISE.value:
        raise ValueError(
            f"sharding_type of dynamic table {name!r} must be {ShardingType.ROW_WISE.value!r}, "
            f"got {plan.sharding_type!r}; plan with DynamicEmbeddingShardingPlanner"
        )
    config = info.embedding_config
    if plan.dynamicemb_options.dim not in (None, config.embedding_dim):
        raise ValueError(
            f"dynamic table {name!r} has embedding_dim={config.embedding_dim} but is planned for "
            f"{plan.dynamicemb_options.dim}; plan again with the configs that the model is built with"
        )
    if plan.dist_type != plan.dynamicemb_options.dist_type:
        raise ValueError(
            f"dist_type={plan.dist_type!r} of dynamic table {name!r} differs from that of its options, "
            f"{plan.dynamicemb_options.dist_type!r}; set both to the same"
        )


def check_env(env: ShardingEnv, infos: list[EmbeddingShardingInfo]) -> None:
    """Refuse environments that dynamic tables cannot work in.

    Raises:
        ValueError: two-dimensional parallelism (it averages replicas of dense weights), no process group, or a plan for
            another number of ranks (its capacities would be those of other shares).
    """
    if isinstance(env, ShardingEnv2D):
        raise ValueError("dynamic tables do not support two-dimensional parallelism; use DistributedModelParallel")
    if env.process_group is None:
        raise ValueError("dynamic tables need a process group; use ShardingEnv.from_process_group")
    for info in infos:
        planned = len(info.param_sharding.ranks or [])
        if planned != env.world_size:
            raise ValueError(
                f"dynamic table {info.embedding_config.name!r} is planned for {planned} ranks but the process group "
                f"has {env.world_size}; give the planner a topology with world_size={env.world_size}"
            )


def share_seed(infos: list[EmbeddingShardingInfo], env: ShardingEnv, device: torch.device | None) -> None:
    """Give all tables the seed of rank 0, unless fused_params name one. A collective on all ranks of `env`."""
    seed = torch.tensor([signed(torch.initial_seed())], dtype=torch.int64, device=device)
    group = env.process_group
    dist.broadcast(seed, src=dist.get_global_rank(group, 0), group=group)
    for info in infos:
        info.fused_params.setdefault(SEED_PARAM, int(seed))


def signed(seed: int) -> int:
    """Return the int64 with the same 64 bits."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed
