"""Initializer arguments, interfaces, and errors."""

import itertools
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dynamicemb
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError, InsertFailedError, UnsupportedOptionError
from dynamicemb.types import (
    AdmissionStrategy,
    CopyMode,
    Counter,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    MemoryType,
)

Mode = DynamicEmbInitializerMode
FIELDS = {
    Mode.NORMAL: {"mean", "std_dev"},
    Mode.TRUNCATED_NORMAL: {"mean", "std_dev", "lower", "upper"},
    Mode.UNIFORM: {"lower", "upper"},
    Mode.CONSTANT: {"value"},
    Mode.DEBUG: set(),
}
OTHER_VALUE = {"mean": 0.25, "std_dev": 2.0, "lower": -0.5, "upper": 0.75, "value": 3.0}


def quiet(**kwargs) -> DynamicEmbInitializerArgs:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DynamicEmbInitializerArgs(**kwargs)


def test_enum_values():
    assert {m.name: m.value for m in Mode} == {
        "NORMAL": "normal",
        "TRUNCATED_NORMAL": "truncated_normal",
        "UNIFORM": "uniform",
        "CONSTANT": "constant",
        "DEBUG": "debug",
    }
    assert {m.name: m.value for m in CopyMode} == {"EMBEDDING": "embedding", "VALUE": "value"}
    assert {m.value for m in MemoryType} == {"device", "managed", "pinned_host", "host"}


def test_initializer_defaults():
    args = DynamicEmbInitializerArgs()
    assert (args.mode, args.mean, args.std_dev) == (Mode.UNIFORM, 0.0, 1.0)
    assert (args.lower, args.upper, args.value) == (None, None, 0.0)


@pytest.mark.parametrize(("mode", "name"), [*itertools.product(Mode, OTHER_VALUE)])
def test_equality_sees_exactly_the_fields_that_the_mode_reads(mode, name):
    plain, changed = DynamicEmbInitializerArgs(mode=mode), quiet(mode=mode, **{name: OTHER_VALUE[name]})
    assert (plain != changed) == (name in FIELDS[mode])
    if name not in FIELDS[mode]:
        assert hash(plain) == hash(changed)


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(Mode, 2)])
def test_different_modes_are_unequal(first, second):
    assert DynamicEmbInitializerArgs(mode=first) != DynamicEmbInitializerArgs(mode=second)


def test_mode_counts_even_where_the_read_values_agree():
    normal = DynamicEmbInitializerArgs(mode=Mode.NORMAL, mean=0.0, std_dev=1.0)
    assert normal != DynamicEmbInitializerArgs(mode=Mode.UNIFORM, lower=0.0, upper=1.0)


def test_equality_with_a_foreign_type_is_left_to_it():
    assert DynamicEmbInitializerArgs().__eq__("uniform") is NotImplemented
    assert DynamicEmbInitializerArgs() != "uniform"


initializers = st.builds(
    quiet,
    mode=st.sampled_from(Mode),
    mean=st.sampled_from([0.0, 1.0]),
    std_dev=st.sampled_from([1.0, 2.0]),
    lower=st.sampled_from([None, -1.0, 0.0]),
    upper=st.sampled_from([None, 0.0, 1.0]),
    value=st.sampled_from([0.0, -0.0, 1.0]),
)


@given(initializers, initializers)
def test_equality_is_agreement_in_mode_and_read_fields(a, b):
    same = a.mode == b.mode and all(getattr(a, name) == getattr(b, name) for name in FIELDS[a.mode])
    assert (a == b) == (b == a) == same
    if same:
        assert hash(a) == hash(b)


@pytest.mark.parametrize(("mode", "name"), [*itertools.product(Mode, OTHER_VALUE)])
def test_c27_a_field_that_the_mode_ignores_warns(mode, name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DynamicEmbInitializerArgs(mode=mode, **{name: OTHER_VALUE[name]})
    messages = [str(w.message) for w in caught]
    if name in FIELDS[mode]:
        assert messages == []
    else:
        assert len(messages) == 1
        assert f"{name}={OTHER_VALUE[name]}" in messages[0]
        assert mode.name in messages[0]


def test_warning_points_at_the_caller():
    with pytest.warns(UserWarning) as caught:
        DynamicEmbInitializerArgs(value=1.0)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"mode": "uniform"}, TypeError, ["mode", "'uniform'"]),
        ({"lower": "0"}, TypeError, ["lower", "'0'"]),
        ({"value": True}, TypeError, ["value", "True"]),
        ({"upper": float("inf")}, ValueError, ["upper", "inf"]),
        ({"lower": 1e39}, ValueError, ["lower", "1e+39"]),
        ({"mean": float("nan"), "mode": Mode.NORMAL}, ValueError, ["mean", "nan"]),
        ({"lower": 1.0, "upper": 0.5}, ValueError, ["lower=1.0", "upper=0.5", "swap"]),
        ({"lower": 1.0, "upper": 0.5, "mode": Mode.TRUNCATED_NORMAL}, ValueError, ["lower=1.0", "upper=0.5"]),
        ({"std_dev": -1.0, "mode": Mode.NORMAL}, ValueError, ["std_dev", "-1.0"]),
        ({"std_dev": 0.0, "mode": Mode.TRUNCATED_NORMAL}, ValueError, ["std_dev", "0.0", "CONSTANT"]),
    ],
)
def test_c04_bad_initializer_arguments_raise(kwargs, error, words):
    with pytest.raises(error) as caught:
        DynamicEmbInitializerArgs(**kwargs)
    assert all(word in str(caught.value) for word in words)


def test_degenerate_but_meaningful_initializers_are_accepted():
    DynamicEmbInitializerArgs(lower=0.5, upper=0.5)
    DynamicEmbInitializerArgs(mode=Mode.NORMAL, std_dev=0)


@pytest.mark.parametrize("interface", [Counter, AdmissionStrategy])
def test_interfaces_cannot_be_instantiated_half_done(interface):
    with pytest.raises(TypeError, match="abstract"):
        interface()


def test_a_user_written_admission_strategy_is_hashable_and_usable():
    class Frequent(AdmissionStrategy):
        def admit(self, keys, frequencies):
            return frequencies >= 2

        def initialize_non_admitted_embeddings(self, buffer, indices):
            return False

    strategy = Frequent()
    assert strategy.admit(torch.tensor([5, 6]), torch.tensor([1, 2])).tolist() == [False, True]
    assert hash(dynamicemb.DynamicEmbTableOptions(admit_strategy=strategy)) is not None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            CheckpointCorruptError("/d/t_emb_keys", "800 bytes", "792 bytes"),
            ["/d/t_emb_keys", "800 bytes", "792 bytes"],
        ),
        (InsertFailedError("users", 3, 10), ["users", "3 of 10", "max_capacity"]),
    ],
)
def test_errors_carry_the_numbers_and_survive_pickling(error, words):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    for text in (str(error), str(copy)):
        assert all(word in text for word in words)


def test_errors_form_one_tree():
    assert all(issubclass(e, DynamicEmbError) for e in (CheckpointCorruptError, InsertFailedError))
    assert issubclass(DynamicEmbError, RuntimeError)
    assert issubclass(UnsupportedOptionError, DynamicEmbError)
    assert issubclass(UnsupportedOptionError, NotImplementedError)


def test_every_exported_name_exists():
    assert len(set(dynamicemb.__all__)) == len(dynamicemb.__all__)
    assert [name for name in dynamicemb.__all__ if not hasattr(dynamicemb, name)] == []
    with pytest.raises(AttributeError, match="KVCounters"):
        dynamicemb.KVCounters  # noqa: B018
