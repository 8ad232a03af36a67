"""Everything in which the supported torchrec releases (1.6 to 1.9) differ, or that is private there.

The rest of this folder uses torchrec's public classes; what it needs beyond them is asked for here, so that a new
release is one file to read.
"""

import functools
import inspect
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

try:
    from torchrec.distributed.memory_stashing import MemoryStashingManager
except ImportError:
    MemoryStashingManager = None

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


def jagged_tensor(values: torch.Tensor, weights: torch.Tensor | None, lengths: torch.Tensor) -> JaggedTensor:
    """Return a JaggedTensor of parts that are known to fit; its constructor looks at them for some microseconds."""
    if not _jagged_tensor_has_four_parts():
        return JaggedTensor(values, weights, lengths)
    jagged: JaggedTensor = JaggedTensor.__new__(JaggedTensor)
    jagged.__dict__.update(_values=values, _weights=weights, _lengths=lengths, _offsets=None)
    return jagged


@functools.cache
def _jagged_tensor_has_four_parts() -> bool:
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    made = JaggedTensor(nothing, nothing, nothing)
    return vars(made) == {"_values": nothing, "_weights": nothing, "_lengths": nothing, "_offsets": None}


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
    return MemoryStashingManager is not None and bool(MemoryStashingManager.is_enabled())
