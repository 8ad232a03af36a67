"""From table options to a group of tables; every option is honoured or refused here."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from dynamicemb.capacity import growing_bucket_layout
from dynamicemb.dynamicemb_config import (
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    unsupported_options,
)
from dynamicemb.embedding.admission import build_admission
from dynamicemb.embedding.memories import check_memories
from dynamicemb.errors import UnsupportedOptionError
from dynamicemb.optimizer import OptimizerSpec
from dynamicemb.score_function import translate
from dynamicemb.table.group import GroupOptions, TableGroup
from dynamicemb.table.growing.growth import GrowthLimits
from dynamicemb.table.index import INDEX_BYTES_PER_SLOT, NEVER, STAMP_BYTES_PER_SLOT
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.rows import RowFormat
from dynamicemb.table.scores import (
    SCORE_COMPOUND,
    SCORE_CUSTOMIZED,
    SCORE_LFU,
    SCORE_NO_EVICTION,
    SCORE_STEP,
    SCORE_TIMESTAMP,
)
from dynamicemb.types import Default
from dynamicemb.warn import warn

_SCORES = {
    DynamicEmbScoreStrategy.TIMESTAMP: SCORE_TIMESTAMP,
    DynamicEmbScoreStrategy.STEP: SCORE_STEP,
    DynamicEmbScoreStrategy.CUSTOMIZED: SCORE_CUSTOMIZED,
    DynamicEmbScoreStrategy.LFU: SCORE_LFU,
    DynamicEmbScoreStrategy.NO_EVICTION: SCORE_NO_EVICTION,
}


@dataclass(frozen=True)
class GroupFeatures:
    """How features map to the tables of a group.

    Attributes:
        tables: the table of each feature, ``F`` ints.
        first_features: first feature of each table and the end, ``T+1`` ints.
        column_offsets: where each feature's columns start in pooled output and the end, ``F+1`` ints.
    """

    tables: list[int]
    first_features: list[int]
    column_offsets: list[int]


def check_output_dtype(output_dtype: Any) -> None:
    """Refuse a dtype in which no lookup can answer.

    Raises:
        ValueError: as said.
    """
    if output_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"output_dtype must be float32, float16 or bfloat16, got {output_dtype}")


def strategy_name(option: DynamicEmbTableOptions) -> str:
    """Return the score strategy of a table for people to read, for example ``TIMESTAMP+LFU``."""
    strategy = option.score_strategy
    parts = strategy if isinstance(strategy, tuple) else (strategy,)
    return "+".join(part.name for part in parts if part is not None)


def check_pooling_mode(pooling_mode: Any) -> DynamicEmbPoolingMode:
    """Return the pooling mode, also of its number.

    Raises:
        ValueError: there is no such mode.
    """
    try:
        return DynamicEmbPoolingMode(pooling_mode)
    except ValueError:
        known = ", ".join(f"DynamicEmbPoolingMode.{mode.name}" for mode in DynamicEmbPoolingMode)
        raise ValueError(f"pooling_mode {pooling_mode!r} is unknown; use one of {known}") from None


def check_seed(seed: int | None) -> int:
    """Return the seed of the initial values; None is torch's.

    Raises:
        TypeError: not an int.
    """
    if seed is None:
        return torch.initial_seed()
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an int or None, got {seed!r}; None takes torch.initial_seed()")
    return seed


def check_options(
    options: Sequence[DynamicEmbTableOptions], names: Sequence[str] | None, pooling: DynamicEmbPoolingMode
) -> list[str]:
    """Check that the tables are complete, supported, and agree where one group must.

    Returns:
        The tables' names, T; ``table_0``, ``table_1``, ... if none are given.

    Raises:
        TypeError: something is not a ``DynamicEmbTableOptions``, or a name not a string.
        ValueError: an option is missing, or tables disagree.
        UnsupportedOptionError: an option this version cannot honour.
    """
    if not isinstance(options, list | tuple):
        raise TypeError(f"table_options must be a list of DynamicEmbTableOptions, got {type(options).__name__}")
    if not options:
        raise ValueError("table_options is empty; give one DynamicEmbTableOptions per table")
    if names is None:
        names = [f"table_{t}" for t in range(len(options))]
    if not isinstance(names, list | tuple) or any(not isinstance(name, str) for name in names):
        raise TypeError(f"table_names must be a list of strings, got {names!r}")
    if len(names) != len(options) or len(set(names)) != len(names):
        raise ValueError(f"table_names must be {len(options)} distinct names, got {names}")
    for name, option in zip(names, options, strict=True):
        if not isinstance(option, DynamicEmbTableOptions):
            raise TypeError(f"table_options of {name!r} must be a DynamicEmbTableOptions, got {type(option).__name__}")
        option.validate()
        _check_sizes(name, option)
        if option.score_strategy is None:
            raise ValueError(f"score_strategy of table {name!r} is None: not a dynamic table; choose a strategy")
        refused = unsupported_options(option)
        if refused:
            raise UnsupportedOptionError(f"table {name!r}: " + "; ".join(refused))
    _check_agreement(options, names, pooling)
    return list(names)


def _check_sizes(name: str, option: DynamicEmbTableOptions) -> None:
    size = ("max_capacity", option.max_capacity)
    if option.grows_without_limit:
        size = ("init_capacity", option.init_capacity or option.max_capacity)
    for field, value in (("dim", option.dim), size):
        if value is None:
            raise ValueError(f"{field} of table {name!r} is not set; give DynamicEmbTableOptions({field}=...)")


def _check_agreement(
    options: Sequence[DynamicEmbTableOptions], names: Sequence[str], pooling: DynamicEmbPoolingMode
) -> None:
    first = options[0]
    for name, option in zip(names[1:], options[1:], strict=True):
        mine, theirs = option.get_grouped_key(), first.get_grouped_key()
        if option.score_function is None:
            # The index keeps a strategy per table. A score function reads scores in one order.
            del mine["score_strategy"], theirs["score_strategy"]
        # Whose refusal names the counters.
        del mine["admission_counter"], theirs["admission_counter"]
        mine["embedding_dtype"], theirs["embedding_dtype"] = weights_dtype(option), weights_dtype(first)
        different = [f"{key}={mine[key]!r} but {theirs[key]!r}" for key in theirs if mine[key] != theirs[key]]
        if different:
            raise ValueError(
                f"tables {name!r} and {names[0]!r} differ in {', '.join(different)}; "
                "tables of one module must agree there, give them to several modules"
            )
    dims = sorted({option.dim for option in options if option.dim is not None})
    if pooling is DynamicEmbPoolingMode.NONE and len(dims) > 1:
        raise ValueError(f"dim: tables looked up without pooling need one dim, got {dims}; use several modules")


def weights_dtype(option: DynamicEmbTableOptions) -> torch.dtype:
    """Return the dtype of a table's weights; float32 unless set."""
    return option.embedding_dtype or torch.float32


def check_features(feature_table_map: list[int] | None, num_tables: int, dims: list[int]) -> GroupFeatures:
    """Check the map from features to tables.

    Args:
        feature_table_map: the table of each feature, not decreasing, naming every table; None is one feature a table.
        num_tables: T.
        dims: D of each table.

    Raises:
        TypeError: not a list of ints.
        ValueError: decreasing, out of range, or a table without a feature.
    """
    if feature_table_map is None:
        feature_table_map = list(range(num_tables))
    tables = list(feature_table_map)
    if any(not isinstance(t, int) or isinstance(t, bool) for t in tables):
        raise TypeError(f"feature_table_map must be a list of ints, got {feature_table_map!r}")
    if sorted(set(tables)) != list(range(num_tables)) or tables != sorted(tables):
        raise ValueError(
            f"feature_table_map must name every table 0..{num_tables - 1} in order, each for a run of features; "
            f"got {tables}"
        )
    columns = [0]
    for table in tables:
        columns.append(columns[-1] + dims[table])
    return GroupFeatures(tables, [tables.index(t) for t in range(num_tables)] + [len(tables)], columns)


def check_device(device: torch.device | str | None) -> torch.device:
    """Return the device of the tables as tensors on it name theirs; None is the current CUDA device, else the CPU.

    Raises:
        ValueError: a CUDA device that torch does not see.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        # "cpu:0" is no other device, but would not be equal to that of any tensor.
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(device)!r}: torch sees {torch.cuda.device_count()} CUDA devices; use device='cpu', or None "
            "for the current CUDA device where there is one"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_device_ids(options: Sequence[DynamicEmbTableOptions], names: Sequence[str], device: torch.device) -> None:
    """Check that tables on a GPU are where they were wanted.

    Raises:
        ValueError: a table names another CUDA device.
    """
    for name, option in zip(names, options, strict=True):
        if device.type == "cuda" and option.device_id not in (None, device.index):
            raise ValueError(
                f"table {name!r}: device_id={option.device_id}, but the module is on {device}; leave device_id None "
                f"or make the module with device='cuda:{option.device_id}'"
            )


def build_group(
    options: list[DynamicEmbTableOptions], names: list[str], optimizer: OptimizerSpec, seed: int, device: torch.device
) -> TableGroup:
    """Allocate the tables of a module; ``options`` must have been checked."""
    first = options[0]
    check_device_ids(options, names, device)
    check_memories(options, names, optimizer.kind, device)
    layouts = [_layout(option) for option in options]
    buckets = {bucket for _, _, bucket in layouts}
    if len(buckets) > 1:
        raise ValueError(
            f"bucket_capacity: one bucket per table, but the tables need buckets of {sorted(buckets)} slots "
            "and a module has buckets of one size; give the tables equal capacities or to several modules"
        )
    for name, option in zip(names, options, strict=True):
        for field, reason in _idle_options(option, device).items():
            value = getattr(option, field)
            warn(f"table {name!r}: {field}={value!r} has no effect: {reason}")
    strategies = tuple(_score(option) for option in options)
    capacities = [num * bucket for num, _, bucket in layouts]
    max_capacities = [None if num is None else num * bucket for _, num, bucket in layouts]
    growth = None
    if capacities != max_capacities:
        growth = GrowthLimits(max_capacities, [float(o.max_load_factor) for o in options])
    # Plain numbers: those that a planner wrote are of a type that kernels do not know.
    dims = [int(_set(o.dim)) for o in options]
    formats = [RowFormat(dim, optimizer.num_state(dim) if first.training else 0) for dim in dims]
    if device.type == "cuda":
        wanted = [c * f.num_bytes(weights_dtype(first)) for c, f in zip(capacities, formats, strict=True)]
        per_slot = INDEX_BYTES_PER_SLOT + (STAMP_BYTES_PER_SLOT if SCORE_COMPOUND in strategies else 0)
        _check_gpu_memory(options, wanted, sum(capacities) * per_slot, device)
    return TableGroup(
        names,
        capacities,
        formats,
        InitializerTable.create([o.initializer_args for o in options], names, seed, device),
        GroupOptions(
            bucket_capacity=layouts[0][2],
            dtype=weights_dtype(first),
            strategies=strategies,
            seed=seed,
            state_value=optimizer.initial_accumulator_value,
            protect_steps=first.protect_steps,
            score_function=_score_function(first),
            ttls=_ttls(options),
        ),
        device,
        growth,
        build_admission(options, names, seed, device),
    )


def _check_gpu_memory(
    options: list[DynamicEmbTableOptions], row_bytes: list[int], index_bytes: int, device: torch.device
) -> None:
    """Refuse tables that are meant to be partly in host memory, and tables that do not fit.

    Args:
        options: of each table.
        row_bytes: bytes of the rows of each table.
        index_bytes: of all of them.
        device: the GPU.

    Raises:
        UnsupportedOptionError: ``local_hbm_for_values`` of a table is set and holds less than all its rows.
        torch.OutOfMemoryError: the GPU has too little memory left.
    """
    for option, number in zip(options, row_bytes, strict=True):
        if 0 < option.local_hbm_for_values < number:
            raise UnsupportedOptionError(
                f"local_hbm_for_values={option.local_hbm_for_values} is less than the {number} bytes of all rows: rows "
                "in host memory are not available in this version; set it to 0 or at least to that number, or lower "
                "max_capacity"
            )
    all_rows = sum(row_bytes)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if all_rows + index_bytes > free:
        raise torch.OutOfMemoryError(
            f"the tables need {all_rows} bytes of rows and {index_bytes} of index, {device} has {free} bytes free; "
            "lower max_capacity, or use a smaller embedding_dtype or an optimizer with less state"
        )


def _idle_options(option: DynamicEmbTableOptions, device: torch.device) -> dict[str, str]:
    """Return the options that are set and have no effect, and why."""
    reasons = {}
    init, most, _ = _layout(option)
    if init == most:
        reasons["max_load_factor"] = "the table does not grow; set init_capacity below max_capacity, or leave it"
    if not option.training:
        reasons["admit_strategy"] = "only training lookups ask it, and training=False refuses them; set it to None"
    if device.type == "cpu":
        reasons["local_hbm_for_values"] = "on the CPU all rows are in host memory; set it to 0"
        reasons["global_hbm_for_values"] = "on the CPU all rows are in host memory; set it to 0"
        reasons["device_id"] = "the tables are on the CPU; set it to None"
    elif not option.local_hbm_for_values:
        reasons["global_hbm_for_values"] = "the planner divides it, and none made this module; set local_hbm_for_values"
    if device.type == "cpu" and option.local_hbm_for_values:
        # Sharding derives it from the global one; one warning is enough.
        del reasons["global_hbm_for_values"]
    defaults = {field.name: field.default for field in fields(option) if field.default is not MISSING}
    return {name: why for name, why in reasons.items() if _is_given(getattr(option, name), defaults[name])}


def _is_given(value: Any, default: Any) -> bool:
    """Say whether somebody set an option, as far as can be told: of most, to another value than the default."""
    return not isinstance(value, Default) if isinstance(default, Default) else bool(value != default)


def _layout(option: DynamicEmbTableOptions) -> tuple[int, int | None, int]:
    """Return ``growing_bucket_layout`` of a table."""
    init = _set(option.init_capacity or option.max_capacity)
    most = None if option.grows_without_limit else option.max_capacity
    return growing_bucket_layout(init, most, option.bucket_capacity)


def _score(option: DynamicEmbTableOptions) -> int:
    """Return SCORE_* of a table; a tuple can only be TIMESTAMP with LFU."""
    strategy = option.score_strategy
    return _SCORES[strategy] if isinstance(strategy, DynamicEmbScoreStrategy) else SCORE_COMPOUND


def _score_function(option: DynamicEmbTableOptions) -> str | None:
    if option.score_function is None or option.score_strategy is None:
        return None
    return translate(option.score_function, option.score_strategy)


def _ttls(options: Sequence[DynamicEmbTableOptions]) -> tuple[int, ...]:
    """Return the time to live of each table in nanoseconds, or nothing if no table has one."""
    if all(option.ttl is None for option in options):
        return ()
    return tuple(NEVER if option.ttl is None else round(option.ttl * 1e9) for option in options)


def _set(value: int | None) -> int:
    assert value is not None
    return value


def warn_about_idle_arguments(
    use_index_dedup: bool, prefetch_pipeline: bool, enforce_hbm: bool, bounds_check_mode: Any
) -> None:
    """Warn about arguments that are given and have no effect."""
    if prefetch_pipeline:
        warn(
            "prefetch_pipeline=True has no effect: rows are not moved between memories, and the forward does all of "
            "the work; leave it False"
        )
    if use_index_dedup:
        warn("use_index_dedup has no effect on tables of one rank: repeated ids need no preparation; leave it False")
    if enforce_hbm:
        warn("enforce_hbm has no effect: rows are not cached; leave it False")
    if bounds_check_mode is not None:
        warn(
            "bounds_check_mode has no effect: every id is legal and offsets are always checked; leave it None",
        )
