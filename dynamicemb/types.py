"""Public value types and the interfaces that users may implement."""

import abc
import enum
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from dynamicemb.warn import warn

KEY_TYPE = torch.int64
EMBEDDING_TYPE = torch.float32
SCORE_TYPE = torch.int64
OPT_STATE_TYPE = torch.float32
COUNTER_TYPE = torch.int64

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
