"""Everything in which the supported torchrec releases (1.6 to 1.9) differ, or that is private there.

The rest of this folder uses torchrec's public classes; what it needs beyond them is asked for here, so that a new
release is one file to read.
"""

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

CUSTOMIZED_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value

# Keys that TorchRec puts into fused_params for its own use; no embedding module takes them.
TORCHREC_ONLY_PARAMS = frozenset(
    {
        "_batch_key",
        "cache_load_factor",
        "cache_precision",
        "embedding_table_index_type",
        "embedding_table_offset_type",
        "enable_raw_embedding_streaming",
        "use_one_tbe_per_table",
        "weights_precision",
    }
)


def as_kjt(features: Any) -> KeyedJaggedTensor:
    """Return a TorchRec input, which may be a TensorDict of jagged tensors, as a KeyedJaggedTensor.

    Raises:
        TypeError: it is neither.
    """
    kjt = features if isinstance(features, KeyedJaggedTensor) else maybe_td_to_kjt(features, None)
    if not isinstance(kjt, KeyedJaggedTensor):
        raise TypeError(f"features must be a KeyedJaggedTensor or a TensorDict, got {type(features).__name__}")
    return kjt


def module_params(config: GroupedEmbeddingConfig) -> dict[str, Any]:
    """Return a group's fused_params without those that TorchRec uses itself."""
    params = config.fused_params or {}
    return {name: value for name, value in params.items() if name not in TORCHREC_ONLY_PARAMS}


def replace_values(
    kjt: KeyedJaggedTensor,
    values: Any,
    lengths: Any,
    weights: Any = None,
    num_copies: int = 1,
    kind: type[KeyedJaggedTensor] = KeyedJaggedTensor,
    length_per_key: list[int] | None = None,
) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor with other contents and the strides of `kjt`.

    Args:
        kjt: source of keys and strides.
        values: ids ``[N]``.
        lengths: occurrences per bag, ``[num_copies * K]`` for the K bags of `kjt`.
        weights: one value per occurrence, or None.
        num_copies: how often the keys repeat (once per destination rank).
        kind: class of the result.
        length_per_key: sums of lengths per key of the result, if they are known.
    """
    variable = kjt.variable_stride_per_key()
    return kind(
        keys=kjt.keys() * num_copies,
        values=values,
        weights=weights,
        lengths=lengths,
        stride=None if variable else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() * num_copies if variable else None,
        length_per_key=length_per_key,
    )


def keyed_jagged_tensor(
    keys: list[str],
    values: torch.Tensor,
    weights: torch.Tensor | None,
    lengths: torch.Tensor,
    offsets: torch.Tensor | None,
    stride: int,
    starts: list[int] | None,
) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor of parts that are known to fit.

    Args:
        keys: F features.
        values: ids ``[N]``.
        weights: one value per occurrence, or None.
        lengths: i64 ``[F*B]``.
        offsets: their running sums, i64 ``[F*B+1]``, if they are known.
        stride: B.
        starts: those of the running sums at which a feature begins or the last ends, F+1, if they are known.
    """
    return _made(
        KeyedJaggedTensor,
        keys=keys,
        values=values,
        weights=weights,
        lengths=lengths,
        offsets=offsets,
        stride=stride,
        length_per_key=starts and sums_between(starts),
        offset_per_key=starts,
    )


def jagged_tensors(
    names: list[str],
    values: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
    lengths: Sequence[torch.Tensor],
) -> dict[str, JaggedTensor]:
    """Return JaggedTensors of parts that are known to fit, by name; the parts are in the order of the names."""
    none: list[None] = [None] * len(names)
    parts = zip(names, values, none if weights is None else weights, lengths, strict=True)
    return {name: _made(JaggedTensor, values=v, weights=w, lengths=n) for name, v, w, n in parts}


def sums_between(starts: list[int]) -> list[int]:
    """Return the numbers whose running sums, behind a 0, are `starts`."""
    return [end - start for start, end in itertools.pairwise(starts)]


def _made(kind: Any, **parts: Any) -> Any:
    """Return ``kind(**parts)``; the constructors of TorchRec's tensors take some microseconds to look at the parts."""
    others = _other_fields(kind, tuple(parts))
    if others is None:
        return kind(**parts)
    one = kind.__new__(kind)
    fields = one.__dict__
    fields.update(others)
    for name, part in parts.items():
        fields["_" + name] = part
    return one


@functools.cache
def _other_fields(kind: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the fields of TorchRec's tensors that do not depend on some arguments; None if this is not known.

    Args:
        kind: a KeyedJaggedTensor or a JaggedTensor.
        names: of the arguments, which become fields as they are.
    """
    tensors = {"values", "weights", "lengths", "offsets"}
    parts: dict[str, Any] = {
        name: torch.empty(0, dtype=torch.int64, device="cpu") if name in tensors else [] for name in names
    }
    fields = vars(kind(**parts))
    if any(fields.get("_" + name) is not part for name, part in parts.items()):
        return None
    others = {name: value for name, value in fields.items() if name[1:] not in names}
    return others if all(value is None for value in others.values()) else None


def make_topology(**arguments: Any) -> Topology:
    """Build a planner topology. Newer releases log a warning that their factory was not used; it needs a trainer."""
    return Topology(**arguments)


def remember_search_space(enumerator: Any, options: list[ShardingOption]) -> None:
    """Replace the search space that an enumerator keeps for its next call."""
    enumerator._last_stored_search_space = options


def fbgemm_params() -> frozenset[str]:
    """Return the names that FBGEMM's training tables take, and with them the fused_params of static tables."""
    return frozenset(inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters) - {"self"}


def optimizer_arguments_of_parameter(parameter: Any) -> dict[str, Any]:
    """Return the optimizer's arguments that `apply_optimizer_in_backward` attached to a parameter, if any."""
    arguments: dict[str, Any] = getattr(parameter, "_optimizer_kwargs", [{}])[0]
    return arguments


def optimizer_of_parameter(parameter: nn.Parameter) -> type | None:
    """Return the optimizer class that `apply_optimizer_in_backward` attached to a parameter, if any."""
    classes = getattr(parameter, "_optimizer_classes", [None])
    return classes[0]


def stashes_memory() -> bool:
    """Say whether TorchRec moves weights of static tables to the host while they are not needed."""
    return bool(MemoryStashingManager.is_enabled())
