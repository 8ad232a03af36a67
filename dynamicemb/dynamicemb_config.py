"""Table options and capacity arithmetic.

Nothing here imports torchrec: embedding configs and their ``DataType`` are read by attribute and by name.
"""

import enum
import os
import warnings
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Protocol, TypeAlias, cast

import torch

from dynamicemb.optimizer import get_optimizer_state_dim
from dynamicemb.types import AdmissionStrategy, DynamicEmbInitializerArgs, DynamicEmbInitializerMode

DEFAULT_INDEX_TYPE = torch.int64
BUCKET_ALIGNMENT = 16
DEMB_TABLE_ALIGN_SIZE = 16
DEFAULT_BUCKET_CAPACITY = 128
# As a bucket_capacity: one bucket holds the whole shard of a rank.
MAX_BUCKET_CAPACITY = 2**63 - 1
BATCH_SIZE_PER_DUMP = 65536
DEBUG_EMB_INITIALIZER_MOD = 100_000
MAX_DIM = 2048
SUPPORTED_DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")
DynamicEmbKernel = "DynamicEmb"
# Environment variable: "0" silences the warning about decreasing scores.
DYNAMICEMB_CSTM_SCORE_CHECK = "DYNAMICEMB_CSTM_SCORE_CHECK"

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_STATE_ALIGNMENT = 4
_ROW_ALIGNMENT = 16


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


class DynamicEmbScoreStrategy(enum.IntEnum):
    """What the score of an id is. The lowest score is evicted first."""

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


ScoreStrategy: TypeAlias = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]

_COMPOUND_ORDER = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)


class EvictStrategy(enum.Enum):
    """Names of eviction rules in dumps: ``str()`` of a member is written to the meta file."""

    KLru = 0
    KLfu = 1
    KEpochLru = 2
    KEpochLfu = 3
    KCustomized = 4


class DynamicEmbEvictStrategy(enum.Enum):
    """Eviction rules by their public names. The rule of a table follows from its score strategy."""

    LRU = EvictStrategy.KLru
    LFU = EvictStrategy.KLfu
    EPOCH_LRU = EvictStrategy.KEpochLru
    EPOCH_LFU = EvictStrategy.KEpochLfu
    CUSTOMIZED = EvictStrategy.KCustomized


_EVICT_STRATEGY_OF_SCORE = {
    DynamicEmbScoreStrategy.TIMESTAMP: DynamicEmbEvictStrategy.LRU,
    DynamicEmbScoreStrategy.STEP: DynamicEmbEvictStrategy.CUSTOMIZED,
    DynamicEmbScoreStrategy.CUSTOMIZED: DynamicEmbEvictStrategy.CUSTOMIZED,
    DynamicEmbScoreStrategy.LFU: DynamicEmbEvictStrategy.LFU,
    DynamicEmbScoreStrategy.NO_EVICTION: DynamicEmbEvictStrategy.CUSTOMIZED,
}


class DynamicEmbDataType(enum.Enum):
    """Element types by the names of the reference implementation."""

    Float32 = torch.float32
    Float16 = torch.float16
    BFloat16 = torch.bfloat16
    Int64 = torch.int64
    UInt64 = torch.uint64
    Int32 = torch.int32
    UInt32 = torch.uint32
    Int8 = torch.int8
    UInt8 = torch.uint8


_DTYPE_OF_DATA_TYPE = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
}


class EmbeddingConfig(Protocol):
    """The attributes of TorchRec's embedding configs that capacity arithmetic reads."""

    num_embeddings: int
    embedding_dim: int
    data_type: Any


# ---- score strategies -------------------------------------------------------------------------------------------


def normalize_score_strategy(score_strategy: Any) -> ScoreStrategy:
    """Return the canonical form of a strategy: a member, or a tuple of two. A 1-tuple becomes its member.

    Raises:
        TypeError: something is not a ``DynamicEmbScoreStrategy``.
        NotImplementedError: a combination other than {TIMESTAMP, LFU}.
    """
    if isinstance(score_strategy, DynamicEmbScoreStrategy):
        return score_strategy
    if not isinstance(score_strategy, tuple | list) or not score_strategy:
        raise TypeError(
            f"score_strategy must be a DynamicEmbScoreStrategy or a tuple of them, got {score_strategy!r}; "
            "use for example DynamicEmbScoreStrategy.TIMESTAMP"
        )
    for element in score_strategy:
        if not isinstance(element, DynamicEmbScoreStrategy):
            raise TypeError(f"score_strategy must hold DynamicEmbScoreStrategy members, got {element!r}")
    if len(score_strategy) == 1:
        return score_strategy[0]
    if sorted(score_strategy) != sorted(_COMPOUND_ORDER):
        raise NotImplementedError(
            f"score_strategy ({', '.join(s.name for s in score_strategy)}) is not supported; "
            "the only combination is TIMESTAMP with LFU, in either order"
        )
    return tuple(score_strategy)


def validate_score_strategy(score_strategy: Any) -> None:
    """Raise what ``normalize_score_strategy`` raises."""
    normalize_score_strategy(score_strategy)


def get_eviction_score_strategy(score_strategy: Any) -> DynamicEmbScoreStrategy:
    """Return the strategy that ranks evictions: of the compound, the one that is not TIMESTAMP."""
    strategy = normalize_score_strategy(score_strategy)
    return DynamicEmbScoreStrategy.LFU if isinstance(strategy, tuple) else strategy


def get_evict_strategy(score_strategy: Any) -> DynamicEmbEvictStrategy:
    """Return the eviction rule that a score strategy implies; dumps name it."""
    return _EVICT_STRATEGY_OF_SCORE[get_eviction_score_strategy(score_strategy)]


def score_strategy_has_timestamp_column(score_strategy: Any) -> bool:
    """Return whether one of the score words is a timestamp."""
    return DynamicEmbScoreStrategy.TIMESTAMP in get_physical_score_order(score_strategy)


def get_physical_score_order(score_strategy: Any) -> tuple[DynamicEmbScoreStrategy, ...]:
    """Return the strategies in the order of their words in memory: compounds always (TIMESTAMP, LFU)."""
    strategy = normalize_score_strategy(score_strategy)
    return _COMPOUND_ORDER if isinstance(strategy, tuple) else (strategy,)


def score_dump_permutation(score_strategy: Any) -> list[int]:
    """Return ``p`` such that ``in_memory[:, p]`` has its columns in the user's order, as in a dump."""
    strategy = normalize_score_strategy(score_strategy)
    logical = strategy if isinstance(strategy, tuple) else (strategy,)
    physical = get_physical_score_order(strategy)
    return [physical.index(element) for element in logical]


def score_load_permutation(score_strategy: Any) -> list[int]:
    """Return ``p`` such that ``from_dump[:, p]`` has its columns in the order in memory."""
    dump = score_dump_permutation(score_strategy)
    return [dump.index(column) for column in range(len(dump))]


def string_to_evict_strategy(strategy_str: str) -> EvictStrategy:
    """Return the rule named ``"KLru"`` or ``"EvictStrategy.KLru"``, and so on.

    Raises:
        ValueError: there is no such rule.
    """
    name = strategy_str.removeprefix("EvictStrategy.")
    if name not in EvictStrategy.__members__:
        raise ValueError(
            f"evict strategy {strategy_str!r} is unknown; use one of {', '.join(EvictStrategy.__members__)}"
        )
    return EvictStrategy[name]


def warning_for_cstm_score() -> bool:
    """Return whether to warn about a decreasing custom score: unless DYNAMICEMB_CSTM_SCORE_CHECK is "0"."""
    return os.environ.get(DYNAMICEMB_CSTM_SCORE_CHECK) != "0"


# ---- element types ----------------------------------------------------------------------------------------------


def data_type_to_dtype(data_type: Any) -> torch.dtype:
    """Return the torch dtype of a TorchRec ``DataType``, or of its name such as ``"FP32"``.

    Raises:
        ValueError: the type has no torch dtype here.
    """
    name = data_type.value if isinstance(data_type, enum.Enum) else data_type
    if not isinstance(name, str) or name not in _DTYPE_OF_DATA_TYPE:
        raise ValueError(f"data_type {data_type!r} is not supported; use one of {', '.join(_DTYPE_OF_DATA_TYPE)}")
    return _DTYPE_OF_DATA_TYPE[name]


def data_type_to_dyn_emb(data_type: Any) -> DynamicEmbDataType:
    """Return our element type of a TorchRec ``DataType``."""
    return torch_to_dyn_emb(data_type_to_dtype(data_type))


def dyn_emb_to_torch(data_type: DynamicEmbDataType) -> torch.dtype:
    """Return the torch dtype of an element type."""
    if not isinstance(data_type, DynamicEmbDataType):
        raise ValueError(f"data_type must be a DynamicEmbDataType, got {data_type!r}")
    return cast(torch.dtype, data_type.value)


def torch_to_dyn_emb(dtype: torch.dtype) -> DynamicEmbDataType:
    """Return the element type of a torch dtype.

    Raises:
        ValueError: there is none.
    """
    try:
        return DynamicEmbDataType(dtype)
    except ValueError:
        known = ", ".join(str(member.value) for member in DynamicEmbDataType)
        raise ValueError(f"dtype {dtype!r} is not supported; use one of {known}") from None


def dtype_to_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one element."""
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype, got {dtype!r}")
    return dtype.itemsize


# ---- capacity ---------------------------------------------------------------------------------------------------


def align_to_table_size(n: int, alignment: int = DEMB_TABLE_ALIGN_SIZE) -> int:
    """Round up to a multiple of ``alignment``, at least one."""
    return max(-(-n // alignment), 1) * alignment


def bucket_layout(num_rows: int, bucket_capacity: int) -> tuple[int, int]:
    """Return ``(number of buckets, slots of a bucket)`` of a table that holds at least ``num_rows`` ids.

    Args:
        num_rows: rows on one rank.
        bucket_capacity: slots of a bucket; MAX_BUCKET_CAPACITY asks for a single bucket.

    Raises:
        ValueError: ``bucket_capacity`` is not a positive multiple of 16.

    Example:
        ``bucket_layout(251, 128) == (2, 128)`` and ``bucket_layout(251, MAX_BUCKET_CAPACITY) == (1, 256)``.
    """
    _check_bucket_capacity(bucket_capacity)
    if bucket_capacity == MAX_BUCKET_CAPACITY:
        return 1, align_to_table_size(num_rows, BUCKET_ALIGNMENT)
    return align_to_table_size(num_rows, bucket_capacity) // bucket_capacity, bucket_capacity


def _sharded_table_bucket_layout(
    embedding_config: EmbeddingConfig, world_size: int, bucket_capacity: int
) -> tuple[int, int]:
    """Return the ``bucket_layout`` of one rank's share of a table.

    Raises:
        ValueError: ``world_size`` < 1, or a bad ``bucket_capacity``.
    """
    if world_size <= 0:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    return bucket_layout(-(-embedding_config.num_embeddings // world_size), bucket_capacity)


def get_sharded_table_capacity(embedding_config: EmbeddingConfig, world_size: int, bucket_capacity: int) -> int:
    """Return the slots that one rank has for its share of a table."""
    num_buckets, bucket = _sharded_table_bucket_layout(embedding_config, world_size, bucket_capacity)
    return num_buckets * bucket


def state_offset_bytes(dtype: torch.dtype, dim: int) -> int:
    """Return the bytes from the start of a row to its optimizer state: the weights, padded to 4."""
    return align_to_table_size(dim * dtype.itemsize, _STATE_ALIGNMENT)


def row_bytes(dtype: torch.dtype, dim: int, num_state: int) -> int:
    """Return the bytes of a row as stored: weights padded to 4, fp32 optimizer state, padded to 16.

    Args:
        dtype: dtype of the weights.
        dim: embedding dim D.
        num_state: fp32 values of optimizer state.

    Example:
        ``row_bytes(torch.bfloat16, 3, 1) == 16``: 6 bytes of weights, 2 of padding, 4 of state, 4 of padding.
    """
    return align_to_table_size(state_offset_bytes(dtype, dim) + 4 * num_state, _ROW_ALIGNMENT)


def get_table_value_bytes(
    embedding_config: EmbeddingConfig,
    optimizer_type: Any,
    world_size: int,
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY,
) -> int:
    """Return the nominal bytes of a table's values on all ranks: element size x (D + state) x capacity.

    This is the reference implementation's measure, in which state elements are as wide as weights and nothing is padded.
    ``get_table_row_bytes`` is what the rows take here: fp32 state and padding make it larger for fp16 and bf16 tables
    with state, and for dims that are not multiples of 4.
    """
    dim = embedding_config.embedding_dim
    dtype = data_type_to_dtype(embedding_config.data_type)
    elements = dim + get_optimizer_state_dim(optimizer_type, dim, dtype)
    capacity = get_sharded_table_capacity(embedding_config, world_size, bucket_capacity)
    return dtype.itemsize * elements * capacity * world_size


def get_table_row_bytes(
    embedding_config: EmbeddingConfig,
    optimizer_type: Any,
    world_size: int,
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY,
) -> int:
    """Return the bytes that a table's rows take on all ranks, without the index."""
    dim = embedding_config.embedding_dim
    dtype = data_type_to_dtype(embedding_config.data_type)
    row = row_bytes(dtype, dim, get_optimizer_state_dim(optimizer_type, dim, dtype))
    return row * get_sharded_table_capacity(embedding_config, world_size, bucket_capacity) * world_size


def get_constraint_capacity(
    memory_bytes: int, dtype: torch.dtype, dim: int, optimizer_type: Any, bucket_capacity: int
) -> int:
    """Return how many rows fit into ``memory_bytes``, in whole buckets and at least one (then with a warning)."""
    bucket_bytes = bucket_capacity * row_bytes(dtype, dim, get_optimizer_state_dim(optimizer_type, dim, dtype))
    if memory_bytes < bucket_bytes:
        warnings.warn(
            f"{memory_bytes} bytes hold no bucket of {bucket_capacity} rows ({bucket_bytes} bytes); using one bucket",
            UserWarning,
            stacklevel=2,
        )
    return max(memory_bytes // bucket_bytes, 1) * bucket_capacity


def complete_initializer_args(
    initializer_args: DynamicEmbInitializerArgs, *, embedding_config: EmbeddingConfig | None = None
) -> DynamicEmbInitializerArgs:
    """Fill the open bounds of a UNIFORM initializer; other modes are returned as they are.

    Args:
        initializer_args: not changed.
        embedding_config: its ``num_embeddings`` N gives bounds of +-sqrt(1 / N); without it they are 0 and 1.

    Returns:
        A new object if a bound was filled, else the argument.
    """
    args = initializer_args
    if args.mode is not DynamicEmbInitializerMode.UNIFORM or (args.lower is not None and args.upper is not None):
        return args
    lower, upper = 0.0, 1.0
    if embedding_config is not None:
        upper = sqrt(1.0 / embedding_config.num_embeddings)
        lower = -upper
    return DynamicEmbInitializerArgs(
        mode=args.mode,
        lower=lower if args.lower is None else args.lower,
        upper=upper if args.upper is None else args.upper,
    )


# ---- table options ----------------------------------------------------------------------------------------------


def _constant_zero() -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.0)


@dataclass(eq=False)
class DynamicEmbTableOptions:
    """Options of one dynamic table on one rank.

    Tables whose ``get_grouped_key()`` are equal compare and hash equal; TorchRec puts them into one module.

    Attributes:
        embedding_dtype: float32, float16 or bfloat16; the planner sets it from the embedding config.
        dim: embedding dim D, 1..2048; the planner sets it.
        max_capacity: rows on this rank at most; the planner sets it.
        evict_strategy: follows from ``score_strategy``; another value than the default or the implied one warns.
        local_hbm_for_values: bytes of GPU memory for rows on this rank.
        device_id: CUDA device of the table.
        training: False: the table is only read.
        initializer_args: first values of rows.
        eval_initializer_args: what a missing id reads in evaluation; CONSTANT.
        caching: use GPU memory as a cache of host rows.
        init_capacity: rows at the start; None: ``max_capacity``.
        max_load_factor: share of used slots, in (0, 1], above which the table grows.
        score_strategy: see ``DynamicEmbScoreStrategy``, or (TIMESTAMP, LFU) in either order; None: not a dynamic table.
        bucket_capacity: slots of a bucket, a multiple of 16, or MAX_BUCKET_CAPACITY for a single bucket.
        safe_check_mode: what happens when ids find no slot.
        global_hbm_for_values: bytes of GPU memory for rows on all ranks; the planner divides it.
        external_storage: a class, called as ``external_storage(options, optimizer)``.
        index_type: int64 (default) or uint64.
        dist_type: which rank owns an id: "roundrobin", "hash_roundrobin" or "continuous".
        admit_strategy: decides which new ids get a row.
        admission_counter: counts the ids that have none.
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
    max_load_factor: float = 0.5
    score_strategy: ScoreStrategy | None = DynamicEmbScoreStrategy.TIMESTAMP
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    global_hbm_for_values: int = 0
    external_storage: type | None = None
    index_type: torch.dtype | None = None
    dist_type: str = "roundrobin"
    admit_strategy: AdmissionStrategy | None = None
    admission_counter: Any = None

    def __post_init__(self) -> None:
        self.validate()
        self._warn_about_evict_strategy()

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
        if self.admit_strategy is not None:
            _check_type("admit_strategy", self.admit_strategy, AdmissionStrategy)
        self.initializer_args.validate()
        self.eval_initializer_args.validate()

    def _validate_sizes(self) -> None:
        _check_int("dim", self.dim, 1, MAX_DIM, optional=True)
        _check_int("max_capacity", self.max_capacity, 1, optional=True)
        _check_int("init_capacity", self.init_capacity, 1, optional=True)
        _check_int("local_hbm_for_values", self.local_hbm_for_values, 0)
        _check_int("global_hbm_for_values", self.global_hbm_for_values, 0)
        _check_int("device_id", self.device_id, 0, optional=True)
        _check_bucket_capacity(self.bucket_capacity)
        if self.init_capacity is not None and self.max_capacity is not None and self.init_capacity > self.max_capacity:
            raise ValueError(
                f"init_capacity must be <= max_capacity, got {self.init_capacity} > {self.max_capacity}; "
                "lower init_capacity or raise max_capacity"
            )
        if not isinstance(self.max_load_factor, float | int) or isinstance(self.max_load_factor, bool):
            raise TypeError(f"max_load_factor must be a number, got {self.max_load_factor!r}")
        if not 0 < self.max_load_factor <= 1:
            raise ValueError(f"max_load_factor must be in (0, 1], got {self.max_load_factor}")

    def _warn_about_evict_strategy(self) -> None:
        if self.score_strategy is None or self.evict_strategy is DynamicEmbEvictStrategy.LRU:
            return
        implied = get_evict_strategy(self.score_strategy)
        if self.evict_strategy is not implied:
            warnings.warn(
                f"evict_strategy={self.evict_strategy.name} has no effect: score_strategy implies {implied.name}; "
                "choose a score_strategy instead",
                UserWarning,
                stacklevel=4,
            )

    def get_grouped_key(self) -> dict[str, Any]:
        """Return the fields in which tables of one module must agree."""
        return {
            "training": self.training,
            "caching": self.caching,
            "external_storage": self.external_storage,
            "index_type": self.index_type,
            "dist_type": self.dist_type,
            "score_strategy": self.score_strategy,
            "admit_strategy": self.admit_strategy,
            # One index serves a module, and its buckets are equally large.
            "bucket_capacity": self.bucket_capacity,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DynamicEmbTableOptions):
            return NotImplemented
        return self.get_grouped_key() == other.get_grouped_key()

    def __hash__(self) -> int:
        return hash(tuple(self.get_grouped_key().items()))


def unsupported_options(options: DynamicEmbTableOptions) -> list[str]:
    """Return one message for each option that this version cannot honour; empty if it can honour all."""
    messages = []
    if options.caching:
        messages.append("caching=True: rows do not move between memories yet; use caching=False")
    if options.external_storage is not None:
        messages.append(f"external_storage={options.external_storage!r}: not available yet; use None")
    if options.admit_strategy is not None or options.admission_counter is not None:
        messages.append("admit_strategy, admission_counter: every id is admitted in this version; use None for both")
    if options.score_strategy is DynamicEmbScoreStrategy.NO_EVICTION:
        messages.append("score_strategy=NO_EVICTION: tables do not grow yet; use STEP to evict the oldest")
    if isinstance(options.score_strategy, tuple):
        names = ", ".join(strategy.name for strategy in options.score_strategy)
        messages.append(f"score_strategy=({names}): one score per id in this version; use LFU or TIMESTAMP")
    if options.safe_check_mode is not DynamicEmbCheckMode.IGNORE:
        messages.append(
            f"safe_check_mode={options.safe_check_mode.name}: failed inserts are only counted; use IGNORE and stats()"
        )
    if options.init_capacity is not None and options.max_capacity is not None:
        # A table has whole buckets, so capacities in the same bucket are the same size.
        init_buckets, _ = bucket_layout(options.init_capacity, options.bucket_capacity)
        max_buckets, _ = bucket_layout(options.max_capacity, options.bucket_capacity)
        if init_buckets != max_buckets:
            messages.append(
                f"init_capacity={options.init_capacity} < max_capacity={options.max_capacity}: tables do not grow yet; "
                "use init_capacity=None"
            )
    return messages


# ---- checks -----------------------------------------------------------------------------------------------------


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise TypeError(f"{name} must be a {expected.__name__}, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int{' or None' if optional else ''}, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f">= {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be {bound}, got {value}")


def _check_bucket_capacity(bucket_capacity: object) -> None:
    _check_int("bucket_capacity", bucket_capacity, 1)
    if bucket_capacity != MAX_BUCKET_CAPACITY and cast(int, bucket_capacity) % BUCKET_ALIGNMENT:
        raise ValueError(
            f"bucket_capacity must be a multiple of {BUCKET_ALIGNMENT} or MAX_BUCKET_CAPACITY, got {bucket_capacity}; "
            f"use for example {align_to_table_size(cast(int, bucket_capacity))}"
        )
