"""Which optimizer a checkpoint has the state of, and how its state becomes that of a dynamic row."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dynamicemb.optimizer import OptimizerKind

# What TorchRec calls the first state of every optimizer, and what torch and FBGEMM call it.
_FIRST = ("momentum1", "sum", "exp_avg")
_SECOND = ("exp_avg_sq", "momentum2")
# How many steps there were, where a checkpoint tells.
STEPS = ("step", "iter")
# Adagrad with counters keeps these beside its sum, which stands for itself.
_COUNTERS = ("prev_iter", "row_counter")

_NAMES = {
    OptimizerKind.SGD: "sgd",
    OptimizerKind.ADAM: "adam",
    OptimizerKind.ADAGRAD: "exact_adagrad",
    OptimizerKind.ROWWISE_ADAGRAD: "exact_row_wise_adagrad",
}


@dataclass(frozen=True)
class Stored:
    """The optimizer state of a table in a checkpoint.

    Attributes:
        name: of the optimizer, as FBGEMM calls it.
        kind: ours, None where this package has no such optimizer.
        items: names of the tensors that a row's state is made of, in order.
        idle: names of those that the row's state has no place for.
    """

    name: str
    kind: OptimizerKind | None
    items: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


def recognise(sizes: Mapping[str, tuple[int, ...]], num_rows: int, dim: int) -> Stored:
    """Return the optimizer that keeps such state.

    LAMB keeps what Adam keeps, and Adagrad with an average in place what row-wise Adagrad keeps; they are taken for
    them.

    Args:
        sizes: of the tensors, by name.
        num_rows: N, of the table.
        dim: D, of the table.

    Example::

        recognise({"momentum1": (20,)}, 10, 8)  # row-wise Adagrad, in two blocks of columns
    """
    others = sorted(set(sizes) - {*_FIRST, *_SECOND, *STEPS})
    first = next((name for name in _FIRST if name in sizes), None)
    second = next((name for name in _SECOND if name in sizes), None)
    whole = {name for name, size in sizes.items() if size == (num_rows, dim)}
    per_row = {name for name, size in sizes.items() if size == (num_rows, 1) or len(size) == 1} - whole
    unknown = Stored(f"one with the state {dict(sorted(sizes.items()))}", None)
    if first is None:
        return _of(OptimizerKind.SGD) if not sizes or set(sizes) <= {*STEPS} else unknown
    if second is not None:
        if first in whole and second in per_row:
            return Stored("partial_row_wise_adam", None)
        if others:
            return Stored(f"adam with {', '.join(others)}", None)
        return _of(OptimizerKind.ADAM, first, second) if {first, second} <= whole else unknown
    if "sparse_ema" in others:
        return Stored("ensemble_row_wise_adagrad", None)
    if first == "exp_avg" or set(others) - {*_COUNTERS}:
        return unknown
    kind = OptimizerKind.ADAGRAD if first in whole else OptimizerKind.ROWWISE_ADAGRAD
    if first not in whole | per_row:
        return unknown
    return Stored(_NAMES[kind], kind, (first,), tuple(others))


def _of(kind: OptimizerKind, *items: str) -> Stored:
    return Stored(_NAMES[kind], kind, items)


@dataclass(frozen=True)
class Assembly:
    """Makes the state of rows of matrices.

    Attributes:
        shares: of a row-wise state, the share that each of its blocks has of the columns.
    """

    shares: tuple[float, ...] = ()

    def state(self, matrices: list[torch.Tensor]) -> torch.Tensor:
        """Return the state of rows, f32 ``[n, S]``.

        A block of columns keeps the mean of squares of its own columns. That of the whole row is their sum, each times
        the share that its block has.

        Args:
            matrices: f32 ``[n, D]`` each, or one ``[n, C]`` of a row-wise state.

        Example::

            Assembly((0.25, 0.75)).state([tensor([[4.0, 8.0]])])  # [[7.0]]
        """
        if len(self.shares) <= 1:
            return torch.cat(matrices, 1)
        (blocks,) = matrices
        return (blocks.double() @ torch.tensor(self.shares, dtype=torch.float64)).float()[:, None]


def shares_of(columns: list[tuple[int, int]], num_blocks: int, dim: int, name: str) -> tuple[float, ...]:
    """Return the share of the columns that each block of a row-wise state has.

    Args:
        columns: first column and width of the blocks of the weights.
        num_blocks: of the state.
        dim: D.
        name: of the state, for messages.

    Raises:
        ValueError: weights and state are cut into different blocks.
    """
    if num_blocks > 1 and len(columns) != num_blocks:
        raise ValueError(
            f"optimizer: {name} is the state of {num_blocks} blocks of columns, the weights are in {len(columns)}; "
            "pass weights and state as they were sharded, from one checkpoint"
        )
    return tuple(width / dim for _, width in columns) if num_blocks > 1 else ()
