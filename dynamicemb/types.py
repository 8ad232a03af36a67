"""Public value types and the interfaces that users may implement."""

import abc
import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from dynamicemb.warn import warn

KEY_TYPE = torch.int64
EMBEDDING_TYPE = torch.float32
SCORE_TYPE = torch.int64
OPT_STATE_TYPE = torch.float32
COUNTER_TYPE = torch.int64

DEMB_TABLE_ALIGN_SIZE = 16
# Slots of a bucket are a multiple of this.
BUCKET_ALIGNMENT = DEMB_TABLE_ALIGN_SIZE
# As a bucket_capacity: one bucket holds the whole shard of a rank.
MAX_BUCKET_CAPACITY = 2**63 - 1

OptionsT = TypeVar("OptionsT")
OptimizerT = TypeVar("OptimizerT")

torch_dtype_to_np_dtype: dict[torch.dtype, type[np.generic]] = {
    torch.uint64: np.uint64,
    torch.int64: np.int64,
    torch.float32: np.float32,
}

# Bounds used where UNIFORM or TRUNCATED_NORMAL leave one open and no table size is known.
DEFAULT_LOWER = 0.0
DEFAULT_UPPER = 1.0

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Default(float):
    """The default of an argument, which can be told from the same number given by a caller.

    An argument without an effect is to be named to whoever gave it, also if the value is that of the default.
    """


class Planned(int):
    """A number that a planner wrote into the options of a table.

    Another planner that gets the options goes by what was there before. The mark travels with the number into copies of
    the options, pickled ones too; what is computed from it is a plain number.

    Attributes:
        given: what was there before.
        field: which option it was written into; as another option it is a number like any other.
        beside: what a planner wrote beside it into options that cannot carry a mark, and what was there before: the
            pair ``(before, written)`` by option.
    """

    given: int | None
    field: str | None
    beside: dict[str, tuple[Any, Any]]

    def __new__(cls, value: int, given: int | None = None, field: str | None = None) -> "Planned":
        """Mark a number."""
        planned = super().__new__(cls, value)
        planned.given, planned.field, planned.beside = given, field, {}
        return planned


class DynamicEmbInitializerMode(enum.Enum):
    """How the first value of a row is made."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


_RELEVANT_FIELDS: dict[DynamicEmbInitializerMode, tuple[str, ...]] = {
    DynamicEmbInitializerMode.NORMAL: ("mean", "std_dev"),
    DynamicEmbInitializerMode.TRUNCATED_NORMAL: ("mean", "std_dev", "lower", "upper"),
    DynamicEmbInitializerMode.UNIFORM: ("lower", "upper"),
    DynamicEmbInitializerMode.CONSTANT: ("value",),
    DynamicEmbInitializerMode.DEBUG: (),
}


@dataclass(eq=False)
class DynamicEmbInitializerArgs:
    """Initial values of rows.

    Two objects are equal when they make the same values: same ``mode``, same fields that the mode reads.

    Attributes:
        mode: distribution. DEBUG gives every column ``id mod 100000``.
        mean: of NORMAL and TRUNCATED_NORMAL.
        std_dev: of NORMAL and TRUNCATED_NORMAL, before truncation.
        lower: smallest value of UNIFORM and TRUNCATED_NORMAL (absolute). None: see ``complete_initializer_args``.
        upper: largest value of UNIFORM and TRUNCATED_NORMAL (absolute). None: see ``complete_initializer_args``.
        value: of CONSTANT.
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0

    def __post_init__(self) -> None:
        self.validate()
        relevant = _RELEVANT_FIELDS[self.mode]
        defaults = {name: f.default for name, f in self.__dataclass_fields__.items()}
        idle = [n for n in defaults if n != "mode" and n not in relevant and getattr(self, n) != defaults[n]]
        if idle:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in idle)
            warn(
                f"initializer mode {self.mode.name} ignores {given}; it reads {', '.join(relevant) or 'nothing'}",
            )

    def validate(self) -> None:
        """Check the fields that the mode reads.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: a field is not finite in fp32, or the fields contradict each other.
        """
        if not isinstance(self.mode, DynamicEmbInitializerMode):
            raise TypeError(
                f"mode must be a DynamicEmbInitializerMode, got {self.mode!r}; "
                "use for example DynamicEmbInitializerMode.UNIFORM"
            )
        for name in ("mean", "std_dev", "value"):
            _check_float32(name, getattr(self, name))
        for name in ("lower", "upper"):
            if getattr(self, name) is not None:
                _check_float32(name, getattr(self, name))
        truncated = self.mode is DynamicEmbInitializerMode.TRUNCATED_NORMAL
        if truncated and self.std_dev <= 0:
            raise ValueError(
                f"std_dev must be > 0 for TRUNCATED_NORMAL, got {self.std_dev}; use CONSTANT for one value"
            )
        if self.mode is DynamicEmbInitializerMode.NORMAL and self.std_dev < 0:
            raise ValueError(f"std_dev must be >= 0 for NORMAL, got {self.std_dev}")
        reads_bounds = "lower" in _RELEVANT_FIELDS[self.mode]
        if reads_bounds and self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower must be <= upper, got lower={self.lower}, upper={self.upper}; swap them")

    def relevant_fields(self) -> tuple[Any, ...]:
        """Return the mode and the values that it reads."""
        return (self.mode, *(getattr(self, name) for name in _RELEVANT_FIELDS[self.mode]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DynamicEmbInitializerArgs):
            return NotImplemented
        return self.relevant_fields() == other.relevant_fields()

    def __hash__(self) -> int:
        return hash(self.relevant_fields())


def _check_float32(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or abs(float(value)) > _FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {value}")


class CopyMode(enum.Enum):
    """Which part of rows is copied: EMBEDDING ``[N, max_D]`` or VALUE ``[N, max_V]``, whose states start at max_D."""

    EMBEDDING = "embedding"
    VALUE = "value"


class MemoryType(enum.Enum):
    """Where memory is."""

    DEVICE = "device"
    MANAGED = "managed"
    PINNED_HOST = "pinned_host"
    HOST = "host"


class Counter(abc.ABC):
    """Counts occurrences of ids that are not in the table yet."""

    @abc.abstractmethod
    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Add to the counts of ids.

        Args:
            keys: int64 ``[U]``, distinct within a table.
            table_ids: int64 ``[U]``.
            frequencies: int64 ``[U]``, occurrences to add.

        Returns:
            int64 ``[U]``, the counts after the addition.
        """

    @abc.abstractmethod
    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        """Forget ids, also some that are not known: those that ``insert`` and loads gave a row.

        Args:
            keys: int64 ``[U]``, distinct within a table.
            table_ids: int64 ``[U]``.
        """

    @abc.abstractmethod
    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        """Return the bytes held in one kind of memory."""

    @abc.abstractmethod
    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Read one table's counts from two files of int64, row-aligned."""

    @abc.abstractmethod
    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Write one table's counts to two files of int64, row-aligned."""


class AdmissionStrategy(abc.ABC):
    """Decides which new ids get a row. Must be hashable: tables are grouped by it."""

    @abc.abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Choose the ids to insert.

        Args:
            keys: int64 ``[U]``.
            frequencies: int64 ``[U]``, occurrences of each id so far.

        Returns:
            bool ``[U]``, True where the id gets a row.
        """

    @abc.abstractmethod
    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        """Fill what rejected ids read in this step.

        Args:
            buffer: ``[N, D]``, written in place.
            indices: int64 ``[M]``, the rows of ``buffer`` to fill.

        Returns:
            True if the rows were filled; False leaves them to the table's own initializer.
        """


class Storage(abc.ABC, Generic[OptionsT, OptimizerT]):
    """Keeps rows outside of the tables of one module, for ``external_storage``.

    A class, not an object, is given there: the module calls ``storage_class(options, optimizer)`` with the list of the
    options of its tables and its optimizer. Tables have numbers ``t`` in the order of that list.

    Shapes: N ids, T tables, D_t the embedding dim of table ``t``, V_t the width of its value, which is the embedding
    followed by the optimizer state. max_D and max_V are the largest of all tables. A padded value ``[max_V]`` has the
    embedding from column 0 and the optimizer state from column max_D on; what is between is not read.

    A storage may also have ``expand_if_need(unique_size_per_table)``, with int64 ``[T]`` on the CPU: how many ids are
    about to be inserted.
    """

    @abc.abstractmethod
    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> tuple[
        int,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
    ]:
        """Look ids up. In training, a storage that ranks ids updates their scores.

        Args:
            unique_keys: int64 ``[N]``, distinct within a table.
            table_ids: int64 ``[N]``, ascending.
            copy_mode: EMBEDDING for embeddings alone, VALUE for padded values.
            lfu_accumulated_frequency: int64 ``[N]``, occurrences to add to the scores of LFU tables; None is one each.

        Returns:
            Eight values, where M ids are missing:

            - ``num_missing``: int, M.
            - ``missing_keys``: int64 ``[M]``.
            - ``missing_indices``: int64 ``[M]``, their places in ``unique_keys``, ascending.
            - ``missing_table_ids``: int64 ``[M]``.
            - ``missing_scores``: int64 ``[M]``, the scores that they would get; None if the storage has none.
            - ``founds``: bool ``[N]``, True where the id is there.
            - ``output_scores``: int64 ``[N]``; those of missing ids are not read.
            - ``values``: ``[N, max_D]`` or ``[N, max_V]``, by ``copy_mode``, of ``embedding_dtype()``; those of missing
              ids are not read.
        """

    @abc.abstractmethod
    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Write rows: new ids get one, the others a new value.

        Args:
            keys: int64 ``[N]``, distinct within a table.
            table_ids: int64 ``[N]``.
            values: ``[N, max_V]``, padded. A storage of a single table may be given fewer columns.
            scores: int64 ``[N]``; None leaves them to the storage.
            preserve_existing: True keeps the scores of ids that are there.
        """

    @abc.abstractmethod
    def dump(
        self,
        table_id: int,
        meta_file_path: str,
        emb_key_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        timestamp: int,
    ) -> None:
        """Write one table to files, which hold row after row without a header.

        Args:
            table_id: the table.
            meta_file_path: JSON, the arguments of the optimizer.
            emb_key_path: int64 ``[n]``.
            embedding_file_path: float32 ``[n, D_t]``.
            score_file_path: int64 ``[n]``; None is no file.
            opt_file_path: float32 optimizer states ``[n, state]``; None is no file.
            timestamp: now, in the unit of the scores: of TIMESTAMP tables files hold ages, ``timestamp - score``.
        """

    @abc.abstractmethod
    def load(
        self,
        table_id: int,
        meta_file_path: str,
        emb_file_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        include_optim: bool,
        timestamp: int,
    ) -> None:
        """Read one table from files that ``dump`` wrote; ids that are there already get the values of the files.

        Args:
            table_id: the table.
            meta_file_path: JSON, the arguments of the optimizer.
            emb_file_path: int64 ids ``[n]``.
            embedding_file_path: float32 ``[n, D_t]``.
            score_file_path: int64 ``[n]``; None is no file.
            opt_file_path: float32 optimizer states ``[n, state]``; None is no file.
            include_optim: whether optimizer states are read; otherwise rows get the initial one.
            timestamp: now, in the unit of the scores: the score of an age is ``timestamp - age``, at least 0.
        """

    @abc.abstractmethod
    def embedding_dtype(self) -> torch.dtype:
        """Return the dtype of values."""

    @abc.abstractmethod
    def embedding_dim(self, table_id: int) -> int:
        """Return D_t of a table."""

    @abc.abstractmethod
    def value_dim(self, table_id: int) -> int:
        """Return V_t of a table."""

    @abc.abstractmethod
    def max_embedding_dim(self) -> int:
        """Return max_D."""

    @abc.abstractmethod
    def max_value_dim(self) -> int:
        """Return max_V."""

    @abc.abstractmethod
    def embedding_dims(self, on_device: bool = False) -> torch.Tensor:
        """Return D of all tables, int64 ``[T]``: on the CPU, or on the device of the values if ``on_device``."""

    def all_dims_vec4(self) -> bool:
        """Return whether D_t and V_t are multiples of 4 in every table, so that rows can be moved by fours."""
        dims = enumerate(self.embedding_dims().tolist())
        return all(dim % 4 == 0 and self.value_dim(table) % 4 == 0 for table, dim in dims)

    @abc.abstractmethod
    def init_optimizer_state(self) -> float:
        """Return the value that optimizer states begin with."""

    @abc.abstractmethod
    def export_keys_values(
        self,
        device: torch.device,
        batch_size: int = 65536,
        table_id: int = 0,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Yield all rows of a table, at most ``batch_size`` at a time.

        Args:
            device: where the tensors are to be.
            batch_size: rows of one batch at most.
            table_id: the table.

        Yields:
            ``(ids int64 [n], embeddings float32 [n, D_t], optimizer states float32 [n, state] or None, scores int64
            [n])``.
        """


class Cache(abc.ABC):
    """Keeps a part of the rows of a module in the memory of its device. Shapes: N ids."""

    @abc.abstractmethod
    def lookup(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the slots of ids, and update their scores in training.

        Args:
            unique_keys: int64 ``[N]``, distinct within a table.
            table_ids: int64 ``[N]``, ascending.
            lfu_accumulated_frequency: int64 ``[N]``, occurrences to add to the scores of LFU tables; None is one each.

        Returns:
            ``(scores int64 [N], founds bool [N], slots int64 [N])``; a missing id has slot -1.
        """

    @abc.abstractmethod
    def insert_and_evict(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        scores: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give slots to ids that have none, and take them from others where it must be.

        Args:
            keys: int64 ``[N]``, distinct within a table.
            table_ids: int64 ``[N]``.
            scores: int64 ``[N]``; None leaves them to the cache.

        Returns:
            ``(slots int64 [N], num_evicted, evicted_keys int64 [E], evicted_slots int64 [E], evicted_scores int64 [E],
            evicted_table_ids int64 [E])``, with E the number ``num_evicted``; an id without a slot has slot -1.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all ids."""

    @property
    @abc.abstractmethod
    def cache_metrics(self) -> torch.Tensor | None:
        """Counts of the last lookup, int64 ``[10]`` on the CPU; None while they are not recorded.

        Entry 0 is the number of ids, 1 of hits, 2 of ids inserted, 3 of ids evicted.
        """

    @abc.abstractmethod
    def set_record_cache_metrics(self, record: bool) -> None:
        """Record ``cache_metrics`` from now on, or end the recording."""
