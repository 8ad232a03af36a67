"""Dumps and a state_dict of format version 1, whose manifests name no placements, load, go on and are inspected."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynamicemb import DynamicEmbDump, DynamicEmbLoad, DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, KVCounter
from dynamicemb.checkpoint.tables import tables_of_model
from tests.support.admitting import lengths_of
from tests.support.checkpoints import records
from tests.support.inspecting import Shell, shell  # noqa: F401
from tests.support.lookups import make_module, options

FOLDER = Path(__file__).parents[1] / "data" / "format_1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def users() -> Any:
    admission = {"admit_strategy": FrequencyAdmissionStrategy(2), "admission_counter": KVCounter(64)}
    return options(4, dist_type="continuous", score_strategy=DynamicEmbScoreStrategy.LFU, **admission)


def items() -> Any:
    return options(3, dist_type="roundrobin")


def modules() -> tuple[nn.ModuleList, dict[str, Any]]:
    """Return a model with the tables of the dump, and its modules by table."""
    found = {"users": make_module([users()], table_names=["users"], optimizer="adam")}
    found["items"] = make_module([items()], table_names=["items"], optimizer="adam")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dynamic_embedding_modules = list(found.values())

        def state_dict_ranks(self) -> Any:
            return found["users"].state_dict_ranks()

    return Model(), found


def check(module: Any, name: str) -> None:
    rows = {int(key): (weights, state) for key, (weights, state, _) in EXPECTED["rows"][name].items()}
    got = {key: (weights.hex(), state.hex()) for key, (weights, state, _) in records(module, name).items()}
    assert got == rows


def test_c22_a_dump_of_version_1_loads_and_an_increment_continues_it(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "dump", tmp_path / "0")
    model, found = modules()
    assert [table.name for table in tables_of_model(model, None)] == ["items", "users"]
    DynamicEmbLoad(tmp_path / "0", model, optim=True, counter=True)
    for name, module in found.items():
        check(module, name)
    scores = {int(key): row[2] for key, row in EXPECTED["rows"]["users"].items()}
    assert {key: list(row[2]) for key, row in records(found["users"], "users").items()} == scores
    assert lengths_of(found["users"]) == {int(key): count for key, count in EXPECTED["counts"].items()}
    assert found["items"].insert("items", torch.tensor([777]), torch.ones(1, 3)).all()
    DynamicEmbDump(tmp_path / "1", model, optim=True, counter=True, base=tmp_path / "0")
    copy, of_copy = modules()
    DynamicEmbLoad([tmp_path / "0", tmp_path / "1"], copy, optim=True, counter=True)
    check(of_copy["users"], "users")
    held = records(of_copy["items"], "items")
    assert held.keys() == {777, *map(int, EXPECTED["rows"]["items"])}
    assert held[777][0] == torch.ones(3).numpy().tobytes()


def test_c22_a_state_dict_of_version_1_loads() -> None:
    module = make_module([users()], table_names=["users"], optimizer="adam")
    module.load_state_dict(torch.load(FOLDER / "state.pt", weights_only=True))
    assert module.load_report["users"].num_rows == len(records(module, "users")) > 0


@pytest.mark.parametrize("arguments", [[], ["--verify"]], ids=["described", "verified"])
def test_a_dump_of_version_1_is_inspected(shell: Shell, tmp_path: Path, arguments: list[str]) -> None:  # noqa: F811
    shutil.copytree(FOLDER / "dump", tmp_path / "d")
    status, output, _ = shell.run(tmp_path / "d", *arguments)
    assert status == 0 and "users" in output and "continuous" in output
