"""The way of a batch from the user to the exchange, in both sharded collections.

Whatever raises on it raises on all ranks: the rank sends an empty batch in the place of its own and says so, see
`dynamicemb.sharding.exchange.sent_batch`. Features are read by name, in whatever order they come.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import EmbeddingEvent
from torchrec.distributed.utils import maybe_annotate_embedding_event
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.embedding.construct import check_device
from dynamicemb.sharding.checks.features import Wanted, read_counts, read_features
from dynamicemb.sharding.exchange.alone import ReadySplits
from dynamicemb.sharding.exchange.input_dist import DynamicFeaturesDist
from dynamicemb.sharding.exchange.sent_batch import Sending, empty_batch
from dynamicemb.sharding.exchange.stand_in import pad_empty_batch
from dynamicemb.sharding.torchrec_compat import replace_values, stashes_memory
from dynamicemb.warn import warn

# Lists of a context that TorchRec fills while it sends.
_FILLED = ("sharding_contexts", "input_features", "reverse_indices", "seq_vbe_ctx")


class SendsBatches:
    """Reads a batch and starts its exchange; comes before TorchRec's class in the bases."""

    # Sequences have no pooling weights.
    _is_weighted: bool = False
    # Whether features that a batch lacks are read as ones without ids; the sharder sets it.
    missing_features_as_empty: bool = False
    # Whether integer weights are taken for how often each occurrence counts; the collection sets it.
    reads_counts: bool = False
    _sending: Sending
    _device: torch.device | None
    _env: Any
    _input_dists: list[nn.Module]
    _lookups: list[Any]
    _module_fqn: str | None
    _has_uninitialized_input_dist: bool
    _features_order: list[int]
    _features_order_tensor: torch.Tensor
    _feature_splits: list[int]
    # Keys of the batch that the order of features was made for.
    _keys_in_order: list[str] | None = None
    _inverse_names: list[str] | None = None
    _has_said_weights_are_idle: bool = False
    # TorchRec's trackers of what is looked up.
    post_lookup_tracker_fn: Any
    post_odist_tracker_fn: Any

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Start the exchange of ids; see TorchRec's method.

        A malformed batch, a table that cannot be trained yet, or anything else that goes wrong raises on all ranks,
        once the exchange is awaited; a rank alone raises at once.
        """
        sending = self._sending
        sending.begin()
        try:
            return self._send(ctx, self._read(features))
        except Exception as error:
            # Only input dists of dynamic tables tell the other ranks. Once one has begun, it tells by itself.
            if self._env.world_size == 1 or not self._has_dynamic_tables or sending.started:
                raise
            sending.begin()
            sending.error = error
            for name in _FILLED:
                if hasattr(ctx, name):
                    getattr(ctx, name).clear()
            weights = torch.empty(0) if self._wanted.weighted else None
            return self._send(ctx, empty_batch(self._names, weights, self._tables_device))
        finally:
            sending.begin()

    def _send(self, ctx: Any, batch: KeyedJaggedTensor) -> Any:
        padded = self.padded(batch)
        ctx.is_padded = padded is not batch
        self.prepare(ctx, padded)
        self._make_input_dists()
        self._order_features(padded)
        alone = self._is_alone and self._is_kept(padded)
        if self._sending.counts is not None and (self._features_order or not alone):
            parts = zip(self._input_dists, self.places_of_parts(padded), strict=True)
            (places,) = (places for input_dist, places in parts if isinstance(input_dist, DynamicFeaturesDist))
            self._sending.counts = self._sending.counts[places]
        return self._keep(ctx, padded) if alone else super().input_dist(ctx, padded)  # type: ignore[misc]

    @cached_property
    def _is_alone(self) -> bool:
        """Whether one rank has all tables, and these are dynamic: nothing is exchanged, and there is one sharding."""
        are_dynamic = [isinstance(input_dist, DynamicFeaturesDist) for input_dist in self._input_dists]
        # TorchRec collects scores for its own tables.
        scored = getattr(self, "_enabled_feature_score_auto_collection", False)
        return self._env.world_size == 1 and are_dynamic == [True] and not scored

    def _is_kept(self, batch: KeyedJaggedTensor) -> bool:
        """Say whether a rank alone need not ask TorchRec about this batch."""
        # A pipeline may ask TorchRec to free the memory of batches in another order.
        return not (self._features_order and getattr(self, "_free_features_storage_early", False)) and (
            not batch.variable_stride_per_key()
        )

    def _keep(self, ctx: Any, batch: KeyedJaggedTensor) -> ReadySplits:
        """Do what TorchRec's ``input_dist`` does for a rank alone."""
        if self._features_order:
            with torch.no_grad():
                batch = batch.permute(self._features_order, self._features_order_tensor)
        batch = self.deduplicated(ctx, batch)
        (input_dist,) = self._input_dists
        assert isinstance(input_dist, DynamicFeaturesDist)
        kept = input_dist.kept(batch)
        context = self.sharding_context(batch)
        context.batch_size_per_rank = [batch.stride()]
        ctx.sharding_contexts.append(context)
        return ReadySplits(kept, ctx)

    def deduplicated(self, ctx: Any, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return what a rank alone looks up of its batch, the features in the order of the tables."""
        return batch

    def sharding_context(self, batch: KeyedJaggedTensor) -> Any:
        """Return TorchRec's context of a batch in the one sharding of a rank alone."""
        raise NotImplementedError

    def looked_up(self, batch: KeyedJaggedTensor, sharding_type: str, **options: Any) -> torch.Tensor:
        """Look up in the one sharding of a rank alone, under the label that TorchRec gives it in profiles."""
        lookup = self._lookups[0]
        # A label costs as much as a torch op.
        if not torch.autograd.profiler._is_profiler_enabled:
            return lookup(batch, **options)
        with maybe_annotate_embedding_event(EmbeddingEvent.LOOKUP, self._module_fqn, sharding_type):
            return lookup(batch, **options)

    def is_short(self, ctx: Any) -> bool:
        """Say whether a looked-up batch needs nothing that TorchRec does around its lookup and exchange."""
        return (
            self._is_alone
            and self.post_lookup_tracker_fn is None
            and self.post_odist_tracker_fn is None
            and not stashes_memory()
        )

    def places_of_parts(self, batch: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Return, for each sharding, which occurrences of a batch its input dist gets, i64 ``[M]``."""
        places = torch.arange(batch.values().numel(), device=batch.device())
        numbered = replace_values(batch, places, batch.lengths())
        if self._features_order:
            numbered = numbered.permute(self._features_order, self._features_order_tensor)
        return [part.values() for part in numbered.split(self._feature_splits)]

    def padded(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return a batch that TorchRec can handle in the place of one without samples."""
        return pad_empty_batch(batch)

    def prepare(self, ctx: Any, features: KeyedJaggedTensor) -> None:
        """Take from a batch what its results will need."""

    def check_batch(self, batch: KeyedJaggedTensor) -> None:
        """Refuse what this kind of collection cannot do.

        Raises:
            ValueError: the batch has another number of samples for some features.
        """

    def _read(self, features: Any) -> KeyedJaggedTensor:
        batch, self._sending.contradicts = read_features(features, self._wanted)
        self._sending.counts = read_counts(features, self._wanted)
        self.check_batch(batch)
        # Before any group of tables is looked up, and on all ranks.
        for module in self._dynamic_modules:
            module.check_ready()
        if not self._has_said_weights_are_idle and not self._wanted.weighted:
            self._say_weights_are_idle(features)
        return batch

    def _say_weights_are_idle(self, features: Any) -> None:
        weights = features.weights_or_none() if isinstance(features, KeyedJaggedTensor) else None
        if weights is None:
            return
        self._has_said_weights_are_idle = True
        if self._sending.counts is not None:
            warn(
                "features: the batch has integer weights, which are taken for how often each occurrence counts, and "
                "weigh nothing"
            )
        elif weights.is_floating_point():
            warn(
                "features: the batch has weights, but the collection is not weighted and ignores them; make it with "
                "is_weighted=True, or leave weights out"
            )
        else:
            warn(
                "features: the batch has integer weights, but the collection is not weighted, and no dynamic table of "
                "it counts occurrences (score_strategy LFU, admission); leave weights out"
            )

    @property
    def dynamic_embedding_modules(self) -> list[Any]:
        """The dynamic tables of this rank."""
        raise NotImplementedError

    def dynamic_table_names(self) -> list[str]:
        """Return the names of the dynamic tables."""
        raise NotImplementedError

    def _shardings(self) -> list[Any]:
        """Return TorchRec's shardings, in the order of the input dists."""
        raise NotImplementedError

    @property
    def weights_come_later(self) -> bool:
        """Whether a batch may come without pooling weights, as another module makes them from what this rank looks up.

        With dynamic tables that module sends positions ahead in the place of weights, as with any row-wise table.
        """
        return not self._has_dynamic_tables

    @cached_property
    def _wanted(self) -> Wanted:
        # Scores of TorchRec's virtual tables travel as weights.
        has_scores = getattr(self, "_enable_feature_score_weight_accumulation", False)
        return Wanted(
            names=self._names,
            weighted=bool(self._is_weighted) or has_scores,
            weights_come_later=self.weights_come_later or has_scores,
            missing_as_empty=self.missing_features_as_empty,
            checks_on_device=self._has_dynamic_tables,
            device=self._tables_device,
            counted=self.reads_counts and not has_scores,
            alone=self._env.world_size == 1,
        )

    @cached_property
    def _dynamic_modules(self) -> list[Any]:
        """The dynamic tables of this rank, found once; a collection keeps its own."""
        return self.dynamic_embedding_modules

    @cached_property
    def _names(self) -> list[str]:
        """Return the features, once each."""
        return list(dict.fromkeys(self._names_of_shardings))

    @cached_property
    def _names_of_shardings(self) -> list[str]:
        """Return the features in the order of the shardings; tables may share one."""
        return [name for sharding in self._shardings() for name in sharding.feature_names()]

    @cached_property
    def _has_dynamic_tables(self) -> bool:
        return bool(self.dynamic_table_names())

    @cached_property
    def _tables_device(self) -> torch.device:
        return check_device(self._device)

    def _make_input_dists(self) -> None:
        """Make the input dists where TorchRec would with its first batch, from whose order nothing is learnt."""
        if not self._has_uninitialized_input_dist:
            return
        self._create_input_dist(self._names_of_shardings)  # type: ignore[attr-defined]
        self._has_uninitialized_input_dist = False
        if self._env.world_size > 1 and self._has_dynamic_tables:
            for input_dist in self._input_dists:
                input_dist.forward = partial(_forward, input_dist.forward, self._sending)  # type: ignore[method-assign]

    def _order_features(self, batch: KeyedJaggedTensor) -> None:
        """Tell TorchRec where the features stand in a batch."""
        inverse = batch.inverse_indices_or_none()
        if inverse is not None and inverse[0] != self._inverse_names:
            self._inverse_names = inverse[0]
            self.forget_inverse_indices(inverse)
        keys = batch.keys()
        if keys == self._keys_in_order:
            return
        order = [keys.index(name) for name in self._names_of_shardings]
        in_order = order == list(range(len(keys)))
        self._features_order = [] if in_order else order
        self.register_buffer(  # type: ignore[attr-defined]
            "_features_order_tensor",
            torch.tensor(order, device=self._device, dtype=torch.int32),
            persistent=False,
        )
        # Bags have a flag for what sequences see by the empty list.
        if hasattr(self, "_has_features_permute"):
            self._has_features_permute = not in_order
        self._keys_in_order = list(keys)

    def forget_inverse_indices(self, inverse: tuple[list[str], torch.Tensor]) -> None:
        """Make TorchRec take the order of inverse indices from the next batch."""


def _forward(inner: Callable[[KeyedJaggedTensor], Any], sending: Sending, features: KeyedJaggedTensor) -> Any:
    """Run an input dist; send an empty batch and refuse it if it raises before its exchange."""
    if sending.error is None:
        try:
            awaitable = inner(features)
            sending.started += 1
            return awaitable
        except Exception as error:
            sending.begin()
            sending.error = error
            features = empty_batch(features.keys(), features.weights_or_none(), features.values().device)
    sending.started += 1
    return inner(features)
