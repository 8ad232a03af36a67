"""The kernels as ``torch.library`` ops, for ``torch.compile``, ``torch.export`` and the profiler.

Ops take tensors and numbers only, so a group's index and rows are flattened: ``index`` is ``Index.tensors()``; the rows
are their chunks and what the row formats are. Eager code calls the launchers directly: flattening and dispatch cost
more than a small step can bear (``docs/architecture.md`` has the numbers).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynamicemb.optimizer import OptimizerKind, OptimizerSpec
from dynamicemb.table.backends import kernels_for
from dynamicemb.table.counter import Newcomers
from dynamicemb.table.index import Index
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.table.lookup import Lookup
from dynamicemb.table.rows import RowFormat, RowStore

_INDEX = "Tensor{0}[] index, int bucket_capacity, int strategy, str? score_function"
_STORE = "Tensor{0}[] chunks, int[] dims, int[] num_states, ScalarType dtype, int chunk_shift, int[] chunk_tables"
_BATCH = "Tensor ids, Tensor table_ranges"
_LAYOUT = (
    "Tensor feature_tables, Tensor column_offsets, Tensor table_features, SymInt batch_size, int pooling, SymInt width"
)

_SCHEMAS = {
    "find": f"({_INDEX.format('')}, {_BATCH}) -> Tensor",
    "find_and_touch": f"({_INDEX.format('(a!)')}, {_BATCH}, Tensor? frequencies) -> Tensor",
    "insert": f"({_INDEX.format('(a!)')}, {_BATCH}, Tensor(b!) rows, Tensor? frequencies)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "find_or_insert": f"({_INDEX.format('(a!)')}, {_STORE.format('(b!)')}, Tensor modes, Tensor params, Tensor keys,"
    f" {_BATCH}, Tensor? frequencies, Tensor state_values) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "erase": f"({_INDEX.format('(a!)')}, {_BATCH}) -> Tensor",
    "scan": f"({_INDEX.format('')}, int table, int min_score) -> Tensor",
    "initialize": f"({_STORE.format('(a!)')}, Tensor modes, Tensor params, Tensor keys, Tensor rows, Tensor ids,"
    " Tensor tables, Tensor state_values) -> ()",
    "gather": f"({_STORE.format('')}, Tensor rows, Tensor table_ranges, Tensor missing_values,"
    " ScalarType output_dtype) -> Tensor",
    "pool": f"({_STORE.format('')}, Tensor rows, Tensor offsets, {_LAYOUT},"
    " Tensor? per_sample_weights, Tensor missing_values, ScalarType output_dtype) -> Tensor",
    "update": f"({_STORE.format('(a!)')}, {_BATCH}, Tensor rows, Tensor offsets, {_LAYOUT},"
    " Tensor? per_sample_weights, Tensor grad, Tensor(b!) clock, Tensor learning_rate, Tensor table_keys,"
    " int kind, float[] settings, bool gradient_clipping, bool stochastic_rounding) -> ()",
    "pool_weights_grad": f"({_STORE.format('')}, Tensor rows, Tensor offsets, {_LAYOUT}, Tensor grad) -> Tensor",
}

# What an optimizer's numbers are called, in the order of ``update``'s ``settings``.
_SETTINGS = ("eps", "beta1", "beta2", "weight_decay", "max_gradient")

# Arguments of an op that ``_INDEX`` names.
_NUM_INDEX_ARGUMENTS = 4

_library = torch.library.Library("dynamicemb", "DEF")


def _index(arguments: Sequence[Any]) -> Index:
    """Return the index that the first arguments of an op are."""
    return Index.from_tensors(*arguments[:_NUM_INDEX_ARGUMENTS])


def _store(
    chunks: list[torch.Tensor],
    dims: list[int],
    num_states: list[int],
    dtype: torch.dtype,
    chunk_shift: int,
    chunk_tables: list[int],
) -> RowStore:
    formats = [RowFormat(dim, num_state) for dim, num_state in zip(dims, num_states, strict=True)]
    return RowStore.attach(chunks, formats, dtype, chunk_shift, chunk_tables)


def index_arguments(index: Index) -> tuple[list[torch.Tensor], int, int, str | None]:
    """Return the first arguments of the ops on an index."""
    return index.tensors(), index.bucket_capacity, index.strategy, index.score_function


def store_arguments(store: RowStore) -> tuple[list[torch.Tensor], list[int], list[int], torch.dtype, int, list[int]]:
    """Return the first arguments of the ops on rows."""
    dims, states = [f.dim for f in store.formats], [f.num_state for f in store.formats]
    return store.chunks, dims, states, store.dtype, store.chunk_shift, store.chunk_tables


def layout_arguments(layout: FeatureLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Return the layout arguments of the pooling ops."""
    return (
        layout.feature_tables,
        layout.column_offsets,
        layout.table_features,
        layout.batch_size,
        layout.pooling,
        layout.width,
    )


def optimizer_arguments(spec: OptimizerSpec) -> tuple[int, list[float], bool, bool]:
    """Return the last arguments of ``update``."""
    return (
        int(spec.kind),
        [getattr(spec, name) for name in _SETTINGS],
        spec.gradient_clipping,
        spec.stochastic_rounding,
    )


# Implementations: unflatten, then call the kernels of the device.


def _find(*args: Any) -> torch.Tensor:
    index, (ids, ranges) = _index(args), args[_NUM_INDEX_ARGUMENTS:]
    return kernels_for(ids.device).find(index, ids, ranges, False)


def _find_and_touch(*args: Any) -> torch.Tensor:
    index, (ids, ranges, frequencies) = _index(args), args[_NUM_INDEX_ARGUMENTS:]
    return kernels_for(ids.device).find(index, ids, ranges, True, frequencies)


def _insert(*args: Any) -> Any:
    index, batch = _index(args), args[_NUM_INDEX_ARGUMENTS:]
    return tuple(kernels_for(batch[0].device).insert(index, *batch))


def _find_or_insert(*args: Any) -> Any:
    index, rest = _index(args), args[_NUM_INDEX_ARGUMENTS:]
    store, (modes, params, keys, *batch, state_values) = _store(*rest[:6]), rest[6:]
    newcomers = Newcomers(InitializerTable(modes, params, keys), state_values)
    rows, events = kernels_for(store.device).find_or_insert(index, store, newcomers, *batch)
    return rows, *events.result()


def _erase(*args: Any) -> torch.Tensor:
    index, (ids, ranges) = _index(args), args[_NUM_INDEX_ARGUMENTS:]
    return kernels_for(ids.device).erase(index, ids, ranges)


def _scan(*args: Any) -> torch.Tensor:
    return kernels_for(args[0][0].device).scan(_index(args), *args[_NUM_INDEX_ARGUMENTS:])


def _initialize(*args: Any) -> None:
    store, (modes, params, keys, *rest) = _store(*args[:6]), args[6:]
    kernels_for(store.device).initialize(store, InitializerTable(modes, params, keys), *rest)


def _gather(*args: Any) -> torch.Tensor:
    store = _store(*args[:6])
    return kernels_for(store.device).gather(store, *args[6:])


def _pool(*args: Any) -> torch.Tensor:
    store, (rows, offsets, *layout) = _store(*args[:6]), args[6:14]
    weights, missing_values, output_dtype = args[14:]
    kernels = kernels_for(store.device)
    return kernels.pool(store, rows, offsets, FeatureLayout(*layout), weights, missing_values, output_dtype)


def _pool_weights_grad(*args: Any) -> torch.Tensor:
    store, (rows, offsets, *layout), grad = _store(*args[:6]), args[6:14], args[14]
    return kernels_for(store.device).pool_weights_grad(store, rows, offsets, FeatureLayout(*layout), grad)


def _update(*args: Any) -> None:
    store, (ids, table_ranges, rows, offsets, *layout) = _store(*args[:6]), args[6:16]
    weights, grad, clock, learning_rate, table_keys, kind, settings, clipping, stochastic = args[16:]
    spec = OptimizerSpec(
        OptimizerKind(kind),
        gradient_clipping=clipping,
        stochastic_rounding=stochastic,
        **dict(zip(_SETTINGS, settings, strict=True)),
    )
    lookup = Lookup(ids, rows, table_ranges, offsets, FeatureLayout(*layout), weights)
    kernels_for(store.device).update(store, spec, lookup, grad, clock, learning_rate, table_keys)


# Fakes: shapes and dtypes without data.


def _fake_rows(*args: Any) -> torch.Tensor:
    ids = args[_NUM_INDEX_ARGUMENTS]
    return ids.new_empty(ids.shape, dtype=torch.int32)


def _fake_outcome(ids: torch.Tensor) -> Any:
    context = torch.library.get_ctx()
    new, evicted, stamps = (context.new_dynamic_size() for _ in range(3))
    return tuple(ids.new_empty(size) for size in (new, evicted, evicted, evicted, stamps))


def _fake_insert(*args: Any) -> Any:
    return _fake_outcome(args[_NUM_INDEX_ARGUMENTS])


def _fake_find_or_insert(*args: Any) -> Any:
    # After those of the rows, and modes, params and keys.
    ids = args[_NUM_INDEX_ARGUMENTS + 9]
    return ids.new_empty(ids.shape, dtype=torch.int32), *_fake_outcome(ids)


def _fake_erase(*args: Any) -> torch.Tensor:
    ids = args[_NUM_INDEX_ARGUMENTS]
    return ids.new_empty(ids.shape, dtype=torch.bool)


def _fake_scan(index: Any, *rest: Any) -> torch.Tensor:
    return index[0].new_empty(torch.library.get_ctx().new_dynamic_size())


def _fake_gather(*args: Any) -> torch.Tensor:
    dims, rows, output_dtype = args[1], args[6], args[9]
    return rows.new_empty(rows.shape[0], dims[0], dtype=output_dtype)


def _fake_pool(*args: Any) -> torch.Tensor:
    rows, batch_size, width, output_dtype = args[6], args[11], args[13], args[16]
    return rows.new_empty(batch_size, width, dtype=output_dtype)


def _fake_pool_weights_grad(*args: Any) -> torch.Tensor:
    return args[6].new_empty(args[6].shape, dtype=torch.float32)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "find": (_find, _fake_rows),
    "find_and_touch": (_find_and_touch, _fake_rows),
    "insert": (_insert, _fake_insert),
    "find_or_insert": (_find_or_insert, _fake_find_or_insert),
    "erase": (_erase, _fake_erase),
    "scan": (_scan, _fake_scan),
    "initialize": (_initialize, lambda *args: None),
    "gather": (_gather, _fake_gather),
    "pool": (_pool, _fake_pool),
    "update": (_update, lambda *args: None),
    "pool_weights_grad": (_pool_weights_grad, _fake_pool_weights_grad),
}

for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    _implementation, _fake = _IMPLEMENTATIONS[_name]
    # On a GPU, insert is a part of find_or_insert.
    for _key in ("CPU",) if _name == "insert" else ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"dynamicemb::{_name}", _fake, lib=_library)
