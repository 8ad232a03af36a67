"""What the keys of a TorchRec checkpoint say: whose weights, optimizer state or raw ids an entry holds."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

# Wrappers that stand in some keys and not in others.
_WRAPPERS = {"_dmp_wrapped_module", "module"}
# Below this name a managed-collision collection has its embeddings.
_MANAGED = {"_embedding_module", "_embedding_collection", "_embedding_bag_collection"}
_COLLISIONS = "_managed_collision_collection"

_TABLE = r"(?:(?P<path>.+)\.)?(?:embedding_bags|embeddings)\.(?P<table>[^.]+)"
_WEIGHTS = re.compile(_TABLE + r"\.weight")
# Fused optimizers put the table's name before that of the state, those of torch do not.
_STATE = re.compile(_TABLE + r"\.weight\.(?:(?P=table)\.)?(?P<item>[^.]+)")
_RAW_IDS = re.compile(r"(?:(?P<path>.+)\.)?_managed_collision_modules\.(?P<table>[^.]+)\.(?P<item>[^.]+)")


class Key(NamedTuple):
    """An entry of a checkpoint that belongs to a table.

    Attributes:
        path: of the collection, as ``("ebc",)`` in ``ebc.embedding_bags.t.weight``; behind the optimizer's own, and
            without wrappers.
        table: the table's name.
        item: what of the table, such as ``momentum1``; empty for weights.
        text: the whole key.
        is_managed: whether a managed-collision collection has the table.
    """

    path: tuple[str, ...]
    table: str
    item: str
    text: str
    is_managed: bool = False

    def __str__(self) -> str:
        return self.text


def flattened(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested mappings by their joined keys; an empty mapping below the top is an entry itself.

    Example::

        flattened({"a": {"b": 1, "c": {}}})  # ("a.b", 1), ("a.c", {}); torch.distributed.checkpoint names them so too
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{key}.")
        else:
            yield key, value


def weights_of(text: str) -> Key | None:
    """Return the key if it names the weights of a table."""
    match = _WEIGHTS.fullmatch(text)
    return None if match is None else _key(match, text)


def stateless_of(text: str) -> Key | None:
    """Return the key if it names, among the keys of an optimizer, weights without state."""
    match = _WEIGHTS.fullmatch(text)
    return None if match is None else _key(match, text, of_optimizer=True)


def state_of(text: str) -> Key | None:
    """Return the key if it names optimizer state of a table."""
    match = _STATE.fullmatch(text)
    return None if match is None else _key(match, text, of_optimizer=True)


def raw_ids_of(text: str) -> Key | None:
    """Return the key if it names a buffer of a managed-collision module."""
    match = _RAW_IDS.fullmatch(text)
    return None if match is None else _key(match, text)


def without_wrappers(path: list[str]) -> tuple[str, ...]:
    """Return a path without the names that DistributedModelParallel and DistributedDataParallel add."""
    return tuple(part for part in path if part not in _WRAPPERS)


def _key(match: re.Match[str], text: str, of_optimizer: bool = False) -> Key:
    parts = match["path"].split(".") if match["path"] else []
    if of_optimizer and "state" in parts:
        # Before it is where the optimizer is, behind it where its parameters are.
        parts = parts[len(parts) - parts[::-1].index("state") :]
    path = without_wrappers(parts)
    is_managed = bool(path) and (path[-1] in _MANAGED or path[-1] == _COLLISIONS)
    item = match.groupdict().get("item") or ""
    return Key(path[:-1] if is_managed else path, match["table"], item, text, is_managed)


def common_suffix(a: tuple[str, ...], b: tuple[str, ...]) -> int | None:
    """Return how long the shorter path is if the longer one ends with it, else None."""
    length = min(len(a), len(b))
    return length if a[len(a) - length :] == b[len(b) - length :] else None


def listed(keys: Iterable[Any]) -> str:
    """Return keys for a message, the first of many."""
    texts = sorted(str(key) for key in keys)
    more = f" and {len(texts) - 12} more" if len(texts) > 12 else ""
    return ", ".join(texts[:12]) + more if texts else "none"
