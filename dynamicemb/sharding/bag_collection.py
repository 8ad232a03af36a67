"""EmbeddingBagCollection with dynamic tables: pooled lookups."""

from functools import partial
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.sharding.bag_mean import DynamicBagContext, bag_sizes, divide_by_bag_sizes
from dynamicemb.sharding.check_params import check_fused_params, weights_of
from dynamicemb.sharding.check_plan import checked_plan
from dynamicemb.sharding.constraints import is_dynamic
from dynamicemb.sharding.empty_batch import bags_without_padding
from dynamicemb.sharding.pooled_output import RwPooledSharding
from dynamicemb.sharding.refused_batch import Refusal
from dynamicemb.sharding.shardings import DynamicRwPooledSharding, check_env, share_seed, split_off_dynamic
from dynamicemb.sharding.with_dynamic_tables import WithDynamicTables


class ShardedDynamicEmbeddingBagCollection(WithDynamicTables, ShardedEmbeddingBagCollection):
    """TorchRec's sharded EmbeddingBagCollection, some of whose tables are dynamic."""

    CONFIGS = "_embedding_bag_configs"
    PREFIX = "embedding_bags"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal = Refusal()
        for sharding in self._embedding_shardings:
            if isinstance(sharding, DynamicRwPooledSharding):
                sharding.refusal = self._refusal
        self._leave_static_mean_to_torchrec()
        # Output name -> feature, of dynamic tables with MEAN pooling.
        self._averaged = {
            output: feature
            for sharding in self._embedding_shardings
            if isinstance(sharding, DynamicRwPooledSharding)
            for table in sharding.embedding_tables()
            if table.pooling is PoolingType.MEAN
            for output, feature in zip(table.embedding_names, table.feature_names, strict=True)
        }
        self.finish_building()

    def _leave_static_mean_to_torchrec(self) -> None:
        """Make TorchRec's own division see dynamic features as sums; it would divide them a second time."""
        plan, dynamic = self.module_sharding_plan, set()
        for config in self._embedding_bag_configs:
            if is_dynamic(plan[config.name]):
                dynamic.update(config.feature_names)
        averaged: list[str] = []
        for config in self._embedding_bag_configs:
            own = not is_dynamic(plan[config.name]) and config.pooling is PoolingType.MEAN
            if own and plan[config.name].sharding_type in (
                ShardingType.ROW_WISE.value,
                ShardingType.TABLE_ROW_WISE.value,
            ):
                averaged.extend(config.feature_names)
        both = sorted(dynamic & set(averaged))
        if both:
            raise ValueError(
                f"features {both} belong to a dynamic table and to a static row-wise table with MEAN pooling, which "
                "TorchRec's division cannot tell apart; shard the static table table-wise or use separate features"
            )
        before = self._pooling_type_to_rs_features
        sums = [name for name in before[PoolingType.SUM.value] if name not in dynamic]
        before[PoolingType.MEAN.value] = averaged
        before[PoolingType.SUM.value] = [*sums, *sorted(dynamic)]
        self._has_mean_pooling_callback = bool(averaged)

    @classmethod
    def create_grouped_sharding_infos(cls, *args: Any, **kwargs: Any) -> dict[str, list[EmbeddingShardingInfo]]:
        """Group tables by sharding type, dynamic ones apart."""
        return split_off_dynamic(super().create_grouped_sharding_infos(*args, **kwargs))

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        """Make the sharding of a group of tables."""
        plan = sharding_infos[0].param_sharding
        if not is_dynamic(plan):
            if plan.sharding_type == ShardingType.ROW_WISE.value and (device is None or device.type != "meta"):
                return RwPooledSharding(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        check_env(env, sharding_infos)
        share_seed(sharding_infos, env, device)
        return DynamicRwPooledSharding(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)

    def create_context(self) -> DynamicBagContext:
        """Make the context of one batch."""
        return DynamicBagContext()

    def check_batch(self, features: Any) -> KeyedJaggedTensor:
        """Return a batch as a KeyedJaggedTensor.

        Raises:
            TypeError: ids of a wrong dtype.
            ValueError: the batch is malformed, or has another number of samples for some features.
        """
        batch = super().check_batch(features)
        if batch.variable_stride_per_key() and self._has_dynamic_tables:
            raise ValueError(
                "batches of variable size per feature are not supported for an EmbeddingBagCollection with dynamic "
                "tables; give all features the same batch size"
            )
        return batch

    def padded(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return a batch that TorchRec can handle in the place of one without samples."""
        # Only static tables get this far with a variable batch size, and padding would make it a fixed one.
        return batch if batch.variable_stride_per_key() else super().padded(batch)

    def prepare(self, ctx: DynamicBagContext, features: KeyedJaggedTensor) -> None:
        """Note the sizes of bags that will be averaged."""
        if self._averaged:
            ctx.bag_sizes = bag_sizes(features, list(self._averaged.values()))

    def output_dist(self, ctx: DynamicBagContext, output: list[torch.Tensor]) -> Any:
        """Start the exchange of results; see TorchRec's method."""
        return self._finished(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: DynamicBagContext, input: Any) -> Any:
        """Look up and start the exchange of results; see TorchRec's method."""
        return self._finished(ctx, super().compute_and_output_dist(ctx, input))

    def _finished(self, ctx: DynamicBagContext, awaitable: Any) -> Any:
        if ctx.bag_sizes is not None:
            awaitable.callbacks.append(partial(divide_by_bag_sizes, names=list(self._averaged), sizes=ctx.bag_sizes))
        if ctx.is_padded:
            awaitable.callbacks.append(bags_without_padding)
        return awaitable


class DynamicEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection whose plan has dynamic tables.

    Args:
        fused_params: arguments of the tables, such as ``optimizer`` and ``learning_rate``; ``seed`` sets the seed of
            first values, which is otherwise ``torch.initial_seed()`` of rank 0.
        qcomm_codecs_registry: as in TorchRec.
    """

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingBagCollection:
        """Make the sharded module; a collective on all ranks of `env`.

        Raises:
            TypeError: ``fused_params`` have a name that dynamic tables do not know.
            ValueError: an optimizer that static tables cannot use on the CPU, or a plan that contradicts itself.
        """
        params = checked_plan(params, module.embedding_bag_configs())
        check_fused_params(self.fused_params, params, weights_of(module.embedding_bags), device)
        return ShardedDynamicEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types of a device; TorchRec lists row-wise for GPUs only, though gloo can do it too."""
        types = list(super().sharding_types(compute_device_type))
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingBagCollection]:
        """The class of sharded modules."""
        return ShardedDynamicEmbeddingBagCollection
