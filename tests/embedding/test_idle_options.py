"""Every table option and every argument of the module acts, warns or is refused: one row each, one test a row."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbEvictStrategy, DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.admission import KVCounter, ProbabilityAdmissionStrategy
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbCheckMode
from dynamicemb.embedding.memories import check_memories
from dynamicemb.errors import DynamicEmbError, InsertFailedError, UnsupportedOptionError
from dynamicemb.types import Default
from tests.support.lookups import MEAN, bag_per_id, batch, constant, make_module, messages, options, score_of

Module = BatchedDynamicEmbeddingTablesV2
LFU = DynamicEmbScoreStrategy.LFU
COMPOUND = (DynamicEmbScoreStrategy.TIMESTAMP, LFU)


def outcome(show: Callable[[Module], Any], make: Callable[[], Module]) -> tuple[Any, list[str]]:
    """Return what a module shows, or the error, and what it warned of."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        try:
            shown = show(make())
        except (TypeError, ValueError, DynamicEmbError) as error:
            shown = error
    return shown, messages(recorded)


def look_up(module: Module, *ids: int) -> torch.Tensor:
    return module(*bag_per_id(ids)).detach()


def first_value(module: Module) -> float:
    return round(float(look_up(module, 3)[0, 0]), 6)


def missing_value(module: Module) -> float:
    return float(look_up(module.eval(), 3)[0, 0])


def survivors(module: Module) -> bool:
    """Say whether the ids of the step before stay while a full bucket gets one more."""
    look_up(module, *range(16)).sum()
    look_up(module, 99)
    return int(module.contains("a", torch.arange(16)).sum()) == 16


def overfull(module: Module) -> int:
    look_up(module, *range(40))
    return module.stats()["a"]["failed"]


def trainable(module: Module) -> bool:
    look_up(module, 1)
    return True


def sized(module: Module) -> int:
    look_up(module, *range(30))
    return module.stats()["a"]["capacity"]


def frequency(module: Module) -> bool:
    for _ in range(3):
        look_up(module, 5, 5)
    return score_of(module, "a", 5) == 6


def admitted(module: Module) -> bool:
    look_up(module, 5)
    return bool(module.contains("a", torch.tensor([5])).all())


def unbuilt(module: Module) -> bool:
    return look_up(module, 1) is not None and module.tables.admission is None and "counter" not in module.memory_usage()


def expires(module: Module) -> bool:
    return bool(module.tables.options.ttls)


def ranks_by_time(scores: Any, cur_timestamp: float) -> float:
    last, count = scores
    return last


ONE_BUCKET = {"max_capacity": 16, "bucket_capacity": 16}
# field: (options beside it, value, what is shown, with the default, with the value). An exception type is a refusal,
# a string a warning that begins so.
OPTIONS: dict[str, tuple[dict[str, Any], Any, Callable[[Module], Any], Any, Any]] = {
    "embedding_dtype": ({}, torch.float16, lambda m: m.embedding_dtype, torch.float32, torch.float16),
    "dim": ({}, 8, lambda m: look_up(m, 1).shape[1], 4, 8),
    "max_capacity": ({}, 128, sized, 64, 128),
    "evict_strategy": ({}, DynamicEmbEvictStrategy.LFU, trainable, True, "evict_strategy=LFU has no effect"),
    "local_hbm_for_values": ({}, 9, trainable, True, "table 'a': local_hbm_for_values=9 has no effect: on the CPU"),
    "global_hbm_for_values": ({}, 9, trainable, True, "table 'a': global_hbm_for_values=9 has no effect: on the CPU"),
    "device_id": ({}, 0, trainable, True, "table 'a': device_id=0 has no effect: the tables are on the CPU"),
    "training": ({}, False, trainable, True, DynamicEmbError),
    "initializer_args": ({}, constant(3.0), lambda m: first_value(m) == 3, False, True),
    "eval_initializer_args": ({}, constant(3.0), missing_value, 0.0, 3.0),
    "caching": ({}, True, trainable, True, "table 'a': caching=True has no effect: on the CPU all rows are in host"),
    "init_capacity": ({}, 16, lambda m: m.stats()["a"]["capacity"], 64, 16),
    "max_load_factor": ({"init_capacity": 32}, 1.0, sized, 64, 32),
    "score_strategy": ({}, LFU, frequency, False, True),
    "bucket_capacity": ({}, 64, lambda m: m.tables.options.bucket_capacity, 16, 64),
    "safe_check_mode": (ONE_BUCKET, DynamicEmbCheckMode.ERROR, overfull, 24, InsertFailedError),
    "external_storage": ({}, dict, trainable, True, UnsupportedOptionError),
    "index_type": ({}, torch.uint64, lambda m: m.index_type, torch.int64, torch.uint64),
    "dist_type": (
        {},
        "continuous",
        lambda m: m.table_options[0].get_grouped_key()["dist_type"],
        "roundrobin",
        "continuous",
    ),
    "admit_strategy": ({}, ProbabilityAdmissionStrategy(2**-32), admitted, True, False),
    "admission_counter": (
        {},
        KVCounter(16),
        unbuilt,
        True,
        "admission_counter has no effect without an admit_strategy",
    ),
    "protect_steps": (ONE_BUCKET, 1, survivors, False, True),
    "score_function": (
        {"score_strategy": COMPOUND},
        ranks_by_time,
        lambda m: bool(m.tables.options.score_function),
        False,
        True,
    ),
    "ttl": ({}, 60.0, expires, False, True),
}


def table(beside: dict[str, Any], more: dict[str, Any]) -> DynamicEmbTableOptions:
    given = {"dim": 4, "max_capacity": 64, "bucket_capacity": 16, **beside, **more}
    return DynamicEmbTableOptions(**given)


def test_c27_every_table_option_is_decided() -> None:
    assert {field.name for field in fields(DynamicEmbTableOptions)} == OPTIONS.keys()


def check(got: tuple[Any, list[str]], expected: Any, default: Any) -> None:
    shown, warned = got
    if isinstance(expected, str) and not isinstance(default, str):
        assert shown == default and len(warned) == 1 and warned[0].startswith(expected), got
    elif isinstance(expected, type) and issubclass(expected, Exception):
        assert isinstance(shown, expected), got
    else:
        assert (shown, warned) == (expected, []), got


@pytest.mark.parametrize("name", OPTIONS)
def test_c27_every_table_option_acts_warns_or_is_refused(name: str) -> None:
    beside, value, show, default, expected = OPTIONS[name]
    assert outcome(show, lambda: make_module([table(beside, {})])) == (default, [])
    check(outcome(show, lambda: make_module([table(beside, {name: value})])), expected, default)


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, False),
        ({"max_load_factor": 0.5}, True),
        ({"max_load_factor": 0.75}, True),
        ({"max_load_factor": 0.5, "init_capacity": 16}, False),
    ],
)
def test_c27_a_load_factor_of_a_table_that_cannot_grow_warns_also_at_its_default(
    given: dict[str, Any], warned: bool
) -> None:
    made = table({}, given)
    for again in (made, table({}, {f.name: getattr(made, f.name) for f in fields(made)})):
        _, got = outcome(trainable, lambda option=again: make_module([option]))
        assert [message.partition(" has no effect")[0] for message in got] == (
            [f"table 'a': max_load_factor={given['max_load_factor']}"] if warned else []
        )


# The module


def spec(name: str) -> Callable[[Module], Any]:
    return lambda module: getattr(module.optimizer, name)


def bag_of_two(module: Module) -> bool:
    return bool(torch.allclose(module(*batch([7, 7])).detach(), module(*batch([7])).detach()))


TWO = {"table_options": [options(), options()], "table_names": None}
ADAM = {"optimizer": "adam"}
ARGUMENTS: dict[str, tuple[dict[str, Any], Any, Callable[[Module], Any], Any, Any]] = {
    "table_options": ({}, [options(dim=8)], lambda m: m.dims, [4], [8]),
    "table_names": ({}, ["z"], lambda m: m.table_names, ["table_0"], ["z"]),
    "feature_table_map": (TWO, [0, 0, 1], lambda m: m.feature_num, 2, 3),
    "use_index_dedup": ({}, True, trainable, True, "use_index_dedup has no effect"),
    "prefetch_pipeline": ({}, True, trainable, True, "prefetch_pipeline=True has no effect: rows are not moved"),
    "pooling_mode": ({}, MEAN, bag_of_two, False, True),
    "output_dtype": ({}, torch.float16, lambda m: look_up(m, 1).dtype, torch.float32, torch.float16),
    "device": ({}, "cuda:63", lambda m: True, True, ValueError),
    "enforce_hbm": ({}, True, trainable, True, "enforce_hbm has no effect"),
    "bounds_check_mode": ({}, 1, trainable, True, "bounds_check_mode has no effect"),
    "optimizer": ({}, "adam", spec("name"), "sgd", "adam"),
    "stochastic_rounding": ({}, False, spec("stochastic_rounding"), True, False),
    "gradient_clipping": ({}, True, spec("gradient_clipping"), False, True),
    "max_gradient": ({}, 1.0, trainable, True, "optimizer sgd ignores max_gradient=1.0"),
    "max_norm": ({}, 1.0, trainable, True, "optimizer sgd ignores max_norm=1.0"),
    "learning_rate": ({}, 0.5, spec("learning_rate"), 0.01, 0.5),
    "eps": (ADAM, 0.5, spec("eps"), 1e-8, 0.5),
    "initial_accumulator_value": (ADAM, 0.5, spec("initial_accumulator_value"), 0.0, 0.5),
    "momentum": ({}, 0.9, trainable, True, "optimizer sgd ignores momentum=0.9"),
    "weight_decay": (ADAM, 0.5, spec("weight_decay"), 0.0, 0.5),
    "weight_decay_mode": (ADAM, 1, trainable, True, "optimizer adam ignores weight_decay_mode=1"),
    "eta": ({}, 0.001, trainable, True, "optimizer sgd ignores eta=0.001"),
    "beta1": (ADAM, 0.5, spec("beta1"), 0.9, 0.5),
    "beta2": (ADAM, 0.5, spec("beta2"), 0.999, 0.5),
    "counter_based_regularization": ({}, {}, trainable, True, "optimizer sgd ignores counter_based_regularization={}"),
    "cowclip_regularization": ({}, {}, trainable, True, "optimizer sgd ignores cowclip_regularization={}"),
    "seed": ({}, 8, first_value, None, None),
}


def test_c27_every_argument_of_the_module_is_decided() -> None:
    assert set(inspect.signature(Module.__init__).parameters) - {"self", "unknown"} == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_c27_every_argument_of_the_module_acts_warns_or_is_refused(name: str) -> None:
    beside, value, show, default, expected = ARGUMENTS[name]
    arguments = {"table_options": [options()], **({"device": "cpu"} if name != "device" else {}), **beside}
    torch.manual_seed(3)
    plain = outcome(show, lambda: Module(**arguments))
    given = outcome(show, lambda: Module(**(arguments | {name: value})))
    if expected is None:
        assert plain[0] != given[0] and plain[1] == given[1] == []
        return
    assert plain == (default, [])
    check(given, expected, default)


# name: (value, how the warning ends)
UNKNOWN: dict[str, tuple[Any, str]] = {
    "lr": (0.5, "use learning_rate"),
    "betas": ((0.5, 0.5), "use beta1 and beta2"),
    "enable_prefetch": (True, "use prefetch_pipeline"),
    "learnign_rate": (0.5, "did you mean 'learning_rate'?"),
    "cache_precision": ("fp32", "known: " + ", ".join(sorted(ARGUMENTS))),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_c27_an_argument_that_the_module_does_not_have_warns_once_and_has_no_effect(name: str) -> None:
    value, end = UNKNOWN[name]
    (learning_rate, beta1), warned = outcome(
        lambda m: (m.optimizer.learning_rate, m.optimizer.beta1),
        lambda: Module([options()], device="cpu", optimizer="adam", **{name: value}),
    )
    assert (learning_rate, beta1) == (0.01, 0.9)
    assert warned == [f"{name}={value!r} has no effect: {Module.__name__} has no such argument; {end}"]


def test_c27_each_unknown_argument_has_its_own_warning_where_the_module_is_made() -> None:
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        Module([options()], device="cpu", lr=0.5, betas=(0, 0))
    assert [(str(w.message).partition("=")[0], w.filename) for w in recorded] == [("lr", __file__), ("betas", __file__)]


def two_tables(budgets: tuple[int, int], asked: dict[str, Any], rows: int = 64) -> Callable[[], Module]:
    def make() -> Module:
        tables = [options(4, rows, local_hbm_for_values=budget, **asked) for budget in budgets]
        return make_module(tables, optimizer="adam", device="cpu")

    return make


# Adam: 3 x 4 values of 4 bytes for 64 rows of two tables.
NEEDED = 2 * 64 * 48


@pytest.mark.parametrize("asked", [{"caching": True}, {"external_storage": dict}])
@pytest.mark.parametrize("budgets", [(NEEDED, 0), (NEEDED // 2, NEEDED // 2), (10**9, 10**9)])
def test_c27_memories_that_no_row_would_be_in_warn(asked: dict[str, Any], budgets: tuple[int, int]) -> None:
    ((field, value),) = asked.items()
    off = "False" if field == "caching" else "None"
    shown, warned = outcome(lambda module: (module.cache, look_up_two(module)), two_tables(budgets, asked))
    assert shown == (None, 2)
    assert [message for message in warned if field in message] == [
        f"table {name!r}: {field}={value!r} has no effect: the {NEEDED} bytes of all rows of the module fit its "
        f"{sum(budgets)} bytes of local_hbm_for_values; use {off}"
        for name in "ab"
    ]


def look_up_two(module: Module) -> int:
    module(*batch([1], [2])).sum().backward()
    return sum(int(of_table["size"]) for of_table in module.stats().values())


@pytest.mark.parametrize("budgets", [(0, 0), (NEEDED - 1, 0), (0, NEEDED - 1)])
def test_c27_rows_in_several_memories_are_refused(budgets: tuple[int, int]) -> None:
    error, _ = outcome(trainable, two_tables(budgets, {"external_storage": dict}))
    assert isinstance(error, UnsupportedOptionError)
    assert f"external_storage={dict!r}: the {NEEDED} bytes of all rows of the module do not fit its {sum(budgets)}" in (
        str(error)
    )
    # Who only caches loses nothing on the CPU.
    shown, warned = outcome(look_up_two, two_tables(budgets, {"caching": True}))
    assert shown == 2 and sum("caching=True has no effect: on the CPU" in message for message in warned) == 2


def test_c27_a_cache_of_rows_that_a_gpu_does_not_hold_is_refused_there() -> None:
    tables = [options(4, 64, caching=True, local_hbm_for_values=NEEDED - 1), options(4, 64, caching=True)]
    with pytest.raises(UnsupportedOptionError, match="table 'a': caching=True: the 6144 bytes .* 6143 bytes"):
        check_memories(tables, ["a", "b"], "adam", torch.device("cuda", 0))
    tables[1].local_hbm_for_values = 1
    with pytest.warns(UserWarning, match="caching=True has no effect: the 6144 bytes .* fit its 6144 bytes"):
        check_memories(tables, ["a", "b"], "adam", torch.device("cuda", 0))
    # Rows of tables that are only read have no state, and those of row-wise Adagrad count 16 bytes for theirs.
    for more, optimizer, needed in (({"training": False}, "adam", 1024), ({}, "exact_row_wise_adagrad", 2048)):
        table = options(4, 64, caching=True, local_hbm_for_values=needed - 1, **more)
        with pytest.raises(UnsupportedOptionError, match=f"the {needed} bytes"):
            check_memories([table], ["a"], optimizer, torch.device("cuda", 0))


def test_a_default_is_a_number_of_its_own_kind_only() -> None:
    assert isinstance(DynamicEmbTableOptions().max_load_factor, Default)
    module = Module([options()], optimizer="adam", device="cpu")
    # What kernels and files get is plain.
    for name in ("eps", "beta1", "beta2", "max_gradient"):
        assert type(getattr(module.optimizer, name)) is float
