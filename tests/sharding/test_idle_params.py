"""Every fused param and every argument of a table's own optimizer acts on dynamic tables, warns or is refused."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.types import DataType

from dynamicemb.admission import KVCounter
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy
from dynamicemb.errors import UnsupportedOptionError
from dynamicemb.optimizer import OptimizerArgs, OptimizerSpec
from dynamicemb.planner import DynamicEmbParameterSharding
from dynamicemb.sharding.checks.params import (
    _BY_MODEL,
    _OPTIMIZER_PARAMS,
    _TORCH_ARGUMENTS,
    ACTING_PARAMS,
    arguments_of_module,
    check_fused_params,
    drop_own_params,
    idle_params,
    unknown_params,
)
from dynamicemb.sharding.torchrec_compat import TORCHREC_ONLY_PARAMS
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_collection import Built, constraint, shard

PLAN: dict[str, Any] = {"t": DynamicEmbParameterSharding(sharding_type="row_wise", ranks=[0])}
OUR_ARGUMENTS = set(inspect.signature(BatchedDynamicEmbeddingTablesV2.__init__).parameters) - {"self", "unknown"}
FBGEMM_ARGUMENTS = set(inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters) - {"self"}
ADAM = {"optimizer": EmbOptimType.ADAM}


def config(name: str = "t", **fields: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=100, embedding_dim=8, feature_names=[f"f_{name}"], **fields)


def test_c27_every_fused_param_is_decided() -> None:
    decided = ACTING_PARAMS | idle_params() | _BY_MODEL | {"embedding_specs"}
    assert OUR_ARGUMENTS | FBGEMM_ARGUMENTS | TORCHREC_ONLY_PARAMS <= decided
    # Each that acts has a row below.
    assert ACTING_PARAMS == ACTING.keys() | IDLE_IN_ANY_OPTIMIZER.keys()


@pytest.mark.parametrize("name", sorted(idle_params()))
def test_c27_a_fused_param_without_an_effect_warns(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"^dynamic tables \['t'\] ignore {name}=7 of fused_params; .*remove it$"):
        check_fused_params({name: 7}, PLAN, {}, None)
    assert arguments_of_module({name: 7}) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for nothing in (None, False, BoundsCheckMode.NONE):
            check_fused_params({name: nothing}, PLAN, {}, None)


@pytest.mark.parametrize("name", [*sorted(_BY_MODEL), "embedding_specs"])
def test_c27_a_fused_param_that_the_model_decides_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"fused_params has '{name}', which the embedding configs and the plan decide"):
        check_fused_params({name: 1}, PLAN, {}, None)


@pytest.mark.parametrize("name", ["lr", "momentun", "amsgrad", "dynamicemb_options"])
def test_c27_a_fused_param_that_is_none_warns_unless_a_static_table_would_raise(name: str) -> None:
    assert unknown_params([name, "eps"]) == [name]
    with pytest.warns(UserWarning, match=f"^{name}=1 has no effect: fused_params has no such argument; ") as recorded:
        check_fused_params({name: 1}, PLAN, {}, None)
    assert len(recorded) == 1
    assert arguments_of_module({name: 1, "eps": 0.5}) == {"eps": 0.5}
    static = DynamicEmbParameterSharding.__mro__[1](sharding_type="row_wise", compute_kernel="fused")
    with pytest.raises(TypeError, match=rf"fused_params has '{name}', which neither .* such as \['s'\]; "):
        check_fused_params({name: 1}, PLAN | {"s": static}, {}, torch.device("cuda"))
    dense = DynamicEmbParameterSharding.__mro__[1](sharding_type="data_parallel", compute_kernel="dense")
    with pytest.warns(UserWarning, match=f"^{name}=1 has no effect"):
        check_fused_params({name: 1}, PLAN | {"s": dense}, {}, torch.device("cuda"))


def test_c27_an_idle_fused_param_names_the_static_tables_on_which_it_acts() -> None:
    static = DynamicEmbParameterSharding.__mro__[1](sharding_type="row_wise", compute_kernel="fused")
    with pytest.warns(UserWarning, match=r"\['t'\] ignore cache_sets=3 of .*; for static tables it acts: \['s'\]$"):
        check_fused_params({"cache_sets": 3}, PLAN | {"s": static}, {}, torch.device("cuda"))
    with pytest.warns(UserWarning, match=r"static tables \['s'\] ignore initial_accumulator_value=0.5"):
        check_fused_params({"initial_accumulator_value": 0.5}, PLAN | {"s": static}, {}, torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fused_params({"cache_sets": 3}, {"s": static}, {}, torch.device("cuda"))


def test_static_tables_get_what_fbgemm_knows() -> None:
    params = {"seed": 1, "use_index_dedup": False, "initial_accumulator_value": 0.5, "betas": (0.5, 0.75), "eps": 0.1}
    drop_own_params(params)
    assert params == {"beta1": 0.5, "beta2": 0.75, "eps": 0.1}


# What acts


def spec(name: str) -> Callable[[Built], Any]:
    return lambda built: getattr(built.modules[0].optimizer, name)


def row_of(built: Built) -> list[float]:
    (rows,) = (rows["t"] for rows in [built.exported()])
    return [round(float(value), 6) for value in rows[3]]


def trained(built: Built) -> list[float]:
    built.forward({"f_t": torch.tensor([3]), "f_u": torch.tensor([3])}).sum().backward()
    return row_of(built)


# name: (what goes with it, value, what shows it, with the default, with the value); no values: they only differ.
ACTING: dict[str, tuple[dict[str, Any], Any, Callable[[Built], Any], Any, Any]] = {
    "beta1": (ADAM, 0.5, spec("beta1"), 0.9, 0.5),
    "beta2": (ADAM, 0.5, spec("beta2"), 0.999, 0.5),
    "betas": (ADAM, (0.5, 0.75), lambda b: (spec("beta1")(b), spec("beta2")(b)), (0.9, 0.999), (0.5, 0.75)),
    "eps": (ADAM, 0.5, spec("eps"), 1e-8, 0.5),
    "weight_decay": (ADAM, 0.5, spec("weight_decay"), 0.0, 0.5),
    # Adam's decay is decoupled; other modes warn.
    "weight_decay_mode": (ADAM, WeightDecayMode.DECOUPLE, lambda built: built.warnings, [], []),
    "gradient_clipping": ({}, True, spec("gradient_clipping"), False, True),
    "max_gradient": ({"gradient_clipping": True}, 0.5, spec("max_gradient"), 1.0, 0.5),
    "initial_accumulator_value": (ADAM, 0.5, spec("initial_accumulator_value"), 0.0, 0.5),
    "learning_rate": ({}, 0.5, trained, None, None),
    "optimizer": ({}, EmbOptimType.ADAM, spec("name"), "sgd", "adam"),
    "output_dtype": ({}, DataType.BF16, lambda b: b.modules[0].output_dtype, torch.float32, torch.bfloat16),
    "seed": ({}, 8, trained, None, None),
    "stochastic_rounding": ({}, False, spec("stochastic_rounding"), True, False),
    "use_one_tbe_per_table": ({}, True, lambda built: len(built.modules), 1, 2),
}
IDLE_IN_ANY_OPTIMIZER: dict[str, Any] = {
    # That of the module, which is also FBGEMM's.
    "momentum": 0.9,
    "eta": 0.001,
    "max_norm": 1.0,
    "counter_based_regularization": "counters",
    "cowclip_regularization": "clips",
}


def build(fused_params: dict[str, Any], prepare: Callable[[Any], None] | None = None, static: bool = False) -> Built:
    configs = [config(), config("u")]
    constraints = {"t": constraint()} if static else {"t": constraint(), "u": constraint()}
    return shard(configs, constraints, {"seed": 7, **fused_params}, prepare)


def params_on_rank(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    results: dict[str, tuple[Any, ...]] = {}
    for name, (beside, value, shown, *_) in ACTING.items():
        results[name] = (shown(build(beside)), shown(build(beside | {name: value})))
    for name, value in IDLE_IN_ANY_OPTIMIZER.items():
        results[name] = (build({}).warnings, build({name: value}).warnings)
    results["lr"] = (trained(build({})), trained(build({"lr": 0.5})), build({"lr": 0.5}).warnings)
    # Ours beside static tables, which FBGEMM would not know.
    ours = {"seed": 1, "initial_accumulator_value": 0.5, "use_index_dedup": True, "eps": 0.1}
    beside = build({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, **ours}, static=True)
    before = trained(beside)
    results["beside"] = (beside.warnings, trained(beside) != before)
    return results


@pytest.mark.distributed
def test_c27_every_fused_param_acts_or_warns(ranks: RankPool) -> None:  # noqa: F811
    (results,) = ranks.run(1, params_on_rank)
    without, with_lr, unknown = results.pop("lr")
    # The reference implementation does not read this name either.
    assert with_lr == without and unknown == [
        "lr=0.5 has no effect: fused_params has no such argument; use learning_rate"
    ]
    beside, trains = results.pop("beside")
    assert trains and len(beside) == 2
    assert beside[0].startswith(
        "dynamic tables ['t'] ignore use_index_dedup=True of fused_params; set use_index_dedup="
    )
    assert beside[1].startswith("static tables ['u'] ignore initial_accumulator_value=0.5")
    for name, (default, given) in results.items():
        if name in IDLE_IN_ANY_OPTIMIZER:
            assert default == [] and len(given) == 1 and given[0].startswith(f"optimizer sgd ignores {name}="), name
            continue
        *_, plain, changed = ACTING[name]
        if changed is None:
            assert default != given, name
        else:
            assert (default, given) == (plain, changed), name


# The optimizer of a single table

OPTIMIZERS: list[type] = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.Adagrad,
    torchrec.optim.SGD,
    torchrec.optim.Adam,
    torchrec.optim.Adagrad,
    torchrec.optim.RowWiseAdagrad,
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_c27_every_argument_of_an_optimizer_is_decided(kind: type) -> None:
    arguments = inspect.signature(kind.__init__).parameters.values()
    names = {a.name for a in arguments if a.kind is not inspect.Parameter.VAR_KEYWORD} - {"self", "params"}
    assert names <= _OPTIMIZER_PARAMS | _TORCH_ARGUMENTS.keys()


def weight_with(arguments: Mapping[str, Any]) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(2, 2))
    weight._optimizer_classes, weight._optimizer_kwargs = [torch.optim.Adam], [dict(arguments)]  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize("name", sorted(_TORCH_ARGUMENTS))
def test_c27_an_argument_that_no_optimizer_has_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for nothing in _TORCH_ARGUMENTS[name]:
        check_fused_params({}, PLAN, {"t": weight_with({name: nothing})}, None)
        assert arguments_of_module({name: nothing}) == {}
    something = {"dampening": 0.5, "lr_decay": 0.5, "decoupled_weight_decay": False}.get(name, True)
    with pytest.raises(ValueError, match=f"optimizer of dynamic table 't' has {name}={something}, .*; remove it"):
        check_fused_params({}, PLAN, {"t": weight_with({name: something})}, None)


def attach(kind: Any, **arguments: Any) -> Callable[[Any], None]:
    def prepare(collection: Any) -> None:
        apply_optimizer_in_backward(kind, [collection.embedding_bags["t"].weight], arguments)

    return prepare


# name: (optimizer, its arguments, what it becomes, warnings of)
OWN: dict[str, tuple[Any, dict[str, Any], dict[str, Any], list[str]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0, "nesterov": False}, {"name": "sgd", "learning_rate": 0.5}, []),
    "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, {"name": "sgd"}, ["momentum=0.9"]),
    "adam": (
        torch.optim.Adam,
        {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.5, "weight_decay": 0.1, "amsgrad": False},
        {"name": "adam", "learning_rate": 0.25, "beta1": 0.5, "beta2": 0.75, "eps": 0.5, "weight_decay": 0.1},
        [],
    ),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.25, "initial_accumulator_value": 0.5, "eps": 0.5, "lr_decay": 0},
        {"name": "exact_adagrad", "learning_rate": 0.25, "initial_accumulator_value": 0.5, "eps": 0.5},
        [],
    ),
    "rowwise": (
        torchrec.optim.RowWiseAdagrad,
        {"lr": 0.25, "weight_decay": 0.1, "max_norm": 1.0},
        {"name": "exact_row_wise_adagrad", "learning_rate": 0.25},
        ["weight_decay=0.1, max_norm=1.0", "max_norm=1.0, weight_decay=0.1"],
    ),
}


def own_on_rank(rank: int, world_size: int) -> dict[str, tuple[dict[str, Any], list[str]]]:
    results = {}
    for name, (kind, arguments, expected, _) in OWN.items():
        built = build({}, attach(kind, **arguments))
        tables = next(module for module in built.modules if module.table_names == ["t"])
        trained(built)
        results[name] = ({key: getattr(tables.optimizer, key) for key in expected}, built.warnings)
    try:
        build({}, attach(torch.optim.Adam, lr=0.1, maximize=True))
    except ValueError as error:
        results["maximize"] = ({}, [str(error)])
    return results


@pytest.mark.distributed
def test_c27_arguments_of_a_tables_own_optimizer_act_warn_or_are_refused(ranks: RankPool) -> None:  # noqa: F811
    (results,) = ranks.run(1, own_on_rank)
    assert "the optimizer of dynamic table 't' has maximize=True" in results.pop("maximize")[1][0]
    for name, (got, given) in results.items():
        _, _, expected, idle = OWN[name]
        assert got == expected
        assert len(given) == bool(idle), (name, given)
        assert not idle or any(f"ignores {part};" in given[0] for part in idle), given


# Options that a sharded table hands on to its module


def options_on_rank(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, options in OPTIONS_OF_TABLES.items():
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            constraints = {"t": constraint(**options), "u": constraint(**options)}
        try:
            built = shard([config(), config("u")], constraints, ADAM)
            for _ in range(2):
                trained(built)
            modules = len(built.modules)
            sizes = sum(int(of["size"]) for module in built.modules for of in module.stats().values())
            counters = [module.tables.admission for module in built.modules]
            result = (modules, sizes, set(counters), built.warnings)
        except UnsupportedOptionError as error:
            result = (0, 0, set(), [str(error)])
        results[name] = (len(given), result)
    return results


# Two tables of one bucket of 128 slots, with the state of Adam.
ALL_ROWS = 2 * 128 * 8 * 3 * 4
OPTIONS_OF_TABLES: dict[str, dict[str, Any]] = {
    "cache": {"caching": True, "global_hbm_for_values": ALL_ROWS // 2},
    "storage": {"external_storage": dict, "global_hbm_for_values": ALL_ROWS // 2},
    "storage of too many": {"external_storage": dict, "global_hbm_for_values": ALL_ROWS // 2 - 1},
    "counter": {"admission_counter": KVCounter(64)},
    "limit": {"score_strategy": DynamicEmbScoreStrategy.NO_EVICTION, "max_capacity": 99},
}


@pytest.mark.distributed
def test_c27_options_of_sharded_tables_that_do_nothing_warn_once(ranks: RankPool) -> None:  # noqa: F811
    (results,) = ranks.run(1, options_on_rank)
    for name, field in (("cache", "caching=True"), ("storage", "external_storage=<class 'dict'>")):
        given, (modules, size, _, warned) = results.pop(name)
        assert (given, modules, size) == (0, 1, 2)
        found = [message for message in warned if field in message]
        assert len(found) == 2 and all(f"the {ALL_ROWS} bytes of all rows of the module fit" in m for m in found), found
    _, (modules, _, _, (error,)) = results.pop("storage of too many")
    assert modules == 0 and f"the {ALL_ROWS} bytes of all rows" in error and f"its {ALL_ROWS - 2} bytes" in error
    # Whoever made the options has heard of the counter.
    assert results.pop("counter") == (2, (1, 2, {None}, []))
    given, (modules, size, _, warned) = results.pop("limit")
    assert (given, modules, size) == (2, 1, 2)
    assert [message.partition(" has no")[0] for message in warned] == [
        f"max_capacity=99 of dynamic table {table!r}" for table in "tu"
    ]
    assert not results


# The optimizer of a module


READ = {
    "sgd": set(),
    "adam": {"eps", "beta1", "beta2"},
    "exact_adagrad": {"eps"},
    "exact_row_wise_adagrad": {"eps"},
}


@pytest.mark.parametrize("kind", READ)
def test_c27_an_argument_given_at_its_default_warns_where_nothing_reads_it(kind: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerArgs)}
    # Numbers that ask for something; as arguments of a caller they are no longer known as defaults.
    for name in ("eps", "beta1", "beta2", "momentum", "eta", "max_gradient"):
        given = {name: float(defaults[name])}
        if name in READ[kind]:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                OptimizerSpec.create(kind, **given)
            continue
        with pytest.warns(UserWarning, match=f"optimizer {kind} ignores {name}={given[name]}"):
            OptimizerSpec.create(kind, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OptimizerSpec.create(kind, momentum=0, eta=0.0, max_norm=0.0, weight_decay=0, weight_decay_mode=0)
