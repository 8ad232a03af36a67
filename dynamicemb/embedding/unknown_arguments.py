"""Arguments that a module does not have, and the names that may be meant."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from dynamicemb.warn import warn

# Names that differ too much for difflib, and those of the reference implementation and of torch's optimizers.
_MEANT = {
    "betas": "beta1 and beta2",
    "enable_prefetch": "prefetch_pipeline",
    "lr": "learning_rate",
    "optim": "optimizer",
    "wd": "weight_decay",
}
# What is so anyway.
_ASKS_NOTHING = {"enable_prefetch": False}


def suggestion(name: str, known: Collection[str]) -> str:
    """Return which argument may be meant, or all of them, as the end of a message."""
    if name in _MEANT:
        return f"use {_MEANT[name]}"
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def warn_about_unknown(owner: str, arguments: Mapping[str, Any], known: Collection[str]) -> None:
    """Warn, once each, about arguments that nobody reads.

    Args:
        owner: what they were given to.
        arguments: by name.
        known: the names that there are.
    """
    for name, value in arguments.items():
        if name in _ASKS_NOTHING and value is _ASKS_NOTHING[name]:
            continue
        warn(f"{name}={value!r} has no effect: {owner} has no such argument; {suggestion(name, known)}")
