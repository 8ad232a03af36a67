"""Check and canonicalise what users pass to a lookup; nothing changes before everything is checked."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

_ID_DTYPES = (torch.int64, torch.int32, torch.uint64)
_OFFSET_DTYPES = (torch.int64, torch.int32)
_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COUNT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# A frequency is a count of one batch; the bound keeps sums of scores far from the end of int64.
MAX_FREQUENCY = 2**31 - 1


class Batch(NamedTuple):
    """A checked batch.

    Attributes:
        ids: i64 ``[N]``, feature-major.
        offsets: i64 ``[F*B+1]``.
        batch_size: B.
        per_sample_weights: f32 ``[N]`` pooling weights, or None.
        frequencies: i64 ``[N]``, or None.
        has_counts_as_weights: the frequencies were given as ``per_sample_weights``.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    batch_size: int
    per_sample_weights: torch.Tensor | None
    frequencies: torch.Tensor | None
    has_counts_as_weights: bool = False


def check_ids(ids: torch.Tensor, device: torch.device, name: str = "indices") -> torch.Tensor:
    """Return ids as contiguous i64 ``[N]``; uint64 keeps its bit pattern.

    Raises:
        TypeError: not a tensor of int64, int32 or uint64.
        ValueError: not one-dimensional, or on another device.
    """
    if _is_plain(ids, torch.int64, device):
        return ids
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(ids).__name__}; pass torch.tensor(ids)")
    if ids.dtype not in _ID_DTYPES:
        raise TypeError(f"{name} must be int64, int32 or uint64, got {ids.dtype}; convert with {name}.long()")
    _check_shape(ids, device, name)
    if ids.dtype == torch.uint64:
        return ids.contiguous().view(torch.int64)
    return ids.to(torch.int64).contiguous()


def check_rows(rows: torch.Tensor, num_ids: int, dim: int, device: torch.device) -> None:
    """Check rows that are to be imported, ``[num_ids, dim]``.

    Raises:
        TypeError: not a floating tensor.
        ValueError: another shape, or on another device.
    """
    if not isinstance(rows, torch.Tensor) or not rows.is_floating_point():
        got = rows.dtype if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise TypeError(f"rows must be a floating tensor of shape ({num_ids}, {dim}), got {got}")
    if rows.shape != (num_ids, dim) or rows.device != device:
        raise ValueError(
            f"rows must have shape ({num_ids}, {dim}) on {device}, got {tuple(rows.shape)} on {rows.device}"
        )


def check_batch(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    num_features: int,
    device: torch.device,
    per_sample_weights: torch.Tensor | None = None,
    frequency_counters: torch.Tensor | None = None,
    wait: bool = False,
    counts_occurrences: bool = True,
) -> Batch:
    """Check the arguments of a lookup.

    Args:
        indices: ``[N]`` ids, feature-major.
        offsets: ``[F*B+1]`` bag boundaries.
        num_features: F.
        device: device of the tables.
        per_sample_weights: floating ``[N]``; integers are taken for `frequency_counters`.
        frequency_counters: integers ``[N]``, positive.
        wait: whether to look at values also on a GPU, for which the host must wait.
        counts_occurrences: whether it matters how often an id occurs; if not, integer weights are dropped.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or, on the CPU or with ``wait``, value.
    """
    ids = check_ids(indices, device)
    offsets = _check_offsets(offsets, ids.numel(), num_features, device)
    check_values = wait or device.type == "cpu"
    if check_values:
        _check_offset_values(offsets, ids.numel())
    name, as_weights = "frequency_counters", False
    if per_sample_weights is not None:
        per_sample_weights = _check_weights(per_sample_weights, ids.numel(), device)
        as_weights = not per_sample_weights.is_floating_point()
        if as_weights:
            if frequency_counters is not None:
                raise ValueError(
                    "per_sample_weights of integers are taken for frequency_counters, which are given too; give one of "
                    "them, or floating weights"
                )
            name = "per_sample_weights of integers, which count,"
            frequency_counters, per_sample_weights = per_sample_weights, None
    if frequency_counters is not None:
        frequency_counters = _check_frequencies(frequency_counters, ids.numel(), device)
        if as_weights and not counts_occurrences:
            frequency_counters = None
        elif check_values:
            _check_frequency_values(frequency_counters, name)
    batch_size = (offsets.numel() - 1) // num_features
    return Batch(ids, offsets, batch_size, per_sample_weights, frequency_counters, as_weights)


def _is_plain(tensor: object, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether something is a dense contiguous tensor of one dimension, with this dtype and device.

    Nearly all arguments are. One question costs the host less than a check of each property, and a conversion of a
    tensor to the dtype that it has costs as much as a launch.
    """
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype is dtype
        and tensor.layout is torch.strided
        and tensor.dim() == 1
        and tensor.device == device
        and tensor.is_contiguous()
    )


def _check_shape(tensor: torch.Tensor, device: torch.device, name: str, size: int | None = None) -> None:
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}; use {name}.to_dense()")
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}; use {name}.flatten()")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but the tables are on {device}; use {name}.to({str(device)!r})")
    if size is not None and tensor.numel() != size:
        raise ValueError(f"{name} has {tensor.numel()} entries for {size} ids; give one per id")


def check_effects(batch: Batch, is_pooled: bool, counts_occurrences: bool) -> None:
    """Refuse arguments that would do nothing.

    Args:
        batch: the batch.
        is_pooled: whether bags are pooled.
        counts_occurrences: whether it matters how often an id occurs.

    Raises:
        ValueError: as said.
    """
    if batch.per_sample_weights is not None and not is_pooled:
        raise ValueError("per_sample_weights weigh the rows of a bag, but pooling_mode is NONE; use SUM or MEAN")
    if batch.frequencies is not None and not counts_occurrences:
        raise ValueError("frequency_counters has no effect: only score_strategy LFU and admission count; leave it out")


def check_batch_sizes(sizes: Sequence[Sequence[int]] | None, num_features: int, batch_size: int) -> None:
    """Check that all features have the samples of the offsets.

    Args:
        sizes: of each feature, its samples by rank; None says nothing.
        num_features: F.
        batch_size: B.

    Raises:
        TypeError: something else than lists of ints.
        ValueError: other numbers.
    """
    if sizes is None:
        return
    try:
        of_features = [sum(of_ranks) for of_ranks in sizes]
    except TypeError:
        raise TypeError(
            f"batch_size_per_feature_per_rank must list, for each feature, its samples by rank, got {sizes!r}"
        ) from None
    if of_features != [batch_size] * num_features:
        raise ValueError(
            f"batch_size_per_feature_per_rank={sizes!r}, but by the offsets each of the {num_features} features has "
            f"{batch_size} samples; batches of variable size per feature are not supported, leave it None"
        )


def asks_to_freeze(feature_requires_grad: torch.Tensor) -> bool:
    """Say whether some feature is not to be trained; on a GPU, where the host would have to wait, say yes.

    Raises:
        TypeError: not a tensor.
    """
    if not isinstance(feature_requires_grad, torch.Tensor):
        raise TypeError(
            f"feature_requires_grad must be a tensor or None, got {type(feature_requires_grad).__name__}; leave it None"
        )
    return feature_requires_grad.device.type != "cpu" or not bool(feature_requires_grad.all())


def _check_offsets(offsets: torch.Tensor, num_ids: int, num_features: int, device: torch.device) -> torch.Tensor:
    if _is_plain(offsets, torch.int64, device) and offsets.numel() > 0 and (offsets.numel() - 1) % num_features == 0:
        return offsets
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"offsets must be a tensor, got {type(offsets).__name__}; pass torch.tensor(offsets)")
    if offsets.dtype not in _OFFSET_DTYPES:
        raise TypeError(f"offsets must be int64 or int32, got {offsets.dtype}; convert with offsets.long()")
    _check_shape(offsets, device, "offsets")
    if offsets.numel() == 0 or (offsets.numel() - 1) % num_features:
        raise ValueError(
            f"offsets has {offsets.numel()} entries, but {num_features} features need F * B + 1: "
            "one boundary per feature and sample, and the end"
        )
    return offsets.to(torch.int64).contiguous()


def _check_offset_values(offsets: torch.Tensor, num_ids: int) -> None:
    values = offsets.cpu().numpy()
    decreasing = (values[1:] < values[:-1]).nonzero()[0]
    if decreasing.size:
        k = int(decreasing[0])
        raise ValueError(f"offsets must not decrease, got {values[k]} before {values[k + 1]} at position {k + 1}")
    if values[0] != 0 or values[-1] != num_ids:
        raise ValueError(
            f"offsets must start at 0 and end at the number of ids, {num_ids}; got {values[0]} and {values[-1]}"
        )


def _check_weights(weights: torch.Tensor, num_ids: int, device: torch.device) -> torch.Tensor:
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"per_sample_weights must be a tensor, got {type(weights).__name__}")
    if weights.dtype not in _WEIGHT_DTYPES + COUNT_DTYPES:
        raise TypeError(
            f"per_sample_weights must be floating pooling weights, got {weights.dtype}; "
            "integer counts of how often an id occurred go into frequency_counters"
        )
    _check_shape(weights, device, "per_sample_weights", num_ids)
    return weights


def _check_frequencies(frequencies: torch.Tensor, num_ids: int, device: torch.device) -> torch.Tensor:
    if not isinstance(frequencies, torch.Tensor):
        raise TypeError(f"frequency_counters must be a tensor, got {type(frequencies).__name__}")
    if frequencies.dtype not in COUNT_DTYPES:
        raise TypeError(
            f"frequency_counters must be int64 or int32, got {frequencies.dtype}; "
            "floating pooling weights go into per_sample_weights"
        )
    _check_shape(frequencies, device, "frequency_counters", num_ids)
    return frequencies.to(torch.int64).contiguous()


def _check_frequency_values(frequencies: torch.Tensor, name: str) -> None:
    if not frequencies.numel():
        return
    lowest, highest = int(frequencies.min()), int(frequencies.max())
    if lowest < 1 or highest > MAX_FREQUENCY:
        raise ValueError(
            f"{name} must be in 1..{MAX_FREQUENCY}, got {lowest}..{highest}; leave ids out that do not count"
        )
