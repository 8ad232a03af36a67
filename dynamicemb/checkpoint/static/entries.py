"""Tensors of a checkpoint as this rank sees them: pieces whose rows can be read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dynamicemb.checkpoint.static.keys import flattened, raw_ids_of, state_of, weights_of

# Reads rows begin to end, as the whole tensor counts them.
Reader: TypeAlias = Callable[[int, int], torch.Tensor]


class Piece(NamedTuple):
    """A box of a tensor that this rank can read.

    Attributes:
        offsets: where it begins, in each dimension.
        sizes: how far it goes.
        read: its rows.
        check: raises where they cannot be read.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Reader
    check: Callable[[], None] = lambda: None


class Described(NamedTuple):
    """What ranks tell each other about an entry.

    Attributes:
        size: of the whole tensor.
        dtype: of its elements.
        boxes: offsets and sizes of the pieces of a rank.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        size: of the whole.
        dtype: of its elements.
        pieces: what this rank can read.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def described(self) -> Described:
        """The same, to send."""
        return Described(self.size, self.dtype, tuple((piece.offsets, piece.sizes) for piece in self.pieces))


@dataclass(frozen=True)
class Entries:
    """The tensors of a checkpoint.

    Attributes:
        by_key: each tensor.
        stateless: keys below which there is nothing, as those of a parameter whose optimizer has no state.
    """

    by_key: Mapping[str, Entry]
    stateless: tuple[str, ...] = ()


def entries_of_mapping(values: Mapping[Any, Any]) -> Entries:
    """Return the tensors of tables in a state_dict, also of one inside others; nothing is copied.

    Whatever else it holds is not looked at, so that a sparse tensor or a large number elsewhere does no harm.

    Raises:
        ValueError: a tensor is not laid out in a way that can be read.
    """
    by_key, stateless = {}, []
    for key, value in flattened(values):
        if isinstance(value, Mapping):
            stateless.append(key)
        if not (weights_of(key) or state_of(key) or raw_ids_of(key)):
            continue
        entry = _entry(value, key)
        if entry is not None:
            by_key[key] = entry
    return Entries(by_key, tuple(stateless))


def _entry(value: Any, key: str) -> Entry | None:
    if isinstance(value, ShardedTensor):
        shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
        # Its own attributes warn that the class will go.
        metadata = value.metadata()
        return _of_parts(tuple(metadata.size), metadata.tensor_properties.dtype, shards, key)
    if isinstance(value, DTensor):
        return _of_parts(tuple(value.shape), value.dtype, _parts_of_dtensor(value, key), key)
    if isinstance(value, torch.Tensor):
        return _of_parts(tuple(value.shape), value.dtype, [([0] * value.dim(), value)], key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = torch.tensor(value)
        return Entry((), number.dtype, (Piece((), (), lambda begin, end: number),))
    return None


def _parts_of_dtensor(value: DTensor, key: str) -> list[tuple[Any, torch.Tensor]]:
    local: Any = value.to_local()
    if hasattr(local, "local_shards"):
        # TorchRec's wrapper of several shards; one without any has offsets nevertheless.
        return list(zip(local.local_offsets(), local.local_shards(), strict=False))
    if any(isinstance(placement, Partial) for placement in value.placements):
        raise ValueError(f"checkpoint: {key} is a DTensor of partial sums; redistribute it first")
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return [(offsets, local)] if local.numel() else []


def _of_parts(size: tuple[int, ...], dtype: torch.dtype, parts: list[tuple[Any, torch.Tensor]], key: str) -> Entry:
    pieces = []
    for offsets, tensor in parts:
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(
                f"checkpoint: {key} must be a dense tensor with data, got layout {tensor.layout} on {tensor.device}"
            )
        begin = tuple(int(offset) for offset in offsets)
        pieces.append(Piece(begin, tuple(tensor.shape), _reader(tensor.detach(), begin[0] if begin else 0)))
    return Entry(size, dtype, tuple(pieces))


def _reader(tensor: torch.Tensor, first: int) -> Reader:
    def read(begin: int, end: int) -> torch.Tensor:
        return (tensor[begin - first : end - first] if tensor.dim() else tensor).cpu()

    return read
