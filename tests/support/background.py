"""A disk on which a dump in the background stands still, and modules to dump."""

import json
import threading
from typing import Any

import torch

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
from dynamicemb.checkpoint.load import LoadRequest, load_tables
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.tables import tables_of_modules
from dynamicemb.checkpoint.writing.background import DumpHandle
from dynamicemb.table.index import NOW, SEEN
from tests.support.lookups import make_module
from tests.support.memory_disk import MemoryDisk
from tests.support.tables import device_of, use_backend

# Later than any clock, so that time passes only where a test says so, and two dumps see the same.
LATE = 4 * 10**18


class SlowDisk(MemoryDisk):
    """A disk in memory that stands still before its first write, until `go` is set.

    Attributes:
        reached: set when a dump stands still.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def _operation(self, name: str) -> None:
        if name == "write":
            self.reached.set()
            assert self.go.wait(300), "nobody let the disk go on"
        super()._operation(name)


def make(backend: str, *tables: Any, **more: Any) -> BatchedDynamicEmbeddingTablesV2:
    """Make a module whose clock stands still."""
    module = make_module(tables, **{"optimizer": "adam", "device": device_of(backend), **more})
    use_backend(module.tables, backend)
    module.tables.index.clock[[NOW, SEEN]] = LATE
    return module


def dump(
    module: BatchedDynamicEmbeddingTablesV2, disk: MemoryDisk, path: str = "/runs/dump", **request: Any
) -> DumpHandle | None:
    """Dump to a disk in memory, with ``optim`` unless the request says otherwise."""
    request = {"optim": True, **request}
    base = tuple(request.pop("base", ()))
    return dump_tables(DumpRequest(path, base=base, **request), tables_of_modules([module], ""), Ranks(), disk)


def dump_in_background(
    module: BatchedDynamicEmbeddingTablesV2, disk: MemoryDisk, path: str = "/runs/dump", **request: Any
) -> DumpHandle:
    """Do what `dump` does, in the background; where the disk is slow, it stands still afterwards."""
    handle = dump(module, disk, path, blocking=False, **request)
    assert handle is not None
    if isinstance(disk, SlowDisk):
        assert disk.reached.wait(60)
    return handle


def load(module: BatchedDynamicEmbeddingTablesV2, disk: MemoryDisk, *paths: str, **request: Any) -> None:
    """Load from a disk in memory, with ``optim`` unless the request says otherwise."""
    request = {"optim": True, **request}
    load_tables(LoadRequest(paths or ("/runs/dump",), **request), tables_of_modules([module], ""), Ranks(), disk)


def files_of(disk: MemoryDisk, path: str = "/runs/dump") -> dict[str, bytes]:
    """Return the files of a dump without the dump's name."""
    files = {name.removeprefix(path): data for name, data in disk.all_files(path).items()}
    manifest = json.loads(files["/manifest.json"])["manifest"]
    del manifest["dump_id"]
    return files | {"/manifest.json": json.dumps(manifest).encode()}


def step(module: BatchedDynamicEmbeddingTablesV2, *ids: int) -> None:
    """Train on ids of all tables of a module."""
    device = module.tables.device
    batch = torch.tensor([*ids] * len(module.table_names), device=device)
    module(batch, torch.arange(len(batch) + 1, device=device)).pow(2).sum().backward()
