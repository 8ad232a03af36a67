"""The interfaces `Storage` and `Cache`, which users subclass."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.types import Cache, CopyMode, Storage

REQUIRED = inspect.Parameter.empty
# Method -> its parameters with their defaults.
STORAGE = {
    "find": {"unique_keys": REQUIRED, "table_ids": REQUIRED, "copy_mode": REQUIRED, "lfu_accumulated_frequency": None},
    "insert": {
        "keys": REQUIRED, "table_ids": REQUIRED, "values": REQUIRED, "scores": None, "preserve_existing": False,
    },
    "dump": dict.fromkeys(
        ("table_id", "meta_file_path", "emb_key_path", "embedding_file_path", "score_file_path", "opt_file_path",
         "timestamp"), REQUIRED,
    ),
    "load": dict.fromkeys(
        ("table_id", "meta_file_path", "emb_file_path", "embedding_file_path", "score_file_path", "opt_file_path",
         "include_optim", "timestamp"), REQUIRED,
    ),
    "embedding_dtype": {},
    "embedding_dim": {"table_id": REQUIRED},
    "value_dim": {"table_id": REQUIRED},
    "max_embedding_dim": {},
    "max_value_dim": {},
    "embedding_dims": {"on_device": False},
    "all_dims_vec4": {},
    "init_optimizer_state": {},
    "export_keys_values": {"device": REQUIRED, "batch_size": 65536, "table_id": 0},
}  # fmt: skip
CACHE = {
    "lookup": {"unique_keys": REQUIRED, "table_ids": REQUIRED, "lfu_accumulated_frequency": None},
    "insert_and_evict": {"keys": REQUIRED, "table_ids": REQUIRED, "scores": None},
    "reset": {},
    "set_record_cache_metrics": {"record": REQUIRED},
}


class PyDictStorage(Storage[DynamicEmbTableOptions, Any]):
    """Rows in a dict, as a user would write such a class."""

    def __init__(self, options: list[DynamicEmbTableOptions], optimizer: Any) -> None:
        self.dims = [option.dim or 0 for option in options]
        self.states = [optimizer.get_state_dim(dim) for dim in self.dims]
        self.rows: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}

    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, None, torch.Tensor, torch.Tensor, torch.Tensor]:
        width = self.max_embedding_dim() if copy_mode is CopyMode.EMBEDDING else self.max_value_dim()
        values, scores = torch.zeros(len(unique_keys), width), torch.zeros(len(unique_keys), dtype=torch.int64)
        founds = torch.zeros(len(unique_keys), dtype=torch.bool)
        for n, place in enumerate(zip(table_ids.tolist(), unique_keys.tolist(), strict=True)):
            if place in self.rows:
                row, score = self.rows[place]
                values[n], scores[n], founds[n] = row[:width], score, True
        missing = (~founds).nonzero().flatten()
        return len(missing), unique_keys[missing], missing, table_ids[missing], None, founds, scores, values

    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        for n, place in enumerate(zip(table_ids.tolist(), keys.tolist(), strict=True)):
            score = 0 if scores is None else int(scores[n])
            if preserve_existing and place in self.rows:
                score = self.rows[place][1]
            self.rows[place] = (values[n].clone(), score)

    def dump(self, table_id, meta_file_path, emb_key_path, embedding_file_path, score_file_path, opt_file_path,
             timestamp) -> None:  # fmt: skip
        Path(meta_file_path).write_text(json.dumps({"table": table_id}))
        for ids, embeddings, _, scores in self.export_keys_values(torch.device("cpu"), 2**20, table_id):
            ids.numpy().tofile(emb_key_path)
            embeddings.numpy().tofile(embedding_file_path)
            if score_file_path is not None:
                scores.numpy().tofile(score_file_path)

    def load(self, table_id, meta_file_path, emb_file_path, embedding_file_path, score_file_path, opt_file_path,
             include_optim, timestamp) -> None:  # fmt: skip
        ids = torch.from_numpy(np.fromfile(emb_file_path, np.int64))
        values = torch.zeros(len(ids), self.max_value_dim())
        dim = self.embedding_dim(table_id)
        values[:, :dim] = torch.from_numpy(np.fromfile(embedding_file_path, np.float32)).view(len(ids), dim)
        self.insert(ids, torch.full_like(ids, table_id), values)

    def embedding_dtype(self) -> torch.dtype:
        return torch.float32

    def embedding_dim(self, table_id: int) -> int:
        return self.dims[table_id]

    def value_dim(self, table_id: int) -> int:
        return self.dims[table_id] + self.states[table_id]

    def max_embedding_dim(self) -> int:
        return max(self.dims)

    def max_value_dim(self) -> int:
        return self.max_embedding_dim() + max(self.states)

    def embedding_dims(self, on_device: bool = False) -> torch.Tensor:
        return torch.tensor(self.dims)

    def init_optimizer_state(self) -> float:
        return 0.0

    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]]:
        mine = sorted(key for table, key in self.rows if table == table_id)
        for first in range(0, len(mine), batch_size):
            ids = mine[first : first + batch_size]
            rows = torch.stack([self.rows[table_id, key][0] for key in ids])[:, : self.dims[table_id]]
            scores = torch.tensor([self.rows[table_id, key][1] for key in ids])
            yield torch.tensor(ids).to(device), rows.contiguous().to(device), None, scores.to(device)


class Momentum:
    """An optimizer with one value of state for each weight."""

    def get_state_dim(self, dim: int) -> int:
        return dim


def made(*dims: int) -> PyDictStorage:
    return PyDictStorage([DynamicEmbTableOptions(dim=dim) for dim in dims], Momentum())


def parameters(method: Any) -> dict[str, Any]:
    found = dict(inspect.signature(method).parameters)
    del found["self"]
    return {name: parameter.default for name, parameter in found.items()}


@pytest.mark.parametrize(("interface", "methods"), [(Storage, STORAGE), (Cache, CACHE)])
def test_methods_have_the_documented_parameters_in_order(interface: Any, methods: dict[str, dict[str, Any]]) -> None:
    for name, expected in methods.items():
        method = getattr(interface, name)
        assert list(parameters(method).items()) == list(expected.items()), name
        assert inspect.getdoc(method)
        assert getattr(method, "__isabstractmethod__", False) is (name != "all_dims_vec4"), name
    extra = {"cache_metrics"} if interface is Cache else set()
    assert interface.__abstractmethods__ == set(methods) - {"all_dims_vec4"} | extra


def test_a_storage_that_a_user_writes_stores_rows(tmp_path: Path) -> None:
    storage = made(4, 2)
    assert isinstance(storage, Storage)
    ids, tables = torch.tensor([7, -1, 7]), torch.tensor([0, 0, 1])
    values = torch.arange(24.0).view(3, 8)
    storage.insert(ids, tables, values, scores=torch.tensor([5, 6, 7]))
    storage.insert(ids[:1], tables[:1], values[1:2], scores=torch.tensor([9]), preserve_existing=True)
    asked = torch.tensor([7, 8, -1, 7])
    found = storage.find(asked, torch.tensor([0, 0, 0, 1]), CopyMode.VALUE)
    num_missing, missing, places, missing_tables, missing_scores, founds, scores, rows = found
    assert (num_missing, missing.tolist(), places.tolist(), missing_tables.tolist()) == (1, [8], [1], [0])
    assert missing_scores is None and founds.tolist() == [True, False, True, True]
    assert scores[founds].tolist() == [5, 6, 7]
    assert torch.equal(rows[founds], values[[1, 1, 2]])
    assert storage.find(asked, torch.zeros(4, dtype=torch.int64), CopyMode.EMBEDDING)[-1].shape == (4, 4)
    ((exported, embeddings, states, ages),) = storage.export_keys_values(torch.device("cpu"), table_id=1)
    assert (exported.tolist(), embeddings.tolist(), states, ages.tolist()) == ([7], [[16.0, 17.0]], None, [7])
    files = [str(tmp_path / name) for name in ("meta", "keys", "values")]
    storage.dump(0, *files, None, None, 0)
    other = made(4, 2)
    other.load(0, *files, None, None, False, 0)
    assert torch.equal(other.find(asked, torch.zeros(4, dtype=torch.int64), CopyMode.EMBEDDING)[-1][2], values[1, :4])


@pytest.mark.parametrize(("dims", "by_fours"), [((4, 8), True), ((4, 6), False), ((1,), False)])
def test_rows_can_be_moved_by_fours_where_all_widths_are_multiples(dims: tuple[int, ...], by_fours: bool) -> None:
    assert made(*dims).all_dims_vec4() is by_fours

    class OddState(PyDictStorage):
        def value_dim(self, table_id: int) -> int:
            return self.dims[table_id] + 1

    assert OddState([DynamicEmbTableOptions(dim=4)], Momentum()).all_dims_vec4() is False


@pytest.mark.parametrize("name", sorted(Storage.__abstractmethods__))
def test_an_incomplete_storage_cannot_be_made(name: str) -> None:
    methods = {method: getattr(PyDictStorage, method) for method in STORAGE if method not in (name, "all_dims_vec4")}
    incomplete = type("Incomplete", (Storage,), {"__init__": PyDictStorage.__init__, **methods})
    with pytest.raises(TypeError, match=f"abstract .*{name}"):
        incomplete([DynamicEmbTableOptions(dim=4)], Momentum())


def test_a_cache_can_be_written_and_an_incomplete_one_not_be_made() -> None:
    class Nothing(Cache):
        def lookup(self, unique_keys, table_ids, lfu_accumulated_frequency=None):
            missing = torch.zeros(len(unique_keys), dtype=torch.bool)
            return torch.zeros_like(unique_keys), missing, torch.full_like(unique_keys, -1)

        def insert_and_evict(self, keys, table_ids, scores=None):
            none = keys[:0]
            return torch.full_like(keys, -1), 0, none, none, none, none

        def reset(self) -> None:
            pass

        @property
        def cache_metrics(self) -> torch.Tensor | None:
            return None

    with pytest.raises(TypeError, match="abstract .*set_record_cache_metrics"):
        Nothing()
    complete: Any = type("Complete", (Nothing,), {"set_record_cache_metrics": lambda self, record: None})
    assert complete().lookup(torch.tensor([3]), torch.tensor([0]))[2].tolist() == [-1]
