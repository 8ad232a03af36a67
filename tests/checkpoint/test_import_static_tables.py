"""What an import of static tables reads, writes and refuses; on modules of tables alone."""

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import (
    DynamicEmbDump,
    DynamicEmbError,
    DynamicEmbLoad,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    import_static,
)
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.checkpoint.static.stream import Received, Stream
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode
from tests.support.checkpoints import records

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


# Which tables


def two_collections(first: str, second: str) -> dict[str, torch.Tensor]:
    return {f"{path}.embedding_bags.t.weight": rows_of(20, salt=i) for i, path in enumerate((first, second))}


class Nested(torch.nn.Module):
    def __init__(self, **tables: Any) -> None:
        super().__init__()
        for name, value in tables.items():
            setattr(self, name, value)


def held(tables: BatchedDynamicEmbeddingTablesV2, name: str = "t") -> torch.Tensor:
    ids, weights = tables.export_keys_values(name, "cpu")
    return weights[ids.argsort()]


def test_a_table_is_found_by_the_end_of_its_path() -> None:
    a, b = module(), module()
    model = Nested(a=a, over=Nested(a=b))
    for prefix in ("", "model.", "app.state.model."):
        values = two_collections(f"{prefix}a", f"{prefix}over.a")
        report = import_static(model, values, optimizer=False)
        assert [report[path]["t"].source for path in ("model.a", "model.over.a")] == list(values)
        assert torch.equal(held(a), rows_of(20)) and torch.equal(held(b), rows_of(20, salt=1))
    # Of two that fit, the one with nothing before it is meant.
    alone = import_static(Nested(a=a), two_collections("over.a", "a"), optimizer=False)
    assert alone["model.a"]["t"].source == "a.embedding_bags.t.weight" and torch.equal(held(a), rows_of(20, salt=1))
    # Nested mappings are named as torch.distributed.checkpoint names them.
    nested = {"app": {"model": two_collections("a", "over.a")}, "step": 4, "lists": [1]}
    assert import_static(model, nested, optimizer=False)["model.a"]["t"].source == "app.model.a.embedding_bags.t.weight"


@pytest.mark.parametrize("prefix", ["", "module.", "_dmp_wrapped_module.module.", "run.module."])
def test_wrappers_in_a_path_do_not_matter(prefix: str) -> None:
    tables, other = module(), module()
    model = Nested(module=Nested(a=tables), b=Nested(a=other))
    values = two_collections(f"{prefix}module.a", f"{prefix}b.a")
    report = import_static(model, values, optimizer=False)
    assert [report[path]["t"].source for path in ("model.module.a", "model.b.a")] == list(values)


def test_a_name_that_one_static_table_has_is_enough() -> None:
    tables = module()
    report = import_static(Nested(renamed=tables), {"old.embeddings.t.weight": rows_of(20)}, optimizer=False)
    assert report["model.renamed"]["t"].source == "old.embeddings.t.weight"


def test_two_static_tables_that_fit_are_refused_until_one_is_named() -> None:
    tables = module()
    model = Nested(a=tables)
    for values in (two_collections("x.a", "y.a"), two_collections("x", "y")):
        with pytest.raises(ValueError, match=r"several static tables .*: x\S*, y\S*; name one with table_names="):
            import_static(model, values, optimizer=False)
        chosen = list(values)[1]
        import_static(model, values, optimizer=False, table_names={"model.a": {"t": chosen}})
        assert torch.equal(held(tables), values[chosen])
    with pytest.raises(ValueError, match="no weights 'nothing' for table model.a/t; it has those of x.emb"):
        import_static(model, values, table_names={"model.a": {"t": "nothing"}})
    with pytest.raises(TypeError, match="must be a key of the checkpoint"):
        import_static(model, values, table_names={"model.a": {"t": 3}})


def test_the_state_is_that_of_the_collection() -> None:
    a, b = module("exact_adagrad"), module("exact_adagrad")
    values = two_collections("a", "over.a")
    state = {key: {"t.momentum1": torch.full((20, DIM), float(i + 2))} for i, key in enumerate(values)}
    import_static(Nested(a=a, over=Nested(a=b)), values, {"state": state, "param_groups": [{"lr": 9.0}]})
    assert {record[1] for record in records(a, "t").values()} == {torch.full((DIM,), 2.0).numpy().tobytes()}
    assert {record[1] for record in records(b, "t").values()} == {torch.full((DIM,), 3.0).numpy().tobytes()}
    assert a.optimizer.learning_rate == 0.1


def test_tables_without_a_static_one() -> None:
    tables = module(names=("t", "u"))
    tables.insert("u", torch.tensor([7]), torch.ones(1, DIM))
    values = {"embeddings.t.weight": rows_of(20), "embeddings.v.weight": rows_of(20)}
    with pytest.warns(UserWarning, match="no static table for model/u, which stay as they are"):
        report = import_static(tables, values, optimizer=False)
    assert list(report["model"]) == ["t"] and tables.contains("u", torch.tensor([7])).all()
    with pytest.raises(ValueError, match="no static table for model/u; the checkpoint has the weights embeddings.t"):
        import_static(tables, values, table_names={"model": ["t", "u"]})
    with pytest.raises(ValueError, match="no static table for model/t, model/u; the checkpoint has the weights none"):
        import_static(tables, {})
    with pytest.raises(ValueError, match="there is no collection 'model.x'"):
        import_static(tables, values, table_names={"model.x": ["t"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_static(tables, values, optimizer=False, table_names={"model": ["t"]})


# What does not fit


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.zeros(20, DIM + 1), f"has dim {DIM}, embeddings.t.weight of the checkpoint the size .* embedding_dim=5"),
        (torch.zeros(20, DIM, dtype=torch.uint8), "has the dtype torch.uint8"),
        (torch.zeros(20 * DIM), "has dim"),
        (torch.zeros(0, DIM), "has no rows"),
        (torch.zeros(20, DIM, device="meta"), "must be a dense tensor with data"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_the_table_changes(weights: torch.Tensor, message: str) -> None:
    tables = module()
    tables.insert("t", torch.tensor([-5]), torch.ones(1, DIM))
    with pytest.raises(ValueError, match=message):
        import_static(tables, {"embeddings.t.weight": weights})
    assert tables.stats()["t"]["size"] == 1


def test_state_that_does_not_fit_the_weights_is_refused() -> None:
    tables = module("exact_row_wise_adagrad")
    weights = {"embeddings.t.weight": rows_of(20)}
    for size, message in (((19,), "does not fit the 20 rows"), ((40,), "the state of 2 blocks of columns")):
        state = {"state": {"embeddings.t.weight": {"t.momentum1": torch.zeros(size)}}}
        with pytest.raises(ValueError, match=message):
            import_static(tables, weights, state)
    state = {"state": {f"{path}embeddings.t.weight": {"t.momentum1": torch.zeros(20)} for path in ("", "module.")}}
    with pytest.raises(ValueError, match="may be the state of"):
        import_static(tables, weights, state)


@pytest.mark.parametrize("checkpoint", [3, None, [rows_of(20)], b"folder"])
def test_what_is_no_checkpoint_is_refused(checkpoint: Any) -> None:
    with pytest.raises(TypeError, match="checkpoint must be"):
        import_static(module(), checkpoint)


def test_c14_gradients_of_a_forward_before_the_import_are_dropped() -> None:
    tables = module()
    out = tables(torch.arange(3), torch.arange(4))
    with pytest.warns(UserWarning, match=r"backward of forwards has not run: 1 of tables \['model/t'\]"):
        import_static(tables, {"embeddings.t.weight": rows_of(20)})
    out.sum().backward()
    ids, weights = tables.export_keys_values("t", "cpu")
    assert torch.equal(weights[ids.argsort()], rows_of(20))
    assert tables.stats()["t"]["dropped_gradients"] == 3


# Numbers


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_converted_to_the_table_dtype(source: torch.dtype, target: torch.dtype) -> None:
    tables = module(embedding_dtype=target)
    weights = rows_of(20).to(source)
    weights[3, 1], weights[4, 2] = float("nan"), float("-inf")
    import_static(tables, {"embeddings.t.weight": weights})
    assert torch.equal(held(tables).nan_to_num(7), weights.float().to(target).float().nan_to_num(7))


def test_weights_beyond_the_table_dtype_are_refused_and_leave_it_empty() -> None:
    tables = module(embedding_dtype=torch.float16)
    weights = rows_of(20)
    weights[13, 2] = 1e6
    with pytest.raises(DynamicEmbError, match="1 rows have weights beyond the range of torch.float16.*of id 13"):
        import_static(tables, {"embeddings.t.weight": weights})
    assert tables.stats()["t"]["size"] == 0


@pytest.mark.parametrize(("name", "score"), [("LFU", 1), ("STEP", 4), ("CUSTOMIZED", 9)])
def test_ids_have_the_scores_of_an_insert(name: str, score: int) -> None:
    tables = module(score_strategy=DynamicEmbScoreStrategy[name])
    if name == "CUSTOMIZED":
        with pytest.raises(DynamicEmbError, match="CUSTOMIZED: table model/t has no score"):
            import_static(tables, {"embeddings.t.weight": rows_of(20)})
        tables.set_score({"t": 9})
    train(tables, range(3))
    import_static(tables, {"embeddings.t.weight": rows_of(20)})
    tables.insert("t", torch.tensor([77]), torch.ones(1, DIM))
    assert {record[2] for record in records(tables, "t").values()} == {(score,)}
    (tables(torch.arange(2), torch.arange(3)) * 0).sum().backward()
    later = {"LFU": 2, "STEP": 4, "CUSTOMIZED": 9}[name]
    assert records(tables, "t")[1][2] == (later,)


@pytest.mark.parametrize("names", [("TIMESTAMP",), ("NO_EVICTION",), ("TIMESTAMP", "LFU"), ("LFU", "TIMESTAMP")])
def test_times_of_ids_are_the_present(names: tuple[str, ...]) -> None:
    parts = tuple(DynamicEmbScoreStrategy[name] for name in names)
    room = {"init_capacity": 1024, "max_capacity": None} if names == ("NO_EVICTION",) else {}
    tables = module(score_strategy=parts if len(parts) > 1 else parts[0], **room)
    train(tables, range(3))
    before = tables.get_score()["t"]
    import_static(tables, {"embeddings.t.weight": rows_of(20)})
    after = tables.get_score()["t"]
    for record in records(tables, "t").values():
        for name, number in zip(names, record[2], strict=True):
            assert number == 1 if name == "LFU" else before <= number < after


def test_ids_without_a_place_are_counted_with_a_warning() -> None:
    tables = module(max_capacity=128)
    weights = rows_of(1000)
    with pytest.warns(UserWarning, match="of 1000 ids found no place; raise max_capacity"):
        report = import_static(tables, {"embeddings.t.weight": weights})["model"]["t"]
    ids, found = tables.export_keys_values("t", "cpu")
    assert report.num_rows == 1000 and report.num_lost == 1000 - ids.numel() and ids.numel() == 128
    assert torch.equal(found, weights[ids])


def test_a_table_that_grows_takes_all() -> None:
    tables = module(
        score_strategy=DynamicEmbScoreStrategy.NO_EVICTION, init_capacity=128, max_capacity=None, embedding_dtype=None
    )
    weights = rows_of(70000)
    assert import_static(tables, {"embeddings.t.weight": weights})["model"]["t"].num_lost == 0
    assert torch.equal(held(tables), weights)


def test_a_row_that_is_not_as_it_was_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = module("exact_adagrad")
    weights, state = as_static(tables, 20)
    kernels = tables.tables.kernels
    original = kernels.write_rows
    for damaged in (0, 1):

        def write(store: Any, table: int, rows: Any, weights: Any, state: Any, damaged: int = damaged) -> None:
            values = [weights.clone(), state.clone()]
            values[damaged][5:6, 1] += 1e-6
            original(store, table, rows, *values)

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "write_rows", write)
            with pytest.raises(DynamicEmbError, match="1 rows are not as they were written"):
                import_static(tables, weights, state)
        assert tables.stats()["t"]["size"] == 0
    import_static(tables, weights, state)
    assert tables.stats()["t"]["size"] == 20


def test_a_row_that_gets_lost_on_the_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = module()
    group = tables.tables
    original = Stream.exchange

    def lose(self: Stream, block: Any, values: Any) -> Any:
        received = original(self, block, values)
        return Received(received.rows[1:], received.ids[1:], [column[1:] for column in received.columns])

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "exchange", lose)
        with pytest.raises(DynamicEmbError, match="20 rows were sent and 19 came; all tables of the call are empty"):
            import_static(tables, {"embeddings.t.weight": rows_of(20)})
    assert tables.stats()["t"]["size"] == 0
    size = group.size
    with monkeypatch.context() as patch:
        patch.setattr(group, "size", lambda table: size(table) - 1)
        with pytest.raises(DynamicEmbError, match="of 20 rows 19 are in the table and 0 are known to be lost"):
            import_static(tables, {"embeddings.t.weight": rows_of(20)})
    assert tables.stats()["t"]["size"] == 0


def test_an_error_in_the_second_table_empties_both(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = module(names=("t", "u"), embedding_dtype=torch.float16)
    values = {"embeddings.t.weight": rows_of(20), "embeddings.u.weight": rows_of(20)}
    import_static(tables, values)
    values["embeddings.u.weight"][2, 2] = 1e6
    with pytest.raises(DynamicEmbError, match="table model/u"):
        import_static(tables, values)
    assert [of_table["size"] for of_table in tables.stats().values()] == [0, 0]
    values["embeddings.u.weight"][2, 2] = 1
    import_static(tables, values)
    assert [of_table["size"] for of_table in tables.stats().values()] == [20, 20]


# With other options


def test_a_table_that_only_evaluates_takes_weights_alone() -> None:
    source = module("adam")
    train(source, range(4))
    tables = module("adam", training=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = import_static(tables, *as_static(source, 20))["model"]["t"]
    assert not report.has_state and torch.equal(held(tables), held(source))


def test_imported_ids_are_admitted_and_live_as_long_as_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = {"admit_strategy": FrequencyAdmissionStrategy(3), "admission_counter": KVCounter(256, 16)}
    for options in (admission, {"ttl": 3600.0}):
        tables = module(**options)
        out = tables(torch.arange(5), torch.arange(6))
        out.sum().backward()
        import_static(tables, {"embeddings.t.weight": rows_of(20)})
        assert torch.equal(held(tables), rows_of(20))
        out = tables(torch.arange(20), torch.arange(21))
        assert torch.equal(out, rows_of(20))
        out.sum().backward()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3601 * 10**9)
    assert not tables.contains("t", torch.arange(20)).any()


def test_an_increment_cannot_go_on_from_before_an_import(tmp_path: Path) -> None:
    tables = module()
    train(tables, range(2))
    DynamicEmbDump(f"{tmp_path}/base", tables)
    import_static(tables, {"embeddings.t.weight": rows_of(20)})
    with pytest.raises(DynamicEmbError, match="base"):
        DynamicEmbDump(f"{tmp_path}/more", tables, base=f"{tmp_path}/base")
    DynamicEmbDump(f"{tmp_path}/full", tables)
    restored = module()
    DynamicEmbLoad(f"{tmp_path}/full", restored)
    assert torch.equal(held(restored), rows_of(20))
