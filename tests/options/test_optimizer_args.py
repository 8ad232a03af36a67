"""Optimizer names, state sizes, and the checked description that kernels read."""

import enum
import subprocess
import sys
import warnings
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamicemb import optimizer
from dynamicemb.optimizer import (
    OptimizerArgs,
    OptimizerKind,
    OptimizerSpec,
    get_optimizer_ckpt_state_dim,
    get_optimizer_state_dim,
    get_required_arg,
    optimizer_kind,
    saved_iterations,
    string_to_opt_type,
)

SUPPORTED = {
    "sgd": OptimizerKind.SGD,
    "exact_sgd": OptimizerKind.SGD,
    "adam": OptimizerKind.ADAM,
    "exact_adagrad": OptimizerKind.ADAGRAD,
    "exact_row_wise_adagrad": OptimizerKind.ROWWISE_ADAGRAD,
}
UNSUPPORTED = sorted({m.value for m in optimizer._EmbOptimType} - set(SUPPORTED))

RUN_WITHOUT_FBGEMM = """
import sys
import dynamicemb
assert not {"torchrec", "fbgemm_gpu", "numba"} & set(sys.modules)
sys.modules["fbgemm_gpu"] = None
from dynamicemb import EmbOptimType
from dynamicemb.optimizer import _EmbOptimType, OptimizerSpec, string_to_opt_type
assert EmbOptimType is _EmbOptimType
assert string_to_opt_type("adam") is EmbOptimType.ADAM
assert OptimizerSpec.create(EmbOptimType.ADAM).name == "adam"
"""


def test_package_imports_without_torchrec_and_fbgemm():
    done = subprocess.run([sys.executable, "-c", RUN_WITHOUT_FBGEMM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_enum_is_that_of_fbgemm_and_our_copy_agrees():
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    assert optimizer.EmbOptimType is configs.EmbOptimType
    ours = {m.name: m.value for m in optimizer._EmbOptimType}
    # Older and newer FBGEMM differ at the edges; what we support must be there.
    theirs = {m.name: m.value for m in configs.EmbOptimType}
    assert {n: v for n, v in ours.items() if n in theirs} == {n: v for n, v in theirs.items() if n in ours}
    assert set(SUPPORTED) <= set(ours.values()) & set(theirs.values())


def test_broken_fbgemm_warns_and_falls_back(monkeypatch):
    def fail(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(optimizer.importlib, "import_module", fail)
    optimizer._emb_optim_type.cache_clear()
    try:
        with pytest.warns(UserWarning, match="libcudart"):
            assert optimizer.EmbOptimType is optimizer._EmbOptimType
    finally:
        optimizer._emb_optim_type.cache_clear()


@pytest.mark.parametrize(("name", "kind"), SUPPORTED.items())
def test_kind_is_found_by_member_of_either_enum_and_by_name(name, kind):
    member = optimizer._EmbOptimType(name)
    foreign = enum.Enum("EmbOptimType", {member.name: name})(name)
    assert [optimizer_kind(key) for key in (name, member, foreign, kind)] == [kind] * 4
    assert string_to_opt_type(name).value == name


@pytest.mark.parametrize("name", [*UNSUPPORTED, "", "ADAM", None, 1, 7, True])
def test_c04_unsupported_optimizer_raises_naming_the_supported_ones(name):
    for call in (optimizer_kind, OptimizerSpec.create, lambda n: get_optimizer_state_dim(n, 8)):
        with pytest.raises(ValueError, match="exact_row_wise_adagrad") as caught:
            call(name)
        assert repr(name) in str(caught.value)
        assert all(known in str(caught.value) for known in SUPPORTED)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 3, 128, 2048])
def test_state_dims(dim, dtype):
    expected = {"sgd": 0, "exact_sgd": 0, "adam": 2 * dim, "exact_adagrad": dim, "exact_row_wise_adagrad": 1}
    for name, num_state in expected.items():
        assert get_optimizer_state_dim(name, dim, dtype) == num_state
        assert get_optimizer_ckpt_state_dim(name, dim, dtype) == num_state
        assert OptimizerSpec.create(name).num_state(dim) == num_state


def test_get_required_arg():
    assert get_required_arg({"lr": 0.0}, "lr") == 0.0
    with pytest.raises(ValueError, match="'eps' is missing.*lr"):
        get_required_arg({"lr": 0.0}, "eps")


def test_defaults_are_the_documented_ones():
    assert OptimizerArgs() == OptimizerArgs(
        True, False, 1.0, 0.0, 0.01, 1e-8, 0.0, 0.9, 0.999, 0.0, 0, 0.001, 0.9, -1, -1, 1.0, -1, -1, 0, 0, 0, 0, 0, 0
    )
    spec, args = OptimizerSpec(), OptimizerArgs()
    shared = {f.name for f in fields(spec)} - {"kind"}
    assert len(shared) == 9
    assert {name: getattr(spec, name) for name in shared} == {name: getattr(args, name) for name in shared}


def test_create_takes_what_it_is_given():
    given_options = {
        "learning_rate": 0.5,
        "eps": 0.25,
        "beta1": 0.0,
        "beta2": 0.75,
        "weight_decay": 0.125,
        "initial_accumulator_value": 2.0,
        "gradient_clipping": True,
        "max_gradient": 3.0,
        "stochastic_rounding": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = OptimizerSpec.create("adam", **given_options)
    assert {name: getattr(spec, name) for name in given_options} == given_options
    assert spec.kind is OptimizerKind.ADAM


@pytest.mark.parametrize("name", SUPPORTED)
def test_defaults_given_explicitly_do_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OptimizerSpec.create(name, **vars(OptimizerArgs()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adam", {"max_norm": 1.0}),
        ("adam", {"momentum": 0.5}),
        ("adam", {"eta": 0.1}),
        ("adam", {"weight_decay_mode": 1}),
        ("adam", {"weight_decay_mode": enum.Enum("WeightDecayMode", {"L2": 1}).L2}),
        ("adam", {"counter_based_regularization": object()}),
        ("adam", {"cowclip_regularization": object()}),
        ("adam", {"regularization_mode": 3}),
        ("adam", {"max_gradient": 2.0}),
        ("sgd", {"weight_decay": 0.1}),
        ("exact_adagrad", {"weight_decay": 0.1}),
        ("exact_row_wise_adagrad", {"beta2": 0.5}),
        ("sgd", {"eps": 1.0, "initial_accumulator_value": 1.0}),
    ],
)
def test_c27_an_option_without_effect_warns_by_name(name, options):
    with pytest.warns(UserWarning, match="ignores") as caught:
        OptimizerSpec.create(name, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert all(f"{key}={value}" in str(caught[0].message) for key, value in options.items())


def test_weight_decay_mode_none_is_the_default():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OptimizerSpec.create("adam", weight_decay_mode=enum.Enum("WeightDecayMode", {"NONE": 0}).NONE)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"learning_rate": -0.1}, ValueError),
        ({"learning_rate": float("nan")}, ValueError),
        ({"learning_rate": float("inf")}, ValueError),
        ({"learning_rate": 1e39}, ValueError),
        ({"learning_rate": "0.1"}, TypeError),
        ({"learning_rate": True}, TypeError),
        ({"eps": -1e-8}, ValueError),
        ({"eps": None}, TypeError),
        ({"beta1": 1.0}, ValueError),
        ({"beta1": -0.1}, ValueError),
        ({"beta2": 1.5}, ValueError),
        ({"weight_decay": -0.1}, ValueError),
        ({"initial_accumulator_value": -1.0}, ValueError),
        ({"max_gradient": 0.0, "gradient_clipping": True}, ValueError),
        ({"max_gradient": -1.0, "gradient_clipping": True}, ValueError),
        ({"gradient_clipping": 1}, TypeError),
        ({"stochastic_rounding": None}, TypeError),
        ({"learning_rte": 0.1}, TypeError),
    ],
)
def test_c04_bad_optimizer_options_raise_naming_option_and_value(options, error):
    name, value = next(iter(options.items()))
    with pytest.raises(error, match=name) as caught:
        OptimizerSpec.create("adam", **options)
    if name != "learning_rte":
        assert str(value) in str(caught.value)


def test_changing_the_learning_rate_is_checked_and_changes_nothing_else():
    spec = OptimizerSpec.create("adam", weight_decay=0.5)
    assert spec.with_learning_rate(0.25) == replace(spec, learning_rate=0.25)
    assert spec.with_learning_rate(0).learning_rate == 0
    with pytest.raises(ValueError, match="learning_rate"):
        spec.with_learning_rate(-1.0)


def test_saved_form_has_the_documented_keys():
    adagrad = {"lr": 0.01, "eps": 1e-8, "initial_accumulator_value": 0.0}
    adam = {"lr": 0.01, "iters": 7, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    assert OptimizerSpec.create("exact_sgd").to_dict(7) == {"opt_type": "sgd", "lr": 0.01}
    assert OptimizerSpec.create("adam").to_dict(7) == {"opt_type": "adam"} | adam
    assert OptimizerSpec.create("exact_adagrad").to_dict(7) == {"opt_type": "exact_adagrad"} | adagrad
    assert OptimizerSpec.create("exact_row_wise_adagrad").to_dict(7) == {"opt_type": "exact_row_wise_adagrad"} | adagrad


unit = st.floats(0, 1, exclude_max=True, width=32)
specs = st.builds(
    OptimizerSpec,
    kind=st.sampled_from(OptimizerKind),
    learning_rate=unit,
    eps=unit,
    beta1=unit,
    beta2=unit,
    weight_decay=unit,
    initial_accumulator_value=unit,
    gradient_clipping=st.booleans(),
    stochastic_rounding=st.booleans(),
)


@given(specs, st.integers(0, 2**40))
def test_saved_form_round_trips(spec, iterations):
    saved = spec.to_dict(iterations)
    restored = OptimizerSpec.from_dict(saved)
    assert restored.to_dict(iterations) == saved
    assert restored.kind is spec.kind
    assert saved_iterations(saved) == (iterations if spec.kind is OptimizerKind.ADAM else 0)


@given(specs, specs)
def test_updating_takes_the_saved_numbers_and_keeps_clipping_and_rounding(running, saved):
    saved = replace(saved, kind=running.kind)
    updated = running.updated(saved.to_dict(3))
    assert updated.to_dict(3) == saved.to_dict(3)
    assert updated.gradient_clipping == running.gradient_clipping
    assert updated.stochastic_rounding == running.stochastic_rounding


@pytest.mark.parametrize("name", sorted(set(SUPPORTED) - {"exact_sgd"}))
def test_a_missing_saved_key_raises(name):
    saved = OptimizerSpec.create(name).to_dict()
    for key in saved:
        with pytest.raises(ValueError, match=f"'{key}' is missing"):
            OptimizerSpec.from_dict({k: v for k, v in saved.items() if k != key})


def test_saved_numbers_of_another_optimizer_are_refused():
    with pytest.raises(ValueError, match="'sgd'.*'adam'"):
        OptimizerSpec.create("adam").updated({"opt_type": "sgd", "lr": 0.1})
    with pytest.raises(ValueError, match="beta1"):
        OptimizerSpec.from_dict(OptimizerSpec.create("adam").to_dict() | {"beta1": 1.0})
    with pytest.raises(ValueError, match="iters"):
        saved_iterations(OptimizerSpec.create("adam").to_dict(-1))
