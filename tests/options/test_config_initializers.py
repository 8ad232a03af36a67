"""First values from embedding configs: ``init_fn``, ``weight_init_min`` and ``weight_init_max`` of dynamic tables."""

import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.config_initializer import initializer_of_config
from dynamicemb.dynamicemb_config import DynamicEmbTableOptions, complete_initializer_args
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_collection import constraint, shard

ROWS, DIM, SEED = 100, 8, 11
Mode = DynamicEmbInitializerMode


def args(mode: Mode, *values: float) -> DynamicEmbInitializerArgs:
    names = {
        Mode.UNIFORM: ("lower", "upper"),
        Mode.NORMAL: ("mean", "std_dev"),
        Mode.TRUNCATED_NORMAL: ("mean", "std_dev", "lower", "upper"),
        Mode.CONSTANT: ("value",),
    }
    return DynamicEmbInitializerArgs(mode=mode, **dict(zip(names[mode], values, strict=True)))


def fill_with_halves(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return weight.fill_(0.5)


@torch.no_grad()
def fill_in_two_steps(weight: torch.Tensor) -> None:
    weight.zero_()
    weight.add_(2)


partial = functools.partial
# How a config asks, and what that is.
ASKED: dict[str, tuple[dict[str, Any], DynamicEmbInitializerArgs]] = {
    "both bounds": ({"weight_init_min": 5.0, "weight_init_max": 6.0}, args(Mode.UNIFORM, 5, 6)),
    "upper bound": ({"weight_init_max": 2.0}, args(Mode.UNIFORM, -0.1, 2)),
    "lower bound": ({"weight_init_min": -2}, args(Mode.UNIFORM, -2, 0.1)),
    "uniform": ({"init_fn": nn.init.uniform_}, args(Mode.UNIFORM, 0, 1)),
    "uniform with bounds": ({"init_fn": partial(nn.init.uniform_, a=-0.5, b=0.25)}, args(Mode.UNIFORM, -0.5, 0.25)),
    "normal": ({"init_fn": nn.init.normal_}, args(Mode.NORMAL, 0, 1)),
    "normal of partials": (
        {"init_fn": partial(partial(nn.init.normal_, mean=3.0), std=0.5, generator=None)},
        args(Mode.NORMAL, 3, 0.5),
    ),
    "truncated": ({"init_fn": nn.init.trunc_normal_}, args(Mode.TRUNCATED_NORMAL, 0, 1, -2, 2)),
    "truncated with bounds": (
        {"init_fn": partial(nn.init.trunc_normal_, mean=0.5, std=0.02, a=0.48, b=0.53)},
        args(Mode.TRUNCATED_NORMAL, 0.5, 0.02, 0.48, 0.53),
    ),
    "constant": ({"init_fn": partial(nn.init.constant_, val=-3)}, args(Mode.CONSTANT, -3)),
    "zeros": ({"init_fn": nn.init.zeros_}, args(Mode.CONSTANT, 0)),
    "ones": ({"init_fn": nn.init.ones_}, args(Mode.CONSTANT, 1)),
    "xavier uniform": (
        {"init_fn": partial(nn.init.xavier_uniform_, gain=2.0)},
        args(Mode.UNIFORM, -2 * math.sqrt(6 / 108), 2 * math.sqrt(6 / 108)),
    ),
    "xavier normal": ({"init_fn": nn.init.xavier_normal_}, args(Mode.NORMAL, 0, math.sqrt(2 / 108))),
    "kaiming uniform": (
        {"init_fn": partial(nn.init.kaiming_uniform_, nonlinearity="relu")},
        args(Mode.UNIFORM, -math.sqrt(3) * (math.sqrt(2) / math.sqrt(8)), math.sqrt(3) * (math.sqrt(2) / math.sqrt(8))),
    ),
    "kaiming normal": (
        {"init_fn": partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="linear")},
        args(Mode.NORMAL, 0, 0.1),
    ),
    "calls uniform_": ({"init_fn": lambda w: w.data.uniform_(-0.25, 0.5)}, args(Mode.UNIFORM, -0.25, 0.5)),
    "calls normal_": ({"init_fn": lambda w: nn.init.normal_(w, std=0.25)}, args(Mode.NORMAL, 0, 0.25)),
    "calls fill_": ({"init_fn": fill_with_halves}, args(Mode.CONSTANT, 0.5)),
    "one value in two steps": ({"init_fn": fill_in_two_steps}, args(Mode.CONSTANT, 2)),
}
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "orthogonal": (nn.init.orthogonal_, "more than to fill all weights"),
    "rows differ": (lambda w: w.copy_(torch.arange(w.shape[0])[:, None].expand_as(w)), "more than to fill"),
    "a part": (lambda w: w[:3].uniform_(), "leaves weights as they are"),
    "a zero in front": (lambda w: w.fill_(1)[0].zero_(), "more than to fill all weights"),
    "nothing": (lambda w: w, "leaves weights as they are"),
    "scaled noise": (lambda w: w.normal_().mul_(0.02), "more than to fill all weights"),
    "pretrained weights": (lambda w: w.copy_(torch.zeros(ROWS, DIM)), "must match the size"),
    "a generator": (partial(nn.init.uniform_, generator=torch.Generator()), "more than to fill all weights"),
    "a buffer": (lambda w: torch.empty(w.shape).uniform_(), "leaves weights as they are"),
    "negative deviation": (partial(nn.init.normal_, std=-1.0), "std_dev must be >= 0"),
    "no deviation": (partial(nn.init.trunc_normal_, std=0.0), "std_dev must be > 0"),
    "unknown argument": (partial(nn.init.uniform_, c=1), "unexpected keyword argument 'c'"),
    "an error": (lambda w: w.no_such_method(), "no_such_method"),
}


def make_config(kind: type = EmbeddingConfig, **fields: Any) -> Any:
    return kind(**{"name": "t", "num_embeddings": ROWS, "embedding_dim": DIM, "feature_names": ["f_t"], **fields})


def same(got: DynamicEmbInitializerArgs | None, expected: DynamicEmbInitializerArgs) -> None:
    assert got is not None and got.mode is expected.mode
    assert got.relevant_fields()[1:] == pytest.approx(expected.relevant_fields()[1:], rel=1e-12)


@pytest.mark.parametrize("kind", [EmbeddingConfig, EmbeddingBagConfig])
@pytest.mark.parametrize("name", ASKED)
def test_a_config_asks_for_first_values(name: str, kind: type) -> None:
    fields, expected = ASKED[name]
    state = torch.random.get_rng_state()
    config = make_config(kind, **fields)
    # Collections copy their configs.
    for again in (config, copy.deepcopy(config), dataclasses.replace(config)):
        same(initializer_of_config(again), expected)
        same(complete_initializer_args(DynamicEmbInitializerArgs(), embedding_config=again), expected)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", REFUSED)
def test_c27_an_init_fn_that_no_initializer_stands_for_is_refused(name: str) -> None:
    init_fn, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"init_fn=.* of table 't' cannot make.*{reason}.*set initializer_args"):
        initializer_of_config(make_config(init_fn=init_fn))


def test_bounds_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="weight_init_min=3.0, weight_init_max=None of table 't' are no bounds"):
        initializer_of_config(make_config(weight_init_min=3.0))


def test_a_config_without_a_wish_leaves_the_default() -> None:
    config = make_config()
    # TorchRec fills in an init_fn of its own.
    assert config.init_fn is not None and initializer_of_config(config) is None
    default = complete_initializer_args(DynamicEmbInitializerArgs(), embedding_config=config)
    same(default, args(Mode.UNIFORM, -0.1, 0.1))
    # A copy keeps the init_fn that was made before the bounds were set.
    bounded = dataclasses.replace(config, weight_init_max=1.0)
    same(initializer_of_config(bounded), args(Mode.UNIFORM, -0.1, 1))


def test_options_overrule_the_config() -> None:
    config = make_config(init_fn=nn.init.ones_)
    for own in (args(Mode.NORMAL, 0, 1), DynamicEmbInitializerArgs(lower=-0.5), args(Mode.CONSTANT, 0)):
        completed = complete_initializer_args(own, embedding_config=config)
        assert completed.mode is own.mode and completed.value == own.value and completed.lower == own.lower


# Sharded


def configs_of_tables(kind: type) -> list[Any]:
    configs = [
        make_config(kind, name=name.replace(" ", "_"), feature_names=[f"f_{name}"], **fields)
        for name, (fields, _) in ASKED.items()
    ]
    static = make_config(kind, name="static", feature_names=["f_s"], init_fn=partial(nn.init.constant_, val=9.0))
    return [*configs, static]


def rows_of_ids(rank: int, world_size: int, bags: bool, by_hand: bool) -> dict[str, dict[int, torch.Tensor]]:
    """Return the first values that a rank has of 40 ids, by table."""
    configs = configs_of_tables(EmbeddingBagConfig if bags else EmbeddingConfig)
    constraints = {config.name: constraint() for config in configs[:-1]}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dynamic table.*")
        built = shard(configs, constraints, {"seed": SEED}, by_hand=by_hand)
    ids = {f"f_{name}": torch.arange(-20, 20) for name in ASKED} | {"f_s": torch.arange(ROWS)}
    built.forward(ids)
    static = next(p for name, p in built.model.named_parameters() if ".static." in name)
    assert torch.equal(static, torch.full_like(static, 9.0))
    built.collection.reset_parameters()
    assert torch.equal(static, torch.full_like(static, 9.0))
    return built.exported()


@pytest.mark.distributed
@pytest.mark.parametrize(("bags", "by_hand", "world_size"), [(True, False, 2), (False, True, 1)])
def test_c05_rows_of_a_sharded_table_begin_as_its_config_asks(
    ranks: RankPool,  # noqa: F811
    bags: bool,
    by_hand: bool,
    world_size: int,
) -> None:
    results = ranks.run(world_size, rows_of_ids, bags, by_hand)
    ids = torch.arange(-20, 20)
    for name, (_, expected) in ASKED.items():
        table = name.replace(" ", "_")
        options = DynamicEmbTableOptions(dim=DIM, max_capacity=128, initializer_args=expected)
        module = BatchedDynamicEmbeddingTablesV2([options], [table], seed=SEED, device="cpu")
        values = module(ids, torch.arange(ids.numel() + 1)).detach()
        merged = {i: row for result in results for i, row in result[table].items()}
        got = torch.stack([merged[i] for i in ids.tolist()])
        torch.testing.assert_close(got, values, rtol=1e-6, atol=1e-6, msg=f"table {name!r}")


def warnings_of_both(rank: int, world_size: int) -> list[list[str]]:
    given = []
    own = {"initializer_args": DynamicEmbInitializerArgs(lower=1.0, upper=2.0)}
    for fields, options in (
        ({"init_fn": nn.init.orthogonal_}, own),
        ({"weight_init_max": 3.0}, own),
        ({"init_fn": nn.init.zeros_, "weight_init_min": -1.0}, {}),
        # The same twice, as somebody who was not sure may write it.
        ({"weight_init_min": 1.0, "weight_init_max": 2.0}, own),
        ({}, own),
    ):
        built = shard([make_config(EmbeddingBagConfig, **fields)], {"t": constraint(**options)}, {"seed": SEED})
        values = built.forward({"f_t": torch.arange(30)})
        low, high = (1.0, 2.0) if options else (0.0, 0.0)
        assert values.min() >= low and values.max() <= high
        given.append(built.warnings)
    return given


@pytest.mark.distributed
def test_c27_two_initializers_of_a_table_warn(ranks: RankPool) -> None:  # noqa: F811
    (results,) = ranks.run(1, warnings_of_both)
    expected = ["init_fn=<function orthogonal_.*: initializer_args of its options", "weight_init_max=3.0: initializer_"]
    expected += ["weight_init_min=-1.0: init_fn decides"]
    for given, message in zip(results[:3], expected, strict=True):
        with pytest.raises(Warning, match=f"dynamic table 't' ignores {message}.*give only one"):
            assert len(given) == 1
            raise UserWarning(given[0])
    assert results[3:] == [[], []]
