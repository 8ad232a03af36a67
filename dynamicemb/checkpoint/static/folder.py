"""A folder that ``torch.distributed.checkpoint`` wrote, read row by row rather than tensor by tensor."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from dynamicemb.checkpoint.static.entries import Entries, Entry, Piece
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError

_METADATA = ".metadata"


class StoredPiece:
    """A piece of a tensor inside a file, where it is written as ``torch.save`` writes.

    The tensor stands there as it was in memory, behind a header, so that rows are bytes at a known place.
    """

    def __init__(self, path: Path, info: Any, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Take where the piece is.

        Args:
            path: the file.
            info: offset and length of the piece in the file, as the metadata have it.
            key: of the tensor, for messages.
            offsets: where the piece begins in the tensor.
            sizes: how far it goes.
        """
        self._path, self._info, self._key = path, info, key
        self._first = offsets[0] if offsets else 0
        self._sizes = sizes
        self._header: tuple[int, torch.dtype] | None = None

    def check(self) -> None:
        """Refuse a file that is missing or too short, and a piece that is not what the metadata say.

        Raises:
            CheckpointCorruptError: as said.
            DynamicEmbError: the piece is compressed or encrypted.
        """
        if getattr(self._info, "transform_descriptors", None):
            raise DynamicEmbError(
                f"checkpoint: {self._key} was written with the extensions {self._info.transform_descriptors}; load it "
                "with torch.distributed.checkpoint and pass the state_dict"
            )
        end = self._info.offset + self._info.length
        size = self._path.stat().st_size if self._path.exists() else None
        if size is None or size < end:
            raise CheckpointCorruptError(self._path, f"at least {end} bytes", "no file" if size is None else f"{size}")
        self._data()

    def _data(self) -> tuple[int, torch.dtype]:
        """Return where the elements begin in the file, and their dtype."""
        if self._header is None:
            with open(self._path, "rb") as file:
                view: Any = _create_file_view(file, self._info.offset, self._info.length)
                try:
                    # No element is read for this device.
                    tensor = torch.load(view, map_location="meta", weights_only=True)
                    first = tensor.storage_offset() * tensor.element_size()
                    begin = tensor.untyped_storage()._checkpoint_offset + first
                except Exception as error:
                    raise CheckpointCorruptError(self._path, f"a tensor for {self._key}", f"{error}") from None
            if tuple(tensor.shape) != self._sizes or not tensor.is_contiguous():
                wanted = f"a contiguous tensor of shape {self._sizes} for {self._key}"
                raise CheckpointCorruptError(self._path, wanted, f"{tuple(tensor.shape)}, strides {tensor.stride()}")
            self._header = self._info.offset + begin, tensor.dtype
        return self._header

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return some rows, as the whole tensor counts them.

        Raises:
            CheckpointCorruptError: the file ends before them.
        """
        first, dtype = self._data()
        width = self._sizes[1:] if self._sizes else ()
        row_bytes = dtype.itemsize * torch.Size(width).numel()
        wanted = (end - begin) * row_bytes
        data = bytearray(wanted)
        with open(self._path, "rb") as file:
            file.seek(first + (begin - self._first) * row_bytes)
            got = file.readinto(data)
        if got != wanted:
            raise CheckpointCorruptError(self._path, f"{wanted} bytes for {self._key}", f"{got}")
        if not wanted:
            return torch.empty(0, *width, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(end - begin, *width)


def entries_of_folder(path: str, argument: str = "checkpoint") -> Entries:
    """Return the tensors of a folder.

    Args:
        path: of the folder.
        argument: which has the path, for messages.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is none of ``torch.distributed.checkpoint``.
        CheckpointCorruptError: its metadata cannot be read.
    """
    folder = Path(path)
    if not (folder / _METADATA).exists():
        raise ValueError(
            f"{argument}: {path!r} has no file {_METADATA!r}, so torch.distributed.checkpoint did not write it, or not "
            "to its end; a dump of DynamicEmbDump is for DynamicEmbLoad"
        )
    try:
        metadata = dcp.FileSystemReader(os.fspath(folder)).read_metadata()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
    except Exception as error:
        raise CheckpointCorruptError(folder / _METADATA, "metadata of a checkpoint", f"{error}") from error
    found = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            pieces = []
            for chunk in stored.chunks:
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                if 0 in sizes:
                    continue
                info = places.get((key, offsets))
                if info is None:
                    raise CheckpointCorruptError(folder / _METADATA, f"a place for {key} at {offsets}", "none")
                piece = StoredPiece(folder / info.relative_path, info, key, offsets, sizes)
                pieces.append(Piece(offsets, sizes, piece.read, piece.check))
            found[key] = Entry(tuple(stored.size), stored.properties.dtype, tuple(pieces))
    return Entries(found)
