"""Modules for tests, what their rows hold, and digests to show that nothing changed."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode
from dynamicemb.table.initializers import table_key
from tests.support.tables import UNIFORM

SUM, MEAN, NONE = DynamicEmbPoolingMode
SEED = 7
OPTIMIZERS = ("sgd", "adam", "exact_adagrad", "exact_row_wise_adagrad")
EXTREME = [-(2**63), -(2**63) + 1, -4, -3, -2, -1, 0, 1, 2**31, 2**32, 2**63 - 2, 2**63 - 1]


def constant(value: float) -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=value)


def options(dim: int = 4, capacity: int = 64, **more: Any) -> DynamicEmbTableOptions:
    more = {"bucket_capacity": 16, "initializer_args": UNIFORM, **more}
    return DynamicEmbTableOptions(dim=dim, max_capacity=capacity, **more)


def make_module(
    tables: Sequence[DynamicEmbTableOptions] | None = None, **arguments: Any
) -> BatchedDynamicEmbeddingTablesV2:
    """Make a module of tables "a", "b", ... (default: one of 64 rows, D = 4), seed 7, learning rate 1."""
    tables = [options()] if tables is None else list(tables)
    names = list("abcdefgh"[: len(tables)])
    arguments = {"table_names": names, "seed": SEED, "learning_rate": 1.0, **arguments}
    return BatchedDynamicEmbeddingTablesV2(tables, **arguments)


def batch(*bags: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(indices, offsets)`` of feature-major bags."""
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    return ids, torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)


def bag_per_id(ids: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(*([i] for i in ids))


def row_of(module: BatchedDynamicEmbeddingTablesV2, table: str, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(weights [D], state [num_state])`` of a resident id."""
    group = module.tables
    t = group.names.index(table)
    rows = group.find(torch.tensor([key], device=group.device), group.ranges_of(t, 1))
    assert rows[0] >= 0, f"{key} is not in table {table}"
    weights, state = group.read(t, rows)
    return weights[0], state[0]


def score_of(module: BatchedDynamicEmbeddingTablesV2, table: str, key: int) -> int:
    group = module.tables
    slots = group.scan(group.names.index(table))
    keys = group.index.keys[slots].tolist()
    return int(group.index.scores[slots[keys.index(key)]])


def contents(module: BatchedDynamicEmbeddingTablesV2) -> dict[str, dict[int, tuple[int, bytes]]]:
    """Return, per table, what every resident id holds: its score, and the bytes of its weights and state."""
    group = module.tables
    out = {}
    for t, name in enumerate(group.names):
        slots = group.scan(t)
        weights, state = group.read(t, group.index.rows[slots])
        values = torch.cat([weights, state], 1).cpu().numpy()
        rows = [value.tobytes() for value in values]
        keys, scores = group.index.keys[slots].tolist(), group.index.scores[slots].tolist()
        out[name] = {key: (score, row) for key, score, row in zip(keys, scores, rows, strict=True)}
    return out


def snapshot(module: BatchedDynamicEmbeddingTablesV2) -> list[torch.Tensor]:
    """Copy every tensor of the index and every byte of the rows."""
    group = module.tables
    return [tensor.clone() for tensor in [*group.index.tensors(), *group.store.chunks]]


def assert_unchanged(module: BatchedDynamicEmbeddingTablesV2, before: list[torch.Tensor]) -> None:
    for old, new in zip(before, snapshot(module), strict=True):
        assert torch.equal(old, new)
    assert module.tables.steps.num_outstanding == 0


def poison(module: BatchedDynamicEmbeddingTablesV2) -> None:
    """Fill the memory of rows that hold nothing yet with NaNs of a pattern."""
    for chunk in module.tables.store.chunks:
        chunk.fill_(0xFF)


def messages(recorded: Iterable[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in recorded]


def key_of(table: str) -> int:
    return table_key(SEED, table)
