"""Check fused_params before TorchRec hands them to FBGEMM, whose own messages name neither tables nor a way out."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from dynamicemb.embedding.module import BatchedDynamicEmbeddingTablesV2
from dynamicemb.sharding.constraints import is_dynamic
from dynamicemb.sharding.torchrec_compat import TORCHREC_ONLY_PARAMS, optimizer_of_parameter

_MODULE_PARAMS = frozenset(inspect.signature(BatchedDynamicEmbeddingTablesV2.__init__).parameters) - {"self"}
# Names that differ too much for difflib.
_MEANT = {"lr": "learning_rate", "optim": "optimizer", "wd": "weight_decay"}
_DEFAULT_OPTIMIZER = "exact_sgd"
# Values of the optimizers that FBGEMM has on the CPU.
_CPU_OPTIMIZERS = frozenset(
    {"exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", "ema_in_place_row_wise_adagrad"},
)


def check_names(names: Iterable[str]) -> None:
    """Check the names of fused_params of dynamic tables.

    Raises:
        TypeError: an unknown name; suggests a known one.
    """
    known = _MODULE_PARAMS | TORCHREC_ONLY_PARAMS | {"betas"}
    for name in sorted(set(names) - known):
        close = [_MEANT[name]] if name in _MEANT else difflib.get_close_matches(name, _MODULE_PARAMS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(_MODULE_PARAMS))}"
        raise TypeError(f"fused_params has {name!r}, which dynamic tables do not know; {hint}")


def check_fused_params(
    fused_params: dict[str, Any] | None,
    plan: dict[str, ParameterSharding],
    weights: dict[str, Any],
    device: torch.device | None,
) -> None:
    """Check the fused_params of a sharder against the plan of a collection.

    Args:
        fused_params: the sharder's.
        plan: by table name.
        weights: the weight of each table of the module before sharding; it may carry an optimizer of its own.
        device: of the sharded module; None is the CPU, as for TorchRec.

    Raises:
        TypeError: an unknown name.
        ValueError: an optimizer that FBGEMM lacks on the CPU, for static tables there.
    """
    params = fused_params or {}
    if any(is_dynamic(entry) for entry in plan.values()):
        check_names(params)
    if device is not None and device.type != "cpu":
        return
    refused: dict[str, list[str]] = {}
    for name, entry in plan.items():
        # Dense kernels belong to the optimizer of the dense layers.
        if is_dynamic(entry) or entry.compute_kernel == EmbeddingComputeKernel.DENSE.value:
            continue
        own = optimizer_of_parameter(weights[name]) if name in weights else None
        optimizer = optimizer_type_to_emb_opt_type(own) if own else params.get("optimizer", _DEFAULT_OPTIMIZER)
        if getattr(optimizer, "value", optimizer) not in _CPU_OPTIMIZERS:
            refused.setdefault(getattr(optimizer, "name", str(optimizer)), []).append(name)
    for optimizer_name, tables in refused.items():
        raise ValueError(
            f"optimizer {optimizer_name}: static tables {tables} cannot use it on the CPU (FBGEMM); use EXACT_SGD or "
            "EXACT_ROWWISE_ADAGRAD, or make them dynamic with use_dynamicemb=True"
        )


def weights_of(tables: nn.ModuleDict) -> dict[str, Any]:
    """Return the weight of each table of an unsharded collection."""
    return {name: table.weight for name, table in tables.items()}
