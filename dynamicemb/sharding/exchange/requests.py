"""Exchanges of results that are over let go of the autograd graph.

TorchRec's request keeps a dummy tensor whose graph leads back to the request. This circle would keep the graph of a
forward whose outputs were dropped, and the step of its ids outstanding, until Python's garbage collector comes by.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torchrec.distributed.comm_ops import Request


def let_go_of_graphs(awaitable: Any) -> Any:
    """Make the awaitable of a collection cut the circle once it has been awaited; return it."""
    awaitable.callbacks.append(partial(_let_go, parts=list(_parts(awaitable))))
    return awaitable


def _let_go(result: Any, parts: list[Any]) -> Any:
    for request in (request for part in parts for request in _requests(part)):
        # Backward returns the dummy as a gradient and needs its shape alone.
        if request.dummy_tensor is not None:
            request.dummy_tensor = request.dummy_tensor.detach()
    parts.clear()
    return result


def _parts(awaitable: Any) -> Iterator[Any]:
    # A lazy awaitable awaits its result when it is asked for an attribute that it lacks.
    attributes = vars(awaitable)
    for name in ("_awaitables", "_awaitables_per_sharding"):
        yield from attributes.get(name, ())


def _requests(part: Any) -> Iterator[Request]:
    """Yield the requests in an awaitable of one sharding, which may wrap them."""
    seen: list[Any] = [part]
    while seen:
        one = seen.pop()
        if isinstance(one, Request):
            yield one
        elif hasattr(one, "__dict__"):
            seen.extend(value for name, value in vars(one).items() if name.endswith("awaitable"))
