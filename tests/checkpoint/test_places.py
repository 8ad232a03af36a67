"""Where a dump may go: what is there already and is not part of it stays (contract 21, 27)."""

import errno
import os
import warnings
import zlib
from pathlib import Path

import pytest
import torch

from dynamicemb import DynamicEmbDump
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.checkpoint.checksum import crc32
from dynamicemb.checkpoint.disk.io import DISK
from dynamicemb.inspection.collect import Inspection, NoDumpError
from tests.support.checkpoints import records
from tests.support.lookups import bag_per_id, make_module, options


def small(*ids: int) -> BatchedDynamicEmbeddingTablesV2:
    module = make_module([options()])
    module(*bag_per_id(ids)).sum().backward()
    return module


def held_in(place: Path) -> set[int]:
    copy = small()
    copy.load(place)
    return set(records(copy, "a"))


def dumps_of_modules(runs: Path) -> None:
    small(1).dump(runs / "monday")
    small(1, 2).dump(runs / "tuesday")


def dump_and_dumps_in_it(runs: Path) -> None:
    small(3).dump(runs)
    # A dump goes into no other one, but a folder can be moved there.
    dumps_of_modules(runs.parent / "elsewhere")
    for place in (runs.parent / "elsewhere").iterdir():
        place.rename(runs / place.name)


def dump_of_a_model(runs: Path) -> None:
    dumps_of_modules(runs)
    (runs / "monday").rename(runs / "model")


@pytest.mark.parametrize("make", [dumps_of_modules, dump_and_dumps_in_it, dump_of_a_model])
def test_c21_other_dumps_in_a_folder_are_not_overwritten(tmp_path: Path, make: object) -> None:
    runs = tmp_path / "runs"
    assert callable(make)
    make(runs)
    there = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match=r"(monday|tuesday|model).*is no part of a dump and would be lost"):
        small(4).dump(runs, allow_overwrite=True)
    with pytest.raises(FileExistsError, match=r"(monday|tuesday|model).*is no part of a dump and would be lost"):
        DynamicEmbDump(runs, small(4), allow_overwrite=True)
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == there
    assert held_in(runs / "tuesday") == {1, 2}


def test_c21_a_manifest_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    manifest = tmp_path / "app" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text('{"name": "my app"}')
    with pytest.raises(FileExistsError, match=r"'manifest.json', which is no part of a dump"):
        small(1).dump(manifest.parent, allow_overwrite=True)
    assert manifest.read_text() == '{"name": "my app"}'
    manifest.unlink()
    small(1).dump(manifest.parent)
    # Ours may be damaged: what is replaced need not load.
    manifest.write_bytes(manifest.read_bytes().replace(b'"clock": 1', b'"clock": 2'))
    with pytest.warns(UserWarning, match="is replaced"):
        small(2).dump(manifest.parent, allow_overwrite=True)
    assert held_in(manifest.parent) == {2}


def test_c21_a_dump_into_another_one_is_refused(tmp_path: Path) -> None:
    base, model = tmp_path / "base", torch.nn.Sequential(small(1, 2))
    DynamicEmbDump(base, model)
    for place, overwrite in ((base / "first", False), (base / "model.0", True)):
        with pytest.raises(ValueError, match=r"is inside the dump .*base'.* beside it"):
            DynamicEmbDump(place, model, base=None if overwrite else base, allow_overwrite=overwrite)
    assert sorted(path.name for path in base.iterdir()) == ["manifest.json", "model.0"]
    assert held_in(base / "model.0") == {1, 2}


def test_c21_the_dump_before_is_kept_where_a_killed_one_left_it_and_other_files_came(tmp_path: Path) -> None:
    place, previous = tmp_path / "dump", tmp_path / ".dump.dynamicemb-previous"
    small(1).dump(place)
    # Killed between two renames; then somebody writes a file to the place.
    place.rename(previous)
    place.mkdir()
    (place / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"holds 'config.json'.*dynamicemb-previous'; move either"):
        small(2).dump(place, allow_overwrite=True)
    assert held_in(previous) == {1} and (place / "config.json").exists()
    (place / "config.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small(2).dump(place, allow_overwrite=True)
    assert held_in(place) == {2} and sorted(path.name for path in tmp_path.iterdir()) == ["dump"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/run", "got the URL 's3://bucket/run'; mount it"),
        (Path("gs://bucket/run"), "got the URL 'gs:/bucket/run'"),
        ("~/run", "begins with '~', which only a shell knows"),
        ("", "path is empty; the current folder is '.'"),
    ],
)
def test_c21_paths_that_no_file_system_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    module = small(1)
    for call in (module.dump, module.load, lambda path: module.dump(tmp_path / "d", base=path)):
        with pytest.raises(ValueError) as caught:
            call(path)
        assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_c21_errors_of_the_disk_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module = small(1)
    module.dump(tmp_path / "d")
    for name, work in (
        ("write", lambda: module.dump(tmp_path / "e")),
        ("fsync", lambda: module.dump(tmp_path / "e")),
        ("preadv", lambda: module.load(tmp_path / "d")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError) as caught:
                work()
        assert str(caught.value).startswith(f"[Errno 28] No space left on device: '{tmp_path}"), name


def test_c21_an_unfinished_dump_is_named_and_not_read(tmp_path: Path) -> None:
    module = small(1)
    module.dump(tmp_path / "d")
    (tmp_path / "d" / "manifest.json").unlink()
    unfinished = (tmp_path / "d").rename(tmp_path / ".d.dynamicemb-writing")
    with pytest.raises(FileNotFoundError, match=f"there is no dump in .*; one is being written, .*: '{unfinished}'"):
        module.load(tmp_path / "d")
    with pytest.raises(FileNotFoundError, match="is a dump that is being written, or was not finished"):
        module.load(unfinished)
    assert set(records(module, "a")) == {1}
    for place in (tmp_path / "d", unfinished):
        with pytest.raises(NoDumpError, match="being written, or was not finished"):
            Inspection.open([str(place)], [], DISK)


def test_c22_checksums_are_those_of_zlib_in_pieces_too() -> None:
    data = torch.arange(5000, dtype=torch.int16).numpy()
    whole = zlib.crc32(data)
    assert crc32(data) == whole == crc32(data[1:], crc32(data[:1])) == crc32(memoryview(data.tobytes()))
    assert crc32(b"") == 0


@pytest.mark.parametrize("end", ["writing", "previous"])
def test_c21_a_place_named_like_what_a_killed_dump_leaves_is_refused(tmp_path: Path, end: str) -> None:
    with pytest.raises(ValueError, match="ends like a folder of an unfinished dump"):
        small(1).dump(tmp_path / f".dump.dynamicemb-{end}")
    assert not list(tmp_path.iterdir())


def test_c22_a_dump_that_was_stopped_is_not_taken_for_one_without_a_manifest(tmp_path: Path) -> None:
    unfinished = tmp_path / ".dump.dynamicemb-writing"
    DynamicEmbDump(tmp_path / "dump", torch.nn.Sequential(small(1, 2)))
    (tmp_path / "dump").rename(unfinished)
    (unfinished / "manifest.json").unlink()
    for place in (unfinished, unfinished / "model.0"):
        with pytest.raises(FileNotFoundError, match="is a dump that is being written, or was not finished"):
            small().load(place)
