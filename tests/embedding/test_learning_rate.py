"""One learning rate: whoever sets it, it trains, is saved and comes back."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb.embedding.optimizer_settings import OptimizerSettings
from dynamicemb.optimizer import OptimizerSpec
from tests.support.admitting import module_on
from tests.support.checkpoints import without_scores
from tests.support.lookups import batch, constant, make_module, options, row_of
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import dynamic_modules


def settings(**numbers: Any) -> tuple[OptimizerSettings, torch.Tensor]:
    on_device = torch.full((1,), torch.nan)
    return OptimizerSettings(OptimizerSpec.create("adam", learning_rate=0.5, **numbers), on_device), on_device


def taken(module: Any) -> float:
    """Train an id for the first time with a gradient of 1; return by how much its row fell: the learning rate."""
    taken.next_id = key = getattr(taken, "next_id", 0) + 1
    ids, offsets = batch([key])
    module(ids.to(module.tables.device), offsets.to(module.tables.device)).sum().backward()
    return 1.0 - float(row_of(module, "a", key)[0][0])


def falling(**arguments: Any) -> Any:
    return make_module([options(initializer_args=constant(1.0))], **arguments)


SETTERS = {
    "number": lambda module, rate: module.set_learning_rate(rate),
    "numpy": lambda module, rate: module.set_learning_rate(np.float32(rate)),
    "tensor": lambda module, rate: module.set_learning_rate(torch.tensor(rate)),
    "double": lambda module, rate: module.set_learning_rate(torch.tensor([[rate]], dtype=torch.float64)),
    "in place": lambda module, rate: (module.set_learning_rate(tensor := torch.tensor(0.125)), tensor.fill_(rate)),
}


@pytest.mark.parametrize("how", SETTERS)
def test_c13_the_rate_that_is_set_trains_and_is_saved(how: str, tmp_path: Path) -> None:
    module, other = falling(), falling()
    assert taken(module) == 1.0
    SETTERS[how](module, 0.25)
    assert module.optimizer.learning_rate == 0.25 and taken(module) == 0.25
    SETTERS[how](module, 0.5)
    # Not trained with yet.
    module.dump(tmp_path / "dump", optim=True)
    state = module.state_dict()
    other.load(tmp_path / "dump", optim=True)
    assert other.optimizer.learning_rate == 0.5 and taken(other) == 0.5
    other = falling()
    other.load_state_dict(state)
    assert other.optimizer.learning_rate == 0.5 and taken(other) == 0.5


def test_c13_a_rate_that_is_set_between_forward_and_backward_counts(backend: str) -> None:
    module = module_on(backend, options(initializer_args=constant(1.0)))
    tensor = torch.tensor(0.5)
    for setting in (lambda: module.set_learning_rate(0.25), lambda: module.set_learning_rate(tensor)):
        taken.next_id = key = getattr(taken, "next_id", 0) + 1
        ids, offsets = batch([key])
        output = module(ids.to(module.tables.device), offsets.to(module.tables.device))
        setting()
        output.sum().backward()
    assert float(row_of(module, "a", key - 1)[0][0]) == 0.75 and float(row_of(module, "a", key)[0][0]) == 0.5


def test_a_tensor_is_followed_and_written_and_let_go() -> None:
    tables, on_device = settings()
    tensor = torch.tensor(0.25)
    tables.set_learning_rate(tensor)
    assert tables.learning_rate is tensor and on_device.item() == 0.25
    tensor.mul_(2)
    assert tables.spec.learning_rate == 0.5 == on_device.item()
    tensor.mul_(2)
    assert tables.hand_on().learning_rate == 1.0 == on_device.item()
    # Who loads, or sets a number, changes the tensor, which its owner goes on changing.
    tables.set_learning_rate(0.125)
    tables.adopt(OptimizerSpec.create("adam", learning_rate=0.75, beta1=0.5))
    assert tensor.item() == 0.75 and tables.learning_rate is tensor and tables.spec.beta1 == 0.5
    tables.replace_learning_rate(0.0625)
    tensor.fill_(9)
    assert tables.learning_rate == 0.0625 == tables.hand_on().learning_rate == on_device.item()


@pytest.mark.parametrize(
    ("rate", "error", "message"),
    [
        (-1.0, ValueError, "learning_rate must be finite .* got -1.0"),
        (float("nan"), ValueError, "got nan"),
        (torch.tensor(-1.0), ValueError, "got -1.0"),
        (torch.ones(2), ValueError, r"one element, got a tensor of shape \(2,\)"),
        (torch.tensor(1), TypeError, "floating tensor, got a tensor of torch.int64"),
        ("1", TypeError, "must be a number, got '1'"),
        (True, TypeError, "must be a number, got True"),
        (None, TypeError, "must be a number, got None"),
    ],
)
@pytest.mark.parametrize("given", [0.5, "tensor"])
def test_c04_a_wrong_rate_changes_nothing(rate: Any, error: type[Exception], message: str, given: Any) -> None:
    tables, on_device = settings()
    tensor = torch.tensor(0.5)
    if given == "tensor":
        tables.set_learning_rate(tensor)
    for set_it in (tables.set_learning_rate, tables.replace_learning_rate):
        with pytest.raises(error, match=message):
            set_it(rate)
        assert tables.spec.learning_rate == on_device.item() == tensor.item() == 0.5
        assert (tables.learning_rate is tensor) is (given == "tensor")


def test_other_numbers_change_together_or_not_at_all() -> None:
    tables, on_device = settings()
    tables.change(learning_rate=0.25, beta1=0.5, weight_decay=np.float32(0.5))
    assert tables.spec == OptimizerSpec.create("adam", learning_rate=0.25, beta1=0.5, weight_decay=0.5)
    assert on_device.item() == 0.25 and json.dumps(tables.spec.to_dict(3))
    for wrong, error in (({"beta1": 2.0}, ValueError), ({"momentum": 0.5}, ValueError), ({"eps": "1"}, TypeError)):
        with pytest.raises(error, match=next(iter(wrong))):
            tables.change(learning_rate=1.0, **wrong)
        assert tables.spec.learning_rate == 0.25 == on_device.item() and tables.spec.beta1 == 0.5
    sgd = OptimizerSettings(OptimizerSpec.create("sgd"), torch.zeros(1))
    with pytest.raises(
        ValueError, match="optimizer sgd has no 'weight_decay' that can be changed; it has learning_rate"
    ):
        sgd.change(weight_decay=0.5)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_its_own_rate(how: Any) -> None:
    module = falling()
    tensor = torch.tensor(0.5)
    module.set_learning_rate(tensor)
    twin = how(module)
    tensor.fill_(0.25)
    assert (taken(module), taken(twin)) == (0.25, 0.5)
    twin.set_learning_rate(0.125)
    assert (taken(module), taken(twin)) == (0.25, 0.125)


# Sharded: the param groups that schedulers know


def group_of(optimizer: str = "adam") -> tuple[Any, Any]:
    from dynamicemb.sharding.param_group import TableParamGroup

    module = falling(optimizer=optimizer)
    return TableParamGroup(module.optimizer_settings), module


def test_the_param_group_shows_the_rate_of_the_tables() -> None:
    group, module = group_of("sgd")
    assert dict(group) == {"params": [], "lr": 1.0} and len(group) == 2 and repr(group) == "{'params': [], 'lr': 1.0}"
    group["lr"] = 0.5
    assert module.optimizer.learning_rate == 0.5 and taken(module) == 0.5
    module.set_learning_rate(0.25)
    assert group["lr"] == 0.25 and {**group}["lr"] == 0.25
    assert group.setdefault("initial_lr", 0.75) == 0.75 and "initial_lr" in group and "lr" in group
    tensor = torch.tensor(0.125)
    group.update(lr=tensor)
    assert group["lr"] is tensor and taken(module) == 0.125
    # A copy is a picture of the moment.
    twin = copy.deepcopy(group)
    twin["lr"] = 9.0
    assert taken(module) == 0.125 and twin["initial_lr"] == 0.75
    del group["initial_lr"]
    assert list(group) == ["params", "lr"]


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("weight_decay", "use update_hyper_parameters"),
        ("betas", "use update_hyper_parameters"),
        ("eps", "use update_hyper_parameters"),
        ("momentum", "give it in fused_params"),
        ("learning_rate", "set 'lr'"),
    ],
)
def test_c27_a_setting_without_an_effect_has_no_place_in_the_param_group(key: str, remedy: str) -> None:
    group, _ = group_of()
    for set_it in (group.__setitem__, group.setdefault):
        with pytest.raises(ValueError, match=f"{key}=0.5 would have no effect.*{remedy}"):
            set_it(key, 0.5)
    assert list(group) == ["params", "lr"]
    with pytest.raises(ValueError, match="'lr' cannot be removed"):
        del group["lr"]


def rates(model: Any) -> list[float]:
    return [tables.optimizer.learning_rate for tables in dynamic_modules(model)]


def change_the_rate(rank: int, world_size: int, path: str) -> None:
    """Save right after a scheduler's step; what goes on from there equals what was never interrupted."""
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad
    from tests.support.state_dict_model import Kind, build, held, train

    kind = Kind(optimizer="EXACT_ADAGRAD", static="data_parallel")

    def make() -> tuple[Any, Any]:
        model = build(kind, world_size)
        return model, torch.optim.lr_scheduler.StepLR(model.fused_optimizer, 2, gamma=0.25)

    def steps(model: Any, scheduler: Any, numbers: range) -> list[bytes]:
        losses = []
        for number in numbers:
            losses += train(model, kind, rank, [number])
            model.fused_optimizer.step()
            scheduler.step()
        return losses

    model, scheduler = make()
    steps(model, scheduler, range(2))
    rate = kind.learning_rate * 0.25
    assert rates(model) == [rate, rate] == [group["lr"] for group in model.fused_optimizer.param_groups]
    # Rows are copies already.
    state = {key: value.clone() if "dynamic" not in key else value for key, value in model.state_dict().items()}
    DynamicEmbDump(path, model, optim=True)
    for way in ("state_dict", "dump"):
        resumed, again = make()
        again.load_state_dict(scheduler.state_dict())
        resumed.load_state_dict(dict(state))
        if way == "dump":
            for tables in dynamic_modules(resumed):
                tables.set_learning_rate(7.0)
            DynamicEmbLoad(path, resumed, optim=True)
        assert [group["lr"] for group in resumed.fused_optimizer.param_groups] == [rate, rate] == rates(resumed)
        twin, schedule = (model, scheduler) if way == "dump" else (build(kind, world_size), None)
        if schedule is None:
            # A run that was never interrupted.
            schedule = torch.optim.lr_scheduler.StepLR(twin.fused_optimizer, 2, gamma=0.25)
            steps(twin, schedule, range(2))
        assert steps(resumed, again, range(2, 6)) == steps(twin, schedule, range(2, 6))
        found, wanted = held(resumed), held(twin)
        assert {name: without_scores(rows) for name, rows in found.items()} == {
            name: without_scores(rows) for name, rows in wanted.items()
        }
        assert rates(resumed) == rates(twin) == [rate / 16, rate / 16]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_c29_a_run_resumed_at_a_change_of_rate_goes_on_as_one_that_was_not(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    world_size: int,
) -> None:
    ranks.run(world_size, change_the_rate, str(tmp_path / "dump"))


def use_the_optimizer(rank: int, world_size: int) -> None:
    from torchrec.optim.keyed import CombinedOptimizer
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    from tests.support.state_dict_model import Kind, build, train

    kind = Kind(static="data_parallel")
    model, other = build(kind, world_size), build(kind, world_size)
    optimizer = model.fused_optimizer
    # Each group has its own rate, and gets its own back.
    for made in (model, other):
        made.fused_optimizer.save_param_groups(True)
    for group, rate in zip(optimizer.param_groups, (0.5, 0.25), strict=True):
        group["lr"] = rate
    assert rates(model) == [0.5, 0.25]
    state = optimizer.state_dict()
    names = [group["params"] for group in state["param_groups"]]
    assert names == [["bags.embedding_bags.users.weight"], ["sequences.embeddings.things.weight"]]
    other.fused_optimizer.load_state_dict(state)
    assert rates(other) == [0.5, 0.25]
    optimizer.save_param_groups(False)
    assert not optimizer.params and "param_groups" not in optimizer.state_dict()
    assert [group["params"] for group in optimizer.param_groups] == [[], []]
    # A captured graph does not run Python: a tensor's new value arrives with step() or zero_grad().
    tensor = torch.tensor(0.5)
    for group in optimizer.param_groups:
        group["lr"] = tensor
    for hand_on in (optimizer.step, optimizer.zero_grad):
        tensor.mul_(0.5)
        hand_on()
        assert {float(tables.tables.learning_rate) for tables in dynamic_modules(model)} == {float(tensor)}
    optimizer.update_hyper_parameters({"lr": 0.125, "weight_decay": 0.5})
    assert [(tables.optimizer.learning_rate, tables.optimizer.weight_decay) for tables in dynamic_modules(model)] == [
        (0.125, 0.5)
    ] * 2
    with pytest.raises(ValueError, match="optimizer adam has no 'lower_bound'"):
        optimizer.update_hyper_parameters({"lower_bound": 0.5})
    optimizer.set_optimizer_step(41)
    train(model, kind, rank, [0])
    assert {updates_of(tables) for tables in dynamic_modules(model)} == {42}
    with pytest.raises(ValueError, match="step must be an int in .*, got -1"):
        optimizer.set_optimizer_step(-1)
    warm = WarmupOptimizer(
        optimizer, [WarmupStage(WarmupPolicy.CONSTANT, max_iters=5, value=0.5)], lr=0.25, lr_param="lr"
    )
    CombinedOptimizer([warm]).step()
    assert rates(model) == [0.125, 0.125]


def updates_of(tables: Any) -> int:
    from dynamicemb.table.index import UPDATES

    return int(tables.tables.index.clock[UPDATES])


@pytest.mark.distributed
def test_what_torchrec_hands_on_to_optimizers_reaches_the_tables(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(1, use_the_optimizer)
