"""Optimizer names, their state sizes, and the description of one optimizer that kernels read.

``EmbOptimType`` is FBGEMM's enum where fbgemm_gpu can be imported, else an enum with the same names and values. It is
looked up on first use because importing fbgemm_gpu takes seconds; every function here compares by value, so members of
either enum work.
"""

import enum
import functools
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynamicemb.aliases import also_named
from dynamicemb.types import Default
from dynamicemb.warn import warn

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@enum.unique
class _EmbOptimType(enum.Enum):
    """Optimizers by FBGEMM's names."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"

    def __str__(self) -> str:
        return str(self.value)


if TYPE_CHECKING:
    EmbOptimType = _EmbOptimType


@functools.cache
def _emb_optim_type() -> Any:
    try:
        return importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    # A build for another torch or CUDA fails in ways of its own: missing libraries, missing symbols.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        if getattr(error, "name", None) != "fbgemm_gpu":
            warn(
                f"fbgemm_gpu is installed but cannot be imported ({error}); EmbOptimType is dynamicemb's own copy. "
                "Install the fbgemm_gpu that matches torch",
            )
    return _EmbOptimType


def __getattr__(name: str) -> Any:
    if name == "EmbOptimType":
        return _emb_optim_type()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class OptimizerKind(enum.IntEnum):
    """Update rules that kernels implement."""

    SGD = 0
    ADAM = 1
    ADAGRAD = 2
    ROWWISE_ADAGRAD = 3


_KIND_OF_NAME: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind.SGD,
    "exact_sgd": OptimizerKind.SGD,
    "adam": OptimizerKind.ADAM,
    "exact_adagrad": OptimizerKind.ADAGRAD,
    "exact_row_wise_adagrad": OptimizerKind.ROWWISE_ADAGRAD,
}
_NAME_OF_KIND: dict[OptimizerKind, str] = {
    OptimizerKind.SGD: "sgd",
    OptimizerKind.ADAM: "adam",
    OptimizerKind.ADAGRAD: "exact_adagrad",
    OptimizerKind.ROWWISE_ADAGRAD: "exact_row_wise_adagrad",
}


def optimizer_kind(opt_type: Any) -> OptimizerKind:
    """Return the update rule of an optimizer.

    Args:
        opt_type: a member of ``EmbOptimType`` (FBGEMM's or our copy), its value such as ``"adam"``, or an
            ``OptimizerKind``.

    Raises:
        ValueError: this package has no such update.
    """
    if isinstance(opt_type, OptimizerKind):
        return opt_type
    name = opt_type.value if isinstance(opt_type, enum.Enum) else opt_type
    if not isinstance(name, str) or name not in _KIND_OF_NAME:
        raise ValueError(f"optimizer {opt_type!r} is not supported; use one of {', '.join(sorted(_KIND_OF_NAME))}")
    return _KIND_OF_NAME[name]


@also_named(name="optimizer_str")
def string_to_opt_type(optimizer_str: str) -> "EmbOptimType":
    """Return the ``EmbOptimType`` of a name as found in a checkpoint, for example ``"exact_adagrad"``.

    Raises:
        ValueError: the name is not that of a supported optimizer.
    """
    if not isinstance(optimizer_str, str):
        raise TypeError(f"optimizer_str must be a string, got {optimizer_str!r}; use for example 'adam'")
    optimizer_kind(optimizer_str)
    return _emb_optim_type()(optimizer_str)  # type: ignore[no-any-return]


@also_named(name="key")
def get_required_arg(args: Mapping[str, Any], key: str) -> Any:
    """Return ``args[key]``.

    Raises:
        ValueError: the key is missing.
    """
    if key not in args:
        raise ValueError(f"optimizer argument {key!r} is missing; got {sorted(args)}")
    return args[key]


@also_named(opt_type="optimizer_type")
def get_optimizer_state_dim(optimizer_type: Any, dim: int, dtype: torch.dtype | None = None) -> int:
    """Return how many fp32 values of optimizer state a row holds.

    Args:
        optimizer_type: optimizer, see ``optimizer_kind``.
        dim: embedding dim D.
        dtype: accepted for callers that pass the table's dtype; the state is fp32 whatever it is.

    Returns:
        SGD 0, Adagrad D, Adam 2*D (first moments, then second), row-wise Adagrad 1.
    """
    kind = optimizer_kind(optimizer_type)
    return {
        OptimizerKind.SGD: 0,
        OptimizerKind.ADAM: 2 * dim,
        OptimizerKind.ADAGRAD: dim,
        OptimizerKind.ROWWISE_ADAGRAD: 1,
    }[kind]


@also_named(opt_type="optimizer_type")
def get_optimizer_ckpt_state_dim(optimizer_type: Any, dim: int, dtype: torch.dtype | None = None) -> int:
    """Return how many fp32 values of state a row has in a dump: the same as in memory."""
    return get_optimizer_state_dim(optimizer_type, dim, dtype)


@dataclass
class OptimizerArgs:
    """Optimizer options with FBGEMM's names. ``OptimizerSpec.create`` says which have an effect.

    A default that asks for nothing is a plain number; one that some optimizer acts on is a ``Default``.
    """

    stochastic_rounding: bool = True
    gradient_clipping: bool = False
    max_gradient: float = Default(1.0)
    max_norm: float = 0.0
    learning_rate: float = 0.01
    eps: float = Default(1e-8)
    initial_accumulator_value: float = 0.0
    beta1: float = Default(0.9)
    beta2: float = Default(0.999)
    weight_decay: float = 0.0
    weight_decay_mode: int = 0
    eta: float = Default(0.001)
    momentum: float = Default(0.9)
    counter_halflife: int = -1
    adjustment_iter: int = -1
    adjustment_ub: float = 1.0
    learning_rate_mode: int = -1
    grad_sum_decay: int = -1
    tail_id_threshold: float = 0
    is_tail_id_thresh_ratio: int = 0
    total_hash_size: int = 0
    weight_norm_coefficient: float = 0
    lower_bound: float = 0
    regularization_mode: int = 0


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(OptimizerArgs)} | {
    "counter_based_regularization": None,
    "cowclip_regularization": None,
}
# The values of what has another default, with which an option asks for nothing.
_OFF: dict[str, Any] = {"momentum": 0.0, "eta": 0.0}
# FBGEMM's WeightDecayMode.DECOUPLE, which is what Adam does.
_DECOUPLED = 2
_READ_BY_ALL = frozenset({"learning_rate", "gradient_clipping", "max_gradient", "stochastic_rounding"})
_READ_BY: dict[OptimizerKind, frozenset[str]] = {
    OptimizerKind.SGD: _READ_BY_ALL,
    OptimizerKind.ADAM: _READ_BY_ALL | {"eps", "beta1", "beta2", "weight_decay", "initial_accumulator_value"},
    OptimizerKind.ADAGRAD: _READ_BY_ALL | {"eps", "initial_accumulator_value"},
    OptimizerKind.ROWWISE_ADAGRAD: _READ_BY_ALL | {"eps", "initial_accumulator_value"},
}
# Keys of the optimizer part of a dump's meta file, per kind, and the field each one holds.
_SAVED: dict[OptimizerKind, dict[str, str]] = {
    OptimizerKind.SGD: {"lr": "learning_rate"},
    OptimizerKind.ADAM: {
        "lr": "learning_rate",
        "beta1": "beta1",
        "beta2": "beta2",
        "eps": "eps",
        "weight_decay": "weight_decay",
    },
    OptimizerKind.ADAGRAD: {
        "lr": "learning_rate",
        "eps": "eps",
        "initial_accumulator_value": "initial_accumulator_value",
    },
    OptimizerKind.ROWWISE_ADAGRAD: {
        "lr": "learning_rate",
        "eps": "eps",
        "initial_accumulator_value": "initial_accumulator_value",
    },
}


@dataclass(frozen=True)
class OptimizerSpec:
    """What an update kernel needs to know, checked.

    Attributes:
        kind: update rule.
        learning_rate: step size.
        eps: added to the denominator of Adam and the Adagrads.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        weight_decay: Adam's decoupled decay.
        initial_accumulator_value: first value of every state element.
        gradient_clipping: clamp the incoming gradient of each occurrence to +-max_gradient.
        max_gradient: bound of the clamp.
        stochastic_rounding: round fp16 and bf16 weights stochastically; fp32 weights are never rounded.
    """

    kind: OptimizerKind = OptimizerKind.SGD
    learning_rate: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    gradient_clipping: bool = False
    max_gradient: float = 1.0
    stochastic_rounding: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", optimizer_kind(self.kind))
        for name in ("learning_rate", "eps", "weight_decay", "initial_accumulator_value"):
            _check_non_negative(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            _check_non_negative(name, getattr(self, name))
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        _check_non_negative("max_gradient", self.max_gradient)
        if self.max_gradient == 0:
            raise ValueError(f"max_gradient must be > 0, got {self.max_gradient}: it would clip every gradient away")
        for name in ("gradient_clipping", "stochastic_rounding"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")

    @classmethod
    def create(cls, opt_type: Any, **kwargs: Any) -> "OptimizerSpec":
        """Build the spec from options with FBGEMM's names.

        Warns once, naming every option that was given, asks for something, and has no effect with this optimizer.
        ``momentum=0.9`` is such a one for SGD, ``momentum=0`` asks for nothing.

        Args:
            opt_type: optimizer, see ``optimizer_kind``.
            **kwargs: fields of ``OptimizerArgs``, ``counter_based_regularization``, ``cowclip_regularization``.

        Raises:
            TypeError: an option is unknown or has the wrong type.
            ValueError: the optimizer is not supported, or a number is out of range.
        """
        kind = optimizer_kind(opt_type)
        unknown = sorted(set(kwargs) - set(_DEFAULTS))
        if unknown:
            raise TypeError(f"unknown optimizer option {', '.join(unknown)}; known: {', '.join(_DEFAULTS)}")
        spec = cls(kind=kind, **{f.name: _plain(kwargs[f.name]) for f in fields(cls) if f.name in kwargs})
        idle = [name for name in kwargs if name not in _READ_BY[kind] and _asks(name, kwargs[name])]
        if kind is OptimizerKind.ADAM and _plain(kwargs.get("weight_decay_mode")) == _DECOUPLED:
            idle.remove("weight_decay_mode")
        if not spec.gradient_clipping and _asks("max_gradient", kwargs.get("max_gradient", _DEFAULTS["max_gradient"])):
            idle.append("max_gradient")
        if idle:
            given = ", ".join(f"{name}={kwargs[name]}" for name in idle)
            warn(
                f"optimizer {_NAME_OF_KIND[kind]} ignores {given}; it reads {', '.join(sorted(_READ_BY[kind]))}"
                + (" (max_gradient only with gradient_clipping=True)" if "max_gradient" in idle else ""),
            )
        return spec

    @property
    def name(self) -> str:
        """The optimizer's name in dumps."""
        return _NAME_OF_KIND[self.kind]

    def num_state(self, dim: int) -> int:
        """Return how many fp32 values of state a row of ``dim`` weights has."""
        return get_optimizer_state_dim(self.kind, dim)

    def reads(self, name: str) -> bool:
        """Say whether a setting has an effect with this optimizer."""
        return name in _READ_BY[self.kind]

    def with_learning_rate(self, learning_rate: float) -> "OptimizerSpec":
        """Return a copy with another learning rate."""
        return replace(self, learning_rate=learning_rate)

    def to_dict(self, iterations: int = 0) -> dict[str, Any]:
        """Return the optimizer part of a dump's meta file.

        Args:
            iterations: backward calls so far; only Adam keeps it, as ``iters``.
        """
        values: dict[str, Any] = {"opt_type": self.name}
        values |= {key: getattr(self, name) for key, name in _SAVED[self.kind].items()}
        if self.kind is OptimizerKind.ADAM:
            values["iters"] = iterations
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "OptimizerSpec":
        """Build a spec from a dump's meta file; what the file does not hold gets its default.

        Raises:
            ValueError: a key is missing, or the optimizer is not supported.
        """
        return cls(kind=optimizer_kind(get_required_arg(values, "opt_type"))).updated(values)

    def updated(self, values: Mapping[str, Any]) -> "OptimizerSpec":
        """Return a copy with the numbers of a dump's meta file; clipping and rounding stay as they are.

        Args:
            values: as made by ``to_dict``; other keys are ignored.

        Raises:
            ValueError: a key is missing, or the file belongs to another optimizer.
        """
        saved_kind = optimizer_kind(get_required_arg(values, "opt_type"))
        if saved_kind is not self.kind:
            raise ValueError(f"opt_type is {values['opt_type']!r} in the file but the table trains with {self.name!r}")
        saved_iterations(values)
        return replace(self, **{name: get_required_arg(values, key) for key, name in _SAVED[self.kind].items()})


def saved_iterations(values: Mapping[str, Any]) -> int:
    """Return the backward calls that a dump's meta file records: ``iters`` for Adam, else 0.

    Raises:
        ValueError: the file is Adam's and has no ``iters``, or a negative one.
    """
    if optimizer_kind(get_required_arg(values, "opt_type")) is not OptimizerKind.ADAM:
        return 0
    iterations = int(get_required_arg(values, "iters"))
    if iterations < 0:
        raise ValueError(f"iters must be >= 0, got {iterations}")
    return iterations


def _check_non_negative(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or not 0 <= float(value) <= _FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32 and >= 0, got {value}")


def _asks(name: str, value: Any) -> bool:
    """Say whether an option was given, and asks for something that an optimizer without it would not do."""
    if isinstance(value, Default):
        return False
    default = _OFF.get(name, _DEFAULTS[name])
    return bool(isinstance(default, Default) or _plain(value) != default)


def _plain(value: Any) -> Any:
    """Return a number as kernels and files take it, and what FBGEMM's enums stand for."""
    if isinstance(value, Default):
        return float(value)
    return value.value if isinstance(value, enum.Enum) else value
