"""Second names of parameters."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def also_named(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let callers name parameters otherwise than the signature does.

    Args:
        **names: by the other name, the name in the signature.

    Example:
        ``@also_named(opt_type="optimizer_type")`` takes ``f(opt_type="adam")`` for ``f(optimizer_type="adam")``.
        Whoever gives both gets the ``TypeError`` of an argument that is given twice.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for other, name in names.items():
                if other in kwargs:
                    _rename(function.__name__, kwargs, other, name)
            return function(*args, **kwargs)

        return call

    return decorate


def _rename(function: str, kwargs: dict[str, Any], other: str, name: str) -> None:
    if name in kwargs:
        raise TypeError(f"{function}() got {name!r} and {other!r}, which are the same argument; give one of them")
    kwargs[name] = kwargs.pop(other)
