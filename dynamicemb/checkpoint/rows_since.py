"""Rows that changed since a score, as tensors: ``incremental_dump``, and the scores of a whole model."""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from dynamicemb.aliases import also_named
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.tables import Collection, Table, find_collections, tables_of_modules
from dynamicemb.dynamicemb_config import BATCH_SIZE_PER_DUMP
from dynamicemb.errors import DynamicEmbError
from dynamicemb.score_strategy import DynamicEmbScoreStrategy
from dynamicemb.warn import warn

Thresholds: TypeAlias = int | Mapping[str, Mapping[str, int]]
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# Ranks send each other so many bytes at a time.
_GATHER_BYTES = 2**24


def incremental_dump(
    model: nn.Module, score_threshold: Thresholds, pg: Any = None
) -> tuple[dict[str, dict[str, Rows]], dict[str, dict[str, int]]] | None:
    """Return the ids whose score is at least a threshold, and the thresholds for the next call.

    Of a table with a timestamp the time counts, also beside a frequency. A call with the thresholds that the call
    before returned finds everything touched since; of a NO_EVICTION table, whose times touches leave, what was inserted
    since. Ids that are gone, by eviction, expiry or ``erase``, are not told: the increments of ``DynamicEmbDump`` name
    them. After a load begin with 0.

    Args:
        model: the model.
        score_threshold: for all tables, or per collection path and table; unnamed tables are left out, and names that
            the model does not have warn. For LFU alone it is a frequency, so every id that is frequent enough comes
            again in each call. Of a CUSTOMIZED table, what was touched under the same score comes again: ``set_score``
            a larger one after each call.
        pg: ranks that put their rows together, a collective, after which each has all; None is this rank's rows.

    Returns:
        ``(rows, thresholds)``, both per collection path and table. Rows are ``(ids i64[M], weights [M, D])`` on the
        CPU, weights in the table's dtype, those of rank 0 first. Thresholds are this rank's own. None if the model has
        no dynamic tables, with a warning.

    Raises:
        DynamicEmbError: the ranks of ``pg`` name other tables.
        ValueError: ``score_threshold`` is neither; with ``pg`` on all ranks.
    """
    ranks = None if pg is None else Ranks(pg)

    def select() -> list[tuple[Table, int]] | None:
        if not is_valid_score_threshold(score_threshold):
            raise ValueError(
                "score_threshold must be an int >= 0, or map collection paths to tables to ints, got "
                f"{reprlib.repr(score_threshold)}; a module on its own takes {{table: int}}"
            )
        collections = _collections(model)
        return None if collections is None else _selected(collections, score_threshold)

    # An error of one rank is one of all: the others would wait for its rows, or take those of another table for them.
    selected = select() if ranks is None else ranks.each(select)
    if ranks is not None:
        _check_agreement(selected, ranks)
    if selected is None:
        return None
    rows: dict[str, dict[str, Rows]] = {}
    following: dict[str, dict[str, int]] = {}
    for table, threshold in selected:
        found, after = rows_since(table, threshold)
        rows.setdefault(table.folder, {})[table.name] = found if ranks is None else _gathered(found, ranks, pg)
        following.setdefault(table.folder, {})[table.name] = after
    return rows, following


def _selected(collections: list[Collection], score_threshold: Thresholds) -> list[tuple[Table, int]]:
    """Return the tables that have a threshold, and theirs."""
    if not isinstance(score_threshold, int):
        _warn_about_unknown(score_threshold, collections)
    selected = []
    for collection in collections:
        for table in tables_of_modules(collection.modules, collection.path):
            threshold = score_threshold
            if isinstance(threshold, Mapping):
                threshold = threshold.get(collection.path, {}).get(table.name, -1)
            if threshold >= 0:
                selected.append((table, threshold))
    return selected


def _check_agreement(selected: list[tuple[Table, int]] | None, ranks: Ranks) -> None:
    """Check that all ranks put the rows of the same tables together.

    Raises:
        DynamicEmbError: they do not.
    """
    tables = [(t.folder, t.name, t.dim, str(t.module.embedding_dtype)) for t, _ in selected or []]
    of_ranks = ranks.gather(tables)
    if any(other != of_ranks[0] for other in of_ranks):
        raise DynamicEmbError(f"incremental_dump: the ranks disagree about the tables: {of_ranks}")


def is_valid_score_threshold(score_threshold: object) -> bool:
    """Return whether it is an int >= 0, or maps collection paths to mappings from tables to such."""
    if isinstance(score_threshold, Mapping):
        return all(
            isinstance(tables, Mapping) and all(_is_score(value) for value in tables.values())
            for tables in score_threshold.values()
        )
    return _is_score(score_threshold)


def _is_score(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def get_score(model: nn.Module) -> dict[str, dict[str, int]] | None:
    """Return, per collection path and table, the threshold that all ids touched from now on reach.

    See ``BatchedDynamicEmbeddingTablesV2.get_score``. None if the model has no dynamic tables, with a warning.
    """
    collections = _collections(model)
    if collections is None:
        return None
    return {
        collection.path: {name: score for module in collection.modules for name, score in module.get_score().items()}
        for collection in collections
    }


@also_named(scores="table_score")
def set_score(model: nn.Module, table_score: Thresholds) -> None:
    """Set the score that the following training lookups leave in CUSTOMIZED tables.

    Args:
        model: the model.
        table_score: for all CUSTOMIZED tables, or per collection and table. A collection is named by its path, or by
            the path's last component where that is unique.

    Raises:
        TypeError: a score is not an int, or those of a collection no mapping.
        ValueError: a collection or table is unknown, a score is out of range, or no table is CUSTOMIZED.
    """
    collections = _collections(model)
    if collections is None:
        return
    if isinstance(table_score, Mapping):
        for name, of_tables in table_score.items():
            if not isinstance(of_tables, Mapping):
                raise TypeError(f"scores of collection {name!r} must map tables to ints, got {of_tables!r}")
            _set_scores(_collection_named(name, collections), of_tables)
        return
    customized = [
        (table.module, table.name)
        for collection in collections
        for table in tables_of_modules(collection.modules, collection.path)
        if table.strategy is DynamicEmbScoreStrategy.CUSTOMIZED
    ]
    if not customized:
        raise ValueError("set_score needs score_strategy CUSTOMIZED, which no table of the model has")
    for module, name in customized:
        module.set_score({name: table_score})


def _set_scores(collection: Collection, scores: Mapping[str, int]) -> None:
    tables = {t.name: t for t in tables_of_modules(collection.modules, collection.path, list(scores))}
    for name, score in scores.items():
        tables[name].module.set_score({name: score})


def _collection_named(name: str, collections: list[Collection]) -> Collection:
    found = [c for c in collections if c.path == name]
    found = found or [c for c in collections if c.path.rsplit(".", 1)[-1] == name]
    if len(found) != 1:
        raise ValueError(
            f"collection {name!r} is {'not unique' if found else 'unknown'}; "
            f"the model has {[c.path for c in collections]}"
        )
    return found[0]


def _collections(model: nn.Module) -> list[Collection] | None:
    collections = find_collections(model)
    if not collections:
        warn("model has no dynamic tables")
        return None
    return collections


def _warn_about_unknown(thresholds: Mapping[str, Mapping[str, int]], collections: list[Collection]) -> None:
    known = {c.path: {t.name for t in tables_of_modules(c.modules, c.path)} for c in collections}
    for path, tables in thresholds.items():
        unknown = [path] if path not in known else [f"{path}/{name}" for name in tables if name not in known[path]]
        for name in unknown:
            warn(f"score_threshold names {name!r}, which the model does not have")


def rows_since(table: Table, threshold: int) -> tuple[Rows, int]:
    """Return ``(ids i64[M], weights [M, D])`` of a table with at least this score, and the next threshold."""
    group = table.group
    with group.turn():
        # Before the scan: nothing touched later is missed by the next one.
        following = table.module.get_score()[table.name]
        slots = group.scan(table.index, threshold)
        ids = group.index.keys[slots].cpu()
        weights = torch.empty(slots.numel(), table.dim, dtype=table.module.embedding_dtype)
        for begin in range(0, slots.numel(), BATCH_SIZE_PER_DUMP):
            part = slice(begin, begin + BATCH_SIZE_PER_DUMP)
            weights[part] = group.read(table.index, group.index.rows[slots[part]])[0].cpu()
    return (ids, weights), following


def _gathered(rows: Rows, ranks: Ranks, pg: Any) -> Rows:
    """Return the rows of all ranks, in rank order."""
    counts = ranks.gather(rows[0].numel())
    ids = torch.empty(sum(counts), dtype=torch.int64)
    weights = torch.empty(sum(counts), rows[1].shape[1], dtype=rows[1].dtype)
    if ranks.world_size == 1:
        return rows
    begins = torch.tensor([0, *counts]).cumsum(0).tolist()
    device = ranks.device
    for values, result in ((rows[0], ids), (rows[1], weights)):
        size = max(1, _GATHER_BYTES // (values.element_size() * values.shape[1:].numel()))
        for begin, parts in _exchanged(values, max(counts), size, ranks, pg, device):
            for rank, part in enumerate(parts):
                number = max(0, min(size, counts[rank] - begin))
                result[begins[rank] + begin : begins[rank] + begin + number] = part[:number].cpu()
    return ids, weights


def _exchanged(
    values: torch.Tensor, longest: int, size: int, ranks: Ranks, pg: Any, device: torch.device
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield ``(begin, each rank's values from there)``, ``size`` rows at a time, padded."""
    for begin in range(0, longest, size):
        mine = values[begin : begin + size]
        padded = torch.zeros(min(size, longest - begin), *values.shape[1:], dtype=values.dtype, device=device)
        padded[: len(mine)] = mine.to(device)
        parts = [torch.empty_like(padded) for _ in range(ranks.world_size)]
        dist.all_gather(parts, padded, group=pg)
        yield begin, parts
