"""The sharded collections as torch modules: seeds, learning rates, state_dict, evaluation, and what they refuse."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from dynamicemb.errors import UnsupportedOptionError
from tests.support.ranks import GpuRanks, RankError, RankPool, ranks  # noqa: F401
from tests.support.sharded_model import (
    LEARNING_RATE,
    Case,
    Table,
    build,
    dynamic_modules,
    exported,
    loss_of,
    make_batch,
    make_kjt,
    outputs_of,
)

pytestmark = pytest.mark.distributed

A = Table("a", ("f0", "f1"))
B = Table("b", ("f2",), dist_type="hash_roundrobin", score="LFU")
STATIC = Table("s", ("g0",), sharding="row_wise", num_embeddings=12)
EC = Case((A, B, STATIC), pooled=False)
EBC = Case((A, B, STATIC), pooled=True)
KINDS = pytest.mark.parametrize("case", [EC, EBC], ids=["ec", "ebc"])


def forward(case: Case, model: Any, step: int, rank: int) -> dict[str, torch.Tensor]:
    return outputs_of(case, model(make_kjt(make_batch(case, step, rank), case)))


def same_rows(one: dict[str, dict[int, torch.Tensor]], other: dict[str, dict[int, torch.Tensor]]) -> bool:
    return {name: rows.keys() for name, rows in one.items()} == {
        name: rows.keys() for name, rows in other.items()
    } and all(torch.equal(row, other[name][i]) for name, rows in one.items() for i, row in rows.items())


def first_rows(rank: int, world_size: int, case: Case, seed_of_rank_0: int) -> dict[str, dict[int, torch.Tensor]]:
    torch.manual_seed(seed_of_rank_0 if rank == 0 else 999 + rank)
    model = build(case, world_size, seed=None)
    forward(case, model, 0, rank)
    return exported(model)


def check_seeds(pool: RankPool | GpuRanks, case: Case) -> None:
    def merged(world_size: int, seed: int) -> dict[str, dict[int, torch.Tensor]]:
        rows: dict[str, dict[int, torch.Tensor]] = {}
        for result in pool.run(world_size, first_rows, case, seed):
            for name, part in result.items():
                rows.setdefault(name, {}).update(part)
        return rows

    one, two, other = merged(1, 7), merged(2, 7), merged(2, 2**63 + 5)
    for name, rows in one.items():
        assert rows.keys() <= two[name].keys() and rows
        assert all(torch.equal(row, two[name][i]) for i, row in rows.items())
        assert not any(torch.equal(row, other[name][i]) for i, row in rows.items())


@KINDS
def test_c05_the_seed_of_rank_0_decides(ranks: RankPool, case: Case) -> None:  # noqa: F811
    check_seeds(ranks, replace(case, batch_sizes=(9,)))


def schedule(rank: int, world_size: int, case: Case) -> list[list[float]]:
    model = build(case, world_size)
    scheduler = torch.optim.lr_scheduler.StepLR(model.fused_optimizer, step_size=1, gamma=0.5)
    rates = []
    for step in range(3):
        outputs = forward(case, model, step, rank)
        loss_of(outputs).backward()
        model.fused_optimizer.step()
        rates.append([tables.optimizer.learning_rate for tables in dynamic_modules(model)])
        scheduler.step()
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.25
    # Without step() or zero_grad() the next forward hands it on.
    forward(case, model, 0, rank)
    rates.append([tables.optimizer.learning_rate for tables in dynamic_modules(model)])
    return rates


def check_rates(results: list[list[list[float]]]) -> None:
    for rates in results:
        assert rates == [[rate] * len(rates[0]) for rate in (LEARNING_RATE, LEARNING_RATE / 2, LEARNING_RATE / 4, 0.25)]


@KINDS
def test_schedulers_reach_the_tables(ranks: RankPool, case: Case) -> None:  # noqa: F811
    check_rates(ranks.run(2, schedule, case))


def save_and_load(rank: int, world_size: int, case: Case) -> None:
    model = build(case, world_size)
    loss_of(forward(case, model, 0, rank)).backward()
    before = exported(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state = model.state_dict()
        assert {key.split(".")[-2] for key in state} == {"a", "b", "s"}
        model.load_state_dict(state)
    assert same_rows(before, exported(model))
    prefix = next(iter(state)).rsplit(".", 2)[0]
    dense = dict(state)
    dense[f"{prefix}.a.weight"] = torch.zeros(1000, 4)
    with pytest.warns(UserWarning, match=r"ignores the weights of dynamic tables \['a'\]"):
        model.module.load_state_dict(dense, strict=True)
    assert same_rows(before, exported(model))
    optimizer_state = model.fused_optimizer.state_dict()
    model.fused_optimizer.load_state_dict(optimizer_state)
    assert [weight.numel() for name, weight in model.named_parameters() if ".a." in name] == [0]


@KINDS
def test_c09_state_dict_loses_no_rows(ranks: RankPool, case: Case) -> None:  # noqa: F811
    ranks.run(2, save_and_load, case)


def reshard(rank: int, world_size: int, case: Case) -> None:
    model = build(case, world_size)
    forward(case, model, 0, rank)
    before = exported(model)
    changed = {"s": model.plan.plan["collection"]["s"]}
    message = r"a collection with dynamic tables \['a', 'b'\] cannot be resharded in this version"
    with pytest.raises(UnsupportedOptionError, match=message):
        model.module.collection.update_shards(changed, model._env, model.device)
    if case.pooled:
        # TorchRec knows how to move the tables of bags only.
        with pytest.raises(UnsupportedOptionError, match=message):
            model.reshard({"collection": (0.0, changed)}, "collection")
    assert same_rows(before, exported(model))
    forward(case, model, 0, rank)


@KINDS
def test_c27_resharding_is_refused(ranks: RankPool, case: Case) -> None:  # noqa: F811
    ranks.run(2, reshard, case)


def evaluate(rank: int, world_size: int, case: Case) -> None:
    model = build(case, world_size)
    # Few samples: the next batch must have ids that are new on every rank.
    forward(replace(case, batch_sizes=(1,)), model, 0, rank)
    before = exported(model)
    model.eval()
    assert not any(tables.training for tables in dynamic_modules(model))
    outputs = forward(case, model, 1, rank)
    assert all(bool(torch.isfinite(out).all()) for out in outputs.values())
    assert same_rows(before, exported(model))
    model.train()
    forward(case, model, 1, rank)
    assert not same_rows(before, exported(model))


@KINDS
def test_c11_evaluation_changes_nothing(ranks: RankPool, case: Case) -> None:  # noqa: F811
    ranks.run(2, evaluate, replace(case, batch_sizes=(9,)))


def shard(rank: int, world_size: int, change: str) -> None:
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_modules import EmbeddingCollection

    from dynamicemb.shard import DynamicEmbeddingCollectionSharder
    from tests.support.sharded_model import embedding_configs

    model = build(EC, world_size)
    plan = dict(model.plan.plan["collection"])
    if change == "dist_type":
        plan["a"] = replace(plan["a"], dist_type="continuous")
    elif change == "sharding_type":
        plan["a"] = replace(plan["a"], sharding_type="table_wise")
    # A module with weights: those of dynamic tables are not used, those of static ones are.
    collection = EmbeddingCollection(tables=embedding_configs(EC), device=torch.device("cpu"))
    with torch.no_grad():
        collection.embeddings["s"].weight.fill_(3.0)
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharder = DynamicEmbeddingCollectionSharder(fused_params={"learning_rate": 0.5})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message=".*dynamic tables.*")
        sharded = sharder.shard(collection, plan, env, torch.device("cpu"))
    outputs = outputs_of(EC, sharded(make_kjt(make_batch(EC, 0, rank), EC)))
    assert bool((outputs["g0"] == 3.0).all())
    assert bool((outputs["f0"].abs() < 0.05).all())


def test_a_module_with_weights_is_sharded(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, shard, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dist_type", "dist_type='continuous' of dynamic table 'a' differs from that of its options, 'roundrobin'"),
        ("sharding_type", "sharding_type of dynamic table 'a' must be 'row_wise', got 'table_wise'"),
    ],
)
def test_c04_a_contradictory_plan_is_refused_on_every_rank(ranks: RankPool, change: str, message: str) -> None:  # noqa: F811
    with pytest.raises(RankError, match=rf"failed \(all: \[\d, \d\]\)(.|\n)*ValueError: {message}"):
        ranks.run(2, shard, change)


def shard_with(rank: int, world_size: int, case: Case) -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    static = r"optimizer ADAM: static tables \['s'\] cannot use it on the CPU .*EXACT_SGD or .*use_dynamicemb=True"
    with pytest.raises(ValueError, match=static):
        build(case, world_size, optimizer=EmbOptimType.ADAM)
    with pytest.raises(TypeError, match=r"'lr', which neither dynamic tables nor static .*\['s'\]; use learning_rate"):
        build(case, world_size, lr=0.5)
    dense = replace(case, tables=(A, B, replace(STATIC, sharding="data_parallel")))
    # Dense tables are trained by the optimizer of the dense layers.
    build(dense, world_size, optimizer=EmbOptimType.ADAM)


@KINDS
def test_c04_fused_params_that_no_table_can_use_are_refused(ranks: RankPool, case: Case) -> None:  # noqa: F811
    ranks.run(2, shard_with, case)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lr", "use learning_rate"),
        ("learnig_rate", "did you mean 'learning_rate'?"),
        ("beta_1", "did you mean 'beta1'?"),
        ("xyzzy", "known: beta1, beta2, betas, counter"),
    ],
)
def test_c27_a_wrong_name_in_fused_params_is_explained_and_ignored(name: str, hint: str) -> None:
    from dynamicemb.planner import DynamicEmbParameterSharding
    from dynamicemb.sharding.checks.params import arguments_of_module, check_fused_params, unknown_params

    assert unknown_params(["optimizer", "betas", "seed", "cache_precision"]) == []
    plan = {"a": DynamicEmbParameterSharding(sharding_type="row_wise", ranks=[0])}
    with pytest.warns(UserWarning) as recorded:
        check_fused_params({"optimizer": "adam", name: 0.5}, plan, {}, None)
    (warning,) = recorded
    start = f"{name}=0.5 has no effect: fused_params has no such argument; {hint}"
    assert str(warning.message).startswith(start)
    assert arguments_of_module({"optimizer": "adam", name: 0.5}) == {"optimizer": "adam"}


def vary_batch(rank: int, world_size: int, pooling: str) -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model = build(Case((replace(A, pooling=pooling),), pooled=True), world_size)
    batch = KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f0", "f1"], torch.tensor([[0, 1], [0, 0]])),
    )
    with pytest.raises(ValueError, match="batches of variable size per feature are not supported"):
        model(batch).to_dict()


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_c28_variable_batches_of_bags_are_refused(ranks: RankPool, pooling: str) -> None:  # noqa: F811
    ranks.run(2, vary_batch, pooling)


def ignore_weights(rank: int, world_size: int, device: str) -> None:
    for case in (replace(EC, device=device), replace(EBC, device=device)):
        plain = forward(case, build(case, world_size), 0, rank)
        weighted = {**make_batch(case, 0, rank)}
        weighted["weights"] = torch.full((weighted["values"].numel(),), 5.0)
        outputs = outputs_of(case, build(case, world_size)(make_kjt(weighted, case)))
        dynamic = [name for name in plain if name.startswith("f")]
        assert all(torch.equal(plain[name], outputs[name]) for name in dynamic)


def test_weights_of_unweighted_collections_are_ignored(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, ignore_weights, "cpu")
