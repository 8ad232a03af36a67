"""Sharded collections at the edge: unusual inputs, process groups and plans; what cannot work says so on every rank."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dynamicemb.errors import DynamicEmbError
from tests.support.ranks import GpuRanks, RankPool, ranks  # noqa: F401
from tests.support.sharded_model import (
    Case,
    Table,
    build,
    device_of,
    dynamic_modules,
    exported,
    make_batch,
    make_kjt,
    outputs_of,
)

pytestmark = pytest.mark.distributed

A = Table("a", ("f0",))
B = Table("b", ("f1",), dist_type="hash_roundrobin", score="LFU")
CASES = {
    "ec": Case((A, B), pooled=False),
    "ec-dedup": Case((A, B), pooled=False, dedup=True),
    "ebc": Case((A, B), pooled=True),
}
KINDS = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def look_up_unsigned(rank: int, world_size: int, case: Case) -> None:
    batch = make_batch(case, 0, rank)
    signed, unsigned = build(case, world_size), build(case, world_size)
    expected = outputs_of(case, signed(make_kjt(batch, case)))
    batch["values"] = batch["values"].view(torch.uint64)
    # Non-contiguous, too: every second of doubled ids.
    batch["values"] = batch["values"].repeat_interleave(2)[::2]
    outputs = outputs_of(case, unsigned(make_kjt(batch, case)))
    assert all(torch.equal(value, outputs[name]) for name, value in expected.items())
    assert {n: set(rows) for n, rows in exported(signed).items()} == {
        n: set(rows) for n, rows in exported(unsigned).items()
    }


@KINDS
@pytest.mark.parametrize("world_size", [1, 2])
def test_c01_uint64_ids_are_their_bit_pattern(ranks: RankPool, case: Case, world_size: int) -> None:  # noqa: F811
    ranks.run(world_size, look_up_unsigned, case)


def vary_stride(rank: int, world_size: int, case: Case) -> list[tuple[int, ...]]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    # Feature f0 has 2 distinct samples, f1 one; the other rank has none at all.
    strides, inverse = ([2, 1], [[0, 1], [0, 0]]) if rank == 0 else ([0, 0], [[], []])
    batch = KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.arange(2 * sum(strides)),
        lengths=torch.full((sum(strides),), 2),
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(["f0", "f1"], torch.tensor(inverse, dtype=torch.int64)),
    )
    model, batch = build(case, world_size), batch.to(device_of(case))
    # Rows of such a batch could be read, but not trained.
    with pytest.raises(ValueError, match=r"variable size per feature|another rank refuses"):
        model(batch)
    assert all(not rows for rows in exported(model).values())
    outputs = outputs_of(case, model.eval()(batch))
    return [tuple(outputs[name].shape) for name in ("f0", "f1")]


@pytest.mark.parametrize("name", ["ec", "ec-dedup"])
def test_c03_a_rank_may_be_empty_in_a_variable_batch(ranks: RankPool, name: str) -> None:  # noqa: F811
    assert ranks.run(2, vary_stride, CASES[name]) == [[(4, 4), (4, 4)], [(0, 4), (0, 4)]]


def train_on_several_backends(rank: int, world_size: int) -> None:
    from torchrec.distributed.types import ShardingEnv

    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder

    case = CASES["ebc"]
    model = build(case, world_size)
    # What init_process_group() without a backend, and "cpu:gloo,cuda:nccl", give: no group is called "gloo" then.
    group = dist.new_group(list(range(world_size)), backend="cpu:gloo")
    assert dist.get_backend(group) != "gloo"
    sharder = DynamicEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1, "seed": 20250})
    unsharded = build_unsharded(case)
    env = ShardingEnv.from_process_group(group)
    sharded = sharder.shard(unsharded, model.plan.plan["collection"], env, torch.device("cpu"))
    uneven = Case(case.tables, pooled=True, batch_sizes=(3, 0, 5))
    batch = make_batch(uneven, 0, rank)
    expected, outputs = outputs_of(case, model(make_kjt(batch, case))), outputs_of(case, sharded(make_kjt(batch, case)))
    assert all(torch.equal(value, outputs[name]) for name, value in expected.items())
    sum(value.sum() for value in outputs.values()).backward()


def build_unsharded(case: Case) -> nn.Module:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from tests.support.sharded_model import embedding_configs

    return EmbeddingBagCollection(tables=embedding_configs(case), device=torch.device("meta"))


def test_c03_uneven_batches_in_a_group_of_several_backends(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, train_on_several_backends)


def schedule_a_tensor(rank: int, world_size: int) -> None:
    model = build(CASES["ebc"], world_size)
    for group in model.fused_optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(model.fused_optimizer, step_size=1, gamma=0.5)
    rates = []
    for _ in range(3):
        model.fused_optimizer.step()
        rates.append({tables.optimizer.learning_rate for tables in dynamic_modules(model)})
        scheduler.step()
    assert rates == [{0.5}, {0.25}, {0.125}]


def test_a_learning_rate_may_be_a_tensor_that_changes_in_place(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(1, schedule_a_tensor)


class UnsendableError(Exception):
    """Can be pickled by nobody."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.reason = lambda: text


def plan_for_others(rank: int, world_size: int, planned_for: int) -> list[str]:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology

    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder

    collection = build_unsharded(Case((A,), pooled=True))
    model, sharders = nn.Sequential(collection), [DynamicEmbeddingBagCollectionSharder()]
    planner = DynamicEmbeddingShardingPlanner(
        collection.embedding_bag_configs(),
        topology=Topology(world_size=planned_for, compute_device="cpu"),
        constraints={"a": DynamicEmbParameterConstraints(use_dynamicemb=True)},
    )
    with pytest.raises(ValueError) as collective:
        planner.collective_plan(model, sharders)
    with pytest.raises(ValueError) as alone:
        plan = planner.plan(model, sharders)
        DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    return [str(collective.value), str(alone.value)]


@pytest.mark.parametrize("planned_for", [1, 3])
def test_c04_a_plan_for_another_number_of_ranks_is_refused(ranks: RankPool, planned_for: int) -> None:  # noqa: F811
    for collective, alone in ranks.run(2, plan_for_others, planned_for):
        assert f"topology has world_size={planned_for} but the process group has 2 ranks" in collective
        assert f"dynamic table 'a' is planned for {planned_for} ranks but the process group has 2" in alone


def fail_unsendably(rank: int, world_size: int) -> None:
    from torchrec.distributed.planner import Topology

    from dynamicemb.planner import DynamicEmbeddingShardingPlanner

    class Partitioner:
        def partition(self, *args: Any, **kwargs: Any) -> Any:
            raise UnsendableError("no way")

    collection = build_unsharded(Case((A,), pooled=True))
    planner = DynamicEmbeddingShardingPlanner(
        collection.embedding_bag_configs(),
        topology=Topology(world_size=world_size, compute_device="cpu"),
        partitioner=Partitioner(),
    )
    expected = UnsendableError if rank == 0 else DynamicEmbError
    with pytest.raises(expected, match="no way" if rank == 0 else "rank 0: UnsendableError: no way"):
        planner.collective_plan(nn.Sequential(collection))


def test_c04_an_error_that_cannot_be_pickled_reaches_every_rank(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, fail_unsendably)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_capacity": 333}, "max_capacity=333 of dynamic table 'a' has no effect: num_embeddings makes it 768"),
        ({"init_capacity": 1024}, "init_capacity=1024 of dynamic table 'a' is lowered to 768"),
        (
            {"max_capacity": 333, "score_strategy": 4},
            "max_capacity=333 of dynamic table 'a' has no effect: num_embeddings decides about its first size, unless",
        ),
    ],
)
def test_c27_capacities_that_the_config_overrules_warn(options: dict[str, Any], message: str) -> None:
    from torchrec.distributed.planner import Topology

    from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy, DynamicEmbTableOptions
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints

    if "score_strategy" in options:
        options = options | {"score_strategy": DynamicEmbScoreStrategy(options["score_strategy"])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = DynamicEmbTableOptions(**options)
    constraint = DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=table)
    with pytest.warns(UserWarning, match=message) as recorded:
        DynamicEmbeddingShardingPlanner(
            build_unsharded(Case((A,), pooled=True)).embedding_bag_configs(),
            topology=Topology(world_size=2, compute_device="cpu"),
            constraints={"a": constraint},
        )
    assert sum("dynamic table 'a'" in str(w.message) or "as a limit" in str(w.message) for w in recorded) == 1


def break_one_rank(rank: int, world_size: int, case: Case, fault: str) -> list[str]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    device = device_of(case)
    keys = case.features
    # Not the order of the tables, so that a first batch that is refused must not decide about it.
    good = {
        "keys": keys,
        "values": torch.arange(2 * len(keys), device=device),
        "lengths": torch.ones(2 * len(keys), dtype=torch.int64, device=device),
    }
    elsewhere = "meta" if case.device == "cpu" else "cpu"
    bad = {
        "float ids": {"values": good["values"].float()},
        "a missing feature": {"keys": ["other", *keys[1:]]},
        "lengths": {"lengths": good["lengths"] + (torch.arange(2 * len(keys), device=device) == 3)},
        "another device": {name: good[name].to(elsewhere) for name in ("values", "lengths")},
        "no batch": None,
    }[fault]
    model, expected = build(case, world_size), build(case, world_size)
    messages = []
    for step in range(2):
        try:
            batch = KeyedJaggedTensor(**(good | bad if rank == 1 else good)) if bad or rank != 1 else None
            model(batch)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("nothing raised")
        # The ranks agree where they are, and nothing was inserted.
        if step == 0:
            assert all(not rows for rows in exported(model).values())
        outputs = outputs_of(case, model(KeyedJaggedTensor(**good)))
        wanted = outputs_of(case, expected(KeyedJaggedTensor(**good)))
        assert all(torch.equal(value, outputs[name]) for name, value in wanted.items())
    assert {name: set(rows) for name, rows in exported(model).items()} == {
        name: set(rows) for name, rows in exported(expected).items()
    }
    return messages


FAULTS = {
    "float ids": "TypeError: features: ids must be int64, int32 or uint64, got torch.float32",
    "a missing feature": "ValueError: features: ['f2'] are not in the batch",
    "another device": "ValueError: features: ids are on ",
    "no batch": "TypeError: features must be a KeyedJaggedTensor or a TensorDict, got NoneType",
    "lengths": "ValueError: features: lengths must be non-negative and sum to the 6 ids",
}
STATIC = Table("s", ("f2",), sharding="row_wise", num_embeddings=12)
# Two tables share f0.
C = Table("c", ("f1", "f0"), dist_type="continuous", pooling="mean", num_embeddings=7)
BROKEN_CASES = {
    "ec": Case((A, B, C, STATIC), pooled=False),
    "ec-dedup": Case((STATIC, A, B, C), pooled=False, dedup=True),
    "ebc": Case((A, STATIC, B, C), pooled=True),
}


def check_refusal(pool: RankPool | GpuRanks, case: Case, fault: str) -> None:
    first, second = pool.run(2, break_one_rank, case, fault)
    assert all(message.startswith(FAULTS[fault]) for message in second)
    assert first == ["ValueError: features: another rank refuses its batch; its own error says why"] * 2


@pytest.mark.parametrize("case", BROKEN_CASES.values(), ids=BROKEN_CASES.keys())
@pytest.mark.parametrize("fault", FAULTS)
def test_c04_a_bad_batch_on_one_rank_raises_on_all(ranks: RankPool, case: Case, fault: str) -> None:  # noqa: F811
    check_refusal(ranks, case, fault)


def forget_a_score(rank: int, world_size: int, case: Case) -> list[str]:
    """Forward without a score, with one on rank 0 only, and with it on all ranks; returns what each of them said."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model = build(case, world_size)
    (module,) = (module for module in dynamic_modules(model) if "c" in module.table_names)
    batch = KeyedJaggedTensor(case.features, torch.tensor([7, 7, 9, 9]), lengths=torch.ones(4, dtype=torch.int64))
    messages = []
    for scored in ((), (0,), range(world_size)):
        if rank in scored:
            module.set_score({"c": 5})
        try:
            model(batch)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
            assert all(not rows for rows in exported(model).values())
        else:
            messages.append("went well")
    others = [other for other in dynamic_modules(model) if "l" in other.table_names]
    ids, frequencies = others[0].export_scores("l", "cpu")
    return [*messages, str(list(zip(ids.tolist(), frequencies.tolist(), strict=True)))]


@pytest.mark.parametrize("pooled", [False, True])
def test_c10_a_forgotten_score_raises_on_all_ranks_before_any_lookup(ranks: RankPool, pooled: bool) -> None:  # noqa: F811
    case = Case(
        (Table("l", ("f1",), score="LFU"), Table("c", ("f0",), dim=8 if pooled else 4, score="CUSTOMIZED")), pooled
    )
    first, second = ranks.run(2, forget_a_score, case)
    own = "DynamicEmbError: score_strategy CUSTOMIZED: table c has no score"
    assert first[0].startswith(own) and second[0].startswith(own) and second[1].startswith(own)
    assert first[1] == "ValueError: features: another rank refuses its batch; its own error says why"
    assert first[2] == second[2] == "went well"
    # Two samples on each of two ranks; what was refused has not counted.
    assert {first[3], second[3]} == {"[(7, 4)]", "[]"}
