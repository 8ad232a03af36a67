"""Read a batch before it is exchanged: what is sent has one form, whatever the batch of a rank looks like.

Ids and lengths become int64, pooling weights float32, and weights that nobody reads stay behind. Numbers that a
KeyedJaggedTensor merely remembers (offsets beside lengths, lengths per key) are compared with its lengths and left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.embedding.inputs import COUNT_DTYPES, MAX_FREQUENCY
from dynamicemb.sharding.checks.lengths import ends_on_cpu, ends_on_device
from dynamicemb.sharding.torchrec_compat import as_kjt, keyed_jagged_tensor, sums_between

_ID_DTYPES = (torch.int64, torch.int32, torch.uint64)
_LENGTH_DTYPES = (torch.int64, torch.int32)


@dataclass
class Wanted:
    """What a collection reads of a batch.

    Attributes:
        names: its features.
        weighted: whether it reads pooling weights.
        counted: whether it takes integer weights for how often each occurrence counts.
        weights_come_later: whether a batch may come without them.
        missing_as_empty: whether a feature that the batch lacks is read as one without ids.
        checks_on_device: whether somebody asks what a GPU finds out about lengths; only exchanges of dynamic tables do.
        device: where the tables are.
        alone: whether there is one rank, which may raise at once what a GPU finds out.
    """

    names: list[str]
    weighted: bool
    weights_come_later: bool
    missing_as_empty: bool
    checks_on_device: bool
    device: torch.device
    counted: bool = False
    alone: bool = False
    # The keys of the batch before, which have been checked, and which features it lacked.
    _checked: tuple[list[str], list[str]] = ([], [])

    def missing(self, keys: list[str]) -> list[str]:
        """Return which features a batch lacks.

        Raises:
            ValueError: it must not lack any, or it has one twice.
        """
        checked, missing = self._checked
        if keys != checked:
            missing = _missing(keys, self)
            self._checked = (list(keys), missing)
        return missing


def read_features(features: Any, wanted: Wanted) -> tuple[KeyedJaggedTensor, torch.Tensor | None]:
    """Return a batch in the form in which it is sent, and on a GPU whether its lengths contradict its ids.

    Args:
        features: what the user passed.
        wanted: what the collection reads.

    Returns:
        ``(batch, contradicts)``: ``contradicts`` is a bool ``[1]`` on the GPUs of several ranks, None on the CPU, on a
        rank alone, where batch sizes vary by feature, or where nobody asks. Where it is true, all ids are in the first
        bag, so that nothing is read out of bounds.

    Raises:
        TypeError: ids, lengths, offsets or weights of a wrong type.
        ValueError: a feature or the weights are missing, or parts of the batch contradict each other.

    Host sync: one on the GPU of a rank alone if somebody asks about lengths, else none.
    """
    kjt = as_kjt(features)
    keys = kjt.keys()
    missing = wanted.missing(keys)
    ids = kjt.values()
    _check_part("ids", ids, _ID_DTYPES, wanted.device)
    lengths, offsets = kjt.lengths_or_none(), kjt.offsets_or_none()
    if lengths is None and offsets is None:
        raise ValueError("features: the batch has neither lengths nor offsets; pass lengths=")
    for name, part in (("lengths", lengths), ("offsets", offsets)):
        if part is not None:
            _check_part(name, part, _LENGTH_DTYPES, wanted.device)
    weights = _checked_weights(kjt, wanted)
    if ids.dtype != torch.int64:
        ids = ids.view(torch.int64) if ids.dtype == torch.uint64 else ids.to(torch.int64)
    if kjt.variable_stride_per_key():
        return _of_variable_size(kjt, ids, weights), None
    if kjt.inverse_indices_or_none() is not None:
        raise ValueError(
            "features: inverse_indices need stride_per_key_per_rank and do nothing without; pass both or neither"
        )
    batch_size = _batch_size(kjt, len(keys))
    if lengths is None:
        assert offsets is not None
        lengths = offsets.diff()
    if lengths.dtype != torch.int64:
        lengths = lengths.to(torch.int64)
    ends, starts, contradicts = _compared(kjt, lengths, batch_size, wanted)
    if contradicts is not None and lengths.numel():
        in_first_bag = torch.zeros_like(lengths)
        in_first_bag[:1] = ids.numel()
        lengths = torch.where(contradicts, in_first_bag, lengths)
    if missing:
        keys = [*keys, *missing]
        lengths = torch.cat([lengths, lengths.new_zeros(len(missing) * batch_size)])
        starts = starts and [*starts, *[starts[-1]] * len(missing)]
        ends = None
    return keyed_jagged_tensor(keys, ids.contiguous(), weights, lengths, ends, batch_size, starts), contradicts


def read_counts(features: Any, wanted: Wanted) -> torch.Tensor | None:
    """Return how often each occurrence of a batch counts, i64 ``[N]``; None is once.

    Args:
        features: what `read_features` has accepted.
        wanted: what the collection reads.

    Raises:
        ValueError: not one for each id, or, on the CPU, a number out of range.

    Host sync: none on a GPU, where lookups clamp numbers that are out of range.
    """
    kjt = as_kjt(features)
    counts = kjt.weights_or_none() if wanted.counted else None
    if counts is None or counts.dtype not in COUNT_DTYPES or kjt.variable_stride_per_key():
        return None
    _check_part("weights", counts, COUNT_DTYPES, wanted.device)
    if counts.numel() != kjt.values().numel():
        raise ValueError(f"features: {counts.numel()} weights for {kjt.values().numel()} ids; give one per id")
    if counts.device.type == "cpu" and counts.numel():
        lowest, highest = (int(bound) for bound in counts.aminmax())
        if lowest < 1 or highest > MAX_FREQUENCY:
            raise ValueError(
                f"features: weights of integers, which count, must be in 1..{MAX_FREQUENCY}, got {lowest}..{highest}; "
                "leave ids out that do not count"
            )
    return counts.to(torch.int64)


def check_weights(batches: Iterable[KeyedJaggedTensor], weighted: bool) -> None:
    """Check that batches have pooling weights, if their collection is weighted.

    Raises:
        ValueError: they have none.
    """
    if weighted and any(batch.weights_or_none() is None for batch in batches):
        raise ValueError("features: the collection is weighted, but the batch has no weights; pass weights=")


def _missing(keys: list[str], wanted: Wanted) -> list[str]:
    twice = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
    if twice:
        raise ValueError(f"features: keys {twice} occur twice in the batch, which has {keys}; name each feature once")
    missing = [name for name in wanted.names if name not in keys]
    if missing and not wanted.missing_as_empty:
        raise ValueError(
            f"features: {missing} are not in the batch, which has {keys}; add them, if need be empty, or make the "
            "sharder with missing_features_as_empty=True"
        )
    return missing


def _check_part(name: str, part: torch.Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if part.dtype not in dtypes and (part.numel() or name == "ids"):
        *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        known = f"{', '.join(names)} or {last}"
        raise TypeError(f"features: {name} must be {known}, got {part.dtype}; convert with .long()")
    if part.layout != torch.strided:
        raise TypeError(f"features: {name} must be a dense tensor, got layout {part.layout}; use .to_dense()")
    if part.dim() != 1:
        raise ValueError(f"features: {name} must have one dimension, got shape {tuple(part.shape)}; use .flatten()")
    if part.device != device:
        raise ValueError(
            f"features: {name} are on {part.device}, the tables on {device}; move the batch with .to(device)"
        )


def _checked_weights(kjt: KeyedJaggedTensor, wanted: Wanted) -> torch.Tensor | None:
    if not wanted.weighted:
        return None
    weights = kjt.weights_or_none()
    if not wanted.weights_come_later:
        check_weights([kjt], True)
    if weights is None:
        return None
    if not weights.dtype.is_floating_point:
        raise TypeError(
            f"features: weights must be floating pooling weights, got {weights.dtype}; use .float(), or, for counts, a "
            "collection that is not weighted"
        )
    _check_part("weights", weights, (weights.dtype,), wanted.device)
    if weights.numel() != kjt.values().numel():
        raise ValueError(f"features: {weights.numel()} weights for {kjt.values().numel()} ids; give one per id")
    return weights.to(torch.float32)


def _batch_size(kjt: KeyedJaggedTensor, num_keys: int) -> int:
    """Return the number of samples; compares it with the number of bags."""
    lengths, offsets = kjt.lengths_or_none(), kjt.offsets_or_none()
    of_offsets = None if offsets is None else max(offsets.numel() - 1, 0)
    num_bags = of_offsets if lengths is None else lengths.numel()
    assert num_bags is not None
    if of_offsets not in (None, num_bags):
        raise ValueError(f"features: {num_bags} lengths, but offsets of {of_offsets} bags; pass one of them")
    if num_bags % max(num_keys, 1):
        raise ValueError(
            f"features: {num_bags} lengths for {num_keys} features {kjt.keys()}: each feature needs one per sample"
        )
    batch_size = num_bags // max(num_keys, 1)
    stride = kjt.stride()
    # Who has no samples may say any number.
    if stride != batch_size and num_bags:
        raise ValueError(
            f"features: stride={stride}, but {num_bags} lengths for {num_keys} features are {batch_size} samples; "
            "leave stride out"
        )
    return batch_size


def _compared(
    kjt: KeyedJaggedTensor, lengths: torch.Tensor, batch_size: int, wanted: Wanted
) -> tuple[torch.Tensor | None, list[int] | None, torch.Tensor | None]:
    """Compare what the parts of a batch say about each other.

    Args:
        kjt: the batch.
        lengths: its lengths, i64 ``[F*B]``.
        batch_size: B.
        wanted: what the collection reads.

    Returns:
        ``(ends, starts, contradicts)``: the running sums of lengths, i64 ``[F*B+1]``, and those of them at which a
        feature begins or the last ends, None where they are not known; ``contradicts`` is that of `read_features`.
    """
    num_ids, offsets = kjt.values().numel(), kjt.offsets_or_none()
    if lengths.device.type == "cpu":
        ends, starts = ends_on_cpu(lengths, num_ids, batch_size)
        starts = starts if batch_size else [0] * (len(kjt.keys()) + 1)
        if offsets is not None and offsets.numel() and not torch.equal(offsets.to(torch.int64), ends):
            raise ValueError("features: offsets must start at 0 and be the running sum of lengths; pass one of them")
        _check_remembered(kjt, starts)
        return ends, starts, None
    if not wanted.checks_on_device:
        return None, None, None
    if not wanted.alone:
        return None, None, _contradicts(lengths, offsets, num_ids)
    ends, starts = ends_on_device(lengths, offsets, num_ids, batch_size)
    return ends, starts if batch_size else [0] * (len(kjt.keys()) + 1), None


def _check_remembered(kjt: KeyedJaggedTensor, starts: list[int]) -> None:
    """Compare the sums of lengths that a batch remembers with the right ones."""
    lengths, offsets = kjt.length_per_key_or_none(), kjt.offset_per_key_or_none()
    if lengths is not None and list(lengths) != (right := sums_between(starts)):
        raise ValueError(
            f"features: length_per_key={list(lengths)}, but by its lengths {right}; leave length_per_key out"
        )
    if offsets is not None and list(offsets) != starts:
        raise ValueError(
            f"features: offset_per_key={list(offsets)}, but by its lengths {starts}; leave offset_per_key out"
        )


def _contradicts(lengths: torch.Tensor, offsets: torch.Tensor | None, num_ids: int) -> torch.Tensor:
    """Return, as bool ``[1]``, whether lengths i64 ``[K]`` on a GPU are not those of `num_ids` ids."""
    if not lengths.numel():
        return torch.full((1,), num_ids > 0, device=lengths.device)
    lowest, highest = lengths.aminmax()
    wrong = (lowest < 0) | (highest > num_ids) | (lengths.sum() != num_ids)
    if offsets is not None:
        wrong = wrong | (offsets[0] != 0)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        wrong = wrong | (offsets != ends).any()
    return wrong.view(1)


def _of_variable_size(kjt: KeyedJaggedTensor, ids: torch.Tensor, weights: torch.Tensor | None) -> KeyedJaggedTensor:
    """Return a batch whose features have a number of samples each."""
    lengths = kjt.lengths().to(torch.int64)
    num_bags = sum(kjt.stride_per_key())
    if lengths.numel() != num_bags:
        raise ValueError(f"features: {lengths.numel()} lengths, but stride_per_key_per_rank are {num_bags} samples")
    if ids.device.type == "cpu" and lengths.numel():
        lowest, total = int(lengths.min()), int(lengths.sum())
        if lowest < 0 or total != ids.numel():
            raise ValueError(
                f"features: lengths must be non-negative and sum to the {ids.numel()} ids, "
                f"got a minimum of {lowest} and a sum of {total}"
            )
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=ids.contiguous(),
        weights=weights,
        lengths=lengths,
        stride_per_key_per_rank=kjt.stride_per_key_per_rank(),
        inverse_indices=kjt.inverse_indices_or_none(),
    )
