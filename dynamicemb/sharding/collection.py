"""EmbeddingCollection with dynamic tables: sequence lookups."""

from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.sharding.compute_kernels import needs_counts
from dynamicemb.sharding.exchange.alone import ReadySequences
from dynamicemb.sharding.exchange.dedup import Deduplication
from dynamicemb.sharding.exchange.requests import let_go_of_graphs
from dynamicemb.sharding.exchange.sent_batch import Sending, forget_counts
from dynamicemb.sharding.exchange.stand_in import sequences_without_padding
from dynamicemb.sharding.sharder import DynamicSharder
from dynamicemb.sharding.shardings import (
    DYNAMIC_ROW_WISE,
    DynamicRwSequenceSharding,
    check_env,
    share_seed,
    split_off_dynamic,
)
from dynamicemb.sharding.with_dynamic_tables import WithDynamicTables
from dynamicemb.sharding.wrapped import check_input_dist


class DynamicCollectionContext(EmbeddingCollectionContext):
    """TorchRec's context of one batch.

    Attributes:
        is_padded: the batch had no samples and got one without ids.
    """

    is_padded: bool = False


class ShardedDynamicEmbeddingCollection(WithDynamicTables, ShardedEmbeddingCollection):
    """TorchRec's sharded EmbeddingCollection, some of whose tables are dynamic.

    With ``use_index_dedup`` a rank sends every distinct id of a table once; occurrences are counted before, so that LFU
    scores and admission are the same as without. ``stats()`` then counts what is sent.
    """

    CONFIGS = "_embedding_configs"
    PREFIX = "embeddings"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = [self.module_sharding_plan[name].dynamicemb_options for name in self.dynamic_table_names()]
        self._sending = Sending()
        for sharding in self._sharding_type_to_sharding.values():
            if isinstance(sharding, DynamicRwSequenceSharding):
                sharding.sending = self._sending
                sharding.carries_counts = self._use_index_dedup and needs_counts(options)
        if self._use_index_dedup and self._enable_feature_score_weight_accumulation:
            raise ValueError(
                "use_index_dedup=True cannot be combined with TorchRec's feature-score eviction of virtual tables in a "
                "collection with dynamic tables; use use_index_dedup=False"
            )
        self.reads_counts = needs_counts(options)
        self.finish_building()

    @classmethod
    def create_grouped_sharding_infos(cls, *args: Any, **kwargs: Any) -> dict[str, list[EmbeddingShardingInfo]]:
        """Group tables by sharding type, dynamic ones apart."""
        return split_off_dynamic(super().create_grouped_sharding_infos(*args, **kwargs))

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        """Make the sharding of a group of tables."""
        if sharding_type != DYNAMIC_ROW_WISE:
            return super().create_embedding_sharding(sharding_type, sharding_infos, env, device, qcomm_codecs_registry)
        check_env(env, sharding_infos)
        share_seed(sharding_infos, env, device)
        return DynamicRwSequenceSharding(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)

    def create_context(self) -> DynamicCollectionContext:
        """Make the context of one batch."""
        return DynamicCollectionContext(sharding_contexts=[])

    def compute(self, ctx: DynamicCollectionContext, dist_input: Any) -> list[torch.Tensor]:
        """Look up; see TorchRec's method."""
        check_input_dist(ctx, self.dynamic_table_names())
        self._forget_counts(ctx, dist_input)
        looked_up: list[torch.Tensor] = super().compute(ctx, dist_input)
        return looked_up

    def _shardings(self) -> list[Any]:
        return list(self._sharding_type_to_sharding.values())

    def check_batch(self, batch: KeyedJaggedTensor) -> None:
        """Refuse what sequences cannot do.

        Raises:
            ValueError: in training, the batch has another number of samples for some features.
        """
        if batch.variable_stride_per_key() and self._has_dynamic_tables and self.training:
            raise ValueError(
                "features: batches of variable size per feature are not supported for an EmbeddingCollection with "
                "dynamic tables in training, which would read rows and train none; give all features the same batch "
                "size, or call eval()"
            )

    def forget_inverse_indices(self, inverse: tuple[list[str], torch.Tensor]) -> None:
        """Take the order of inverse indices from this batch."""
        self._inverse_indices_permute_per_sharding = None

    def output_dist(self, ctx: DynamicCollectionContext, output: list[torch.Tensor]) -> Any:
        """Start the exchange of results; see TorchRec's method."""
        return _unpadded(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: DynamicCollectionContext, input: Any) -> Any:
        """Look up and start the exchange of results; see TorchRec's method."""
        if self.is_short(ctx):
            features = input[0]
            rows = self.looked_up(features, DYNAMIC_ROW_WISE, flat=False)
            if rows.dim() == 1:
                rows = rows.view(-1, self._embedding_dim)
            (names,) = self._embedding_names_per_sharding
            return _without_padding(ctx, ReadySequences(rows, features, names, self._need_indices))
        self._forget_counts(ctx, input)
        return _unpadded(ctx, super().compute_and_output_dist(ctx, input))

    def is_short(self, ctx: DynamicCollectionContext) -> bool:
        """Say whether a looked-up batch needs nothing that TorchRec does around its lookup and exchange."""
        return not (ctx.reverse_indices or ctx.seq_vbe_ctx) and super().is_short(ctx)

    def sharding_context(self, batch: KeyedJaggedTensor) -> SequenceShardingContext:
        """Return TorchRec's context of a batch in the one sharding of a rank alone."""
        return SequenceShardingContext(features_before_input_dist=batch)

    def deduplicated(self, ctx: DynamicCollectionContext, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return what a rank alone looks up of its batch, the features in the order of the tables."""
        return self._dedup_indices(ctx, [batch])[0] if self._use_index_dedup else batch

    def _forget_counts(self, ctx: Any, dist_input: Any) -> None:
        for context, batch in zip(getattr(ctx, "sharding_contexts", []), dist_input, strict=False):
            forget_counts(context, batch, self._env.rank)

    def _create_hash_size_info(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the deduplication, where TorchRec prepares its own; ours needs no table sizes."""
        device = self._device or torch.device("cpu")
        self._deduplications = [
            Deduplication(
                [table.num_features() for table in sharding.embedding_tables()],
                getattr(sharding, "carries_counts", False),
                device,
            )
            for sharding in self._sharding_type_to_sharding.values()
        ]

    def _dedup_indices(
        self, ctx: EmbeddingCollectionContext, input_feature_splits: list[KeyedJaggedTensor]
    ) -> list[KeyedJaggedTensor]:
        deduplicated = []
        # From here on counts travel as weights, also where each occurrence counts once.
        counts, self._sending.counts = self._sending.counts, None
        shardings = zip(self._deduplications, self._shardings(), input_feature_splits, strict=True)
        for deduplicate, sharding, features in shardings:
            is_dynamic_part = isinstance(sharding, DynamicRwSequenceSharding)
            unique, reverse = deduplicate(features, counts if is_dynamic_part else None)
            ctx.input_features.append(features)
            ctx.reverse_indices.append(reverse)
            deduplicated.append(unique)
        return deduplicated


def _unpadded(ctx: DynamicCollectionContext, awaitable: Any) -> Any:
    return let_go_of_graphs(_without_padding(ctx, awaitable))


def _without_padding(ctx: DynamicCollectionContext, awaitable: Any) -> Any:
    """Make an awaitable drop padding; return it."""
    # Modules that hold a collection may bring a context of their own.
    if getattr(ctx, "is_padded", False):
        awaitable.callbacks.append(sequences_without_padding)
    return awaitable


class DynamicEmbeddingCollectionSharder(DynamicSharder, EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection whose plan has dynamic tables.

    Args:
        fused_params: arguments of the tables, such as ``optimizer`` and ``learning_rate``; ``seed`` sets the seed of
            first values, which is otherwise ``torch.initial_seed()`` of rank 0.
        qcomm_codecs_registry: as in TorchRec.
        use_index_dedup: send every distinct id once.
        missing_features_as_empty: read a feature that a batch lacks as one without ids; otherwise it is an error.
    """

    CONFIGS = "embedding_configs"
    TABLES = "embeddings"

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
        *,
        missing_features_as_empty: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        self.missing_features_as_empty = missing_features_as_empty

    def module_arguments(self) -> dict[str, Any]:
        """Return whether every distinct id is sent once."""
        return {"use_index_dedup": self._use_index_dedup}

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingCollection]:
        """The class of sharded modules."""
        return ShardedDynamicEmbeddingCollection
