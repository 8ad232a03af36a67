"""The planner: sizes, memory, what it refuses, and the versions it runs on."""

import dataclasses
import logging
import warnings
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.types import DataType

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    ScoreStrategy,
)
from dynamicemb.get_planner import get_planner
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
)
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from dynamicemb.sharding.planning.planner import memory_report
from dynamicemb.sharding.planning.table_sizes import SCRATCH_BYTES_PER_OCCURRENCE, table_memory, table_options_on_rank
from dynamicemb.versions import find_mismatch
from tests.support.ranks import RankError, RankPool, ranks  # noqa: F401

GIB = 2**30


def config(name: str = "t", num_embeddings: int = 1001, dim: int = 8, **arguments: Any) -> EmbeddingConfig:
    # TorchRec's own constructor divides by num_embeddings.
    made = EmbeddingConfig(
        name=name, num_embeddings=num_embeddings or 1, embedding_dim=dim, feature_names=[f"f_{name}"], **arguments
    )
    made.num_embeddings = num_embeddings
    return made


def bag_config(name: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=100, embedding_dim=8, feature_names=[f"f_{name}"], pooling=PoolingType.SUM
    )


def dynamic(**options: Any) -> DynamicEmbParameterConstraints:
    return DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions(**options))


def make_planner(
    configs: list[Any], constraints: dict[str, Any], world_size: int = 2, **arguments: Any
) -> DynamicEmbeddingShardingPlanner:
    topology = Topology(world_size=world_size, compute_device="cpu", ddr_cap=arguments.pop("ddr_cap", 4 * GIB))
    return DynamicEmbeddingShardingPlanner(configs, topology=topology, constraints=constraints, **arguments)


def plan_of(planner: DynamicEmbeddingShardingPlanner, configs: list[Any]) -> dict[str, Any]:
    model = nn.Sequential(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    sharder = DynamicEmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM})
    return planner.plan(model, [sharder]).plan["0"]


def test_plan_has_a_shard_of_whole_buckets_per_rank() -> None:
    configs = [config(), config("static", 100)]
    given = dynamic(dist_type="hash_roundrobin")
    plan = plan_of(make_planner(configs, {"t": given}, world_size=4), configs)
    entry = plan["t"]
    assert isinstance(entry, DynamicEmbParameterSharding)
    assert not isinstance(plan["static"], DynamicEmbParameterSharding)
    assert entry.ranks == [0, 1, 2, 3]
    assert [s.shard_sizes for s in entry.sharding_spec.shards] == [[384, 8]] * 4
    assert [s.shard_offsets for s in entry.sharding_spec.shards] == [[0, 0], [384, 0], [768, 0], [1152, 0]]
    # 251 rows of a rank, and slots to spare.
    assert entry.dynamicemb_options.max_capacity == 384
    assert entry.dynamicemb_options.bucket_capacity == 128
    assert entry.dist_type == "hash_roundrobin"
    # The plan has an object of its own.
    assert entry.dynamicemb_options is not given.dynamicemb_options
    assert given.dynamicemb_options.max_capacity == 384


@pytest.mark.parametrize(
    ("num_embeddings", "world_size", "bucket_capacity", "capacity"),
    [
        (7, 1, 128, 128),
        (1001, 4, 128, 256),
        (1001, 4, None, 384),
        # One bucket holds all ids, but a rank's share of as many may be too small.
        (128, 1, None, 128),
        (512, 4, None, 256),
        (20_000, 1, None, 20_096),
        (1001, 4, MAX_BUCKET_CAPACITY, 256),
        (99, 1, MAX_BUCKET_CAPACITY, 112),
    ],
)
def test_capacity_of_a_rank(num_embeddings: int, world_size: int, bucket_capacity: int | None, capacity: int) -> None:
    options = DynamicEmbTableOptions(bucket_capacity=bucket_capacity)
    planned = table_options_on_rank(config(num_embeddings=num_embeddings), options, world_size)
    assert planned.max_capacity == planned.init_capacity == capacity
    # What is planned is what a module makes of it.
    planned = dataclasses.replace(planned)
    module = BatchedDynamicEmbeddingTablesV2([planned], ["t"], device="cpu")
    assert module.tables.capacities == [capacity]


@pytest.mark.parametrize(
    ("strategy", "per_slot"),
    [(DynamicEmbScoreStrategy.LFU, 25), ((DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU), 33)],
)
def test_c20_planned_memory_equals_allocated_memory(strategy: ScoreStrategy, per_slot: int) -> None:
    given = DynamicEmbTableOptions(score_strategy=strategy)
    options = table_options_on_rank(config(num_embeddings=3000, dim=5), given, 2)
    memory = table_memory("t", options, EmbOptimType.ADAM, 0, "cpu", 2304)
    module = BatchedDynamicEmbeddingTablesV2([options], ["t"], optimizer=EmbOptimType.ADAM, device="cpu")
    used = module.memory_usage()
    assert memory.num_slots == 2304
    assert memory.index_bytes + memory.score_bytes == per_slot * 2304
    assert memory.state_bytes == 2 * 5 * 4 * 2304
    assert memory.row_bytes + memory.state_bytes == 64 * 2304
    # Counters, clock and chunk rounding.
    assert 0 <= used["index"] - per_slot * 2304 < 4096
    assert used["rows"] >= 64 * 2304


def test_c20_memory_is_reported_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    configs = [config(num_embeddings=200_000, dim=64), config("static", 1000, 64)]
    planner = make_planner(configs, {"t": dynamic()})
    with caplog.at_level(logging.INFO, logger="dynamicemb"):
        plan_of(planner, configs)
    assert "dynamic table" in caplog.text
    memory = planner.memory["t"]
    assert memory.hbm_bytes == 0
    # 100,000 rows of 256 + 512 bytes and 25 bytes of index.
    assert memory.total_bytes > 100_000 * (768 + 25)
    assert "t " in memory_report(planner.memory)


def test_c20_memory_for_growth_is_counted() -> None:
    configs = [config(num_embeddings=40_000), config("u", 40_000), config("v", 40_000)]
    lfu = DynamicEmbScoreStrategy.LFU
    constraints = {"t": dynamic(init_capacity=100), "u": dynamic(), "v": dynamic(score_strategy=lfu)}
    planner = make_planner(configs, constraints)
    plan_of(planner, configs)
    slots = {name: memory.num_slots for name, memory in planner.memory.items()}
    growth = {name: memory.growth_bytes for name, memory in planner.memory.items()}
    # u shares a module with t, whose growth copies the index of both; v has another strategy and a module of its own.
    assert growth == {"t": 45 * slots["t"], "u": 45 * slots["u"], "v": 0}
    memory = planner.memory["t"]
    parts = ("index", "score", "row", "state", "scratch", "growth")
    assert memory.total_bytes == sum(getattr(memory, f"{part}_bytes") for part in parts)


def test_c20_a_dynamic_table_that_does_not_fit_is_refused() -> None:
    configs = [config(num_embeddings=20_000_000, dim=64)]
    with pytest.raises(Exception, match="[Ss]torage"):
        plan_of(make_planner(configs, {"t": dynamic()}, ddr_cap=GIB), configs)


def test_c20_all_memory_of_a_table_on_a_gpu_is_gpu_memory() -> None:
    options = DynamicEmbTableOptions(global_hbm_for_values=2 * 10_000)
    options = table_options_on_rank(config(num_embeddings=2000), options, 2)
    memory = table_memory("t", options, EmbOptimType.EXACT_SGD, 100, "cuda", 1024)
    assert options.local_hbm_for_values == 10_000
    assert memory.hbm_bytes == memory.total_bytes == 1024 * (25 + 32) + memory.scratch_bytes
    assert memory.scratch_bytes == 100 * SCRATCH_BYTES_PER_OCCURRENCE["cuda"]


def test_c20_a_dynamic_table_that_does_not_fit_a_gpu_is_refused() -> None:
    configs = [config(num_embeddings=2_000_000, dim=64)]
    model = nn.Sequential(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    sharders = [DynamicEmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM})]
    # 1,000,064 rows of 768 bytes on each of two ranks; TorchRec keeps 15 % of a GPU for itself.
    for hbm_cap, fits in ((2 * GIB, True), (GIB // 2, False)):
        topology = Topology(world_size=2, compute_device="cuda", hbm_cap=hbm_cap)
        planner = DynamicEmbeddingShardingPlanner(configs, topology=topology, constraints={"t": dynamic()})
        if fits:
            planner.plan(model, sharders)
            assert planner.memory["t"].host_bytes == 0
        else:
            with pytest.raises(Exception, match="[Ss]torage"):
                planner.plan(model, sharders)


def test_a_table_without_a_limit_is_planned_for_its_rows_and_begins_with_less() -> None:
    keep = DynamicEmbScoreStrategy.NO_EVICTION
    # 501 rows of a rank at a load factor of 0.5.
    for init, begins, counted in ((None, 1024, 1024), (100, 128, 1024), (2000, 2048, 2048)):
        planner = make_planner([config()], {"t": dynamic(score_strategy=keep, init_capacity=init)})
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="init_capacity|max_capacity")
            entry = plan_of(planner, [config()])["t"]
        assert entry.dynamicemb_options.max_capacity is None
        assert entry.dynamicemb_options.init_capacity == begins
        assert [s.shard_sizes for s in entry.sharding_spec.shards] == [[counted, 8]] * 2
        assert planner.memory["t"].num_slots == counted


def test_tables_of_too_many_slots_are_not_fused() -> None:
    configs = [config(name, 2**30) for name in ("x", "y", "z")]
    planner = make_planner(configs, {c.name: dynamic() for c in configs}, world_size=1, ddr_cap=2**44)
    assert [entry.group for entry in plan_of(planner, configs).values()] == [0, 1, 2]


BAD = {
    "unknown name": ([config()], {"u": dynamic()}, r"constraints has keys \['u'\]"),
    "repeated name": ([config(), config()], {}, r"repeated table names \['t'\]"),
    "dim 0": ([config(dim=0)], {"t": dynamic()}, "embedding_dim .*'t' must be 1..2048, got 0"),
    "dim 2049": ([config(dim=2049)], {"t": dynamic()}, "must be 1..2048, got 2049"),
    "no rows": ([config(num_embeddings=0)], {"t": dynamic()}, "num_embeddings .*at least 1, got 0"),
    "too many rows": ([config(num_embeddings=2**40)], {"t": dynamic()}, "at most 2147483647"),
    "int8": ([config(data_type=DataType.INT8)], {"t": dynamic()}, "data_type .*FP32, FP16 or BF16"),
    "other dim": ([config()], {"t": dynamic(dim=4)}, "dim=4 .* differs from embedding_dim=8"),
    "other dtype": (
        [config()],
        {"t": dynamic(embedding_dtype=torch.float16)},
        "embedding_dtype=torch.float16 .*differs",
    ),
    "no strategy": ([config()], {"t": dynamic(score_strategy=None)}, "score_strategy of dynamic table 't' is None"),
    "table-wise": (
        [config()],
        {"t": dataclasses.replace(dynamic(), sharding_types=["table_wise"])},
        "sharding_types=.*lacks 'row_wise'",
    ),
}


@pytest.mark.parametrize(("configs", "constraints", "message"), BAD.values(), ids=BAD.keys())
def test_c04_bad_constraints_are_refused(configs: list[Any], constraints: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_planner(configs, constraints)


def test_c04_options_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="dynamicemb_options must be DynamicEmbTableOptions, got {'dim': 8}"):
        DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options={"dim": 8})


BAGS, ROWS = EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
DYNAMIC_BAGS, DYNAMIC_ROWS = DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder


@pytest.mark.parametrize(
    ("pooled", "sharders", "message"),
    [
        (False, None, "EmbeddingCollection, .*have EmbeddingCollectionSharder; pass a DynamicEmbeddingColl"),
        (False, [DYNAMIC_BAGS], "EmbeddingCollection, .*have none; pass a DynamicEmbeddingCollectionSharder"),
        (True, [BAGS, DYNAMIC_ROWS], "have EmbeddingBagCollectionSharder; pass a DynamicEmbeddingBagCollectionSharder"),
        (True, [DYNAMIC_BAGS, BAGS], "pass a DynamicEmbeddingBagCollectionSharder"),
        (True, [BAGS, DYNAMIC_BAGS], None),
        (False, [DYNAMIC_ROWS], None),
    ],
)
def test_c04_sharders_that_do_not_know_dynamic_tables_are_refused(
    pooled: bool, sharders: list[type] | None, message: str | None
) -> None:
    configs = [bag_config("t") if pooled else config()]
    kind = EmbeddingBagCollection if pooled else EmbeddingCollection
    model = nn.Sequential(nn.Sequential(kind(tables=configs, device=torch.device("meta"))))
    planner = make_planner(configs, {"t": dynamic()})
    made = sharders and [sharder() for sharder in sharders]
    if message is None:
        assert isinstance(planner.plan(model, made).plan["0.0"]["t"], DynamicEmbParameterSharding)
    else:
        with pytest.raises(ValueError, match=rf"dynamic tables \['t'\] are in an .*{message}"):
            planner.plan(model, made)


def test_c04_a_dynamic_table_that_the_model_lacks_is_refused() -> None:
    configs = [config(), config("u")]
    planner = make_planner(configs, {"t": dynamic(), "u": dynamic()})
    with pytest.raises(ValueError, match=r"dynamic tables \['u'\] are in no collection"):
        plan_of(planner, configs[:1])


def test_c27_options_of_a_static_table_warn() -> None:
    for options in (DynamicEmbTableOptions(), DynamicEmbTableOptions(bucket_capacity=256)):
        with pytest.warns(
            UserWarning, match="'t' is static and ignores dynamicemb_options; set use_dynamicemb=True"
        ) as w:
            make_planner([config()], {"t": DynamicEmbParameterConstraints(dynamicemb_options=options)})
        assert "dynamicemb" not in w[0].filename.split("/")[-2:-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = DynamicEmbParameterConstraints()
        make_planner([config()], {"t": dataclasses.replace(plain, sharding_types=["table_wise"])})


@pytest.mark.parametrize("bucket_capacity", [0, 100, -16])
def test_c04_bad_bucket_capacity_is_refused(bucket_capacity: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_capacity .*multiple of 16.*got {bucket_capacity}"):
        dynamic(bucket_capacity=bucket_capacity)


@pytest.mark.parametrize(
    ("name", "value"),
    [("compute_kernels", ["fused"]), ("enforce_hbm", True), ("bounds_check_mode", BoundsCheckMode.WARNING)],
)
def test_c27_ignored_constraints_warn(name: str, value: Any) -> None:
    constraint = dataclasses.replace(dynamic(), **{name: value})
    with pytest.warns(UserWarning, match=f"'t' ignores {name}="):
        make_planner([config()], {"t": constraint})


def test_c27_a_foreign_enumerator_warns() -> None:
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    topology = Topology(world_size=1, compute_device="cpu")
    with pytest.warns(UserWarning, match="counts dynamic tables as dense"):
        DynamicEmbeddingShardingPlanner(
            [config()], topology, enumerator=EmbeddingEnumerator(topology, 4), constraints={"t": dynamic()}
        )


def test_the_enumerator_searches_static_tables_as_torchrec_does() -> None:
    topology = Topology(world_size=2, compute_device="cpu")
    configs = [config(), config("static", 100)]
    enumerator = DynamicEmbeddingEnumerator(topology, constraints={"t": dynamic()})
    model = nn.Sequential(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    for _ in range(2):
        options = enumerator.enumerate(model, [DynamicEmbeddingCollectionSharder()])
        assert [o.sharding_type for o in options if o.name == "t"] == ["row_wise"]
        assert [o.shards[0].size for o in options if o.name == "t"] == [[768, 8]]
        assert len([o for o in options if o.name == "static"]) > 1


def test_get_planner_plans_all_three_kinds() -> None:
    configs = [bag_config(name) for name in ("dp", "dyn", "other")]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message="dynamic table")
        planner = get_planner(configs, {"dp"}, {"dyn": DynamicEmbTableOptions()}, torch.device("cpu"))
    model = nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    plan = planner.plan(model, [DynamicEmbeddingBagCollectionSharder()]).plan["0"]
    assert {name: entry.sharding_type for name, entry in plan.items()} == {
        "dp": "data_parallel",
        "dyn": "row_wise",
        "other": "row_wise",
    }
    assert isinstance(plan["dyn"], DynamicEmbParameterSharding)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"u"}, {}), r"data_parallel_embedding_table_names names \['u'\]"),
        ((set(), {"u": None}), r"dynamicemb_options_dict names \['u'\]"),
        (({"t"}, {"t": None}), r"\['t'\] cannot be both"),
    ],
)
def test_c04_get_planner_refuses_bad_names(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_planner([config()], *arguments, torch.device("cpu"))
    with pytest.raises(ValueError, match="pipeline_type must be one of .*'fast'"):
        get_planner([config()], set(), {}, torch.device("cpu"), pipeline_type="fast")


def fail_to_plan(rank: int, world_size: int) -> str:
    configs = [config(num_embeddings=20_000_000, dim=64)]
    planner = make_planner(configs, {"t": dynamic()}, world_size=world_size, ddr_cap=GIB)
    model = nn.Sequential(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    try:
        planner.collective_plan(model, [DynamicEmbeddingCollectionSharder()])
    except Exception as error:
        return type(error).__name__
    return "planned"


def plan_badly(rank: int, world_size: int) -> None:
    make_planner([config(dim=0)], {"t": dynamic()})


@pytest.mark.distributed
def test_c04_a_failed_plan_raises_on_every_rank(ranks: RankPool) -> None:  # noqa: F811
    assert ranks.run(2, fail_to_plan) == ["PlannerError"] * 2
    with pytest.raises(RankError, match=r"failed \(all: \[\d, \d\]\)(.|\n)*must be 1..2048"):
        ranks.run(2, plan_badly)


def test_static_constraints_are_left_to_torchrec() -> None:
    configs = [config(), config("static", 100)]
    constraints = {"t": dynamic(), "static": ParameterConstraints(sharding_types=["table_wise"])}
    assert plan_of(make_planner(configs, constraints), configs)["static"].sharding_type == "table_wise"


@pytest.mark.parametrize(
    ("torch_version", "fbgemm", "torchrec", "problem"),
    [
        ("2.13.0+cpu", "1.8.0", "1.8.0", None),
        ("2.11.0", "1.6.0", "1.6.1", None),
        ("2.14.0", "1.9.0", "1.9.0", None),
        ("2.13.0", "1.7.0", "1.8.0", "torch 2.13.0 needs fbgemm_gpu 1.8"),
        ("2.12.1", "1.7.0", "1.8.0", "torch 2.12.1 needs torchrec 1.7"),
        ("2.13.0", "1.6.0", "1.6.0", "needs fbgemm_gpu 1.8 and torchrec 1.8"),
        ("2.10.0", "1.5.0", "1.5.0", "torch 2.11 or newer"),
        ("2.13.0", None, "1.8.0", "missing: fbgemm_gpu"),
    ],
)
def test_version_triples(torch_version: str, fbgemm: str | None, torchrec: str, problem: str | None) -> None:
    found = find_mismatch({"torch": torch_version, "fbgemm_gpu": fbgemm, "torchrec": torchrec})
    assert (found is None) if problem is None else (found is not None and problem in found)
