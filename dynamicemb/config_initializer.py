"""First values from an embedding config: what ``init_fn``, ``weight_init_min`` and ``weight_init_max`` ask for.

A static table calls ``init_fn`` once, on all of its weights. A row of a dynamic table is made when its id comes, and
its first value depends on seed, table and id alone: only a distribution, or one value, can be taken over.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode

# Of a large table a sample is enough.
_SAMPLE_ROWS = 64
_BOUNDS = ("weight_init_min", "weight_init_max")
_NO_FILL = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def given_initializers(config: Any) -> list[str]:
    """Return the names of the fields by which a config asks for first values; TorchRec's default is nobody's wish."""
    given = [name for name in _BOUNDS if getattr(config, name, None) is not None]
    init_fn = getattr(config, "init_fn", None)
    return given if init_fn is None or _is_default(init_fn, config) else ["init_fn", *given]


def initializer_of_config(config: Any) -> DynamicEmbInitializerArgs | None:
    """Return the initializer that a config asks for, None if it asks for none; ``init_fn`` overrules the bounds.

    Args:
        config: TorchRec's EmbeddingConfig or EmbeddingBagConfig.

    Raises:
        ValueError: an ``init_fn`` that no initializer stands for, or bad bounds.
    """
    given = given_initializers(config)
    if not given:
        return None
    if given[0] == "init_fn":
        return _initializer_of_function(config.init_fn, config)
    bound = _default_bound(config)
    lower, upper = (getattr(config, name, None) for name in _BOUNDS)
    try:
        return DynamicEmbInitializerArgs(
            mode=DynamicEmbInitializerMode.UNIFORM,
            lower=-bound if lower is None else lower,
            upper=bound if upper is None else upper,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"weight_init_min={lower}, weight_init_max={upper} of table {config.name!r} are no bounds of first values: "
            f"{error}"
        ) from error


def _default_bound(config: Any) -> float:
    return math.sqrt(1 / config.num_embeddings)


def _is_default(init_fn: Any, config: Any) -> bool:
    """Say whether TorchRec put this function into the config: uniform, from the bounds, or from the table's size."""
    if not isinstance(init_fn, functools.partial) or init_fn.func is not nn.init.uniform_ or init_fn.args:
        return False
    bound = _default_bound(config)
    lower, upper = (getattr(config, name, None) for name in _BOUNDS)
    by_bounds = {"a": -bound if lower is None else lower, "b": bound if upper is None else upper}
    return init_fn.keywords in ({"a": -bound, "b": bound}, by_bounds)


def _initializer_of_function(init_fn: Callable[[torch.Tensor], Any], config: Any) -> DynamicEmbInitializerArgs:
    function, keywords = init_fn, {}
    if isinstance(init_fn, functools.partial) and not init_fn.args:
        function, keywords = init_fn.func, init_fn.keywords
    shape = (config.num_embeddings, config.embedding_dim)
    try:
        known = next((make for fill, make in _KNOWN.items() if fill is function), None)
        if known is not None and keywords.get("generator") is None:
            return known(shape, **{name: value for name, value in keywords.items() if name != "generator"})
        return _observe(init_fn, (min(shape[0], _SAMPLE_ROWS), shape[1]))
    except Exception as error:
        raise ValueError(
            f"init_fn={init_fn!r} of table {config.name!r} cannot make first values of a dynamic table, which depend "
            f"on the id alone ({error}); set initializer_args in its DynamicEmbTableOptions, or use uniform_, normal_, "
            "trunc_normal_, constant_, zeros_, ones_, xavier_* or kaiming_* of torch.nn.init, or a functools.partial"
        ) from error


class _Calls(TorchDispatchMode):
    """Remembers what is called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _NO_FILL:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _observe(init_fn: Callable[[torch.Tensor], Any], shape: tuple[int, int]) -> DynamicEmbInitializerArgs:
    """Return what a function does to a sample: one uniform or normal filling, or one value everywhere.

    Raises:
        ValueError: it does something else.
    """
    sample = nn.Parameter(torch.full(shape, math.nan))
    # The state of torch's generator is the user's.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _Calls() as watch:
        init_fn(sample)
    values = sample.detach()
    if len(watch.calls) == 1:
        func, args, kwargs = watch.calls[0]
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        filled = given.get("self")
        whole = isinstance(filled, torch.Tensor) and _place(filled) == _place(values)
        if func in _FILLS and whole and given.get("generator") is None:
            return _FILLS[func](shape, *(given[name] for name in names[1:3] if name in given))
    if values.isnan().any():
        raise ValueError("it leaves weights as they are, or makes them NaN")
    if not bool((values == values[0, 0]).all()):
        raise ValueError("it does more than to fill all weights from one distribution or with one value")
    return _constant(shape, float(values[0, 0]))


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _uniform(shape: tuple[int, int], a: float = 0.0, b: float = 1.0) -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM, lower=a, upper=b)


def _normal(shape: tuple[int, int], mean: float = 0.0, std: float = 1.0) -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL, mean=mean, std_dev=std)


def _trunc_normal(
    shape: tuple[int, int], mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> DynamicEmbInitializerArgs:
    mode = DynamicEmbInitializerMode.TRUNCATED_NORMAL
    return DynamicEmbInitializerArgs(mode=mode, mean=mean, std_dev=std, lower=a, upper=b)


def _constant(shape: tuple[int, int], val: float) -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=val)


def _zeros(shape: tuple[int, int]) -> DynamicEmbInitializerArgs:
    return _constant(shape, 0.0)


def _ones(shape: tuple[int, int]) -> DynamicEmbInitializerArgs:
    return _constant(shape, 1.0)


def _xavier_uniform(shape: tuple[int, int], gain: float = 1.0) -> DynamicEmbInitializerArgs:
    bound = gain * math.sqrt(6 / sum(shape))
    return _uniform(shape, -bound, bound)


def _xavier_normal(shape: tuple[int, int], gain: float = 1.0) -> DynamicEmbInitializerArgs:
    return _normal(shape, 0.0, gain * math.sqrt(2 / sum(shape)))


def _kaiming_std(shape: tuple[int, int], a: float, mode: str, nonlinearity: Any) -> float:
    """Return the standard deviation, as torch.nn.init has it for weights ``[N, D]``: D is the fan-in, N the fan-out."""
    fans = {"fan_in": shape[1], "fan_out": shape[0]}
    return nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fans[mode.lower()])


def _kaiming_uniform(
    shape: tuple[int, int], a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> DynamicEmbInitializerArgs:
    bound = math.sqrt(3) * _kaiming_std(shape, a, mode, nonlinearity)
    return _uniform(shape, -bound, bound)


def _kaiming_normal(
    shape: tuple[int, int], a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> DynamicEmbInitializerArgs:
    return _normal(shape, 0.0, _kaiming_std(shape, a, mode, nonlinearity))


# Signatures are those of torch.nn.init, with the shape of all weights in the place of the tensor.
_KNOWN: dict[Any, Callable[..., DynamicEmbInitializerArgs]] = {
    nn.init.uniform_: _uniform,
    nn.init.normal_: _normal,
    nn.init.trunc_normal_: _trunc_normal,
    nn.init.constant_: _constant,
    nn.init.zeros_: _zeros,
    nn.init.ones_: _ones,
    nn.init.xavier_uniform_: _xavier_uniform,
    nn.init.xavier_normal_: _xavier_normal,
    nn.init.kaiming_uniform_: _kaiming_uniform,
    nn.init.kaiming_normal_: _kaiming_normal,
}
_FILLS: dict[Any, Callable[..., DynamicEmbInitializerArgs]] = {
    torch.ops.aten.uniform_.default: _uniform,
    torch.ops.aten.normal_.default: _normal,
}
