"""What an import of static tables reads, writes and refuses; on modules of tables alone."""

import warnings
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbTableOptions, import_static
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode
from tests.checkpoints import records

DIM = 4
OPTIMIZERS = ["sgd", "exact_adagrad", "exact_row_wise_adagrad", "adam"]
# What TorchRec calls the states of a row.
STATES = {
    "sgd": [],
    "exact_adagrad": ["momentum1"],
    "exact_row_wise_adagrad": ["momentum1"],
    "adam": ["momentum1", "exp_avg_sq"],
}


def module(optimizer: str = "sgd", names: tuple[str, ...] = ("t",), **options: Any) -> BatchedDynamicEmbeddingTablesV2:
    options = {"dim": DIM, "max_capacity": 1024} | options
    made = [DynamicEmbTableOptions(**options) for _ in names]
    return BatchedDynamicEmbeddingTablesV2(
        made, list(names), pooling_mode=DynamicEmbPoolingMode.NONE, optimizer=optimizer, device="cpu", seed=5,
        learning_rate=0.1,
    )  # fmt: skip


def rows_of(count: int, dim: int = DIM, salt: int = 0) -> torch.Tensor:
    """Return weights that tell rows and columns apart."""
    return torch.sin(torch.arange(count * dim).reshape(count, dim).float() * 1.7 + salt)


def train(tables: BatchedDynamicEmbeddingTablesV2, steps: range, num_ids: int = 20) -> list[torch.Tensor]:
    outputs = []
    for step in steps:
        ids = torch.randint(0, num_ids, (30,), generator=torch.Generator().manual_seed(step))
        out = tables(ids, torch.arange(31))
        (out * torch.linspace(-1, 2, DIM)).square().sum().backward()
        outputs.append(out.detach().clone())
    return outputs


def as_static(tables: BatchedDynamicEmbeddingTablesV2, num_rows: int, path: str = "") -> tuple[dict, dict]:
    """Return the state_dict and the optimizer's of a static table whose row r is that of id r."""
    name = tables.optimizer_settings.name
    weights, state = rows_of(num_rows), torch.full((num_rows, tables.tables.store.formats[0].num_state), 0.0)
    slots = tables.tables.scan(0)
    ids, rows = tables.tables.index.keys[slots], tables.tables.index.rows[slots]
    weights[ids], state[ids] = tables.tables.read(0, rows)
    columns = state.split(DIM, 1) if name != "exact_row_wise_adagrad" else [state[:, 0]]
    key = f"{path}embedding_bags.t.weight"
    states = {f"t.{item}": column for item, column in zip(STATES[name], columns, strict=False)}
    return {key: weights}, {"state": {key: states}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_bit(optimizer: str) -> None:
    first = module(optimizer)
    train(first, range(4))
    weights, state = as_static(first, 20)
    second = module(optimizer)
    train(second, range(90, 93))
    report = import_static(second, weights, state, step=4 if optimizer == "adam" else None)["model"]["t"]
    assert (report.num_rows, report.num_lost, report.num_repeated, report.num_without_id) == (20, 0, 0, 0)
    for a, b in zip(train(first, range(4, 8)), train(second, range(4, 8)), strict=True):
        assert torch.equal(a, b)


def test_the_steps_of_adam_must_be_known() -> None:
    first = module("adam")
    train(first, range(4))
    weights, state = as_static(first, 20)
    second = module("adam")
    with pytest.raises(ValueError, match=r"ADAM needs the number of steps .* pass step="):
        import_static(second, weights, state)
    assert second.stats()["t"]["size"] == 0
    import_static(second, weights, state, step=40)
    wrong = train(second, range(4, 7))
    # As torch's Adam keeps it, and FBGEMM's modules.
    for number in ({"t.iter": torch.tensor([4])}, {"step": torch.tensor(4.0)}, {"step": 4}):
        with_count = {"state": {key: items | number for key, items in state["state"].items()}}
        third = module("adam")
        import_static(third, weights, with_count)
        fourth = module("adam")
        import_static(fourth, weights, state, step=4)
        found = train(third, range(4, 7))
        assert all(torch.equal(a, b) for a, b in zip(found, train(fourth, range(4, 7)), strict=True))
        assert not torch.equal(found[-1], wrong[-1])


def test_steps_that_nobody_counts_are_a_warning() -> None:
    first = module("exact_adagrad")
    with pytest.warns(UserWarning, match="step has no effect"):
        import_static(first, *as_static(first, 20), step=4)
    with pytest.raises(TypeError, match="step must be an int"):
        import_static(first, *as_static(first, 20), step=True)
    with pytest.raises(ValueError, match="step must be in"):
        import_static(first, *as_static(first, 20), step=-1)


def test_without_state_rows_begin_with_the_initial_one() -> None:
    tables = module("exact_adagrad")
    weights, state = as_static(tables, 20)
    with pytest.warns(UserWarning, match="no optimizer state; rows begin with the initial state of exact_adagrad"):
        report = import_static(tables, weights)
    assert not report["model"]["t"].has_state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_static(tables, weights, optimizer=False)
        fresh = module("exact_adagrad")
        fresh.insert("t", torch.arange(20), rows_of(20))
        assert all(torch.equal(a, b) for a, b in zip(train(tables, range(3)), train(fresh, range(3)), strict=True))


@pytest.mark.parametrize("mine", OPTIMIZERS)
@pytest.mark.parametrize("theirs", OPTIMIZERS)
def test_another_optimizer_is_refused_by_name(mine: str, theirs: str) -> None:
    source = module(theirs)
    train(source, range(2))
    weights, state = as_static(source, 20)
    tables = module(mine)
    tables.insert("t", torch.tensor([-5]), torch.ones(1, DIM))
    if mine == theirs:
        import_static(tables, weights, state, step=2 if mine == "adam" else None)
        return
    with pytest.raises(
        ValueError, match=f"trains with {mine}, the checkpoint has the state of {theirs} .*optimizer=False"
    ):
        import_static(tables, weights, state)
    assert tables.contains("t", torch.tensor([-5])).all()
    import_static(tables, weights, optimizer=False)
    assert tables.stats()["t"]["size"] == 20


@pytest.mark.parametrize(
    ("states", "name"),
    [
        ({"momentum1": (20, DIM), "exp_avg_sq": (20,)}, "partial_row_wise_adam"),
        ({"momentum1": (20,), "sparse_ema": (20, DIM)}, "ensemble_row_wise_adagrad"),
        ({"momentum1": (20, DIM), "exp_avg_sq": (20, DIM), "row_counter": (20,)}, "adam with row_counter"),
        ({"momentum_buffer": (20, DIM)}, "one with the state .*momentum_buffer"),
    ],
)
def test_optimizers_that_dynamic_tables_lack_are_refused(states: dict[str, tuple[int, ...]], name: str) -> None:
    items = {f"t.{item}": torch.zeros(size) for item, size in states.items()}
    weights = {"embeddings.t.weight": rows_of(20)}
    for optimizer in OPTIMIZERS:
        with pytest.raises(ValueError, match=name):
            import_static(module(optimizer), weights, {"state": {"embeddings.t.weight": items}})


def test_counters_of_adagrad_are_left_with_a_warning() -> None:
    items = {"t.momentum1": torch.rand(20), "t.prev_iter": torch.zeros(20), "t.row_counter": torch.zeros(20)}
    tables = module("exact_row_wise_adagrad")
    with pytest.warns(UserWarning, match="prev_iter, row_counter .* not imported"):
        import_static(tables, {"embeddings.t.weight": rows_of(20)}, {"state": {"embeddings.t.weight": items}})
    assert {i: record[1] for i, record in records(tables, "t").items()} == {
        i: items["t.momentum1"][i : i + 1].numpy().tobytes() for i in range(20)
    }


def test_state_of_torch_optimizers_is_known() -> None:
    weights = rows_of(20)
    parameter = torch.nn.Parameter(weights.clone())
    adagrad = torch.optim.Adagrad([parameter], lr=0.1, eps=1e-8)
    tables = module("exact_adagrad")
    (parameter * 3).square().sum().backward()
    adagrad.step()
    key = "embedding_bags.t.weight"
    import_static(tables, {key: parameter}, {"state": {key: dict(adagrad.state[parameter])}})
    parameter.grad = None
    out = tables(torch.arange(20), torch.arange(21))
    out.square().sum().backward()
    parameter.square().sum().backward()
    adagrad.step()
    ids, found = tables.export_keys_values("t", "cpu")
    torch.testing.assert_close(found[ids.argsort()], parameter.detach(), rtol=1e-6, atol=1e-6)
