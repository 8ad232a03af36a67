"""Table options, and the documented import path of everything that sizes or ranks a table."""

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from numbers import Integral, Real
from typing import Any

import torch

from dynamicemb.admission import check_admission, counter_kind
from dynamicemb.capacity import (
    BUCKET_ALIGNMENT,
    DEFAULT_BUCKET_CAPACITY,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    EmbeddingConfig,
    _sharded_table_bucket_layout,
    align_to_table_size,
    bucket_layout,
    check_bucket_capacity,
    data_type_to_dtype,
    get_sharded_table_capacity,
    get_table_row_bytes,
    get_table_value_bytes,
    row_bytes,
    state_offset_bytes,
)
from dynamicemb.compatibility import (
    DynamicEmbDataType,
    data_type_to_dyn_emb,
    dtype_to_bytes,
    dyn_emb_to_torch,
    get_constraint_capacity,
    torch_to_dyn_emb,
)
from dynamicemb.config_initializer import initializer_of_config
from dynamicemb.score_function import translate
from dynamicemb.score_strategy import (
    DYNAMICEMB_CSTM_SCORE_CHECK,
    DynamicEmbEvictStrategy,
    DynamicEmbScoreStrategy,
    EvictStrategy,
    ScoreStrategy,
    get_evict_strategy,
    get_eviction_score_strategy,
    get_physical_score_order,
    normalize_score_strategy,
    score_dump_permutation,
    score_load_permutation,
    score_strategy_has_timestamp_column,
    string_to_evict_strategy,
    validate_score_strategy,
    warning_for_cstm_score,
)
from dynamicemb.types import (
    DEFAULT_LOWER,
    DEFAULT_UPPER,
    AdmissionStrategy,
    Default,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
)
from dynamicemb.warn import warn

__all__ = [
    "BATCH_SIZE_PER_DUMP",
    "BUCKET_ALIGNMENT",
    "DEBUG_EMB_INITIALIZER_MOD",
    "DEFAULT_BUCKET_CAPACITY",
    "DEFAULT_INDEX_TYPE",
    "DEMB_TABLE_ALIGN_SIZE",
    "DYNAMICEMB_CSTM_SCORE_CHECK",
    "MAX_BUCKET_CAPACITY",
    "MAX_DIM",
    "SUPPORTED_DIST_TYPES",
    "WEIGHT_DTYPES",
    "DynamicEmbCheckMode",
    "DynamicEmbDataType",
    "DynamicEmbEvictStrategy",
    "DynamicEmbKernel",
    "DynamicEmbPoolingMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "EmbeddingConfig",
    "EvictStrategy",
    "ScoreStrategy",
    "_sharded_table_bucket_layout",
    "align_to_table_size",
    "bucket_layout",
    "complete_initializer_args",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dtype_to_bytes",
    "dyn_emb_to_torch",
    "get_constraint_capacity",
    "get_evict_strategy",
    "get_eviction_score_strategy",
    "get_physical_score_order",
    "get_sharded_table_capacity",
    "get_table_row_bytes",
    "get_table_value_bytes",
    "is_deterministic",
    "normalize_score_strategy",
    "row_bytes",
    "score_dump_permutation",
    "score_load_permutation",
    "score_strategy_has_timestamp_column",
    "state_offset_bytes",
    "string_to_evict_strategy",
    "torch_to_dyn_emb",
    "unsupported_options",
    "validate_score_strategy",
    "warning_for_cstm_score",
]

DEFAULT_INDEX_TYPE = torch.int64
BATCH_SIZE_PER_DUMP = 65536
DEBUG_EMB_INITIALIZER_MOD = 100_000
MAX_DIM = 2048
# Seconds, about 31 years: subtracted from the time since 1970, they leave a positive number.
MAX_TTL = 1_000_000_000
SUPPORTED_DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")
DynamicEmbKernel = "DynamicEmb"
DEMB_DETERMINISM_MODE = "DEMB_DETERMINISM_MODE"
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DynamicEmbPoolingMode(enum.IntEnum):
    """How the rows of a bag are combined."""

    SUM = 0
    MEAN = 1
    NONE = 2


class DynamicEmbCheckMode(enum.IntEnum):
    """What happens when ids find no slot: raise, warn, or only count."""

    ERROR = 0
    WARNING = 1
    IGNORE = 2


def is_deterministic() -> bool:
    """Say whether equal inputs must give bitwise equal tables, also on a GPU.

    They must under ``torch.use_deterministic_algorithms(True)``, and while the environment has a variable
    DEMB_DETERMINISM_MODE, whatever its value. Asked at every lookup.
    """
    return torch.are_deterministic_algorithms_enabled() or DEMB_DETERMINISM_MODE in os.environ


def complete_initializer_args(
    initializer_args: DynamicEmbInitializerArgs, *, embedding_config: EmbeddingConfig | None = None
) -> DynamicEmbInitializerArgs:
    """Fill the open bounds of a UNIFORM initializer; other modes are returned as they are.

    Args:
        initializer_args: not changed. UNIFORM without bounds, the default, stands for no initializer.
        embedding_config: where there is no initializer, its ``init_fn`` decides, or its ``weight_init_min`` and
            ``weight_init_max``. If it has none either, and for a single open bound, its ``num_embeddings`` N gives
            bounds of +-sqrt(1 / N). Without a config bounds are 0 and 1.

    Returns:
        A new object if something was filled, else the argument.

    Raises:
        ValueError: there is no initializer, and no initializer does what ``init_fn`` does.
    """
    args = initializer_args
    if embedding_config is not None and args == DynamicEmbInitializerArgs():
        asked = initializer_of_config(embedding_config)
        if asked is not None:
            return asked
    if args.mode is not DynamicEmbInitializerMode.UNIFORM or (args.lower is not None and args.upper is not None):
        return args
    lower, upper = DEFAULT_LOWER, DEFAULT_UPPER
    if embedding_config is not None:
        upper = sqrt(1.0 / embedding_config.num_embeddings)
        lower = -upper
    return DynamicEmbInitializerArgs(
        mode=args.mode,
        lower=lower if args.lower is None else args.lower,
        upper=upper if args.upper is None else args.upper,
    )


def _constant_zero() -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.0)


@dataclass(eq=False)
class DynamicEmbTableOptions:
    """Options of one dynamic table on one rank.

    Tables whose ``get_grouped_key()`` are equal compare and hash equal; TorchRec puts them into one module. An option
    marked "(planned)" is refused by this version unless it has its default.

    Attributes:
        embedding_dtype: float32, float16 or bfloat16; the planner sets it from the embedding config.
        dim: embedding dim D, 1..2048; the planner sets it.
        max_capacity: rows on this rank at most, rounded up to whole buckets; the planner sets it from
            ``num_embeddings``. A bucket may be full before the table is, see ``bucket_capacity``. NO_EVICTION has no
            such limit: a number warns, and is ``init_capacity`` where that is None. There the planner counts what
            ``num_embeddings`` ids take at ``max_load_factor``.
        evict_strategy: follows from ``score_strategy``; another value than the default or the implied one warns.
        local_hbm_for_values: bytes of GPU memory for rows on this rank.
        device_id: CUDA device of the table.
        training: False: the table is only read.
        initializer_args: first values of rows. The default is UNIFORM without bounds, and leaves them to the embedding
            config of a sharded table: to its ``init_fn``, else to ``weight_init_min`` and ``weight_init_max``, else
            +-sqrt(1 / num_embeddings). Anything else overrules the config. Without a config the bounds are 0 and 1.
        eval_initializer_args: what a missing id reads in evaluation; CONSTANT.
        caching: use GPU memory as a cache of host rows (planned). Where the rows of all tables of the module fit
            their ``local_hbm_for_values`` together, and on the CPU, there is nothing to cache: True warns. Elsewhere it
            is refused.
        init_capacity: rows on this rank at the start, which the planner does not divide; None: ``max_capacity``, or for
            NO_EVICTION the planner's. With fewer the table grows by doubling, so both are rounded up: it starts with
            the buckets that they need or up to twice as many, and ends with that number times a power of two.
        max_load_factor: share of used slots, in (0, 1], above which a table grows that may; others ignore it with a
            warning. Buckets fill unevenly: with 128 slots, at a load of 0.8 one new id in 130 finds its bucket full and
            evicts another or fails, at 0.9 one in 8. NO_EVICTION grows before that happens, whatever the load.
        score_strategy: see ``DynamicEmbScoreStrategy``, or (TIMESTAMP, LFU) in either order: the frequency ranks, the
            time of the last touch is kept beside it, for 8 more bytes per row. None: not a dynamic table. A module may
            have tables of several strategies; TorchRec gives them to several modules.
        bucket_capacity: slots of a bucket, a multiple of 16, or MAX_BUCKET_CAPACITY for a single bucket. None: 128, and
            slots to spare for small tables, ``max(rows, 1.5 * min(rows, 4096))`` unless one bucket on one rank holds
            all rows: then as many different ids as rows all find a place. Without spare slots about 3.5 % of them do
            not, with buckets of 128. Tables of one module must agree.
        safe_check_mode: what happens when ids find no slot. ERROR plans every insert and raises before anything
            changes, also on wrong values of CUDA inputs; it waits for the GPU. WARNING warns once the counters have
            arrived on the host. IGNORE only counts, in ``stats()``.
        global_hbm_for_values: bytes of GPU memory for rows on all ranks; the planner divides it.
        external_storage: a class, called as ``external_storage(options, optimizer)`` (planned). Where the rows of all
            tables of the module fit their ``local_hbm_for_values`` together none would be there: it warns. Elsewhere it
            is refused.
        index_type: int64 (default) or uint64.
        dist_type: which rank owns an id: "roundrobin", "hash_roundrobin" or "continuous".
        admit_strategy: decides which new ids get a row: ``FrequencyAdmissionStrategy``,
            ``ProbabilityAdmissionStrategy``, or your own. None: all. Tables of one module must agree.
        admission_counter: counts the ids that have none: a ``KVCounter``, or your own ``Counter``. Frequency admission
            needs one, probability admission reads none. Without a strategy it is not built, and warns. Tables of one
            module must agree in the kind, and in the slots of a bucket.
        protect_steps: number of past steps whose ids may not be evicted. Tables of one module must agree.
        score_function: ``def f(scores, cur_timestamp) -> float`` that ranks the ids of a compound table: the lowest
            result is evicted first, NaN before all. All numbers are float64: ``scores`` in the order of
            ``score_strategy``, and the time of the step in Unix nanoseconds. It is compiled from its source, so it is a
            ``def`` in a file, of assignments to one name each, ``+ - * / **``, comparisons, conditional expressions,
            ``min``, ``max``, ``abs``, functions of ``math``, and numbers of the scopes around it as they are now. For
            (TIMESTAMP, LFU), counts that halve with each hour since the last touch::

                def decayed(scores, cur_timestamp):
                    last, count = scores
                    return math.log2(count) - (cur_timestamp - last) / 3600e9

            Tables of one module must agree.
        ttl: seconds without a touch after which an id is forgotten: it is absent, its place goes to new ids before any
            other id is evicted, and when it returns it starts fresh. Ids of steps that are not over stay. Evaluations
            touch nothing. None: never. Needs a timestamp: ``score_strategy`` TIMESTAMP, or with LFU.
    """

    embedding_dtype: torch.dtype | None = None
    dim: int | None = None
    max_capacity: int | None = None
    evict_strategy: DynamicEmbEvictStrategy = DynamicEmbEvictStrategy.LRU
    local_hbm_for_values: int = 0
    device_id: int | None = None
    training: bool = True
    initializer_args: DynamicEmbInitializerArgs = field(default_factory=DynamicEmbInitializerArgs)
    eval_initializer_args: DynamicEmbInitializerArgs = field(default_factory=_constant_zero)
    caching: bool = False
    init_capacity: int | None = None
    max_load_factor: float = Default(0.5)
    score_strategy: ScoreStrategy | None = DynamicEmbScoreStrategy.TIMESTAMP
    bucket_capacity: int | None = None
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    global_hbm_for_values: int = 0
    external_storage: type | None = None
    index_type: torch.dtype | None = None
    dist_type: str = "roundrobin"
    admit_strategy: AdmissionStrategy | None = None
    admission_counter: Any = None
    protect_steps: int = 0
    score_function: Callable[..., float] | None = None
    ttl: float | None = None

    def __post_init__(self) -> None:
        self.validate()
        self._warn_about_evict_strategy()
        self._warn_about_idle()

    def validate(self) -> None:
        """Check every field and canonicalise ``score_strategy``; call it again after changing a field.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: a field is out of range, or two contradict each other.
            NotImplementedError: a compound score strategy other than {TIMESTAMP, LFU}.
        """
        if self.score_strategy is not None:
            self.score_strategy = normalize_score_strategy(self.score_strategy)
        self._validate_types()
        self._validate_sizes()
        if self.score_function is not None:
            if not isinstance(self.score_strategy, tuple):
                strategy = getattr(self.score_strategy, "name", None)
                raise ValueError(
                    f"score_function ranks two scores, but score_strategy is {strategy}; "
                    "use (TIMESTAMP, LFU) or (LFU, TIMESTAMP)"
                )
            translate(self.score_function, self.score_strategy)
        if self.eval_initializer_args.mode is not DynamicEmbInitializerMode.CONSTANT:
            raise ValueError(
                f"eval_initializer_args must have mode CONSTANT, got {self.eval_initializer_args.mode.name}; "
                "evaluation does not insert, so a missing id has no row to draw"
            )
        if self.embedding_dtype is not None and self.embedding_dtype not in WEIGHT_DTYPES:
            raise ValueError(f"embedding_dtype must be float32, float16 or bfloat16, got {self.embedding_dtype}")
        if self.index_type not in (None, torch.int64, torch.uint64):
            raise ValueError(f"index_type must be int64 or uint64, got {self.index_type}; int32 ids need no option")
        if self.dist_type not in SUPPORTED_DIST_TYPES:
            raise ValueError(f"dist_type must be one of {', '.join(SUPPORTED_DIST_TYPES)}, got {self.dist_type!r}")

    def _validate_types(self) -> None:
        _check_type("evict_strategy", self.evict_strategy, DynamicEmbEvictStrategy)
        _check_type("training", self.training, bool)
        _check_type("caching", self.caching, bool)
        _check_type("initializer_args", self.initializer_args, DynamicEmbInitializerArgs)
        _check_type("eval_initializer_args", self.eval_initializer_args, DynamicEmbInitializerArgs)
        _check_type("safe_check_mode", self.safe_check_mode, DynamicEmbCheckMode)
        _check_type("dist_type", self.dist_type, str)
        for name in ("embedding_dtype", "index_type"):
            if getattr(self, name) is not None:
                _check_type(name, getattr(self, name), torch.dtype)
        if self.external_storage is not None and not callable(self.external_storage):
            raise TypeError(f"external_storage must be a class, got {self.external_storage!r}")
        check_admission(self.admit_strategy, self.admission_counter)
        self.initializer_args.validate()
        self.eval_initializer_args.validate()

    def _validate_sizes(self) -> None:
        _check_int("dim", self.dim, 1, MAX_DIM, optional=True)
        _check_int("max_capacity", self.max_capacity, 1, optional=True)
        _check_int("init_capacity", self.init_capacity, 1, optional=True)
        _check_int("local_hbm_for_values", self.local_hbm_for_values, 0)
        _check_int("global_hbm_for_values", self.global_hbm_for_values, 0)
        _check_int("device_id", self.device_id, 0, optional=True)
        _check_int("protect_steps", self.protect_steps, 0, 2**20)
        check_bucket_capacity(self.bucket_capacity)
        limit = None if self.grows_without_limit else self.max_capacity
        if self.init_capacity is not None and limit is not None and self.init_capacity > limit:
            raise ValueError(
                f"init_capacity must be <= max_capacity, got {self.init_capacity} > {self.max_capacity}; "
                "lower init_capacity or raise max_capacity"
            )
        if not isinstance(self.max_load_factor, Real) or isinstance(self.max_load_factor, bool):
            raise TypeError(f"max_load_factor must be a number, got {self.max_load_factor!r}")
        if not 0 < self.max_load_factor <= 1:
            raise ValueError(f"max_load_factor must be in (0, 1], got {self.max_load_factor}")
        if self.ttl is not None:
            self._validate_ttl(self.ttl)

    def _validate_ttl(self, ttl: float) -> None:
        if not isinstance(ttl, Real) or isinstance(ttl, bool):
            raise TypeError(f"ttl must be a number of seconds or None, got {ttl!r}")
        if not 0 < ttl < MAX_TTL:
            raise ValueError(f"ttl must be more than 0 and less than {MAX_TTL} seconds, got {ttl}; None is forever")
        timed = isinstance(self.score_strategy, tuple) or self.score_strategy is DynamicEmbScoreStrategy.TIMESTAMP
        if self.score_strategy is not None and not timed:
            strategy = getattr(self.score_strategy, "name", None)
            raise ValueError(
                f"ttl={ttl} needs to know when ids were touched, but score_strategy is {strategy}; "
                "use TIMESTAMP, or TIMESTAMP with LFU"
            )

    def _warn_about_evict_strategy(self) -> None:
        if self.score_strategy is None or self.evict_strategy is DynamicEmbEvictStrategy.LRU:
            return
        implied = get_evict_strategy(self.score_strategy)
        if self.evict_strategy is not implied:
            warn(
                f"evict_strategy={self.evict_strategy.name} has no effect: score_strategy implies {implied.name}; "
                "choose a score_strategy instead",
            )

    def _warn_about_idle(self) -> None:
        if self.grows_without_limit and self.max_capacity is not None:
            start = (
                "" if self.init_capacity is not None else f", from {self.max_capacity} rows on unless a planner decides"
            )
            warn(
                f"max_capacity={self.max_capacity} has no effect as a limit: with score_strategy NO_EVICTION a table "
                f"grows until memory ends{start}; leave it None and set init_capacity, or choose TIMESTAMP"
            )
        if self.admission_counter is not None and self.admit_strategy is None:
            warn("admission_counter has no effect without an admit_strategy; give one, or leave it None")

    @property
    def grows_without_limit(self) -> bool:
        """Whether the table grows until memory ends."""
        return self.score_strategy is DynamicEmbScoreStrategy.NO_EVICTION

    def get_grouped_key(self) -> dict[str, Any]:
        """Return the fields in which tables of one module must agree."""
        return {
            "training": self.training,
            "caching": self.caching,
            "external_storage": self.external_storage,
            "index_type": self.index_type or DEFAULT_INDEX_TYPE,
            "dist_type": self.dist_type,
            "score_strategy": self.score_strategy,
            "admit_strategy": self.admit_strategy,
            # Without a strategy nobody builds one.
            "admission_counter": None if self.admit_strategy is None else counter_kind(self.admission_counter),
            # One index serves a module: its buckets are equally large, its steps are the same.
            "bucket_capacity": self.bucket_capacity or DEFAULT_BUCKET_CAPACITY,
            "protect_steps": self.protect_steps,
            "score_function": self.score_function,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DynamicEmbTableOptions):
            return NotImplemented
        return self.get_grouped_key() == other.get_grouped_key()

    def __hash__(self) -> int:
        return hash(tuple(self.get_grouped_key().items()))


def unsupported_options(options: DynamicEmbTableOptions) -> list[str]:
    """Return one message for each option that this version cannot honour; empty if it can honour all.

    ``caching`` and ``external_storage`` are judged where a module is made, from the sizes of all of its tables.
    """
    messages = []
    single = options.bucket_capacity == MAX_BUCKET_CAPACITY
    if single and options.score_strategy is DynamicEmbScoreStrategy.NO_EVICTION:
        messages.append(
            "score_strategy=NO_EVICTION with bucket_capacity=MAX_BUCKET_CAPACITY: a single bucket cannot grow; use 128"
        )
    elif single and options.init_capacity is not None and options.max_capacity is not None:
        # A table has whole groups of slots, so two capacities may be the same size.
        if (
            bucket_layout(options.init_capacity, MAX_BUCKET_CAPACITY)[1]
            < bucket_layout(options.max_capacity, MAX_BUCKET_CAPACITY)[1]
        ):
            messages.append(
                f"init_capacity={options.init_capacity} < max_capacity={options.max_capacity} with "
                "bucket_capacity=MAX_BUCKET_CAPACITY: a single bucket cannot grow; use init_capacity=None"
            )
    return messages


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        remedy = ""
        if issubclass(expected, enum.Enum):
            remedy = f"; use for example {expected.__name__}.{next(iter(expected)).name}"
        raise TypeError(f"{name} must be a {expected.__name__}, got {value!r}{remedy}")


def _check_int(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int{' or None' if optional else ''}, got {value!r}")
    value = int(value)
    if value < low or (high is not None and value > high):
        bound = f">= {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be {bound}, got {value}")
