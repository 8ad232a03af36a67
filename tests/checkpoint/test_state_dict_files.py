"""``torch.save`` of a state_dict, a file for each rank: who reads the files, and with how many ranks (contract 29)."""

import copy
import json
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy
from dynamicemb.errors import DynamicEmbError
from tests.support.checkpoints import records, without_scores
from tests.support.lookups import EXTREME, bag_per_id, make_module, options
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.state_dict_model import Kind, build, counted, held, joined, joined_tables, others, train

pytestmark = [
    pytest.mark.distributed,
    # TorchRec's.
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]

LFU = Kind(score="LFU", admit=2)
USERS, THINGS = "bags.embedding_bags.users.dynamic_", "sequences.embeddings.things.dynamic_"

# What a process that has nothing but torch makes of files.
READ = """
import json, sys, torch
states = [torch.load(file, weights_only=True) for file in sys.argv[1:]]
told = [{k: [type(v).__name__, *([list(v.shape), str(v.dtype)] if isinstance(v, torch.Tensor) else [])]
         for k, v in state.items()} for state in states]
ids = [{k: v.tolist() for k, v in state.items() if k.endswith("dynamic_ids")} for state in states]
strange = [name for name in sys.modules if name.partition(".")[0] in ("dynamicemb", "torchrec", "fbgemm_gpu")]
assert not strange and not torch.distributed.is_initialized(), strange
print(json.dumps(list(zip(told, ids))))
"""


def read_elsewhere(files: list[str]) -> list[tuple[dict[str, Any], dict[str, list[int]]]]:
    """Return what the entries of each file are, and the ids."""
    done = subprocess.run([sys.executable, "-c", READ, *files], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return [(told, ids) for told, ids in json.loads(done.stdout)]


def save(rank: int, world_size: int, kind: Kind, path: str) -> Any:
    model = build(kind, world_size)
    train(model, kind, rank, range(3))
    torch.save(model.state_dict(), f"{path}.{rank}")
    return held(model), counted(model), others(model)


def load(rank: int, world_size: int, kind: Kind, files: list[str], weights_only: bool = True) -> Any:
    """Load a file on each rank into a model with other rows; returns what it holds then, or the error."""
    model = build(replace(kind, seed=5), world_size)
    train(model, kind, rank, range(70, 72))
    before = held(model)
    try:
        model.load_state_dict(torch.load(files[rank], weights_only=weights_only))
    except DynamicEmbError as error:
        assert held(model) == before
        return str(error)
    return held(model), counted(model), others(model)


def files_of(path: str, world_size: int) -> list[str]:
    return [f"{path}.{rank}" for rank in range(world_size)]


def check_same(before: list[Any], after: list[Any]) -> None:
    was, now = (joined_tables([part[0] for part in parts]) for parts in (before, after))
    assert now["users"] == was["users"] != {}
    assert without_scores(now["things"]) == without_scores(was["things"]) != {}
    assert joined([part[1] for part in after]) == joined([part[1] for part in before]) != {}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_c29_files_of_ranks_are_read_with_weights_only(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    world_size: int,
) -> None:
    path = str(tmp_path / "state")
    before = ranks.run(world_size, save, LFU, path)
    for rank, (told, ids) in enumerate(read_elsewhere(files_of(path, world_size))):
        users, things = (before[rank][0][name] for name in ("users", "things"))
        assert told[USERS + "ids"] == ["Tensor", [len(users)], "torch.int64"]
        assert told[USERS + "values"] == ["Tensor", [len(users), 4], "torch.float32"]
        assert told[THINGS + "state"] == ["Tensor", [len(things), 12], "torch.float32"]
        assert told[THINGS + "counter_ids"] == ["Tensor", [len(before[rank][1])], "torch.int64"]
        assert told[USERS + "table"] == ["str"] and {kind for kind, *_ in told.values()} == {"Tensor", "str"}
        assert set(ids[USERS + "ids"]) == set(users) and set(ids[THINGS + "ids"]) == set(things)
    after = ranks.run(world_size, load, LFU, files_of(path, world_size))
    check_same(before, after)
    assert [part[0]["users"] for part in after] == [part[0]["users"] for part in before]
    assert [part[2] for part in after] == [part[2] for part in before]


def test_c29_files_of_ranks_load_in_any_order_but_on_as_many_ranks(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    path = str(tmp_path / "state")
    before = ranks.run(2, save, LFU, path)
    first, second = files_of(path, 2)
    # Static tables, which are copied here, are the same in both.
    check_same(before, ranks.run(2, load, LFU, [second, first]))
    for files in ([first], [first, first], [second, second], [first, second, first]):
        errors = ranks.run(len(files), load, LFU, files)
        assert len(set(errors)) == 1
        size = "'dynamic_ids' of the state_dict must have the size"
        assert ("are other ids than were saved" in errors[0] or size in errors[0]) and "with as many ranks" in errors[0]


def test_c29_what_one_rank_saved_whole_loads_on_several(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    path = str(tmp_path / "state")
    before = ranks.run(1, save, LFU, path)
    check_same(before, ranks.run(3, load, LFU, [f"{path}.0"] * 3))


def save_like_earlier_versions(rank: int, world_size: int, kind: Kind, path: str) -> Any:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    from dynamicemb.checkpoint.state_dict.shards import RowsOfRanks

    model = build(kind, world_size)
    train(model, kind, rank, range(3))
    state = model.state_dict()
    tensors = [value for value in state.values() if isinstance(value, RowsOfRanks)]
    for tensor in tensors:
        tensor.__class__ = ShardedTensor
    torch.save(state, f"{path}.{rank}")
    assert len(tensors) == 10
    return held(model), counted(model), others(model)


def test_c29_files_of_earlier_versions_load(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    path = str(tmp_path / "state")
    before = ranks.run(2, save_like_earlier_versions, LFU, path)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(f"{path}.0", weights_only=True)
    check_same(before, ranks.run(2, load, LFU, files_of(path, 2), False))


def test_static_tables_that_torch_shards_want_a_trusted_file(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    path, kind = str(tmp_path / "state"), replace(LFU, static="row_wise", optimizer="EXACT_ROWWISE_ADAGRAD")
    before = ranks.run(2, save, kind, path)
    with pytest.raises(pickle.UnpicklingError, match="ShardedTensor was not an allowed global"):
        torch.load(f"{path}.0", weights_only=True)
    after = ranks.run(2, load, kind, files_of(path, 2), False)
    check_same(before, after)
    assert [part[2] for part in after] == [part[2] for part in before]


def rows_on_one_rank(rank: int, world_size: int, path: str, dtype: torch.dtype) -> Any:
    """Save and load tables of which one rank has all rows, or no rank any."""
    tables = [
        options(embedding_dtype=dtype, capacity=256, score_strategy=DynamicEmbScoreStrategy.LFU) for _ in range(2)
    ]
    module, other = (make_module(tables, optimizer="adam", device="cpu") for _ in range(2))
    mine = [i for i in (1, 3, -1, 7) if i % world_size == rank]
    ids = torch.tensor(mine, dtype=torch.int64)
    # The first table alone is looked up.
    module(ids, torch.tensor([0, len(mine), len(mine)])).sum().backward()
    torch.save(module.state_dict(), f"{path}.{rank}")
    state = torch.load(f"{path}.{rank}", weights_only=True)
    sizes = [tuple(state[f"dynamic_tables.{t}.dynamic_values"].shape) for t in "ab"]
    assert state["dynamic_tables.a.dynamic_values"].dtype == dtype
    other.load_state_dict(state)
    assert [records(other, t) for t in "ab"] == [records(module, t) for t in "ab"]
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c29_ranks_without_rows_have_files_too(ranks: RankPool, tmp_path: Path, dtype: torch.dtype) -> None:  # noqa: F811
    found = ranks.run(2, rows_on_one_rank, str(tmp_path / "state"), dtype)
    assert found == [[(0, 4), (0, 4)], [(4, 4), (0, 4)]]


def copies(rank: int, world_size: int, path: str) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    from dynamicemb.checkpoint.state_dict.shards import RowsOfRanks
    from tests.support.placements import owner_of

    module = make_module([options(capacity=256)], optimizer="adam", device="cpu")
    ids = torch.tensor([*EXTREME, *range(40)])
    module(*bag_per_id(ids[owner_of(ids, world_size) == rank].tolist())).pow(2).sum().backward()
    state = module.state_dict()
    with warnings.catch_warnings():
        # Of torch, about ShardedTensor.
        warnings.simplefilter("ignore")
        copied = copy.deepcopy(state)
    name = "dynamic_tables.a.dynamic_values"
    for value in (state[name], copied[name]):
        assert isinstance(value, ShardedTensor) and type(value) is RowsOfRanks and value.size() == (50, 4)
    assert copied[name].local_shards()[0].tensor.data_ptr() != state[name].local_shards()[0].tensor.data_ptr()
    # Who sends entries to another process, as DCP does, sends what they are.
    assert torch.serialization.DEFAULT_PROTOCOL < pickle.DEFAULT_PROTOCOL
    sent = pickle.loads(pickle.dumps(state))[name]
    assert type(sent) is RowsOfRanks and sent.metadata() == state[name].metadata()
    assert torch.equal(sent.local_shards()[0].tensor, state[name].local_shards()[0].tensor)
    torch.save(copied, f"{path}.{rank}")
    other = make_module([options(capacity=256)], optimizer="adam", device="cpu")
    other.load_state_dict(torch.load(f"{path}.{rank}", weights_only=True))
    assert without_scores(records(other, "a")) == without_scores(records(module, "a")) != {}


def test_c29_copies_of_entries_are_written_alike(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(2, copies, str(tmp_path / "state"))
