"""EmbeddingBagCollection with dynamic tables: pooled lookups."""

from functools import partial
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    _apply_mean_pooling,
)
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

from dynamicemb.sharding.bag_mean import DynamicBagContext, averages_of, divide, divisors
from dynamicemb.sharding.checks.features import check_weights
from dynamicemb.sharding.compute_kernels import needs_counts
from dynamicemb.sharding.exchange.alone import ReadyBags
from dynamicemb.sharding.exchange.pooled_output import RwPooledSharding
from dynamicemb.sharding.exchange.requests import let_go_of_graphs
from dynamicemb.sharding.exchange.sent_batch import Sending
from dynamicemb.sharding.exchange.stand_in import bags_without_padding
from dynamicemb.sharding.exchange.weight_gradients import (
    WeightedContext,
    check_gradients,
    remembering_order,
    sent_weights,
    taking_part,
    with_gradients,
)
from dynamicemb.sharding.planning.constraints import is_dynamic
from dynamicemb.sharding.sharder import DynamicSharder
from dynamicemb.sharding.shardings import DynamicRwPooledSharding, check_env, share_seed, split_off_dynamic
from dynamicemb.sharding.with_dynamic_tables import WithDynamicTables
from dynamicemb.sharding.wrapped import check_input_dist


class ShardedDynamicEmbeddingBagCollection(WithDynamicTables, ShardedEmbeddingBagCollection):
    """TorchRec's sharded EmbeddingBagCollection, some of whose tables are dynamic."""

    CONFIGS = "_embedding_bag_configs"
    PREFIX = "embedding_bags"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sending = Sending()
        for sharding in self._embedding_shardings:
            if isinstance(sharding, DynamicRwPooledSharding):
                sharding.sending = self._sending
        # TorchRec divides by the name of a feature, or by its place, which tables of another kind may share. Outputs
        # that are means are divided here, each by itself.
        self._has_mean_pooling_callback = False
        self._averages = averages_of(self.sharding_type_to_sharding_infos)
        self._has_seen_batch = False
        options = [self.module_sharding_plan[name].dynamicemb_options for name in self.dynamic_table_names()]
        self.reads_counts = not self._is_weighted and needs_counts(options)
        self.finish_building()

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

    def _shardings(self) -> list[Any]:
        return self._embedding_shardings

    def input_dist(self, ctx: DynamicBagContext, features: Any) -> Any:
        """Start the exchange of ids; see `SendsBatches.input_dist`."""
        try:
            return super().input_dist(ctx, features)
        finally:
            # TorchRec's own division, of batches that vary in size; each batch says whether it wants it.
            if self._has_mean_pooling_callback:
                self._has_mean_pooling_callback = False

    def check_batch(self, batch: KeyedJaggedTensor) -> None:
        """Refuse what bags cannot do.

        Raises:
            ValueError: the batch has another number of samples for some features, or, the first one, ids that a static
                table has no row for.
        """
        if batch.variable_stride_per_key() and self._has_dynamic_tables:
            raise ValueError(
                "features: batches of variable size per feature are not supported for an EmbeddingBagCollection with "
                "dynamic tables; give all features the same batch size"
            )
        if not self._has_seen_batch:
            # As TorchRec does; ids of a dynamic table are not bounded by its num_embeddings.
            validate_keyed_jagged_tensor(batch, self.static_configs())
            self._has_seen_batch = True

    def padded(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return a batch that TorchRec can handle in the place of one without samples."""
        # Only static tables get this far with a variable batch size, and padding would make it a fixed one.
        return batch if batch.variable_stride_per_key() else super().padded(batch)

    def prepare(self, ctx: DynamicBagContext, features: KeyedJaggedTensor) -> None:
        """Note by what outputs will be divided."""
        if features.variable_stride_per_key():
            self._has_mean_pooling_callback = any(average.is_static for average in self._averages)
        elif self._averages:
            ctx.divisors = divisors(features, self._averages)

    def forget_inverse_indices(self, inverse: tuple[list[str], torch.Tensor]) -> None:
        """Take the order of inverse indices from this batch."""
        self._inverse_indices_permute_indices = None
        self._create_inverse_indices_permute_indices(inverse)
        if self._has_mean_pooling_callback:
            self._init_mean_pooling_callback(self._names_of_shardings, inverse)

    def _send(self, ctx: DynamicBagContext, batch: KeyedJaggedTensor) -> Any:
        weights = batch.weights_or_none() if self._is_weighted and self._has_dynamic_tables else None
        if weights is None or not torch.is_grad_enabled():
            return super()._send(ctx, batch)
        sending = self._sending
        sending.wants_gradient = weights.requires_grad and sending.error is None
        if not sending.wants_gradient:
            awaitable = super()._send(ctx, batch)
            ctx.sharding_contexts[:] = [WeightedContext(context, None) for context in ctx.sharding_contexts]
            return awaitable
        static = {name: self.module_sharding_plan[name].sharding_type for name in self.static_table_names()}
        check_gradients(self._sharding_types, static)
        self._make_input_dists()
        with remembering_order(self._input_dists):
            awaitable = super()._send(ctx, batch)
        if sending.error is not None:
            # An empty batch went in its place, and all ranks will raise.
            return awaitable
        in_order = self._is_alone and not self._features_order
        places = [None] if in_order else self.places_of_parts(batch)
        for i, (context, part) in enumerate(zip(ctx.sharding_contexts, places, strict=True)):
            position = getattr(self._input_dists[i], "unbucketize_permute_tensor", None)
            ctx.sharding_contexts[i] = WeightedContext(context, sent_weights(weights, part, position))
        return awaitable

    def compute(self, ctx: DynamicBagContext, dist_input: Any) -> list[torch.Tensor]:
        """Look up; see TorchRec's method."""
        check_input_dist(ctx, self.dynamic_table_names())
        features = self._tied(ctx, dist_input)
        with taking_part(self._lookups, features):
            looked_up: list[torch.Tensor] = super().compute(ctx, features)
        return looked_up

    def output_dist(self, ctx: DynamicBagContext, output: list[torch.Tensor]) -> Any:
        """Start the exchange of results; see TorchRec's method."""
        return self._finished(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: DynamicBagContext, input: Any) -> Any:
        """Look up and start the exchange of results; see TorchRec's method."""
        features = self._tied(ctx, input)
        if self.is_short(ctx):
            pooled = self.looked_up(features[0], self._sharding_types[0])
            return self._completed(ctx, ReadyBags(pooled, self._embedding_names, self._embedding_dims))
        with taking_part(self._lookups, features):
            return self._finished(ctx, super().compute_and_output_dist(ctx, features))

    def sharding_context(self, batch: KeyedJaggedTensor) -> EmbeddingShardingContext:
        """Return TorchRec's context of a batch in the one sharding of a rank alone."""
        return EmbeddingShardingContext(batch_size_per_feature_pre_a2a=[batch.stride()] * len(batch.keys()))

    def _tied(self, ctx: DynamicBagContext, received: Any) -> Any:
        """Return what the shardings received, with weights whose gradients find their way back."""
        if not self._is_weighted:
            return received
        check_weights(received, True)
        contexts = getattr(ctx, "sharding_contexts", [])
        if not torch.is_grad_enabled() or not any(isinstance(context, WeightedContext) for context in contexts):
            return received
        features = list(received)
        with_gradients(features, contexts, self._env.process_group)
        return KJTList(features)

    def _finished(self, ctx: DynamicBagContext, awaitable: Any) -> Any:
        return let_go_of_graphs(self._completed(ctx, awaitable))

    def _completed(self, ctx: DynamicBagContext, awaitable: Any) -> Any:
        """Make an awaitable divide means and drop padding; return it."""
        # Modules that hold a collection may bring a context of their own.
        by = getattr(ctx, "divisors", None)
        if by is not None:
            outputs = [average.output for average in self._averages]
            awaitable.callbacks.append(partial(divide, outputs=outputs, divisors=by))
        elif getattr(ctx, "divisor", None) is not None:
            awaitable.callbacks.append(partial(_apply_mean_pooling, divisor=ctx.divisor))
        if getattr(ctx, "is_padded", False):
            awaitable.callbacks.append(bags_without_padding)
        return awaitable


class DynamicEmbeddingBagCollectionSharder(DynamicSharder, EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection whose plan has dynamic tables.

    Args:
        fused_params: arguments of the tables, such as ``optimizer`` and ``learning_rate``; ``seed`` sets the seed of
            first values, which is otherwise ``torch.initial_seed()`` of rank 0.
        qcomm_codecs_registry: as in TorchRec.
        missing_features_as_empty: read a feature that a batch lacks as one without ids; otherwise it is an error.
    """

    CONFIGS = "embedding_bag_configs"
    TABLES = "embedding_bags"

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        *,
        missing_features_as_empty: bool = False,
    ) -> None:
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        self.missing_features_as_empty = missing_features_as_empty

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types of a device; TorchRec lists row-wise for GPUs only, though gloo can do it too."""
        types = list(super().sharding_types(compute_device_type))
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingBagCollection]:
        """The class of sharded modules."""
        return ShardedDynamicEmbeddingBagCollection
