"""Names, order and defaults of parameters are those of the reference implementation: its callers need no edit."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy
from dynamicemb.aliases import also_named
from dynamicemb.optimizer import (
    EmbOptimType,
    get_optimizer_ckpt_state_dim,
    get_optimizer_state_dim,
    get_required_arg,
    string_to_opt_type,
)
from tests.support.lookups import make_module, options

TABLES = "dynamicemb.batched_dynamicemb_tables:"
V2 = TABLES + "BatchedDynamicEmbeddingTablesV2."
CONFIG = "dynamicemb.dynamicemb_config:"
OPTIMIZER = "dynamicemb.optimizer:"
ADMISSION = "dynamicemb.embedding_admission:"
INCREMENTAL = "dynamicemb.incremental_dump:"
DUMPS = "dynamicemb.dump_load:"
PATH = "root_path, table_name, rank, world_size, item"

# The parameters there. Ours may follow them, if they may be left out. `=?` is a default that is another one here.
SIGNATURES = {
    CONFIG + "align_to_table_size": "n, alignment=16",
    CONFIG + "_sharded_table_bucket_layout": "embedding_config, world_size, bucket_capacity",
    CONFIG + "get_sharded_table_capacity": "embedding_config, world_size, bucket_capacity",
    # Buckets are 128 slots there; None is 128, with slots to spare in small tables.
    CONFIG + "get_table_value_bytes": "embedding_config, optimizer_type, world_size, bucket_capacity=?",
    CONFIG + "get_constraint_capacity": "memory_bytes, dtype, dim, optimizer_type, bucket_capacity",
    CONFIG + "complete_initializer_args": "initializer_args, embedding_config=None",
    CONFIG + "normalize_score_strategy": "score_strategy",
    CONFIG + "validate_score_strategy": "score_strategy",
    CONFIG + "get_eviction_score_strategy": "score_strategy",
    CONFIG + "score_strategy_has_timestamp_column": "score_strategy",
    CONFIG + "get_physical_score_order": "score_strategy",
    CONFIG + "score_dump_permutation": "score_strategy",
    CONFIG + "score_load_permutation": "score_strategy",
    CONFIG + "data_type_to_dyn_emb": "data_type",
    CONFIG + "data_type_to_dtype": "data_type",
    CONFIG + "dyn_emb_to_torch": "data_type",
    CONFIG + "torch_to_dyn_emb": "torch_dtype",
    CONFIG + "dtype_to_bytes": "dtype",
    CONFIG + "string_to_evict_strategy": "strategy_str",
    CONFIG + "warning_for_cstm_score": "",
    CONFIG + "DynamicEmbTableOptions.get_grouped_key": "self",
    OPTIMIZER + "get_optimizer_state_dim": "optimizer_type, dim, dtype=None",
    OPTIMIZER + "get_optimizer_ckpt_state_dim": "optimizer_type, dim, dtype=None",
    OPTIMIZER + "string_to_opt_type": "optimizer_str",
    OPTIMIZER + "get_required_arg": "args, key",
    TABLES + "encode_meta_json_file_path": "root_path, table_name",
    TABLES + "encode_checkpoint_file_path": PATH,
    TABLES + "encode_counter_checkpoint_file_path": PATH,
    V2 + "__init__": (
        "self, table_options, table_names=None, feature_table_map=None, use_index_dedup=False, "
        "prefetch_pipeline=False, pooling_mode=<DynamicEmbPoolingMode.SUM: 0>, output_dtype=torch.float32, "
        "device=None, enforce_hbm=False, bounds_check_mode=?, optimizer=?, stochastic_rounding=True, "
        "gradient_clipping=False, "
        "max_gradient=1.0, max_norm=0.0, learning_rate=0.01, eps=1e-08, initial_accumulator_value=0.0, momentum=0.9, "
        "weight_decay=0.0, weight_decay_mode=?, eta=0.001, beta1=0.9, beta2=0.999, "
        "counter_based_regularization=None, cowclip_regularization=None"
    ),
    V2 + "forward": (
        "self, indices, offsets, per_sample_weights=None, feature_requires_grad=None, "
        "batch_size_per_feature_per_rank=None, total_unique_indices=None"
    ),
    V2 + "prefetch": (
        "self, indices, offsets, forward_stream=None, batch_size_per_feature_per_rank=None, frequency_counters=None"
    ),
    V2 + "flush": "self",
    V2 + "reset_cache_states": "self",
    V2 + "set_record_cache_metrics": "self, record",
    V2 + "set_learning_rate": "self, lr",
    V2 + "set_score": "self, named_score",
    V2 + "get_score": "self",
    V2 + "export_keys_values": "self, table_name, device, batch_size=65536",
    V2 + "fill_tables": "self, load_factor=0.95, tolerance=1e-05",
    V2 + "dump": "self, save_dir, optim=False, counter=False, table_names=None, pg=None",
    V2 + "load": "self, save_dir, optim=False, counter=False, table_names=None, pg=None",
    V2 + "incremental_dump": "self, named_thresholds=None, pg=None",
    V2 + "split_embedding_weights": "self",
    # Buckets of 1024 there.
    ADMISSION + "KVCounter": "capacity, bucket_capacity=?, key_type=torch.int64",
    ADMISSION + "FrequencyAdmissionStrategy": "threshold, initializer_args=None",
    ADMISSION + "FrequencyAdmissionStrategy.admit": "self, keys, frequencies",
    ADMISSION + "FrequencyAdmissionStrategy.initialize_non_admitted_embeddings": "self, buffer, indices",
    ADMISSION + "AdmissionStrategy.admit": "self, keys, frequencies",
    ADMISSION + "AdmissionStrategy.initialize_non_admitted_embeddings": "self, buffer, indices",
    ADMISSION + "Counter.add": "self, keys, table_ids, frequencies",
    ADMISSION + "Counter.erase": "self, keys, table_ids",
    ADMISSION + "Counter.memory_usage": "self, mem_type=<MemoryType.DEVICE: 'device'>",
    ADMISSION + "Counter.load": "self, key_file, counter_file, table_id",
    ADMISSION + "Counter.dump": "self, key_file, counter_file, table_id",
    INCREMENTAL + "incremental_dump": "model, score_threshold, pg=None",
    INCREMENTAL + "get_score": "model",
    INCREMENTAL + "set_score": "model, table_score",
    INCREMENTAL + "is_valid_score_threshold": "score_threshold",
    # All ranks there, which is what None says.
    DUMPS + "DynamicEmbDump": (
        "path, model, table_names=None, optim=False, counter=False, pg=?, allow_overwrite=False"
    ),
    DUMPS + "DynamicEmbLoad": "path, model, table_names=None, optim=False, counter=False, pg=?",
    DUMPS + "find_sharded_modules": "module, path=''",
    DUMPS + "get_dynamic_emb_module": "model",
}


def resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def shown(parameter: inspect.Parameter) -> str:
    # Not `str`, which shows types too.
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_are_those_of_the_reference_implementation(name: str) -> None:
    expected = SIGNATURES[name].split(", ") if SIGNATURES[name] else []
    parameters = list(inspect.signature(resolve(name)).parameters.values())
    theirs, ours = parameters[: len(expected)], parameters[len(expected) :]
    got = [shown(parameter) for parameter in theirs]
    open_ended = [place for place, text in enumerate(expected) if text.endswith("=?")]
    assert all("=" in got[place] for place in open_ended)
    assert [text.partition("=")[0] if place in open_ended else text for place, text in enumerate(got)] == [
        text.removesuffix("=?") for text in expected
    ]
    for parameter in ours:
        assert parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD, parameter


def test_fields_of_options_keep_their_places() -> None:
    from dynamicemb import DynamicEmbTableOptions

    theirs = (
        "embedding_dtype dim max_capacity evict_strategy local_hbm_for_values device_id training initializer_args "
        "eval_initializer_args caching init_capacity max_load_factor score_strategy bucket_capacity safe_check_mode "
        "global_hbm_for_values external_storage index_type dist_type admit_strategy admission_counter"
    ).split()
    assert list(inspect.signature(DynamicEmbTableOptions).parameters)[: len(theirs)] == theirs


# Names that there were before, beside those.


def customized() -> Any:
    return make_module([options(score_strategy=DynamicEmbScoreStrategy.CUSTOMIZED)])


def rate_after(**given: float) -> float:
    module = make_module()
    module.set_learning_rate(**given)  # type: ignore[arg-type]
    return module.optimizer.learning_rate


def score_after(**given: dict[str, int]) -> int:
    module = customized()
    module.set_score(**given)
    return module.get_score()["a"]


ADAM = EmbOptimType.ADAM
TORCH_TO_DYN_EMB = resolve(CONFIG + "torch_to_dyn_emb")
# name here: (call, other name, value, what comes of it)
ALIASES: dict[str, tuple[Callable[..., Any], str, Any, Any]] = {
    "optimizer_type": (lambda **k: get_optimizer_state_dim(dim=4, **k), "opt_type", ADAM, 8),
    "optimizer_type of a dump": (lambda **k: get_optimizer_ckpt_state_dim(dim=4, **k), "opt_type", ADAM, 8),
    "optimizer_str": (string_to_opt_type, "name", "adam", ADAM),
    "key": (lambda **k: get_required_arg({"lr": 0.5}, **k), "name", "lr", 0.5),
    "torch_dtype": (TORCH_TO_DYN_EMB, "dtype", torch.float16, TORCH_TO_DYN_EMB(torch.float16)),
    "lr": (rate_after, "learning_rate", 0.25, 0.25),
    "named_score": (score_after, "scores", {"a": 5}, 5),
}


@pytest.mark.parametrize("subject", ALIASES)
def test_a_parameter_has_its_other_name_too_but_not_both(subject: str) -> None:
    call, other, value, expected = ALIASES[subject]
    name = subject.split()[0]
    assert call(**{name: value}) == expected
    assert call(**{other: value}) == expected
    with pytest.raises(TypeError, match=f"got '{name}' and '{other}', which are the same argument; give one of them"):
        call(**{name: value, other: value})


def test_a_second_name_leaves_a_function_as_it_is() -> None:
    @also_named(old="new")
    def function(first: int, new: int = 2) -> int:
        """Do."""
        return 10 * first + new

    assert (function(1), function(1, 3), function(1, new=4), function(1, old=5)) == (12, 13, 14, 15)
    assert function.__name__ == "function" and function.__doc__ == "Do."
    assert list(inspect.signature(function).parameters) == ["first", "new"]
    with pytest.raises(TypeError, match="multiple values for argument 'new'"):
        function(1, 2, old=3)
