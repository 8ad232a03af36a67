"""The compute kernels that TorchRec's lookups call: one group of dynamic tables each."""

from collections.abc import Iterator
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
from dynamicemb.sharding.check_params import arguments_of_module
from dynamicemb.sharding.constraints import OPTIONS_PARAM, DynamicEmbParameterSharding
from dynamicemb.sharding.dedup import unpack_counts
from dynamicemb.sharding.torchrec_compat import module_params
from dynamicemb.table.plan import InsertPlan


class DynamicEmbeddingFusedOptimizer(FusedOptimizer):
    """Stands for the optimizer inside a module, so that learning rate schedulers reach it.

    The rate is handed on by `step`, by `zero_grad` and by the next forward, whichever comes first. It holds no state:
    the optimizer state of a row lives in its table.

    Args:
        emb_module: the module.
        learning_rate: its present learning rate.
    """

    def __init__(self, emb_module: BatchedDynamicEmbeddingTablesV2, learning_rate: float) -> None:
        super().__init__({}, {}, [{"params": [], "lr": learning_rate}])
        self._emb_module = emb_module
        self._pushed = learning_rate

    def push_learning_rate(self) -> None:
        """Hand the learning rate on if it changed."""
        # A number: schedulers change a rate that is a tensor in place.
        learning_rate = float(next(iter(self.param_groups))["lr"])
        if learning_rate != self._pushed:
            self._emb_module.set_learning_rate(learning_rate)
            self._pushed = learning_rate

    def adopt_learning_rate(self) -> None:
        """Take the rate of the module, which a load has set."""
        self._pushed = self._emb_module.optimizer.learning_rate
        for group in self.param_groups:
            group["lr"] = self._pushed

    def step(self, closure: Any = None) -> None:
        """Hand the learning rate on; backward has already updated the rows."""
        self.push_learning_rate()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Hand the learning rate on; there are no gradients."""
        self.push_learning_rate()


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
        learning_rate = config.fused_params.get("learning_rate", self._emb_module.optimizer.learning_rate)
        self._optim = DynamicEmbeddingFusedOptimizer(self._emb_module, learning_rate)

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

    def plan_inserts(self, features: KeyedJaggedTensor) -> list[InsertPlan]:
        """Return what a batch would do to the tables of ``safe_check_mode`` ERROR; see the module's method."""
        return self._emb_module.plan_inserts(features.values(), features.offsets(), self._counts(features))

    def _counts(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        """Return how often each id counts; here weights are pooling weights."""
        return None

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
        self._optim.push_learning_rate()
        return self._emb_module(features.values(), features.offsets(), frequency_counters=self._counts(features))

    def _counts(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        packed = features.weights_or_none()
        # Tables of another group of the collection may be the ones that count.
        return unpack_counts(packed) if packed is not None and self.counts_occurrences else None


class BatchedDynamicEmbeddingBag(DynamicKernel):
    """Pooled lookup: the sum over the part of each bag that this rank owns."""

    def __init__(self, config: GroupedEmbeddingConfig, pg: Any = None, device: torch.device | None = None) -> None:
        super().__init__(config, DynamicEmbPoolingMode.SUM, device)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up and add.

        Args:
            features: ids ``[N]`` of B samples; weights are pooling weights, if there are any.

        Returns:
            ``[B, total_D]``.
        """
        self._optim.push_learning_rate()
        return self._emb_module(features.values(), features.offsets(), features.weights_or_none())


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
