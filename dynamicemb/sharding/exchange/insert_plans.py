"""``safe_check_mode`` ERROR in a sharded collection: all ranks plan before any of them inserts.

A collection looks its dynamic tables up in groups, one after the other. All groups are planned first, and one exchange
of the numbers makes every rank raise the same error while no table has changed.
"""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.embedding.checks import raise_failed
from dynamicemb.table.growing.plan import InsertPlan


class PlansInserts:
    """A lookup that plans the inserts of all of its groups first; comes before TorchRec's class in the bases.

    Attributes:
        ranks: the ranks that share the tables; None is all.
    """

    ranks: dist.ProcessGroup | None = None
    _emb_modules: Any
    grouped_configs: list[Any]
    _scale_gradient_factor: int
    # TorchRec's tracker of optimizer states.
    optim_state_tracker_fn: Any
    _feature_splits: list[int]

    def forward(self, sparse_features: KeyedJaggedTensor, flat: bool = True) -> Any:
        """Look up; see TorchRec's method. A collective, if a table has ``safe_check_mode`` ERROR.

        Args:
            sparse_features: ids of all groups.
            flat: whether sequences are returned as TorchRec returns them, ``[N * D]``; else perhaps as ``[N, D]``.

        Raises:
            InsertFailedError: ids of such a table would find no slot on some rank; the numbers are sums over the ranks.
            ValueError: a rank refuses its batch.
        """
        kernels = self._kernels
        if any(kernel.emb_module.insert_checks.has_error_tables for kernel in kernels):
            _plan_on_all_ranks(kernels, sparse_features.split(self._feature_splits), self.ranks)
        if self._is_single and self.optim_state_tracker_fn is None:
            looked_up = kernels[0](sparse_features)
            return looked_up.view(-1) if flat and isinstance(self, GroupedEmbeddingsLookup) else looked_up
        return super().forward(sparse_features)  # type: ignore[misc]

    @cached_property
    def _kernels(self) -> list[Any]:
        return list(self._emb_modules)

    @cached_property
    def _is_single(self) -> bool:
        """Whether there is one group, for which TorchRec has nothing to split, to weigh or to join."""
        if len(self.grouped_configs) != 1 or any(getattr(self, "_feature_score_auto_collections", ())):
            return False
        (config,) = self.grouped_configs
        # TorchRec scales the gradients of pooling weights.
        is_scaled = config.is_weighted and self._scale_gradient_factor != 1
        return not (is_scaled or config.has_feature_processor)


def _plan_on_all_ranks(kernels: Any, features: list[KeyedJaggedTensor], ranks: dist.ProcessGroup | None) -> None:
    names = [name for kernel in kernels for name in kernel.emb_module.table_names]
    # The failed ids of each table, all of its new ids, and at the end how many ranks refuse their batch.
    numbers = [0] * (2 * len(names) + 1)
    error: Exception | None = None
    first = 0
    try:
        for kernel, part in zip(kernels, features, strict=True):
            plans = kernel.plan_inserts(part) if kernel.emb_module.insert_checks.has_error_tables else []
            for plan in plans:
                numbers[first + plan.table] = plan.failed
                numbers[len(names) + first + plan.table] = plan.total
            first += len(kernel.emb_module.table_names)
    except Exception as caught:
        error = caught
        numbers[-1] = 1
    counts = torch.tensor(numbers, dtype=torch.int64, device=kernels[0].emb_module.tables.device)
    dist.all_reduce(counts, group=ranks)
    if error is not None:
        raise error
    *numbers, refused = counts.tolist()
    if refused:
        raise ValueError("features: another rank refuses its batch; its own error says why")
    totals = numbers[len(names) :]
    raise_failed((name, InsertPlan(t, numbers[t], totals[t])) for t, name in enumerate(names))
