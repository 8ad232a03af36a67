"""Every field of TorchRec's dataclasses acts on a dynamic table, warns or is refused.

The tables below hold what was decided, with the value that shows it. A field that a release of TorchRec adds has no row
and fails; the decision goes there and into `dynamicemb/sharding/checks/fields.py`.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode, CacheParams, KeyValueParams, ParameterSharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.types import DataType

from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
)
from dynamicemb.shard import DynamicEmbeddingCollectionSharder
from dynamicemb.sharding.checks.fields import CONFIG_FIELDS, CONSTRAINT_FIELDS, PLAN_FIELDS
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_collection import Built, constraint, shard


@dataclasses.dataclass(frozen=True)
class Acts:
    """A value, and what shows its effect: two results that differ between the default and the value."""

    value: Any
    shown: Callable[..., Any]
    default: Any
    changed: Any


@dataclasses.dataclass(frozen=True)
class Warns:
    value: Any
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Refused:
    value: Any
    message: str


def names(*kinds: type) -> set[str]:
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


def installed(rows: dict[str, Any], *kinds: type) -> list[str]:
    """Return the fields that the installed release has."""
    return sorted(rows.keys() & names(*kinds))


# Embedding configs


def first_rows(built: Built) -> list[float]:
    (rows,) = (rows for rows in built.exported().values())
    return sorted({round(float(value), 6) for row in rows.values() for value in row})


def of_table(attribute: str) -> Callable[[Built], Any]:
    return lambda built: getattr(built.modules[0], attribute)


def capacity(built: Built) -> int:
    return built.modules[0].tables.capacities[0]


def keys_that_work(built: Built) -> list[str]:
    keys = []
    for key in ("f_t", "g"):
        try:
            built.forward({key: torch.arange(3)})
            keys.append(key)
        except (ValueError, KeyError):
            continue
    return keys


def pooled(built: Built) -> float:
    """Return how many times a row a bag of two equal ids is."""
    bag = built.forward({"f_t": torch.tensor([7, 7])}, per_bag=2)
    (rows,) = built.exported().values()
    return round(float(bag[0, 0] / rows[7][0]), 4)


def within(low: float, high: float) -> Callable[[Built], bool]:
    def show(built: Built) -> bool:
        built.forward({"f_t": torch.arange(50)})
        values = first_rows(built)
        return low <= values[0] and values[-1] <= high

    return show


CONFIG_ROWS: dict[str, Acts | Warns | Refused] = {
    "num_embeddings": Acts(1000, capacity, 128, 1536),
    "embedding_dim": Acts(12, of_table("dims"), [8], [12]),
    "name": Acts("other", of_table("table_names"), ["t"], ["other"]),
    "data_type": Acts(DataType.FP16, of_table("embedding_dtype"), torch.float32, torch.float16),
    "feature_names": Acts(["g"], keys_that_work, ["f_t"], ["g"]),
    "weight_init_max": Acts(-0.05, within(-0.1, -0.05), False, True),
    "weight_init_min": Acts(0.05, within(0.05, 0.1), False, True),
    "init_fn": Acts(nn.init.ones_, within(1.0, 1.0), False, True),
    "pooling": Acts(PoolingType.MEAN, pooled, 2.0, 1.0),
    "num_embeddings_post_pruning": Warns(10, "not pruned"),
    "need_pos": Warns(True, "feature processor"),
    "input_dim": Warns(4, "found by id"),
    "total_num_buckets": Warns(4, "dist_type"),
    "virtual_table_eviction_policy": Warns(object(), "score_strategy"),
    "stash_weights": Warns(True, "stay in the memory"),
    "use_virtual_table": Refused(True, "takes every id without it; set it to False"),
    "enable_embedding_update": Refused(True, "set it to False and write rows with insert"),
}
CONFIG_FIELD_NAMES = installed(CONFIG_ROWS, EmbeddingConfig, EmbeddingBagConfig)


def config(**fields: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        **{"name": "t", "num_embeddings": 100, "embedding_dim": 8, "feature_names": ["f_t"], **fields}
    )


def outcome(make: Callable[[], Built], row: Acts | Warns | Refused) -> Any:
    """Return what an Acts shows, what was warned of, or what was raised."""
    try:
        built = make()
    except (TypeError, ValueError) as error:
        return str(error)
    return row.shown(built) if isinstance(row, Acts) else built.warnings


def configs_on_rank(rank: int, world_size: int) -> dict[str, tuple[Any, Any]]:
    """Return the outcome of the default and of the value, by field."""

    def made(**fields: Any) -> Built:
        table = config(**fields)
        return shard([table], {table.name: constraint()}, {"seed": 1})

    return {
        name: (
            outcome(made, CONFIG_ROWS[name]),
            outcome(lambda n=name: made(**{n: CONFIG_ROWS[n].value}), CONFIG_ROWS[name]),
        )
        for name in CONFIG_FIELD_NAMES
    }


def check(results: dict[str, tuple[Any, Any]], rows: dict[str, Any], title: str) -> None:
    for name, (default, given) in results.items():
        row = rows[name]
        if isinstance(row, Acts):
            assert (default, given) == (row.default, row.changed), name
        elif isinstance(row, Warns):
            assert default == [] and len(given) == 1, (name, default, given)
            assert given[0].startswith(f"{title} ignores {name}="), given
            assert row.message in given[0]
        else:
            assert f"{name}=" in given and row.message in given, (name, given)


def test_c27_every_field_of_a_config_is_decided() -> None:
    known = CONFIG_FIELDS.acts | CONFIG_FIELDS.idle.keys() | CONFIG_FIELDS.refused.keys()
    assert names(EmbeddingConfig, EmbeddingBagConfig) <= CONFIG_ROWS.keys() == known


@pytest.mark.distributed
def test_c27_every_field_of_a_config_acts_warns_or_is_refused(ranks: RankPool) -> None:  # noqa: F811
    (results,) = ranks.run(1, configs_on_rank)
    check(results, CONFIG_ROWS, "dynamic table 't'")


def test_c27_a_field_that_nobody_knows_warns_once_it_is_set() -> None:
    made = dataclasses.make_dataclass(
        "Config", [("brand_new", int, 0), ("tables", list, dataclasses.field(default_factory=list))]
    )
    for kind in (CONFIG_FIELDS, CONSTRAINT_FIELDS, PLAN_FIELDS):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kind.warn(made(), "table 't'")
        with pytest.warns(UserWarning, match=r"^table 't' ignores brand_new=3 \(no such field is known.*leave it\)$"):
            kind.warn(made(3), "table 't'")


# Constraints


def plan_of(**fields: Any) -> tuple[Any, Any, Any]:
    """Return the plan entry of a dynamic table, its sharding option, and its memory."""
    table = EmbeddingConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f_t"])
    topology = Topology(world_size=2, compute_device="cpu")
    constraints = {"t": dataclasses.replace(constraint(), **fields)}
    enumerator = DynamicEmbeddingEnumerator(topology, 4, constraints)
    planner = DynamicEmbeddingShardingPlanner([table], topology, 4, enumerator, constraints=constraints)
    model = nn.Sequential(EmbeddingCollection([table], torch.device("meta")))
    entry = planner.plan(model, [DynamicEmbeddingCollectionSharder()]).plan["0"]["t"]
    option = enumerator.last_stored_search_space[0]
    return entry, option, planner.memory.get("t")


def scratch(entry: Any, option: Any, memory: Any) -> int:
    return memory.scratch_bytes // 28


def bytes_of_inputs(entry: Any, option: Any, memory: Any) -> bool:
    return option.total_perf > plan_of()[1].total_perf


CONSTRAINT_ROWS: dict[str, Acts | Warns | Refused] = {
    "use_dynamicemb": Acts(False, lambda entry, *_: type(entry), DynamicEmbParameterSharding, ParameterSharding),
    "dynamicemb_options": Acts(
        DynamicEmbTableOptions(dist_type="hash_roundrobin"),
        lambda entry, *_: entry.dist_type,
        "roundrobin",
        "hash_roundrobin",
    ),
    "pooling_factors": Acts([3.0], scratch, 4, 12),
    "num_poolings": Acts([2.0], scratch, 4, 8),
    "batch_sizes": Acts([7], scratch, 4, 7),
    "is_weighted": Acts(True, bytes_of_inputs, False, True),
    "feature_names": Acts(["f"], lambda _, option, __: option.feature_names, None, ["f"]),
    "output_dtype": Acts(DataType.FP16, lambda entry, *_: entry.output_dtype, None, DataType.FP16),
    "stochastic_rounding": Acts(False, lambda entry, *_: entry.stochastic_rounding, None, False),
    "sharding_types": Refused(["table_wise"], "lacks 'row_wise'"),
    "device_group": Refused("cuda", "the plan is for 'cpu'"),
    "compute_kernels": Warns(["fused"], "kernel of its own"),
    "min_partition": Warns(4, "sharded by rows"),
    "cache_params": Warns(CacheParams(load_factor=0.5), "not cached"),
    "enforce_hbm": Warns(True, "not cached"),
    "bounds_check_mode": Warns(BoundsCheckMode.WARNING, "every id is legal"),
    "key_value_params": Warns(KeyValueParams(), "memory of their device"),
    "use_virtual_table": Warns(True, "every id without it"),
}


def test_c27_every_field_of_a_constraint_is_decided() -> None:
    known = CONSTRAINT_FIELDS.acts | CONSTRAINT_FIELDS.idle.keys() | CONSTRAINT_FIELDS.refused.keys()
    assert names(ParameterConstraints, DynamicEmbParameterConstraints) <= CONSTRAINT_ROWS.keys() == known


@pytest.mark.parametrize("name", installed(CONSTRAINT_ROWS, DynamicEmbParameterConstraints))
def test_c27_every_field_of_a_constraint_acts_warns_or_is_refused(name: str) -> None:
    row = CONSTRAINT_ROWS[name]
    if isinstance(row, Acts):
        assert row.shown(*plan_of()) == row.default
        assert row.shown(*plan_of(**{name: row.value})) == row.changed
    elif isinstance(row, Warns):
        with pytest.warns(UserWarning, match=rf"^dynamic table 't' ignores {name}=.*\(.*{row.message}"):
            plan_of(**{name: row.value})
    else:
        with pytest.raises(ValueError, match=f"{name}=.*{row.message}"):
            plan_of(**{name: row.value})


@pytest.mark.parametrize(
    "fields",
    [
        {"enforce_hbm": False},
        {"bounds_check_mode": BoundsCheckMode.NONE},
        {"device_group": "cpu"},
        {"pooling_factors": [1.0]},
    ],
)
def test_a_constraint_that_asks_for_nothing_is_silent(fields: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dynamic table")
        plan_of(**fields)


# Plans


PLAN_ROWS: dict[str, Acts | Warns | Refused] = {
    "sharding_type": Refused("table_wise", "sharding_type of dynamic table 't' must be 'row_wise', got 'table_wise'"),
    "compute_kernel": Refused("fused", "compute_kernel of dynamic table 't' must be 'customized_kernel', got 'fused'"),
    "customized_compute_kernel": Refused(
        "Other", "customized_compute_kernel of dynamic table 't' must be 'DynamicEmb'"
    ),
    "ranks": Refused([1], "ranks=[1] of dynamic table 't': it is on all ranks"),
    "sharding_spec": Refused(None, "sharding_spec of dynamic table 't' has shards of None"),
    "dist_type": Refused("continuous", "dist_type='continuous' of dynamic table 't' differs from that of its options"),
    "dynamicemb_options": Acts(
        "LFU", lambda built: built.modules[0].table_options[0].score_strategy.name, "TIMESTAMP", "LFU"
    ),
    "group": Acts(1, lambda built: len(built.modules), 1, 2),
    "stochastic_rounding": Acts(False, lambda built: built.modules[0].optimizer.stochastic_rounding, True, False),
    "output_dtype": Acts(DataType.FP16, of_table("output_dtype"), torch.float32, torch.float16),
    "cache_params": Warns(CacheParams(load_factor=0.5), "not cached"),
    "enforce_hbm": Warns(True, "not cached"),
    "bounds_check_mode": Warns(BoundsCheckMode.WARNING, "every id is legal"),
    "key_value_params": Warns(KeyValueParams(), "memory of their device"),
}
PLAN_FIELD_NAMES = installed(PLAN_ROWS, DynamicEmbParameterSharding)


def change_plan(name: str, value: Any) -> Callable[[Any], None]:
    def change(entry: Any) -> None:
        if name == "dynamicemb_options":
            strategy = DynamicEmbScoreStrategy[value]
            entry.dynamicemb_options = dataclasses.replace(entry.dynamicemb_options, score_strategy=strategy)
        else:
            setattr(entry, name, value)

    return change


def plans_on_rank(rank: int, world_size: int) -> dict[str, tuple[Any, Any]]:
    def made(change: Callable[[Any], None] | None = None) -> Built:
        # The plan of one of two tables is changed.
        tables = [config(), config(name="u", feature_names=["f_u"])]
        first = [] if change is None else [change]
        return shard(
            tables, {"t": constraint(), "u": constraint()}, change=lambda entry: first.pop()(entry) if first else None
        )

    return {
        name: (outcome(made, row), outcome(lambda n=name, r=row: made(change_plan(n, r.value)), row))
        for name, row in ((name, PLAN_ROWS[name]) for name in PLAN_FIELD_NAMES)
    }


def test_c27_every_field_of_a_plan_is_decided() -> None:
    known = PLAN_FIELDS.acts | PLAN_FIELDS.idle.keys() | PLAN_FIELDS.refused.keys()
    assert names(ParameterSharding, DynamicEmbParameterSharding) <= PLAN_ROWS.keys() == known


@pytest.mark.distributed
def test_c27_every_field_of_a_plan_acts_warns_or_is_refused(ranks: RankPool) -> None:  # noqa: F811
    (results,) = ranks.run(1, plans_on_rank)
    for name, (default, given) in results.items():
        if isinstance(PLAN_ROWS[name], Refused):
            assert PLAN_ROWS[name].message in given, (name, given)
        else:
            check({name: (default, given)}, PLAN_ROWS, "the plan entry of dynamic table 't'")
