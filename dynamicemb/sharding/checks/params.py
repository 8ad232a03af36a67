"""Check fused_params before TorchRec hands them on, and divide them between dynamic tables and FBGEMM's."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from dynamicemb.embedding.module import MODULE_ARGUMENTS
from dynamicemb.embedding.unknown_arguments import suggestion, warn_about_unknown
from dynamicemb.optimizer import OptimizerArgs
from dynamicemb.sharding.checks.fields import asks
from dynamicemb.sharding.planning.constraints import is_dynamic
from dynamicemb.sharding.torchrec_compat import (
    TORCHREC_ONLY_PARAMS,
    fbgemm_params,
    optimizer_arguments_of_parameter,
    optimizer_of_parameter,
)
from dynamicemb.warn import warn

_BY_MODEL = frozenset({"device", "feature_table_map", "pooling_mode", "table_names", "table_options"})
# What the module takes and has no use for under a sharder.
_IDLE = frozenset({"bounds_check_mode", "enforce_hbm", "prefetch_pipeline", "use_index_dedup"})
_ADAMS_PAIR = "betas"
ACTING_PARAMS = (MODULE_ARGUMENTS - _BY_MODEL - _IDLE) | {_ADAMS_PAIR, "use_one_tbe_per_table"}
_REMEDIES = {
    "use_index_dedup": "set use_index_dedup=True of DynamicEmbeddingCollectionSharder itself",
    "weights_precision": "data_type of the embedding config decides",
}

# What apply_optimizer_in_backward may attach to a parameter beside this.
_OPTIMIZER_PARAMS = (ACTING_PARAMS & {field.name for field in fields(OptimizerArgs)}) | {
    _ADAMS_PAIR,
    "counter_based_regularization",
    "cowclip_regularization",
    "lr",
    "optimizer",
}
# Arguments of torch's optimizers that are not known here, with the values that ask for what is done anyway.
_TORCH_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "amsgrad": (False,),
    "capturable": (False,),
    "dampening": (0,),
    "decoupled_weight_decay": (True,),
    "differentiable": (False,),
    "foreach": (None, False),
    "fused": (None, False),
    "lr_decay": (0,),
    "maximize": (False,),
    "nesterov": (False,),
}

_DEFAULT_OPTIMIZER = "exact_sgd"
# Values of the optimizers that FBGEMM has on the CPU.
_CPU_OPTIMIZERS = frozenset(
    {"exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", "ema_in_place_row_wise_adagrad"},
)


def idle_params() -> frozenset[str]:
    """Return the names of fused_params that may be meant for static tables, and have no effect on dynamic ones."""
    return (TORCHREC_ONLY_PARAMS | fbgemm_params() | _IDLE) - ACTING_PARAMS - _BY_MODEL - {"embedding_specs"}


def unknown_params(names: Iterable[str]) -> list[str]:
    """Return the names of fused_params that neither dynamic nor static tables know.

    Raises:
        TypeError: one of them is what the model decides.
    """
    unknown = sorted(set(names) - ACTING_PARAMS - idle_params())
    for name in unknown:
        if name in _BY_MODEL or name == "embedding_specs":
            raise TypeError(f"fused_params has {name!r}, which the embedding configs and the plan decide; remove it")
    return unknown


def _check_unknown(params: dict[str, Any], static: list[str]) -> None:
    unknown = unknown_params(params)
    if unknown and static:
        # FBGEMM would raise, too late to say more than the name.
        hint = suggestion(unknown[0], ACTING_PARAMS)
        raise TypeError(
            f"fused_params has {unknown[0]!r}, which neither dynamic tables nor static ones know, such as {static}; "
            f"{hint}"
        )
    warn_about_unknown("fused_params", {name: params[name] for name in unknown}, ACTING_PARAMS)


def check_fused_params(
    fused_params: dict[str, Any] | None,
    plan: dict[str, ParameterSharding],
    weights: dict[str, Any],
    device: torch.device | None,
) -> None:
    """Check the fused_params of a sharder against the plan of a collection, and warn about those without an effect.

    Args:
        fused_params: the sharder's.
        plan: by table name.
        weights: the weight of each table of the module before sharding; it may carry an optimizer of its own.
        device: of the sharded module; None is the CPU, as for TorchRec.

    Raises:
        TypeError: what the model decides, or an unknown name where there are static tables too.
        ValueError: an argument of a table's own optimizer that no dynamic table has, or an optimizer that FBGEMM lacks
            on the CPU, for static tables there.
    """
    params = fused_params or {}
    dynamic = [name for name, entry in plan.items() if is_dynamic(entry)]
    # Dense kernels belong to the optimizer of the dense layers.
    dense = EmbeddingComputeKernel.DENSE.value
    static = [name for name, entry in plan.items() if not is_dynamic(entry) and entry.compute_kernel != dense]
    if dynamic:
        _check_unknown(params, static)
        _warn_about_idle(params, dynamic, static)
    for name in dynamic:
        if name in weights:
            _check_own_optimizer(name, optimizer_arguments_of_parameter(weights[name]))
    if device is None or device.type == "cpu":
        _check_static_on_cpu(params, static, weights)


def _warn_about_idle(params: dict[str, Any], dynamic: list[str], static: list[str]) -> None:
    idle = sorted(name for name, value in params.items() if name in idle_params() and asks(value))
    if idle:
        given = ", ".join(f"{name}={params[name]}" for name in idle)
        remedies = [_REMEDIES[name] for name in idle if name in _REMEDIES]
        remedy = "; ".join([*remedies, f"for static tables it acts: {static}" if static else "remove it"])
        warn(f"dynamic tables {dynamic} ignore {given} of fused_params; {remedy}")
    if static and params.get("initial_accumulator_value"):
        if "initial_accumulator_value" not in fbgemm_params():
            warn(
                f"static tables {static} ignore initial_accumulator_value={params['initial_accumulator_value']} of "
                f"fused_params, which FBGEMM lacks; it acts on dynamic tables {dynamic}"
            )


def _check_own_optimizer(table: str, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        # TorchRec adds what it made of them, should the module have been sharded before.
        if name in _OPTIMIZER_PARAMS or value in _TORCH_ARGUMENTS.get(name, ()):
            continue
        known = sorted(_OPTIMIZER_PARAMS - {"optimizer"})
        raise ValueError(
            f"the optimizer of dynamic table {table!r} has {name}={value!r}, which no optimizer of a dynamic table "
            f"does; remove it where apply_optimizer_in_backward is called (known: {', '.join(known)})"
        )


def _check_static_on_cpu(params: dict[str, Any], static: list[str], weights: dict[str, Any]) -> None:
    refused: dict[str, list[str]] = {}
    for name in static:
        own = optimizer_of_parameter(weights[name]) if name in weights else None
        optimizer = optimizer_type_to_emb_opt_type(own) if own else params.get("optimizer", _DEFAULT_OPTIMIZER)
        if getattr(optimizer, "value", optimizer) not in _CPU_OPTIMIZERS:
            refused.setdefault(getattr(optimizer, "name", str(optimizer)), []).append(name)
    for optimizer_name, tables in refused.items():
        raise ValueError(
            f"optimizer {optimizer_name}: static tables {tables} cannot use it on the CPU (FBGEMM); use EXACT_SGD or "
            "EXACT_ROWWISE_ADAGRAD, or make them dynamic with use_dynamicemb=True"
        )


def arguments_of_module(params: dict[str, Any]) -> dict[str, Any]:
    """Return what of checked fused_params of dynamic tables their module takes."""
    unknown = unknown_params(params)
    arguments = {name: value for name, value in params.items() if name not in idle_params().union(unknown)}
    _split_pair(arguments)
    return arguments


def drop_own_params(params: dict[str, Any]) -> None:
    """Remove from the fused_params of a static table, in place, what FBGEMM does not know."""
    _split_pair(params)
    for name in MODULE_ARGUMENTS - fbgemm_params():
        params.pop(name, None)


def _split_pair(params: dict[str, Any]) -> None:
    """Replace torch's name for Adam's two factors by FBGEMM's, in place."""
    if _ADAMS_PAIR in params:
        params["beta1"], params["beta2"] = params.pop(_ADAMS_PAIR)


def weights_of(tables: nn.ModuleDict) -> dict[str, Any]:
    """Return the weight of each table of an unsharded collection."""
    return {name: table.weight for name, table in tables.items()}
