"""``safe_check_mode`` ERROR in a sharded collection: all ranks plan before any of them inserts.

A collection looks its dynamic tables up in groups, one after the other. All groups are planned first, and one exchange
of the numbers makes every rank raise the same error while no table has changed.
"""

from typing import Any

import torch
import torch.distributed as dist
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
    _feature_splits: list[int]

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up; see TorchRec's method. A collective, if a table has ``safe_check_mode`` ERROR.

        Raises:
            InsertFailedError: ids of such a table would find no slot on some rank; the numbers are sums over the ranks.
            ValueError: a rank refuses its batch.
        """
        if any(kernel.emb_module.insert_checks.has_error_tables for kernel in self._emb_modules):
            _plan_on_all_ranks(self._emb_modules, sparse_features.split(self._feature_splits), self.ranks)
        return super().forward(sparse_features)  # type: ignore[misc]


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
