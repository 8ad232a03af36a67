"""Where the tensors of static tables come from: a mapping, a folder, or a file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynamicemb.checkpoint.static.entries import Entries, entries_of_mapping
from dynamicemb.checkpoint.static.folder import entries_of_folder


def open_entries(source: Any, argument: str) -> Entries:
    """Return the tensors of a state_dict, of a folder of ``torch.distributed.checkpoint``, or of a file.

    Args:
        source: a mapping or a path.
        argument: its name, for messages.

    Raises:
        TypeError: it is neither.
        FileNotFoundError: there is nothing at the path.
        ValueError: what is there cannot be read.
    """
    if isinstance(source, Mapping):
        return entries_of_mapping(source)
    if isinstance(source, nn.Module):
        raise TypeError(
            f"{argument} must be a state_dict or a path, got the module {type(source).__name__}; pass its state_dict()"
        )
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"{argument} must be a state_dict or a path, got {type(source).__name__}")
    path = os.fspath(source)
    if not isinstance(path, str):
        raise TypeError(f"{argument} must be a path of text, got {path!r}")
    if "://" in path:
        raise ValueError(
            f"{argument}: {path!r} is a URL; copy the checkpoint to a disk, or load it with "
            "torch.distributed.checkpoint and pass the state_dict"
        )
    if not os.path.exists(path):
        raise FileNotFoundError(f"{argument}: there is nothing at {path!r}")
    return entries_of_folder(path, argument) if Path(path).is_dir() else _entries_of_file(path, argument)


def _entries_of_file(path: str, argument: str) -> Entries:
    try:
        # Mapped: rows are read from the file when they are asked for.
        values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(
            f"{argument}: {path!r} is no file of plain tensors that torch.load can read with weights_only=True "
            f"({reason}); load it yourself, if you trust it, and pass the state_dict. ShardedTensors of several ranks "
            "are loaded by as many ranks, or come in a folder of torch.distributed.checkpoint"
        ) from None
    if not isinstance(values, Mapping):
        raise ValueError(f"{argument}: {path!r} holds a {type(values).__name__}, not a state_dict")
    return entries_of_mapping(values)
