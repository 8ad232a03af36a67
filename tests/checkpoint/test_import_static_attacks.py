"""What an import of static tables must not trip over, lose or leave unsaid."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbDump, DynamicEmbError, DynamicEmbLoad, import_static
from tests.checkpoint.test_import_static_tables import DIM, module, rows_of

KEY = "embeddings.t.weight"


@pytest.mark.parametrize(
    "other",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        2**64 - 1,
    ],
    ids=["sparse", "meta", "seed"],
)
def test_entries_that_belong_to_no_table_are_not_looked_at(other: Any) -> None:
    tables = module()
    import_static(tables, {KEY: rows_of(20), "other": other}, {"state": {KEY: {}}, "other": other})
    ids, weights = tables.export_keys_values("t", "cpu")
    assert torch.equal(weights[ids.argsort()], rows_of(20))


@pytest.mark.parametrize("target", [torch.float32, torch.float16])
def test_float64_weights_beyond_float32_are_refused_and_leave_the_table_empty(target: torch.dtype) -> None:
    tables = module(embedding_dtype=target)
    weights = rows_of(20).double()
    weights[13, 2] = 1e39
    with pytest.raises(DynamicEmbError, match=r"embeddings.t.weight: .* row 13 .* beyond the range of torch.float32"):
        import_static(tables, {KEY: weights})
    assert tables.stats()["t"]["size"] == 0


def test_float64_state_beyond_float32_is_refused() -> None:
    tables = module("exact_adagrad")
    state = torch.ones(20, DIM, dtype=torch.float64)
    state[4, 0] = 1e39
    with pytest.raises(DynamicEmbError, match=r"t.momentum1: .* row 4 .* beyond the range of torch.float32"):
        import_static(tables, {KEY: rows_of(20)}, {"state": {KEY: {"t.momentum1": state}}})
    assert tables.stats()["t"]["size"] == 0


def adam(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a static table and its state."""
    key = f"embeddings.{name}.weight"
    state = {f"{name}.momentum1": torch.ones(20, DIM), f"{name}.exp_avg_sq": torch.ones(20, DIM)}
    return {key: rows_of(20)}, {"state": {key: state}}


def test_a_step_count_that_changes_for_other_tables_is_a_warning() -> None:
    tables = module("adam", names=("t", "u"))
    import_static(tables, *adam("u"), table_names={"model": ["u"]}, step=0)
    tables(torch.arange(3), torch.tensor([0, 0, 3])).sum().backward()
    with pytest.warns(UserWarning, match=r"step=40: .*model/u.* count goes from 1 to 40"):
        import_static(tables, *adam("t"), table_names={"model": ["t"]}, step=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Nothing changes for the other one.
        import_static(tables, *adam("t"), table_names={"model": ["t"]}, step=40)


def test_a_table_without_rows_is_refused_as_such() -> None:
    with pytest.raises(ValueError, match=r"embeddings.t.weight has no rows; leave table model/t out of table_names"):
        import_static(module(), {KEY: torch.zeros(0, DIM)})


def test_modules_named_state_are_told_apart() -> None:
    a, b = module(), module()
    for model, first, second in (
        (torch.nn.ModuleDict({"state": torch.nn.ModuleDict({"a": a, "b": b})}), "state.a", "state.b"),
        (torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"state": a}), "b": torch.nn.ModuleDict({"state": b})}),
         "a.state", "b.state"),
        (torch.nn.ModuleDict({"state": torch.nn.ModuleDict({"a": a}), "a": b}), "state.a", "a"),
    ):  # fmt: skip
        checkpoint = {f"{first}.{KEY}": rows_of(20), f"{second}.{KEY}": rows_of(20, salt=1)}
        report = import_static(model, checkpoint)
        assert report[f"model.{first}"]["t"].source == f"{first}.{KEY}"
        assert report[f"model.{second}"]["t"].source == f"{second}.{KEY}"


def test_messages_say_what_to_pass_instead(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"checkpoint must be .* got the module Linear; pass its state_dict\(\)"):
        import_static(module(), torch.nn.Linear(1, 1))
    for ids in ([5, 6, 7], [5, 6], np.arange(3)):
        with pytest.raises(TypeError, match=r"id_maps\['t'\] .* torch.as_tensor"):
            import_static(module(), {KEY: rows_of(3)}, id_maps={"t": ids})
    with pytest.raises(ValueError, match=r"^optimizer: .* has no file '.metadata'"):
        import_static(module("exact_adagrad"), {KEY: rows_of(3)}, tmp_path)


class Towers(torch.nn.Module):
    """Two towers of a model, each with a table of the same name."""

    def __init__(self, *towers: torch.nn.Module) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleDict({name: torch.nn.Sequential(t) for name, t in zip("ab", towers, strict=True)})


def test_tables_of_one_name_in_nested_modules_keep_their_own_rows(tmp_path: Path) -> None:
    model = Towers(module("exact_adagrad"), module("exact_adagrad"))
    values = {f"towers.{name}.0.{KEY}": rows_of(20, salt=i) for i, name in enumerate("ab")}
    state = {f"towers.{name}.0.{KEY}": {"t.momentum1": torch.full((20, DIM), 2.0 + i)} for i, name in enumerate("ab")}
    import_static(model, values, {"state": state})

    def check(imported: torch.nn.Module) -> None:
        for i, tower in enumerate(imported.towers.values()):
            tables = tower[0].eval()
            output = tables(torch.arange(20), torch.arange(21))
            assert torch.equal(output, rows_of(20, salt=i)), "an evaluation reads the static rows bit for bit"
            _, states = tables.tables.read(0, tables.tables.find(torch.arange(20), torch.tensor([0, 20])))
            assert torch.equal(states, torch.full((20, DIM), 2.0 + i))

    check(model)
    # What was imported is dumped and loaded as what was trained.
    DynamicEmbDump(str(tmp_path / "dump"), model, optim=True)
    again = Towers(module("exact_adagrad"), module("exact_adagrad"))
    DynamicEmbLoad(str(tmp_path / "dump"), again, optim=True)
    check(again)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([4, 4, 5], "4 is there more than once; give each once"),
        ([4, 4, 5, 5], "4 is there more than once, as is 1 other; give"),
        ([4, 4, 5, 5, 6, 6], "4 is there more than once, as are 2 others; give"),
    ],
)
def test_ids_that_come_twice_are_counted(ids: list[int], words: str) -> None:
    tables = module()
    rows = rows_of(len(ids))
    with pytest.raises(ValueError, match=words):
        import_static(tables, {KEY: rows}, optimizer=False, id_maps={"t": torch.tensor(ids)})
