"""The compute kernels that TorchRec's lookups call: one group of dynamic tables each."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.admission import counts_occurrences
from dynamicemb.checkpoint.module import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode, DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.sharding.checks.params import arguments_of_module
from dynamicemb.sharding.exchange.dedup import unpack_counts
from dynamicemb.sharding.param_group import TableParamGroup
from dynamicemb.sharding.planning.constraints import OPTIONS_PARAM, DynamicEmbParameterSharding
from dynamicemb.sharding.table_weights import TableStandIn, make_weight
from dynamicemb.sharding.torchrec_compat import module_params
from dynamicemb.table.growing.plan import InsertPlan
from dynamicemb.table.importing.rows import adopt_updates
from dynamicemb.table.scores import MAX_SCORE


class DynamicEmbeddingFusedOptimizer(FusedOptimizer):
    """Stands for the optimizer inside a module, so that learning rate schedulers reach it.

    It holds no state: the optimizer state of a row lives in its table. Nor does it hold the learning rate, which it
    shows (`TableParamGroup`).

    Args:
        emb_module: the module.
    """

    def __init__(self, emb_module: BatchedDynamicEmbeddingTablesV2) -> None:
        self._emb_module = emb_module
        self._group = TableParamGroup(emb_module.optimizer_settings)
        self.weights: dict[str, nn.Parameter] = {}
        super().__init__({}, {}, [self._group])

    def step(self, closure: Any = None) -> None:
        """Hand on a learning rate that is a tensor and has changed; backward has already updated the rows."""
        self._emb_module.optimizer_settings.hand_on()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Hand on a learning rate that is a tensor and has changed; there are no gradients."""
        self._emb_module.optimizer_settings.hand_on()

    def save_param_groups(self, save: bool) -> None:
        """Let the state_dict hold the param group; then it must list parameters, by which a load tells groups apart."""
        super().save_param_groups(save)
        self.params = dict(self.weights) if save else {}
        self._group.show_params(list(self.params.values()))

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Change ``lr``, ``eps``, ``beta1``, ``beta2`` or ``weight_decay``; TorchRec hands this on to all optimizers.

        Raises:
            TypeError: a value that is no number.
            ValueError: a name that this optimizer does not read, or a value out of range. Nothing has changed.
        """
        names = {"lr": "learning_rate"}
        settings = self._emb_module.optimizer_settings
        settings.change(**{names.get(name, name): value for name, value in params_dict.items()})

    def set_optimizer_step(self, step: int) -> None:
        """Go on as after so many steps; TorchRec hands this on to all optimizers."""
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_SCORE:
            raise ValueError(f"step must be an int in 0..{MAX_SCORE}, got {step!r}")
        adopt_updates(self._emb_module.tables, step, keep=False)


class DynamicKernel(BaseEmbedding, FusedOptimizerModule):
    """A group of dynamic tables behind TorchRec's interface.

    Exposes neither parameters nor buffers nor a state_dict: the collection puts rows into its own.

    Args:
        config: tables of the group.
        pooling_mode: SUM or NONE. A bag's mean is formed once over all ranks, never here.
        device: of the tables.
    """

    def __init__(
        self, config: GroupedEmbeddingConfig, pooling_mode: DynamicEmbPoolingMode, device: torch.device | None
    ) -> None:
        super().__init__()
        self._config = config
        options = [_options_of(table) for table in config.embedding_tables]
        self.counts_occurrences = needs_counts(options)
        self._emb_module = BatchedDynamicEmbeddingTablesV2(
            table_options=options,
            table_names=[table.name for table in config.embedding_tables],
            feature_table_map=[t for t, table in enumerate(config.embedding_tables) for _ in table.feature_names],
            pooling_mode=pooling_mode,
            device=device,
            **_module_arguments(config),
        )
        # The lookup plans for all groups and ranks, see plan_on_all_ranks.
        self._emb_module.insert_checks.left_to_ranks = True
        self._optim = DynamicEmbeddingFusedOptimizer(self._emb_module)

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """The tables as TorchRec describes them."""
        return self._config

    @property
    def emb_module(self) -> BatchedDynamicEmbeddingTablesV2:
        """The tables."""
        return self._emb_module

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The handle for learning rate schedulers."""
        return self._optim

    def show_weights(self, tables: nn.ModuleDict, prefix: str, trained: Mapping[str, bool]) -> None:
        """Put an empty weight for each table where the unsharded collection has its weight.

        Args:
            tables: of the collection, by name.
            prefix: where they stand in the collection.
            trained: whether the weights of the unsharded collection, by their names in it, require a gradient.
        """
        module = self._emb_module
        for t, name in enumerate(module.table_names):
            path = f"{prefix}.{name}.weight"
            optimizer = self._optim if t == 0 else None
            args = (module.dims[t], module.embedding_dtype, module.tables.device, trained.get(path, True), optimizer)
            self._optim.weights[path] = make_weight(*args)
            tables[name] = TableStandIn(self._optim.weights[path])
        self.ask_weights(tables)

    def ask_weights(self, tables: nn.ModuleDict) -> None:
        """Freeze the tables by the weights that a collection shows, see `show_weights`."""
        self._emb_module.weight_holders = [tables[name] for name in self._emb_module.table_names]

    def plan_inserts(self, features: KeyedJaggedTensor) -> list[InsertPlan]:
        """Return what a batch would do to the tables of ``safe_check_mode`` ERROR; see the module's method."""
        return self._emb_module.plan_inserts(features.values(), features.offsets(), self._counts(features))

    def _counts(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        """Return how often each id counts; weights are packed counts, if there are any, unless they weigh rows."""
        packed = None if self._config.is_weighted else features.weights_or_none()
        # Tables of another group of the collection may be the ones that count.
        return unpack_counts(packed) if packed is not None and self.counts_occurrences else None

    def flush(self) -> None:
        """Write cached rows back."""
        self._emb_module.flush()

    def purge(self) -> None:
        """Keep everything: TorchRec calls this before load_state_dict, which replaces rows by itself."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing."""
        yield from ()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing."""
        yield from ()

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing."""
        yield from ()

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Add nothing."""
        return {} if destination is None else destination


class BatchedDynamicEmbedding(DynamicKernel):
    """Sequence lookup: one row per occurrence."""

    def __init__(self, config: GroupedEmbeddingConfig, pg: Any = None, device: torch.device | None = None) -> None:
        super().__init__(config, DynamicEmbPoolingMode.NONE, device)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up.

        Args:
            features: ids ``[N]``; weights are packed counts, if there are any.

        Returns:
            ``[N, D]``.
        """
        return self._emb_module(features.values(), features.offsets(), frequency_counters=self._counts(features))


class BatchedDynamicEmbeddingBag(DynamicKernel):
    """Pooled lookup: the sum over the part of each bag that this rank owns."""

    def __init__(self, config: GroupedEmbeddingConfig, pg: Any = None, device: torch.device | None = None) -> None:
        super().__init__(config, DynamicEmbPoolingMode.SUM, device)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up and add.

        Args:
            features: ids ``[N]`` of B samples; weights are pooling weights if the tables are weighted, else packed
                counts, if there are any.

        Returns:
            ``[B, total_D]``.
        """
        weights = features.weights_or_none() if self._config.is_weighted else None
        counts = self._counts(features)
        return self._emb_module(features.values(), features.offsets(), weights, frequency_counters=counts)


def needs_counts(options: list[DynamicEmbTableOptions]) -> bool:
    """Say whether any of the tables counts occurrences: for LFU scores or for admission."""
    return any(
        counts_occurrences(option.admit_strategy)
        or option.score_strategy is DynamicEmbScoreStrategy.LFU
        or (isinstance(option.score_strategy, tuple) and DynamicEmbScoreStrategy.LFU in option.score_strategy)
        for option in options
    )


def _options_of(table: Any) -> DynamicEmbTableOptions:
    return table.fused_params[OPTIONS_PARAM]


def _module_arguments(config: GroupedEmbeddingConfig) -> dict[str, Any]:
    """Translate TorchRec's fused_params into arguments of the module."""
    arguments = module_params(config)
    DynamicEmbParameterSharding.pop_additional_fused_params(arguments)
    arguments = arguments_of_module(arguments)
    if hasattr(arguments.get("output_dtype"), "as_dtype"):
        arguments["output_dtype"] = arguments["output_dtype"].as_dtype()
    return arguments
