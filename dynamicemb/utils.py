"""Documented import path of some constants."""

from typing import TYPE_CHECKING, Any

from dynamicemb.capacity import DTYPE_NUM_BYTES
from dynamicemb.compatibility import torch_to_dyn_emb

if TYPE_CHECKING:
    from dynamicemb.sharding.torchrec_types import TORCHREC_TYPES

__all__ = ["DTYPE_NUM_BYTES", "TORCHREC_TYPES", "torch_to_dyn_emb"]


def __getattr__(name: str) -> Any:
    # Looking these up imports torchrec, which takes seconds.
    if name == "TORCHREC_TYPES":
        from dynamicemb.sharding import torchrec_types

        return torchrec_types.TORCHREC_TYPES
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
