"""The mean over a bag whose rows are spread over ranks.

Every rank adds the rows it owns and the reduce-scatter adds the ranks: a sum. It is divided here, once, by the number
of ids that the bag had before it was spread. Rows and gradients are then those of one process.
"""

import functools
from dataclasses import dataclass

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dynamicemb.sharding.planning.constraints import is_dynamic

# Added to a sum of weights, as in TorchRec, so that nothing is divided by zero.
_EPSILON = 1e-6
_SPREAD = frozenset({ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value})


@dataclass(frozen=True)
class Average:
    """An output that is a mean over rows of several ranks.

    Attributes:
        output: its name.
        feature: the feature whose bags it pools.
        is_static: whether its table is static. TorchRec divides weighted bags of these by the sum of their weights,
            and so do we; a dynamic table divides by the number of ids.
    """

    output: str
    feature: str
    is_static: bool


@dataclass
class DynamicBagContext(EmbeddingBagCollectionContext):
    """TorchRec's context of one batch, with what its outputs are divided by.

    Attributes:
        divisors: f32 ``[B, M]`` for the M averaged outputs; None if there are none.
        is_padded: the batch had no samples and got one without ids.
    """

    divisors: torch.Tensor | None = None
    is_padded: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory alive for work on `stream`."""
        super().record_stream(stream)
        if self.divisors is not None:
            self.divisors.record_stream(stream)


def averages_of(infos: dict[str, list[EmbeddingShardingInfo]]) -> list[Average]:
    """Return the outputs of a collection that are means over rows of several ranks."""
    return [
        Average(output, feature, not is_dynamic(info.param_sharding))
        for tables in infos.values()
        for info in tables
        if info.embedding_config.pooling is PoolingType.MEAN and info.param_sharding.sharding_type in _SPREAD
        for output, feature in zip(
            info.embedding_config.embedding_names, info.embedding_config.feature_names, strict=True
        )
    ]


@functools.cache
def _constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return i64 ``[len(values)]``, made once: a copy to a GPU waits for it. Not to be written."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def divisors(features: KeyedJaggedTensor, averages: list[Average]) -> torch.Tensor:
    """Return by what the bags of some outputs are divided, f32 ``[B, M]``; an empty bag counts as 1.

    Args:
        features: a batch before it is spread.
        averages: M outputs.

    Host sync: none after the first call.
    """
    keys = features.keys()
    place = {key: position for position, key in enumerate(keys)}
    positions = tuple(place[average.feature] for average in averages)
    sizes = features.lengths().view(len(keys), -1)
    chosen = sizes
    if positions != tuple(range(len(keys))):
        chosen = sizes.index_select(0, _constant(positions, sizes.device))
    by = chosen.clamp(min=1).to(torch.float32)
    weights = features.weights_or_none()
    if weights is not None and any(average.is_static for average in averages):
        sums = torch.ops.fbgemm.segment_sum_csr(1, features.offsets().int(), weights.detach()) + _EPSILON
        sums = sums.view(len(keys), -1).index_select(0, _constant(positions, sizes.device))
        is_static = _constant(tuple(int(average.is_static) for average in averages), sizes.device)
        by = torch.where(is_static[:, None] == 1, sums, by)
    return by.t()


def divide(pooled: KeyedTensor, outputs: list[str], divisors: torch.Tensor) -> KeyedTensor:
    """Divide the columns of averaged outputs.

    Args:
        pooled: ``[B, total_D]``, sums.
        outputs: keys of `pooled` that are averaged, M.
        divisors: ``[B, M]``.

    Host sync: none after the first call.
    """
    keys, dims, values = pooled.keys(), pooled.length_per_key(), pooled.values()
    by = divisors.to(values.dtype)
    divisor_of = {name: m for m, name in enumerate(outputs)}
    if any(key not in divisor_of for key in keys):
        # Divisor M stands for all outputs that are not averaged.
        by = torch.cat([by, values.new_ones(values.shape[0], 1)], dim=1)
    divisor_per_key = tuple(divisor_of.get(key, len(outputs)) for key in keys)
    per_column = by.index_select(1, _per_column(divisor_per_key, tuple(dims), values.device))
    return KeyedTensor(keys=keys, length_per_key=dims, values=values / per_column, key_dim=1)


@functools.cache
def _per_column(value_per_key: tuple[int, ...], dims: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return i64 ``[total_D]``: each key's value, once for each of its columns."""
    return torch.repeat_interleave(torch.tensor(value_per_key), torch.tensor(dims)).to(device)
