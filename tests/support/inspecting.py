"""Run ``python -m dynamicemb.inspect`` in this process, and dumps made by hand for it."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb.checkpoint.disk.io import DISK, FileSystem
from dynamicemb.checkpoint.format import (
    COUNTER_FREQUENCIES,
    COUNTER_KEYS,
    FULL,
    KEYS,
    SCORES,
    VALUES,
    FileEntry,
    Manifest,
    TableEntry,
    rank_file,
)
from dynamicemb.inspection.command import main
from dynamicemb.table.layout import locate
from dynamicemb.table.placement import Placement, Rule
from tests.support.placements import owner_of

CLOCK = 1_700_000_000 * 10**9


@dataclass
class Shell:
    """Calls the command."""

    capsys: pytest.CaptureFixture[str]
    disk: FileSystem = field(default_factory=lambda: DISK)

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        self.capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments], self.disk)
        except SystemExit as exit:
            status = int(exit.code or 0)
        out = self.capsys.readouterr()
        return status, out.out, out.err

    def text(self, *arguments: object) -> str:
        """Return what is printed of a dump without damage."""
        status, out, err = self.run(*arguments)
        assert (status, err) == (0, "")
        return out

    def json(self, *arguments: object) -> dict[str, Any]:
        """Return the facts of a dump without damage."""
        return parsed(self.text("--json", *arguments))

    def table(self, *arguments: object) -> dict[str, Any]:
        """Return the facts of the only table of the last dump."""
        (table,) = self.json(*arguments)["dumps"][-1]["tables"]
        return table


def parsed(text: str) -> Any:
    """Parse JSON, in which there are no NaNs."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def lines(text: str) -> list[str]:
    """Return the lines of a report with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(capsys)


def make_dump(
    folder: Path,
    ids: Sequence[int],
    world_size: int = 2,
    num_buckets: int = 7,
    dim: int = 3,
    counted: dict[int, int] | None = None,
    dist_type: str = "roundrobin",
) -> Path:
    """Write a dump of a table "t" as a model of several ranks would, without one: row i has the values i, i, i."""
    folder.mkdir()
    files: dict[str, FileEntry] = {}
    keys = np.array(ids, np.int64)
    owners = owner_of(torch.from_numpy(keys), world_size, dist_type, 50).numpy()
    place = {i: number for number, i in enumerate(ids)}
    counts, num_counters = [], []
    for rank in range(world_size):
        own = keys[owners == rank]
        own = own[np.argsort(locate(own, num_buckets, 1)[0], kind="stable")] if own.size else own
        numbers = np.array([place[i] for i in own.tolist()], np.int64)
        kept = {i: n for i, n in (counted or {}).items() if i % 2**64 % world_size == rank}
        arrays: dict[str, np.ndarray] = {
            KEYS: own,
            VALUES: np.repeat(numbers[:, None].astype(np.float32), dim, 1),
            SCORES: (numbers + 1) * 10**9,
        }
        if counted is not None:
            arrays |= {COUNTER_KEYS: np.array([*kept], np.int64), COUNTER_FREQUENCIES: np.array([*kept.values()])}
        for item, array in arrays.items():
            data, name = np.ascontiguousarray(array).tobytes(), rank_file("t", item, rank, world_size)
            (folder / name).write_bytes(data)
            files[name] = FileEntry(len(data), zlib.crc32(data))
        counts.append(own.size)
        num_counters.append(len(kept))
    meta = b'{"opt_type": "sgd", "lr": 0.5, "dist_type": "roundrobin", "step_score": 0}'
    (folder / "t_opt_args.json").write_bytes(meta)
    files["t_opt_args.json"] = FileEntry(len(meta), zlib.crc32(meta))
    entry = TableEntry(
        dim, "float32", "sgd", -1, ["TIMESTAMP"], dist_type, 50, 1, 4, counted is not None, counts, counts,
        [num_buckets] * world_size, [num_buckets * 16] * world_size, num_counters, [0] * world_size,
        Placement.row_wise(Rule(dist_type, 50), world_size, dim),
    )  # fmt: skip
    manifest = Manifest("0.1.0", FULL, "5" * 32, [], world_size, CLOCK, {"": {"t": entry}}, files)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return folder


def rewrite(path: Path, data: bytes) -> None:
    """Write a file of the same size into a dump, with the right checksum in the manifest."""
    manifest = path.parent / "manifest.json"
    inner = ""
    if not manifest.exists():
        manifest, inner = path.parent.parent / "manifest.json", path.parent.name + "/"
    values = json.loads(manifest.read_bytes())["manifest"]
    assert values["files"][inner + path.name]["size"] == len(data)
    values["files"][inner + path.name]["crc32"] = zlib.crc32(data)
    path.write_bytes(data)
    body = json.dumps(values, indent=1, sort_keys=True).encode()
    manifest.write_bytes(b'{"crc32": "%08x",\n"manifest": %s}\n' % (zlib.crc32(body), body))
