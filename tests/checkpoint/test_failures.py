"""A dump is complete or absent, whenever it is stopped and whatever the disk does; damage is noticed."""

import errno
import json
import random
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.checkpoint.disk.io import DISK, FileSystem
from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
from dynamicemb.checkpoint.load import LoadRequest, load_tables
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reading.opened import open_dump
from dynamicemb.checkpoint.tables import tables_of_modules
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from tests.support.checkpoints import Records, records, train, trained, without_scores
from tests.support.memory_disk import IMAGES, File, Killed, MemoryDisk, failing_at, killing_at

PLACE = "/runs/dump"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the dump in .* is replaced")
        warnings.filterwarnings("ignore", message=".*was being replaced when its writer was stopped")
        yield


def dump(module: BatchedDynamicEmbeddingTablesV2, disk: FileSystem, path: str = PLACE) -> None:
    request = DumpRequest(path, optim=True, allow_overwrite=True)
    dump_tables(request, tables_of_modules([module], "model"), Ranks(), disk)


def load(module: BatchedDynamicEmbeddingTablesV2, disk: FileSystem, path: str = PLACE) -> None:
    load_tables(LoadRequest((path,), optim=True), tables_of_modules([module], "model"), Ranks(), disk)


def rows(module: BatchedDynamicEmbeddingTablesV2) -> dict[str, dict[int, tuple[bytes, bytes]]]:
    return {name: without_scores(records(module, name)) for name in module.table_names}


def everything(module: BatchedDynamicEmbeddingTablesV2) -> dict[str, Records]:
    return {name: records(module, name) for name in module.table_names}


@pytest.fixture(scope="module")
def old() -> BatchedDynamicEmbeddingTablesV2:
    return trained(num_steps=1, seed=1, num_tables=1)


@pytest.fixture(scope="module")
def new() -> BatchedDynamicEmbeddingTablesV2:
    return trained(num_steps=2, seed=2, num_tables=1)


@pytest.fixture
def scratch() -> BatchedDynamicEmbeddingTablesV2:
    return trained(num_steps=1, seed=3, num_tables=1)


@pytest.fixture
def two_tables() -> BatchedDynamicEmbeddingTablesV2:
    return trained(num_steps=1, seed=3)


def disk_with(module: BatchedDynamicEmbeddingTablesV2 | None, can_exchange: bool) -> MemoryDisk:
    """Return a disk with a dump on it, all of it synced."""
    disk = MemoryDisk(can_exchange)
    if module is not None:
        dump(module, disk)
    return disk.image(True, True)


def num_operations(module: BatchedDynamicEmbeddingTablesV2, disk: MemoryDisk) -> int:
    copy = disk.image(True, True)
    dump(module, copy)
    return copy.count


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("has_dump", [True, False])
def test_c21_a_dump_killed_at_any_operation_leaves_the_one_before(
    old: BatchedDynamicEmbeddingTablesV2,
    new: BatchedDynamicEmbeddingTablesV2,
    scratch: BatchedDynamicEmbeddingTablesV2,
    has_dump: bool,
    can_exchange: bool,
    image: str,
) -> None:
    first = disk_with(old if has_dump else None, can_exchange)
    total = num_operations(new, first)
    assert total > 25
    found = {"old": 0, "new": 0}
    for number in range(1, total + 1):
        disk = first.image(True, True)
        disk.fail = killing_at(number)
        with pytest.raises(Killed):
            dump(new, disk)
        after = disk.image(*IMAGES[image])
        try:
            load(scratch, after)
        except FileNotFoundError:
            assert not has_dump
            found["old"] += 1
        else:
            which = "new" if rows(scratch) == rows(new) else "old"
            assert which == "new" or (has_dump and rows(scratch) == rows(old)), number
            found[which] += 1
        # The next dump is not in the way of what was left, and leaves nothing else.
        dump(new, after)
        assert {path.split("/")[2] for path in after.all_files()} == {"dump"}
        load(scratch, after)
        assert rows(scratch) == rows(new)
    assert found["old"] >= total // 2 and (found["new"] > 0 or not has_dump)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_c21_a_dump_killed_after_one_that_was_killed_leaves_a_whole_one_too(
    old: BatchedDynamicEmbeddingTablesV2,
    new: BatchedDynamicEmbeddingTablesV2,
    scratch: BatchedDynamicEmbeddingTablesV2,
    can_exchange: bool,
) -> None:
    first = disk_with(old, can_exchange)
    counting = first.image(True, True)
    dump(new, counting)
    # Names of dumps change from the manifest's sync on; the second dump then tidies up and is killed in turn.
    begin = len(counting.log) - counting.log[::-1].index("create") + 3
    for number in range(begin, counting.count + 1):
        for second in range(1, 30):
            disk = first.image(True, True)
            disk.fail = killing_at(number)
            with pytest.raises(Killed):
                dump(new, disk)
            # The system goes on, so what was not synced is still there; a crash comes only after the second one.
            disk.dead, disk.count, disk.fail = False, 0, killing_at(second)
            with pytest.raises(Killed):
                dump(new, disk)
            for image in ("only what was synced", "names below"):
                load(scratch, disk.image(*IMAGES[image]))
                assert rows(scratch) in (rows(old), rows(new)), (number, second)


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_c21_a_disk_that_fails_at_any_operation_of_a_dump_raises_and_leaves_a_whole_dump(
    old: BatchedDynamicEmbeddingTablesV2,
    new: BatchedDynamicEmbeddingTablesV2,
    scratch: BatchedDynamicEmbeddingTablesV2,
    can_exchange: bool,
    code: int,
    for_good: bool,
) -> None:
    first = disk_with(old, can_exchange)
    for number in range(1, num_operations(new, first) + 1):
        disk = first.image(True, True)
        disk.fail = failing_at(number, code, for_good)
        with pytest.raises(OSError) as caught:
            dump(new, disk)
        assert caught.value.errno == code
        disk.fail = lambda number, name: None
        assert not disk.files, "a file stayed open"
        for image in IMAGES.values():
            load(scratch, disk.image(*image))
            assert rows(scratch) in (rows(old), rows(new)), number
        dump(new, disk)
        load(scratch, disk)
        assert rows(scratch) == rows(new)


def test_c21_a_dump_that_returned_is_on_the_disk(
    new: BatchedDynamicEmbeddingTablesV2, scratch: BatchedDynamicEmbeddingTablesV2
) -> None:
    for can_exchange in (True, False):
        for before in (None, new):
            disk = disk_with(before, can_exchange)
            dump(new, disk)
            load(scratch, disk.image(False, False))
            assert rows(scratch) == rows(new)


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_c22_a_disk_that_fails_at_any_operation_of_a_load_leaves_tables_as_they_were_or_empty(
    old: BatchedDynamicEmbeddingTablesV2, scratch: BatchedDynamicEmbeddingTablesV2, for_good: bool
) -> None:
    first = disk_with(old, True)
    disk = first.image(True, True)
    load(scratch, disk)
    total = disk.count
    train(scratch, 1)
    before = everything(scratch)
    seen = set()
    for number in range(1, total + 1):
        disk = first.image(True, True)
        disk.fail = failing_at(number, errno.EIO, for_good)
        with pytest.raises(OSError):
            load(scratch, disk)
        assert not disk.files, "a file stayed open"
        after = everything(scratch)
        assert after == before or after == {"a": {}}, number
        seen.add(after == before)
        if after != before:
            load(scratch, first)
            before = everything(scratch)
    assert seen == {True, False}
    scratch.tables.check_invariants()


def test_c21_a_failure_at_any_operation_of_a_first_dump_leaves_nothing(new: BatchedDynamicEmbeddingTablesV2) -> None:
    total = num_operations(new, MemoryDisk())
    for number in range(1, total + 1):
        disk = MemoryDisk()
        disk.fail = failing_at(number, errno.ENOSPC)
        with pytest.raises(OSError):
            dump(new, disk)
        files = disk.all_files()
        # Whether a rename that failed happened, nobody knows: the next dump tidies up.
        assert not files or f"{PLACE}/manifest.json" in files or disk.log[-1] == "rename"


# Damage


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    dump(trained(num_steps=1, seed=1), DISK, str(tmp_path / "dump"))
    return tmp_path / "dump"


def refuses(module: BatchedDynamicEmbeddingTablesV2, folder: Path, name: str) -> None:
    """Check that a load names the file and changes nothing."""
    before = everything(module)
    with pytest.raises(CheckpointCorruptError) as caught:
        load(module, DISK, str(folder))
    assert Path(caught.value.path).name == name, caught.value
    assert name in str(caught.value)
    assert everything(module) == before


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_c22_every_flipped_bit_of_the_manifest_is_noticed(dumped: Path) -> None:
    from dynamicemb.checkpoint.format import Manifest

    path = dumped / "manifest.json"
    data = bytearray(path.read_bytes())
    Manifest.from_bytes(bytes(data), str(path))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorruptError):
            Manifest.from_bytes(bytes(data), str(path))
        data[bit // 8] ^= 1 << bit % 8


def test_c22_every_flipped_bit_of_a_json_file_is_noticed(two_tables: BatchedDynamicEmbeddingTablesV2) -> None:
    disk = disk_with(two_tables, True)
    table = tables_of_modules([two_tables], "model")[0]
    opened = open_dump(PLACE, disk)
    opened.stored(table, disk)
    node = disk.node(f"{PLACE}/model/a_opt_args.json")
    assert isinstance(node, File)
    for bit in range(len(node.data) * 8):
        node.data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorruptError, match=r"a_opt_args\.json"):
            opened.stored(table, disk)
        node.data[bit // 8] ^= 1 << bit % 8


def test_c22_flipped_bits_of_rows_are_noticed(dumped: Path, two_tables: BatchedDynamicEmbeddingTablesV2) -> None:
    random_bits = random.Random(5)
    files = [path for path in sorted((dumped / "model").iterdir()) if path.suffix != ".json"]
    for path in files:
        data = path.read_bytes()
        for _ in range(8):
            flip(path, random_bits.randrange(len(data) * 8))
            refuses(two_tables, dumped, path.name)
            path.write_bytes(data)
    load(two_tables, DISK, str(dumped))


def test_c22_ten_thousand_flipped_bits_of_rows_change_the_checksum(dumped: Path) -> None:
    random_bits = random.Random(6)
    files = [path for path in sorted((dumped / "model").iterdir()) if path.suffix != ".json"]
    for path in files:
        data = bytearray(path.read_bytes())
        crc = zlib.crc32(data)
        for _ in range(10_000 // len(files) + 1):
            bit = random_bits.randrange(len(data) * 8)
            data[bit // 8] ^= 1 << bit % 8
            assert zlib.crc32(data) != crc
            data[bit // 8] ^= 1 << bit % 8


def test_c22_files_cut_or_lengthened_anywhere_are_noticed(
    dumped: Path, two_tables: BatchedDynamicEmbeddingTablesV2
) -> None:
    for path in sorted([*(dumped / "model").iterdir(), dumped / "manifest.json"]):
        data = path.read_bytes()
        row = {"emb_keys": 8, "emb_scores": 8, "emb_values": 20, "emb_opt_values": 40}
        width = next((size for item, size in row.items() if f"_{item}." in path.name), 1)
        boundaries = {0, width, len(data) // 2 // width * width, len(data) - width, len(data)}
        for size in sorted({b + d for b in boundaries for d in (-1, 0, 1)} - {len(data)}):
            if size < 0:
                continue
            path.write_bytes((data + b"\0")[:size])
            refuses(two_tables, dumped, path.name)
        path.write_bytes(data)


def test_c22_missing_swapped_surplus_and_stale_files_are_noticed(
    dumped: Path, tmp_path: Path, two_tables: BatchedDynamicEmbeddingTablesV2
) -> None:
    folder = dumped / "model"
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        (folder / name).rename(tmp_path / "away")
        refuses(two_tables, dumped, name)
        (tmp_path / "away").rename(folder / name)
    swaps = [name for name in names if name.startswith("a_") and not name.endswith(".json")]
    for name in swaps:
        other = name.replace("a_", "b_", 1)
        first, second = (folder / name).read_bytes(), (folder / other).read_bytes()
        assert len(first) == len(second)
        if first == second:
            continue
        (folder / name).write_bytes(second)
        (folder / other).write_bytes(first)
        refuses(two_tables, dumped, name)
        (folder / name).write_bytes(first)
        (folder / other).write_bytes(second)
    surplus = ["a_emb_keys.rank_1.world_size_2", "z_emb_values.rank_0.world_size_1", "z_opt_args.json"]
    for name in [*surplus, "a_emb_tombstones.rank_0.world_size_1"]:
        (folder / name).touch()
        refuses(two_tables, dumped, name)
        (folder / name).unlink()
    (dumped / "elsewhere").mkdir()
    (dumped / "elsewhere" / surplus[0]).touch()
    refuses(two_tables, dumped, surplus[0])
    (dumped / "elsewhere" / surplus[0]).rename(dumped / "elsewhere" / "notes.txt")
    # A file of another dump that fits by its size.
    later = trained(num_steps=1, seed=1, learning_rate=0.5)
    dump(later, DISK, str(tmp_path / "later"))
    for name in names:
        stale, data = (tmp_path / "later" / "model" / name).read_bytes(), (folder / name).read_bytes()
        assert len(stale) == len(data) or name.endswith(".json")
        if stale != data:
            (folder / name).write_bytes(stale)
            refuses(two_tables, dumped, name)
            (folder / name).write_bytes(data)
    # What is not ours is nobody's business.
    load(two_tables, DISK, str(dumped))


def rewrite_manifest(folder: Path, change: object, *arguments: object) -> None:
    """Change the JSON of a manifest and give it the right checksum."""
    text = (folder / "manifest.json").read_bytes()
    values = json.loads(text)["manifest"]
    change(values, *arguments)  # type: ignore[operator]
    body = json.dumps(values, indent=1, sort_keys=True).encode()
    (folder / "manifest.json").write_bytes(b'{"crc32": "%08x",\n"manifest": %s}\n' % (zlib.crc32(body), body))


def test_c22_a_manifest_that_contradicts_itself_is_refused(
    dumped: Path, two_tables: BatchedDynamicEmbeddingTablesV2
) -> None:
    good = (dumped / "manifest.json").read_bytes()
    changes = [
        lambda m: m.pop("clock"),
        lambda m: m.update(surplus=1),
        lambda m: m.update(clock="1"),
        lambda m: m.update(world_size=0),
        lambda m: m.update(kind="increment"),
        lambda m: m["files"].pop("model/a_emb_keys.rank_0.world_size_1"),
        lambda m: m["files"].update({"model/x": {"size": 0, "crc32": 0}}),
        lambda m: m["collections"]["model"]["a"].update(dim=6),
        lambda m: m["collections"]["model"]["a"].update(counts=[1]),
        lambda m: m["collections"].update({"../away": m["collections"].pop("model")}),
    ]
    for change in changes:
        rewrite_manifest(dumped, change)
        refuses(two_tables, dumped, "manifest.json")
        (dumped / "manifest.json").write_bytes(good)
    rewrite_manifest(dumped, lambda m: m.update(format_version=3, package_version="9.9"))
    with pytest.raises(DynamicEmbError, match=r"format version 3.*reads up to 2.*dynamicemb 9\.9"):
        load(two_tables, DISK, str(dumped))


def test_c25_repeated_ids_or_ids_out_of_order_in_our_dump_are_damage(
    dumped: Path, two_tables: BatchedDynamicEmbeddingTablesV2
) -> None:
    path = dumped / "model" / "a_emb_keys.rank_0.world_size_1"
    data = path.read_bytes()

    def accept(values: dict, size: int) -> None:
        values["files"]["model/" + path.name]["crc32"] = zlib.crc32(path.read_bytes())

    for keys in (data[:8] + data[:8] + data[16:], data[-8:] + data[8:-8] + data[:8]):
        path.write_bytes(keys)
        rewrite_manifest(dumped, accept, len(keys))
        refuses(two_tables, dumped, path.name)


def test_c22_a_collection_is_checked_by_the_manifest_above_it(
    dumped: Path, two_tables: BatchedDynamicEmbeddingTablesV2
) -> None:
    path = dumped / "manifest.json"
    data = path.read_bytes()
    two_tables.load(dumped / "model", optim=True)
    before = everything(two_tables)
    for bit in (3, 40, len(data) * 4):
        flip(path, bit)
        with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
            two_tables.load(dumped / "model", optim=True)
        path.write_bytes(data)
    assert everything(two_tables) == before
    # The manifest of another program says nothing about our files.
    path.write_text('{"name": "my app"}')
    with pytest.warns(UserWarning, match="only the sizes"):
        two_tables.load(dumped / "model", optim=True)


# The real disk


def test_c21_a_folder_with_other_files_is_refused_and_left_alone(
    tmp_path: Path, new: BatchedDynamicEmbeddingTablesV2
) -> None:
    place = tmp_path / "dump"
    place.mkdir()
    (place / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"not empty \(1 entries\).*allow_overwrite"):
        new.dump(place)
    with pytest.raises(FileExistsError, match="'thesis.tex', which is no part of a dump"):
        new.dump(place, allow_overwrite=True)
    (place / "thesis.tex").unlink()
    (place / "model").mkdir()
    (place / "model" / "notes").mkdir()
    with pytest.raises(FileExistsError, match="'model/notes', which is no part of a dump"):
        new.dump(place, allow_overwrite=True)
    (place / "model" / "notes").rmdir()
    new.dump(place, allow_overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump"]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        new.dump(tmp_path / "file")
    with pytest.raises(ValueError, match="root of the file system"):
        new.dump("/")


def test_c21_a_dump_goes_through_links_and_makes_parents(
    tmp_path: Path, new: BatchedDynamicEmbeddingTablesV2, scratch: BatchedDynamicEmbeddingTablesV2
) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to("big")
    new.dump(tmp_path / "link" / "x" / "y")
    new.dump(tmp_path / "link" / "x" / "y" / "", allow_overwrite=True)
    scratch.load(tmp_path / "big" / "x" / "y")
    assert rows(scratch).keys() == rows(new).keys() and records(scratch, "a").keys() == records(new, "a").keys()
    assert [path.name for path in (tmp_path / "big" / "x").iterdir()] == ["y"]


def test_c21_the_previous_dump_is_found_where_folders_cannot_be_exchanged(
    tmp_path: Path, old: BatchedDynamicEmbeddingTablesV2, scratch: BatchedDynamicEmbeddingTablesV2
) -> None:
    old.dump(tmp_path / "dump", optim=True)
    (tmp_path / "dump").rename(tmp_path / ".dump.dynamicemb-previous")
    with pytest.warns(UserWarning, match="stopped; the dump before is read"):
        scratch.load(tmp_path / "dump", optim=True)
    assert rows(scratch) == rows(old)
    with pytest.raises(FileNotFoundError, match="there is no dump"):
        scratch.load(tmp_path / "nowhere")
