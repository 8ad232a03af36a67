"""`requires_grad` of the empty weight that a dynamic table shows: it freezes and thaws the table, and nothing else."""

import copy
import pickle
import pickletools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dynamicemb.errors import UnsupportedOptionError
from dynamicemb.table.stepping.lookup import rows_without
from tests.support.admitting import module_on
from tests.support.lookups import OPTIMIZERS, batch, contents, make_module, options
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import Case, Table, build, dynamic_modules, loss_of, make_batch, make_kjt, outputs_of


def holders_of(module: Any) -> list[nn.Module]:
    """Give a module of its own what a sharded collection gives it: a weight for each table."""
    for dim in module.dims:
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.empty(0, dim))
        module.weight_holders.append(holder)
    return module.weight_holders


def rows_of(module: Any) -> dict[str, dict[int, bytes]]:
    """Return weights and state of each id, by table."""
    return {name: {key: row for key, (_, row) in held.items()} for name, held in contents(module).items()}


@pytest.mark.parametrize(
    ("ranges", "tables", "kept"),
    [
        ([0, 1, 1, 4], {2}, [4, -1, -1, -1]),
        ([0, 1, 1, 4], {1}, [4, 5, 6, 7]),
        ([0, 0, 4, 4], {0, 1, 2}, [-1, -1, -1, -1]),
        ([0, 2, 3, 4], {0, 2}, [-1, -1, 6, -1]),
    ],
)
def test_occurrences_of_chosen_tables_lose_their_row(ranges: list[int], tables: set[int], kept: list[int]) -> None:
    rows = torch.tensor([4, 5, 6, 7], dtype=torch.int32)
    found = rows_without(rows, torch.tensor(ranges), tables)
    assert found.tolist() == kept and found.dtype == torch.int32
    assert rows.tolist() == [4, 5, 6, 7]


def test_no_occurrences_are_fine() -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    assert rows_without(nothing, torch.tensor([0, 0, 0]), {1}).tolist() == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c14_a_frozen_table_of_a_group_stays_and_the_others_train(backend: str, optimizer: str) -> None:
    def make() -> Any:
        return module_on(backend, options(4), options(3), options(4), optimizer=optimizer)

    def step(module: Any, ids: Any) -> None:
        ids, offsets = batch(*ids)
        device = module.tables.device
        module(ids.to(device), offsets.to(device)).square().sum().backward()

    module, twin = make(), make()
    weights = [holder.weight for holder in holders_of(module)]
    for made in (module, twin):
        step(made, ([1, 2, 2], [1, 5], [2]))
    before = rows_of(module)
    weights[1].requires_grad_(False)
    for made in (module, twin):
        step(made, ([1, 2, 3], [1, 9], [2, 2]))
    after, trained = rows_of(module), rows_of(twin)
    assert after["a"] == trained["a"] and after["c"] == trained["c"]
    assert {i: after["b"][i] for i in (1, 5)} == before["b"] and trained["b"][1] != before["b"][1]
    # A new id has its first value and a fresh state.
    assert after["b"].keys() == {1, 5, 9} and after["b"][9] != trained["b"][9]
    weights[1].requires_grad_(True)
    step(module, ([1], [1], [2]))
    assert rows_of(module)["b"][1] != before["b"][1]
    assert module.tables.steps.num_outstanding == 0


def test_an_id_that_comes_while_its_table_is_frozen_begins_as_any_other() -> None:
    module, other = make_module([options(), options()]), make_module([options(), options()])
    holders_of(module)[0].weight.requires_grad_(False)
    module(*batch([7], [8])).sum().backward()
    with torch.no_grad():
        other(*batch([7], [8]))
    assert rows_of(module)["a"] == rows_of(other)["a"]


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("number", [1, 2])
def test_c14_a_table_that_is_frozen_at_forward_or_at_backward_does_not_train(when: str, number: int) -> None:
    module = make_module([options(), options()], optimizer="adam")
    weights = [holder.weight for holder in holders_of(module)][:number]
    top = nn.Linear(8, 1)
    module(*batch([1], [2]))
    before = rows_of(module)
    for weight in weights:
        weight.requires_grad_(when != "forward")
    output = top(module(*batch([1], [2]))).sum()
    for weight in weights:
        weight.requires_grad_(when == "forward")
    output.backward()
    after = rows_of(module)
    assert after["a"] == before["a"] and (after["b"] == before["b"]) is (number == 2)
    assert top.weight.grad is not None and module.tables.steps.num_outstanding == 0


def test_a_step_over_frozen_tables_only_is_not_outstanding() -> None:
    module = make_module([options(), options()])
    for holder in holders_of(module):
        holder.weight.requires_grad_(False)
    output = module(*batch([1], [2]))
    assert not output.requires_grad and module.tables.steps.num_outstanding == 0


@pytest.mark.parametrize("number", [1, 2])
def test_pooling_weights_of_frozen_tables_get_their_gradient(number: int) -> None:
    def gradient(frozen: int) -> torch.Tensor:
        module = make_module([options(), options()])
        for holder in holders_of(module)[:frozen]:
            holder.weight.requires_grad_(False)
        weights = torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
        module(*batch([1, 3], [2]), weights).square().sum().backward()
        assert weights.grad is not None and module.tables.steps.num_outstanding == 0
        return weights.grad

    assert torch.equal(gradient(number), gradient(0))


def test_c27_an_average_over_dynamic_tables_is_refused() -> None:
    module = make_module()
    for model, where in ((module, "the model"), (nn.Sequential(module), "'0' of the model")):
        with pytest.raises(
            UnsupportedOptionError, match=f"AveragedModel: {where} holds dynamic tables; .*dense layers"
        ):
            AveragedModel(model)
    AveragedModel(nn.Linear(2, 2)).update_parameters(nn.Linear(2, 2))


# Sharded

A = Table("a", ("f0", "f1"))
# In one group with "a".
C = Table("c", ("f3",))
B = Table("b", ("f2",), score="LFU")
STATIC = Table("s", ("g0",), sharding="row_wise", num_embeddings=12)
EC = Case((A, C, B, STATIC), pooled=False)
EBC = Case((A, C, B, STATIC), pooled=True)


def step(model: Any, case: Case, number: int, rank: int) -> None:
    loss_of(outputs_of(case, model(make_kjt(make_batch(case, number, rank), case)))).backward()


def held(model: Any) -> dict[str, dict[int, bytes]]:
    return {name: rows for tables in dynamic_modules(model) for name, rows in rows_of(tables).items()}


def static_rows(model: Any) -> bytes:
    (name,) = [name for name, _ in model.named_parameters() if ".s." in name]
    return b"".join(shard.tensor.numpy().tobytes() for shard in model.state_dict()[name].local_shards())


def freeze_one(rank: int, world_size: int, case: Case) -> int:
    """Return how many ids came while table "a" was frozen."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    model, twin = (build(case, world_size, optimizer=EmbOptimType.EXACT_ADAGRAD) for _ in range(2))
    prefix = f"collection.{'embedding_bags' if case.pooled else 'embeddings'}"
    names = [name for name, _ in model.named_parameters()]
    assert names == [f"{prefix}.{table}.weight" for table in "acbs"]
    weights = dict(model.named_parameters())
    weight = weights[f"{prefix}.a.weight"]
    assert weight.shape == (0, 4) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    assert weight.requires_grad and sum(weights[f"{prefix}.{table}.weight"].numel() for table in "acb") == 0
    assert not dict(in_backward_optimizer_filter(model.named_parameters()))
    # What a checkpoint and the fused optimizer know of it: nothing.
    assert not [key for key in model.state_dict() if key in (f"{prefix}.a.weight", f"{prefix}.b.weight")]
    assert (
        list(model.fused_optimizer.params)
        == [f"{prefix}.s.weight"]
        == list(model.fused_optimizer.state_dict()["state"])
    )
    assert [tables.table_names for tables in dynamic_modules(model)] == [["a", "c"], ["b"]]
    for made in (model, twin):
        step(made, case, 0, rank)
    before = held(model)
    weight.requires_grad_(False)
    for made in (model, twin):
        step(made, case, 1, rank)
    after, trained = held(model), held(twin)
    assert after["b"] == trained["b"] and after["c"] == trained["c"] and static_rows(model) == static_rows(twin)
    assert after["a"].keys() == trained["a"].keys()
    assert {i: after["a"][i] for i in before["a"]} == before["a"]
    assert any(trained["a"][i] != row for i, row in before["a"].items())
    model.module.collection.reset_parameters()
    assert held(model) == after and not weight.requires_grad
    model.load_state_dict(model.state_dict())
    assert not weight.requires_grad
    weight.requires_grad_(True)
    step(model, case, 1, rank)
    assert any(held(model)["a"][i] != row for i, row in after["a"].items())
    return len(after["a"]) - len(before["a"])


@pytest.mark.distributed
@pytest.mark.parametrize("case", [EC, EBC], ids=["ec", "ebc"])
def test_c14_one_frozen_table_of_a_sharded_collection(ranks: RankPool, case: Case) -> None:  # noqa: F811
    assert sum(ranks.run(2, freeze_one, case)) > 0


class Tower(nn.Module):
    """A dense layer over a collection."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.sparse, self.dense = model, nn.Linear(width, 1)

    def forward(self, features: Any) -> torch.Tensor:
        return self.dense(self.sparse(features).values())


def copy_a_module(rank: int, world_size: int) -> None:
    model = build(Case((A, C), pooled=True), world_size)
    (tables,) = dynamic_modules(model)
    tables(*batch([1], [2], [3])).sum().backward()
    dict(model.named_parameters())["collection.embedding_bags.c.weight"].requires_grad_(False)
    stored = pickle.dumps(tables)
    # Whoever loads it needs no TorchRec. Rows that no id has may hold any bytes, so names are looked for as names.
    names = {str(value) for _, value, _ in pickletools.genops(stored) if isinstance(value, str)}
    assert not [name for name in names if "torchrec" in name or "sharding" in name]
    for twin in (pickle.loads(stored), copy.deepcopy(tables)):
        assert contents(twin) == contents(tables)
        model.requires_grad_(True)
        before = rows_of(twin)
        twin(*batch([1], [2], [3])).sum().backward()
        after = rows_of(twin)
        assert after["c"] == before["c"] and after["a"] != before["a"]
        model.requires_grad_(False)
        twin.weight_holders[1].weight.requires_grad_(True)
        twin(*batch([1], [2], [3])).sum().backward()
        assert rows_of(twin)["c"] != after["c"]
        for name, weight in model.named_parameters():
            weight.requires_grad_(".c." not in name)


@pytest.mark.distributed
def test_a_module_of_a_sharded_model_is_copied_without_it(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(1, copy_a_module)


def freeze_all(rank: int, world_size: int) -> None:
    case = Case((A, B), pooled=True)
    sharded = build(case, world_size)
    tower = Tower(sharded, 12)
    features = [make_kjt(make_batch(case, number, rank), case) for number in range(3)]
    tower(features[0]).sum().backward()
    before = held(sharded)
    sharded.requires_grad_(False)
    tower.dense.weight.grad = None
    output = tower(features[1])
    assert all(tables.tables.steps.num_outstanding == 0 for tables in dynamic_modules(sharded))
    output.sum().backward()
    assert tower.dense.weight.grad is not None and bool(tower.dense.weight.grad.any())
    after = held(sharded)
    assert all({i: after[name][i] for i in rows} == rows for name, rows in before.items())
    assert sum(map(len, after.values())) > sum(map(len, before.values()))
    for parameter in sharded.parameters():
        parameter.requires_grad = True
    tower(features[2]).sum().backward()
    assert held(sharded) != after
    # A copy that could be averaged cannot be made.
    for model in (sharded, tower):
        with pytest.raises(
            TypeError, match=r"dynamic tables \['a', 'b'\] cannot be copied .*AveragedModel\(model.dense"
        ):
            AveragedModel(model)


@pytest.mark.distributed
def test_a_model_whose_tables_are_all_frozen_trains_its_other_layers(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, freeze_all)
    ranks.run(1, freeze_all)


def wrap(rank: int, world_size: int) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
    )
    from torch.nn.parallel import DistributedDataParallel
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from tests.support.state_dict_model import Kind
    from tests.support.state_dict_model import build as build_model
    from tests.support.state_dict_model import train as train_model

    kind = Kind(optimizer="EXACT_SGD", static="row_wise")
    model = build_model(kind, world_size)
    # DistributedModelParallel has wrapped the dense layer; the empty weights never get the gradient it waits for.
    assert isinstance(model._dmp_wrapped_module, DistributedDataParallel)
    train_model(model, kind, rank, range(3))
    mine = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert mine.keys() == {"over.weight", "over.bias"}
    dense = KeyedOptimizerWrapper(mine, lambda params: torch.optim.Adam(params, lr=0.1))
    CombinedOptimizer([model.fused_optimizer, dense]).zero_grad()
    state = get_model_state_dict(model.module)
    assert {key for key in state if key.endswith(".weight")} == {"bags.embedding_bags.static.weight", "over.weight"}
    set_model_state_dict(model.module, state)
    everything = torch.optim.Adam(model.module.over.parameters(), lr=0.1)
    found = get_optimizer_state_dict(model.module, everything)
    assert {key.split(".")[0] for key in found["state"]} == {"over"}
    assert not [key for key in model.module.load_state_dict(model.module.state_dict(), strict=True) if key]
    with pytest.raises(RuntimeError, match=r"Unexpected key.* .*things\.other"):
        model.module.load_state_dict({**model.module.state_dict(), "sequences.embeddings.things.other": torch.ones(1)})


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
def test_wrappers_optimizers_and_checkpoints_pass_over_the_empty_weights(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, wrap)
