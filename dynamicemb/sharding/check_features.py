"""Check a batch before it is exchanged."""

from collections.abc import Iterable
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.sharding.torchrec_compat import as_kjt

_ID_DTYPES = (torch.int64, torch.int32)


def checked_features(features: Any, names: list[str], weighted: bool, device: torch.device) -> KeyedJaggedTensor:
    """Return a batch as a KeyedJaggedTensor.

    Args:
        features: what the user passed.
        names: features that the collection reads.
        weighted: whether it needs pooling weights.
        device: where the tables are.

    Raises:
        TypeError: ids of a wrong dtype.
        ValueError: a feature or the weights are missing, or lengths do not fit.
    """
    kjt = as_kjt(features)
    _check(kjt, names, weighted, device)
    return kjt


def _check(kjt: KeyedJaggedTensor, names: list[str], weighted: bool, device: torch.device) -> None:
    missing = [name for name in names if name not in kjt.keys()]
    if missing:
        raise ValueError(
            f"features: {missing} are not in the batch, which has {kjt.keys()}; add them, if need be empty"
        )
    ids = kjt.values()
    if ids.dtype not in _ID_DTYPES:
        raise TypeError(f"features: ids must be int64, int32 or uint64, got {ids.dtype}; convert with values.long()")
    if ids.device != device:
        raise ValueError(f"features: ids are on {ids.device}, the tables on {device}; move the batch with .to(device)")
    if weighted:
        check_weights([kjt], True)
    if ids.device.type == "cpu":
        lengths = kjt.lengths()
        if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.sum()) != ids.numel()):
            raise ValueError(
                f"features: lengths must be non-negative and sum to the {ids.numel()} ids, "
                f"got a minimum of {int(lengths.min())} and a sum of {int(lengths.sum())}"
            )


def check_weights(batches: Iterable[KeyedJaggedTensor], weighted: bool) -> None:
    """Check that batches have pooling weights, if their collection is weighted.

    Raises:
        ValueError: they have none.
    """
    if weighted and any(batch.weights_or_none() is None for batch in batches):
        raise ValueError("features: the collection is weighted, but the batch has no weights; pass weights=")
