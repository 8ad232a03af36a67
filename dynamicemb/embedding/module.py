"""``BatchedDynamicEmbeddingTablesV2``: lookups with autograd and a fused optimizer over a group of dynamic tables."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dynamicemb.aliases import also_named
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode, DynamicEmbTableOptions
from dynamicemb.embedding.admission import refuse_capture
from dynamicemb.embedding.autograd import LookupFunction
from dynamicemb.embedding.averaging import never_averaged
from dynamicemb.embedding.checks import InsertChecks
from dynamicemb.embedding.construct import (
    build_group,
    check_device,
    check_features,
    check_options,
    check_output_dtype,
    check_pooling_mode,
    check_seed,
    warn_about_idle_arguments,
    weights_dtype,
)
from dynamicemb.embedding.contents import TableContents
from dynamicemb.embedding.freezing import frozen_among, holders_alone
from dynamicemb.embedding.inputs import Batch, check_batch, check_effects
from dynamicemb.embedding.optimizer_settings import OptimizerSettings
from dynamicemb.embedding.phases import phase
from dynamicemb.embedding.reference_calls import ReferenceCalls
from dynamicemb.embedding.reports import TableReports
from dynamicemb.embedding.scores import TableScores
from dynamicemb.embedding.step import Reading, decide, place, place_and_read, place_evaluation, read
from dynamicemb.embedding.unknown_arguments import warn_about_unknown
from dynamicemb.errors import DynamicEmbError
from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.table.group import TableGroup
from dynamicemb.table.growing.plan import InsertPlan
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.types import Default


@never_averaged
class BatchedDynamicEmbeddingTablesV2(TableScores, ReferenceCalls, TableReports, TableContents, nn.Module):
    """Dynamic embedding tables that are looked up and trained together.

    The input of a lookup is ragged and feature-major. With F = 2 features and B = 2 samples::

        #            sample 0   sample 1
        # feature 0  [3, 5]     []
        # feature 1  [7]        [3, 3]
        indices = torch.tensor([3, 5, 7, 3, 3])
        offsets = torch.tensor([0, 2, 2, 3, 5])

    With pooling the output is ``[B, total_D]``, a feature's columns beside each other; without, ``[N, D]``. Backward
    applies the optimizer to the rows that the forward read; no gradient leaves the module but that of
    ``per_sample_weights``.

    In training mode missing ids are inserted, evicting the lowest score of a full bucket; in eval mode nothing changes
    and a missing id reads ``eval_initializer_args``. A training forward under ``torch.no_grad()`` inserts but does not
    train.

    Threads may share a module: lookups and updates of one follow each other. A forked child must not use it, for the
    kernels' threads do not survive a fork: start processes with ``spawn``, and each gets its own copy. Under
    ``torch.utils.checkpoint`` a lookup runs twice, and counts twice for scores and statistics; it trains once.
    """

    def __init__(
        self,
        table_options: list[DynamicEmbTableOptions],
        table_names: list[str] | None = None,
        feature_table_map: list[int] | None = None,
        use_index_dedup: bool = False,
        prefetch_pipeline: bool = False,
        pooling_mode: DynamicEmbPoolingMode = DynamicEmbPoolingMode.SUM,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        enforce_hbm: bool = False,
        bounds_check_mode: Any = None,
        optimizer: Any = "sgd",
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = Default(1.0),
        max_norm: float = 0.0,
        learning_rate: float = 0.01,
        eps: float = Default(1e-8),
        initial_accumulator_value: float = 0.0,
        momentum: float = Default(0.9),
        weight_decay: float = 0.0,
        weight_decay_mode: Any = 0,
        eta: float = Default(0.001),
        beta1: float = Default(0.9),
        beta2: float = Default(0.999),
        counter_based_regularization: Any = None,
        cowclip_regularization: Any = None,
        *,
        seed: int | None = None,
        **unknown: Any,
    ) -> None:
        """Allocate the tables.

        Args:
            table_options: one per table; ``dim`` and ``max_capacity`` (NO_EVICTION: one of the capacities) must be set.
            table_names: distinct names; the initial values of rows depend on them. None: ``table_0``, ``table_1``, ...
            feature_table_map: the table of each feature, in order; None is one feature per table.
            use_index_dedup: has no effect, since repeated ids need no preparation here, and warns.
            prefetch_pipeline: has no effect, since all rows are in the memory of their device, and warns.
            pooling_mode: SUM, MEAN or NONE.
            output_dtype: float32, float16 or bfloat16.
            device: where the tables live; None is the current CUDA device, or the CPU where there is none.
            enforce_hbm: has no effect without a cache and warns.
            bounds_check_mode: has no effect, since every id is legal, and warns unless it is None.
            optimizer: EXACT_SGD, SGD, ADAM, EXACT_ADAGRAD or EXACT_ROWWISE_ADAGRAD of ``EmbOptimType``.
            stochastic_rounding: round fp16 and bf16 weights stochastically.
            gradient_clipping: clamp each incoming gradient element to +-``max_gradient``.
            max_gradient: bound of the clamp.
            max_norm: no optimizer here reads it; warns if it asks for something, as do ``momentum``, ``eta``,
                ``weight_decay_mode``, ``counter_based_regularization`` and ``cowclip_regularization``.
            learning_rate: step size.
            eps: term in the denominator of Adam and Adagrad.
            initial_accumulator_value: first value of optimizer state.
            momentum: see ``max_norm``.
            weight_decay: decoupled, Adam only.
            weight_decay_mode: see ``max_norm``.
            eta: see ``max_norm``.
            beta1: Adam.
            beta2: Adam.
            counter_based_regularization: see ``max_norm``.
            cowclip_regularization: see ``max_norm``.
            seed: seed of the initial values; None is ``torch.initial_seed()``.
            **unknown: have no effect; each warns, and names the argument that may be meant.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a value out of range, or tables that cannot share a module.
            UnsupportedOptionError: a legal option that this version cannot honour.
        """
        super().__init__()
        pooling_mode = check_pooling_mode(pooling_mode)
        names = check_options(table_options, table_names, pooling_mode)
        warn_about_idle_arguments(use_index_dedup, prefetch_pipeline, enforce_hbm, bounds_check_mode)
        warn_about_unknown(type(self).__name__, unknown, MODULE_ARGUMENTS)
        check_output_dtype(output_dtype)
        spec = OptimizerSpec.create(
            optimizer,
            stochastic_rounding=stochastic_rounding,
            gradient_clipping=gradient_clipping,
            max_gradient=max_gradient,
            max_norm=max_norm,
            learning_rate=learning_rate,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
            momentum=momentum,
            weight_decay=weight_decay,
            weight_decay_mode=weight_decay_mode,
            eta=eta,
            beta1=beta1,
            beta2=beta2,
            counter_based_regularization=counter_based_regularization,
            cowclip_regularization=cowclip_regularization,
        )
        self.table_options = table_options
        self.pooling_mode = pooling_mode
        self.output_dtype = output_dtype
        self.embedding_dtype = weights_dtype(table_options[0])
        self.index_type = table_options[0].index_type or torch.int64
        self.dims = [int(option.dim or 0) for option in table_options]
        self._features = check_features(feature_table_map, len(table_options), self.dims)
        self.feature_num = len(self._features.tables)
        self.max_D = max(self.dims)
        self.total_D = self._features.column_offsets[-1]
        device = check_device(device)
        self._begin_saying(prefetch_pipeline)
        # Tables made in inference mode could only be changed there.
        with torch.inference_mode(False):
            self._group = build_group(table_options, names, spec, check_seed(seed), device)
            self.optimizer_settings = OptimizerSettings(spec, self._group.learning_rate)
            self._empty_tensor = nn.Parameter(torch.empty(0, dtype=torch.float32, device=device), requires_grad=True)
        # Per table, where a sharded collection shows the weight that freezes it; none for a module on its own.
        self.weight_holders: list[nn.Module] = []
        self._begin_scores()
        self.insert_checks = InsertChecks(self._group, [option.safe_check_mode for option in table_options])
        self._prepare_constants(device)

    def _prepare_constants(self, device: torch.device) -> None:
        """Put what every lookup reads on the device once."""
        features = self._features
        # Of the last lookup's batch size; the others of a training run have the same, or nearly all.
        self._layout = FeatureLayout(
            torch.tensor(features.tables, dtype=torch.int32, device=device),
            torch.tensor(features.column_offsets, dtype=torch.int64, device=device),
            torch.tensor(features.first_features, dtype=torch.int64, device=device),
            0,
            int(self.pooling_mode),
            self.total_D,
        )
        self._untrainable = [
            name for name, option in zip(self._group.names, self.table_options, strict=True) if not option.training
        ]
        values = [float(option.eval_initializer_args.value) for option in self.table_options]
        missing = torch.tensor(values, dtype=torch.float32, device=device)
        self._eval_reading = Reading(missing, self.output_dtype)
        self._training_reading = Reading(torch.zeros_like(missing), self.output_dtype)

    # What the group is

    @property
    def tables(self) -> TableGroup:
        """The tables; kept under the name that users of the reference implementation know."""
        return self._group

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        return list(self._group.names)

    @property
    def optimizer(self) -> OptimizerSpec:
        """The optimizer's present settings; waits for a GPU if the learning rate is a tensor there."""
        return self.optimizer_settings.spec

    @property
    def feature_offsets(self) -> list[int]:
        """First feature of every table, and the number of features, ``T+1``."""
        return list(self._features.first_features)

    # Lookup

    # Tables are changed behind the graph's back, so a compiled model breaks its graph here and runs the lookup eagerly.
    @torch.compiler.disable
    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        *,
        frequency_counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look ids up.

        Args:
            indices: int64, int32 or uint64 ``[N]``, feature-major; every value is a legal id.
            offsets: int64 or int32 ``[F*B+1]``, bag boundaries.
            per_sample_weights: floating ``[N]`` pooling weights with gradient, for SUM and MEAN. Integers are taken for
                ``frequency_counters``, with a warning, and never weigh rows.
            feature_requires_grad: has no effect and warns, unless all are 1: all features train. On a GPU, where the
                host would have to wait for the answer, all warn.
            batch_size_per_feature_per_rank: samples of each feature by rank; all features must have B.
            total_unique_indices: has no effect and warns.
            frequency_counters: int64 ``[N]``, how often each occurrence counts for an LFU score and for admission; None
                is once. Tables that count for neither ignore it.

        Returns:
            ``[B, total_D]`` with pooling, ``[N, D]`` without, in ``output_dtype``. Empty bags are zero.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong shape or device, features of different batch sizes, or counts given twice; on the CPU,
                and with a table of ``safe_check_mode`` ERROR, also a wrong offset or frequency. Else these are clamped
                and counted on a GPU, since to look at them the host would have to wait.
            InsertFailedError: ids of a table of mode ERROR would find no slot; nothing has changed, but that tables
                which grow may have more room.
            DynamicEmbError: a CUSTOMIZED table without a score; mode ERROR inside a CUDA graph capture.
        """
        with phase("check"):
            batch, layout = self._checked(indices, offsets, per_sample_weights, frequency_counters)
            self._check_arguments(batch)
            self._say_what_is_idle(batch, feature_requires_grad, batch_size_per_feature_per_rank, total_unique_indices)
        if not self.training:
            return self._evaluate(batch, layout)
        return self._lookup_and_insert(batch, layout)

    def plan_inserts(
        self, indices: torch.Tensor, offsets: torch.Tensor, frequency_counters: torch.Tensor | None = None
    ) -> list[InsertPlan]:
        """Check a batch; return, for each table of ``safe_check_mode`` ERROR, how many of its ids would find no slot.

        Waits for the device. Changes nothing, but that tables which grow get the room that the batch wants; an
        evaluation inserts nothing and returns no plans. Arguments and errors are those of ``forward``.
        """
        batch, layout = self._checked(indices, offsets, None, frequency_counters, wait=True)
        self._check_arguments(batch)
        if not self.training:
            return []
        with self._group.turn():
            return self.insert_checks.plan(batch.ids, layout.table_ranges(batch.offsets), batch.frequencies)

    def _checked(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        frequency_counters: torch.Tensor | None,
        wait: bool = False,
    ) -> tuple[Batch, FeatureLayout]:
        self.insert_checks.refuse_capture()
        wait = wait or self.insert_checks.raises_here
        group = self._group
        inputs = (indices, offsets, self.feature_num, group.device, per_sample_weights, frequency_counters)
        batch = check_batch(*inputs, wait=wait, counts_occurrences=group.counts_occurrences)
        if batch.has_counts_as_weights:
            self._say_what_counts()
        layout = self._layout
        if layout.batch_size != batch.batch_size:
            layout = self._layout = replace(layout, batch_size=batch.batch_size)
        return batch, layout

    def _check_arguments(self, batch: Batch) -> None:
        is_pooled = self.pooling_mode is not DynamicEmbPoolingMode.NONE
        check_effects(batch, is_pooled, self._group.counts_occurrences)
        self.check_ready()

    def check_ready(self) -> None:
        """Check that a training lookup can go on as far as the options of the tables go.

        Raises:
            DynamicEmbError: in training mode, a table cannot be trained or has no score yet.
        """
        if not self.training:
            return
        if self._untrainable:
            raise DynamicEmbError(
                f"table {self._untrainable[0]!r} was made with training=False and has no optimizer state; "
                "call module.eval()"
            )
        if self._unscored:
            self._check_scores(range(len(self.dims)))

    def _evaluate(self, batch: Batch, layout: FeatureLayout) -> torch.Tensor:
        group, weights, reading = self._group, batch.per_sample_weights, self._eval_reading
        with group.turn():
            if self.pooling_mode is DynamicEmbPoolingMode.NONE and not group.index.expires:
                return place_and_read(group, batch, layout, reading)
            placed = place_evaluation(group, batch, layout)
            if weights is None or not (weights.requires_grad and torch.is_grad_enabled()):
                return read(group, placed, reading)
            # The rows stay as they are, but the pooling weights still want their gradient.
            return LookupFunction.apply(self._empty_tensor.detach(), weights, group, placed, reading)

    def _lookup_and_insert(self, batch: Batch, layout: FeatureLayout) -> torch.Tensor:
        group = self._group
        refuse_capture(group)
        with group.turn():
            plan = decide(group, self.insert_checks, batch, layout, self)
            try:
                placed = place(group, plan)
                self.insert_checks.after_insert()
                is_frozen = len(plan.training.frozen) == len(self.dims)
                anchor = self._parameters["_empty_tensor"]
                anchor = anchor.detach() if is_frozen else anchor  # type: ignore[union-attr,assignment]
                output: torch.Tensor = LookupFunction.apply(
                    anchor, batch.per_sample_weights, group, placed, self._training_reading
                )
            except BaseException:
                # The exception's traceback may live long, and with it the step.
                plan.training.step.finish()
                raise
        if not output.requires_grad:
            plan.training.step.finish()
        return output

    # Settings

    @also_named(learning_rate="lr")
    def set_learning_rate(self, lr: float | torch.Tensor) -> None:
        """Set the learning rate of the following backward calls; a floating tensor of one element may change later."""
        self.optimizer_settings.set_learning_rate(lr)

    def frozen_tables(self) -> tuple[int, ...]:
        """Return the tables that are not trained at present, all after ``requires_grad_(False)``."""
        if not self._parameters["_empty_tensor"].requires_grad:  # type: ignore[union-attr]
            return tuple(range(len(self.dims)))
        return frozen_among(self.weight_holders)

    # Module protocol

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"weight_holders": holders_alone(self.weight_holders)}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        probe = fn(torch.empty_like(self._empty_tensor))
        if probe.is_shared() and not self._empty_tensor.is_shared():
            raise DynamicEmbError(
                "share_memory: dynamic tables cannot be shared between processes, each would change them unseen by the "
                "others; give every process its own module"
            )
        if probe.device != self._empty_tensor.device or probe.dtype != self._empty_tensor.dtype:
            raise DynamicEmbError(
                f"dynamic tables stay on {self._group.device} in their dtype {self.embedding_dtype}; "
                "construct the module with device= and DynamicEmbTableOptions(embedding_dtype=) instead of moving it"
            )
        return super()._apply(fn, recurse)


MODULE_ARGUMENTS = frozenset(inspect.signature(BatchedDynamicEmbeddingTablesV2.__init__).parameters) - {
    "self",
    "unknown",
}
