"""What a planner writes into the options that users give, and that nobody takes it for a wish."""

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.types import DataType

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    get_sharded_table_capacity,
    get_table_row_bytes,
    get_table_value_bytes,
)
from dynamicemb.get_planner import get_planner
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.shard import DynamicEmbeddingCollectionSharder
from dynamicemb.sharding.planning.table_sizes import table_options_on_rank
from dynamicemb.types import Planned
from tests.support.lookups import bag_per_id
from tests.support.ranks import RankPool, ranks  # noqa: F401

WRITTEN = (
    "dim",
    "embedding_dtype",
    "index_type",
    "bucket_capacity",
    "max_capacity",
    "init_capacity",
    "local_hbm_for_values",
    "initializer_args",
)
NO_EVICTION = DynamicEmbScoreStrategy.NO_EVICTION
# Of 1,001 rows over four ranks, with slots to spare, and of 20,000 over two.
SMALL = {"num_embeddings": 1001, "world_size": 4}
LARGE = {"num_embeddings": 20_000, "world_size": 2, "dim": 16, "data_type": DataType.FP16}


def config(name: str = "t", num_embeddings: int = 1001, dim: int = 8, **arguments: Any) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name, num_embeddings=num_embeddings, embedding_dim=dim, feature_names=[f"f_{name}"], **arguments
    )


def bounds(num_embeddings: int) -> DynamicEmbInitializerArgs:
    upper = (1 / num_embeddings) ** 0.5
    return DynamicEmbInitializerArgs(lower=-upper, upper=upper)


def constraint(options: DynamicEmbTableOptions) -> DynamicEmbParameterConstraints:
    return DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)


def planner_of(
    tables: dict[str, DynamicEmbTableOptions], configs: list[Any], world_size: int
) -> DynamicEmbeddingShardingPlanner:
    topology = Topology(world_size=world_size, compute_device="cpu", ddr_cap=2**34)
    constraints = {name: constraint(options) for name, options in tables.items()}
    return DynamicEmbeddingShardingPlanner(configs, topology=topology, constraints=constraints)


def planned(planner: DynamicEmbeddingShardingPlanner, configs: list[Any]) -> dict[str, DynamicEmbTableOptions]:
    """Return the options in the plan, and check the shards."""
    # Tables of one collection have one dim.
    model = nn.ModuleList(EmbeddingCollection(tables=[each], device=torch.device("meta")) for each in configs)
    modules = planner.plan(model, [DynamicEmbeddingCollectionSharder()]).plan.values()
    entries = {name: entry for module in modules for name, entry in module.items()}
    for name, entry in entries.items():
        options, slots = entry.dynamicemb_options, planner.memory[name].num_slots
        assert [shard.shard_sizes[0] for shard in entry.sharding_spec.shards] == [slots] * len(entry.ranks)
        assert options.max_capacity in (None, slots)
    return {name: entry.dynamicemb_options for name, entry in entries.items()}


def plan(options: DynamicEmbTableOptions, world_size: int = 4, **table: Any) -> DynamicEmbTableOptions:
    """Plan one table; nothing warns."""
    configs = [config(**table)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*capacity|.*dynamic table|.*evict_strategy")
        return planned(planner_of({"t": options}, configs, world_size), configs)["t"]


def values(options: DynamicEmbTableOptions) -> dict[str, Any]:
    return {field: getattr(options, field) for field in WRITTEN}


def everything(options: DynamicEmbTableOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def test_a_planner_writes_what_a_rank_has_of_a_table() -> None:
    options = DynamicEmbTableOptions(global_hbm_for_values=4001, init_capacity=100)
    entry = plan(options, 4)
    assert values(options) == values(entry) == {
        "dim": 8,
        "embedding_dtype": torch.float32,
        "index_type": torch.int64,
        "bucket_capacity": 128,
        # Of two buckets, or four.
        "max_capacity": 512,
        "init_capacity": 256,
        "local_hbm_for_values": 1001,
        "initializer_args": bounds(1001),
    }  # fmt: skip
    options.validate()
    # Numbers of the plan are plain, for whoever asks for their type.
    assert {type(getattr(entry, field)) for field in WRITTEN if isinstance(getattr(entry, field), int)} == {int}
    assert entry is not options and entry.initializer_args is not options.initializer_args


def test_get_planner_writes_too() -> None:
    options = DynamicEmbTableOptions()
    get_planner([config(num_embeddings=100, dim=4)], set(), {"t": options}, torch.device("cpu"))
    assert (options.dim, options.max_capacity, options.init_capacity, options.bucket_capacity) == (4, 128, 128, 128)


def test_what_is_given_stays_as_it_is_given() -> None:
    args = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=2.0)
    given = {"dim": 8, "bucket_capacity": 256, "initializer_args": args, "local_hbm_for_values": 70}
    given |= {"embedding_dtype": torch.float32, "index_type": torch.uint64}
    options = DynamicEmbTableOptions(**given)
    plan(options)
    for field, value in given.items():
        assert getattr(options, field) is value, field
    assert type(options.bucket_capacity) is int
    # They are wishes still.
    with pytest.raises(ValueError, match="dim=8 of table 't' differs from embedding_dim=16"):
        plan(options, dim=16)
    with pytest.raises(ValueError, match="embedding_dtype=torch.float32 of table 't' differs"):
        plan(options, data_type=DataType.FP16)
    assert plan(options, num_embeddings=100, world_size=1).max_capacity == 256


GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bucket": {"bucket_capacity": 64},
    "single bucket": {"bucket_capacity": MAX_BUCKET_CAPACITY},
    "init": {"init_capacity": 200},
    "memory": {"global_hbm_for_values": 10_000},
    "one bound": {"initializer_args": DynamicEmbInitializerArgs(upper=3.0)},
    "no eviction": {"score_strategy": NO_EVICTION},
    "no eviction, init": {"score_strategy": NO_EVICTION, "init_capacity": 300},
    "dtype": {"index_type": torch.uint64},
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda options: options,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickled": lambda options: pickle.loads(pickle.dumps(options)),
    "replace": dataclasses.replace,
    "constructor": lambda options: DynamicEmbTableOptions(**vars_of(options)),
    "pickled copy": lambda options: pickle.loads(pickle.dumps(dataclasses.replace(options))),
}


def vars_of(options: DynamicEmbTableOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_another_planner_goes_by_what_was_given(given: dict[str, Any], copied: Callable[[Any], Any]) -> None:
    for first, second in ((SMALL, LARGE), (LARGE, SMALL), (SMALL, SMALL | {"world_size": 1})):
        options = DynamicEmbTableOptions(**given)
        plan(options, **first)
        again = copied(options)
        entry = plan(again, **second)
        fresh = DynamicEmbTableOptions(**given)
        assert everything(entry) == everything(plan(fresh, **second))
        # The object has what the last planner wrote.
        assert everything(again) == everything(fresh)
        assert values(again) == values(entry) | ({"max_capacity": None} if "score_strategy" in given else {})


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())
def test_options_with_another_field_are_planned_by_what_was_given(given: dict[str, Any]) -> None:
    options = DynamicEmbTableOptions(**given)
    plan(options, **SMALL)
    changed = dataclasses.replace(options, protect_steps=3)
    fresh = DynamicEmbTableOptions(protect_steps=3, **given)
    assert everything(plan(changed, **LARGE)) == everything(plan(fresh, **LARGE))


def test_a_planned_number_that_is_given_as_another_option_is_a_wish() -> None:
    small = DynamicEmbTableOptions()
    plan(small, 1, num_embeddings=100)
    assert type(small.max_capacity) is Planned
    options = DynamicEmbTableOptions(init_capacity=small.max_capacity)
    entry = plan(options, 1, num_embeddings=100_000)
    plain = plan(DynamicEmbTableOptions(init_capacity=int(small.max_capacity)), 1, num_embeddings=100_000)
    assert entry.init_capacity == plain.init_capacity < entry.max_capacity
    wide = DynamicEmbTableOptions()
    plan(wide, 1, dim=64)
    assert plan(DynamicEmbTableOptions(bucket_capacity=wide.dim), 1).bucket_capacity == 64


def test_what_is_changed_after_planning_is_a_wish() -> None:
    options = DynamicEmbTableOptions()
    plan(options)
    options.bucket_capacity = 256
    options.init_capacity = 128
    options.initializer_args = DynamicEmbInitializerArgs(lower=-3.0, upper=3.0)
    entry = plan(options, 1, num_embeddings=2000)
    assert (entry.bucket_capacity, entry.max_capacity, entry.init_capacity) == (256, 2048, 256)
    assert entry.initializer_args == DynamicEmbInitializerArgs(lower=-3.0, upper=3.0)
    # In place too.
    options = DynamicEmbTableOptions()
    plan(options)
    options.initializer_args.upper = 5.0
    lower = bounds(1001).lower
    assert plan(options, num_embeddings=50).initializer_args == DynamicEmbInitializerArgs(lower=lower, upper=5.0)
    options = DynamicEmbTableOptions()
    plan(options)
    options.dim = 8
    with pytest.raises(ValueError, match="dim=8 of table 't' differs"):
        plan(options, dim=16)


def test_an_overruled_capacity_warns_each_time() -> None:
    options = DynamicEmbTableOptions(max_capacity=100)
    for capacity, world_size in ((384, 4), (768, 2)):
        with pytest.warns(UserWarning, match=f"max_capacity=100 of dynamic table 't' .* makes it {capacity}"):
            planner_of({"t": options}, [config()], world_size)
        assert options.max_capacity == capacity


def test_a_table_without_a_limit_has_none_written() -> None:
    options = DynamicEmbTableOptions(score_strategy=NO_EVICTION)
    assert plan(options, 2).max_capacity is options.max_capacity is None
    assert options.init_capacity == 1024
    assert plan(options, 4).init_capacity == options.init_capacity == 512


# One object for several tables


def test_one_object_for_several_tables_has_what_they_agree_in() -> None:
    options = DynamicEmbTableOptions(global_hbm_for_values=8)
    configs = [config("a"), config("b", 20_000, 16), config("c", 1001, 16)]
    plans = planned(planner_of(dict.fromkeys("abc", options), configs, 4), configs)
    for each in configs:
        fresh = DynamicEmbTableOptions(global_hbm_for_values=8)
        alone = planned(planner_of({each.name: fresh}, [each], 4), [each])[each.name]
        assert everything(plans[each.name]) == everything(alone)
    agreed = {"embedding_dtype": torch.float32, "index_type": torch.int64, "local_hbm_for_values": 2}
    # The size of a bucket is the same, but is written with the capacities only.
    assert values(options) == values(DynamicEmbTableOptions()) | agreed
    # Those two are of one size; what disagreed before is written then.
    plans = planned(planner_of(dict.fromkeys("bc", options), configs[1:], 4), configs[1:])
    assert values(options) == values(DynamicEmbTableOptions()) | agreed | {"dim": 16}
    two = [config("a"), config("d")]
    plans = planned(planner_of(dict.fromkeys("ad", options), two, 4), two)
    assert values(options) == values(plans["a"]) == values(plans["d"])
    assert options.max_capacity == 384
    # And what is written is taken back where tables disagree again.
    planner_of(dict.fromkeys("ab", options), configs[:2], 4)
    assert values(options) == values(DynamicEmbTableOptions()) | agreed


def test_capacities_stay_consistent_where_tables_disagree_in_one() -> None:
    options = DynamicEmbTableOptions(init_capacity=100, max_capacity=110)
    configs = [config("a", 256), config("b", 2048)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plans = planned(planner_of(dict.fromkeys("ab", options), configs, 1), configs)
    assert plans["a"].init_capacity == plans["b"].init_capacity == 256
    assert (options.init_capacity, options.max_capacity, options.bucket_capacity) == (100, 110, None)
    options.validate()


def test_an_equal_object_of_the_enumerator_is_no_contradiction() -> None:
    topology = Topology(world_size=2, compute_device="cpu")
    given = {"bucket_capacity": MAX_BUCKET_CAPACITY}
    theirs = constraint(DynamicEmbTableOptions(**given))
    enumerator = DynamicEmbeddingEnumerator(topology, constraints={"t": theirs})
    ours = constraint(DynamicEmbTableOptions(**given))
    for _ in range(2):
        planner = DynamicEmbeddingShardingPlanner([config()], topology, enumerator=enumerator, constraints={"t": ours})
        assert planned(planner, [config()])["t"].max_capacity == 512
    assert theirs.dynamicemb_options.max_capacity is None


def test_growth_beside_another_table_is_counted_by_what_was_given() -> None:
    # They share a module, whose growth copies the index of both. The second options have not been planned before.
    first, second = DynamicEmbTableOptions(init_capacity=100), DynamicEmbTableOptions()
    plan(first, 2, num_embeddings=40_000)
    configs = [config("a", 40_000), config("b", 40_000)]
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=2**34)
    constraints = {"a": constraint(first), "b": constraint(second)}
    enumerator = DynamicEmbeddingEnumerator(topology, constraints=constraints)
    model = nn.Sequential(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    enumerator.enumerate(model, [DynamicEmbeddingCollectionSharder()])
    for memory in enumerator.memory.values():
        assert memory.growth_bytes == 45 * memory.num_slots


def test_a_planner_that_raises_has_written_nothing() -> None:
    options = DynamicEmbTableOptions()
    with pytest.raises(ValueError, match="embedding_dim of dynamic table 'u'"):
        planner_of({"t": options, "u": DynamicEmbTableOptions()}, [config(), config("u", dim=4096)], 2)
    assert values(options) == values(DynamicEmbTableOptions())


# What else reads the object


@pytest.mark.parametrize("given", [{}, {"bucket_capacity": MAX_BUCKET_CAPACITY}, {"bucket_capacity": 256}])
def test_functions_of_capacity_give_the_same_before_and_after(given: dict[str, Any]) -> None:
    options = DynamicEmbTableOptions(**given)
    for function in (get_table_value_bytes, get_table_row_bytes):
        assert function(config(), "sgd", 4, options.bucket_capacity) > 0
    before = get_sharded_table_capacity(config(), 4, options.bucket_capacity)
    plan(options, 4)
    assert get_sharded_table_capacity(config(), 4, options.bucket_capacity) == before == options.max_capacity


def test_planned_options_share_a_module_as_before() -> None:
    first, second = DynamicEmbTableOptions(), DynamicEmbTableOptions()
    plan(first)
    plan(second, num_embeddings=20_000)
    assert first == second and hash(first) == hash(second)
    assert first.get_grouped_key() == DynamicEmbTableOptions(index_type=torch.int64).get_grouped_key()


def test_marks_survive_copies_and_are_numbers() -> None:
    for number in (Planned(7, None), Planned(7, 3)):
        for same in (copy.copy(number), copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
            assert type(same) is Planned
            assert same == 7 and same.given == number.given
        assert f"{number} {number!r}" == "7 7" and type(number + 1) is int


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "ADAM", "EXACT_ADAGRAD"])
def test_a_module_can_be_made_of_what_was_written(backend: str, device: torch.device, optimizer: str) -> None:
    from dynamicemb import EmbOptimType

    modules = []
    for written in (True, False):
        options = DynamicEmbTableOptions(init_capacity=60)
        entry = plan(options, 2, num_embeddings=600, dim=4)
        chosen = options if written else entry
        args = {"optimizer": EmbOptimType[optimizer], "device": device, "seed": 3}
        module = BatchedDynamicEmbeddingTablesV2([chosen], ["t"], **args)
        for step in range(2):
            module(*(t.to(device) for t in bag_per_id(range(step, 20)))).sum().backward()
        modules.append(module)
    first, second = modules
    assert first.tables.capacities == second.tables.capacities
    # Kernels know plain numbers only.
    numbers = [first.tables.index.bucket_capacity, *first.dims]
    numbers += [number for row in first.tables.store.formats for number in (row.dim, row.num_state)]
    assert {type(number) for number in numbers} == {int}
    ids, rows = first.export_keys_values("t", torch.device("cpu"))
    others, other_rows = second.export_keys_values("t", torch.device("cpu"))
    assert torch.equal(ids, others) and torch.equal(rows, other_rows) and len(ids) == 20


def written_on_ranks(rank: int, world_size: int) -> list[Any]:
    options = DynamicEmbTableOptions(global_hbm_for_values=10)
    configs = [config(num_embeddings=2000)]
    planner = planner_of({"t": options}, configs, world_size)
    model = nn.Sequential(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    entry = planner.collective_plan(model, [DynamicEmbeddingCollectionSharder()]).plan["0"]["t"]
    sent: list[Any] = [options]
    torch.distributed.broadcast_object_list(sent, src=world_size - 1)
    assert everything(sent[0]) == everything(options)
    # What came from another rank is planned by what was given there.
    alone = table_options_on_rank(configs[0], sent[0], 1)
    assert everything(alone) == everything(table_options_on_rank(configs[0], DynamicEmbTableOptions(
        global_hbm_for_values=10), 1))  # fmt: skip
    assert values(entry.dynamicemb_options) == values(options)
    return [options.max_capacity, options.local_hbm_for_values, options.init_capacity, options.dim]


@pytest.mark.distributed
def test_every_rank_has_the_same_numbers(ranks: RankPool) -> None:  # noqa: F811
    assert ranks.run(2, written_on_ranks) == [[1536, 5, 1536, 8]] * 2
