"""``python -m dynamicemb.inspect`` of what is damaged, or no dump at all: it says what a load would say."""

import errno
import json
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamicemb.errors import DynamicEmbError
from dynamicemb.inspection import collect
from tests.checkpoint.test_checkpoint_reference import DUMPS, module_for
from tests.checkpoint.test_failures import rewrite_manifest
from tests.support.admitting import admitting
from tests.support.checkpoints import trained
from tests.support.failing_disk import FailingDisk
from tests.support.inspecting import Shell, lines, make_dump, parsed, rewrite, shell  # noqa: F401
from tests.support.lookups import bag_per_id, make_module, options


def what_a_load_says(module: Any, paths: Any, **arguments: Any) -> str:
    """Return the message with which a load refuses a dump."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DynamicEmbError) as caught:
            module.load(paths, **arguments)
    return str(caught.value)


def module_of_two() -> Any:
    return make_module([admitting(2, dim=5), admitting(2, dim=5)], optimizer="adam")


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    module = module_of_two()
    module(*bag_per_id([1, 1, 2, 3, 3, 4, 5, 5, 6, 6])).pow(2).sum().backward()
    module.dump(tmp_path / "d", optim=True, counter=True)
    return tmp_path / "d"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


FILES = [
    "manifest.json",
    "b_opt_args.json",
    *(
        f"b_{item}.rank_0.world_size_1"
        for item in (
            "emb_keys", "emb_values", "emb_scores", "emb_opt_values", "counter_keys", "counter_frequencies",
        )
    ),
]  # fmt: skip


# Without a manifest it is a dump of the reference implementation.
HARMS = [(harm, name) for harm in (flip, cut, lengthen) for name in FILES] + [(Path.unlink, name) for name in FILES[1:]]


@pytest.mark.parametrize(("harm", "name"), HARMS)
def test_damage_is_what_a_load_refuses(shell: Shell, dumped: Path, harm: Callable[[Path], None], name: str) -> None:  # noqa: F811
    harm(dumped / name)
    expected = what_a_load_says(module_of_two(), dumped, optim=True, counter=True)
    status, out, err = shell.run(dumped, "--verify")
    assert (status, err) == (1, expected + "\n") and name in err
    assert "verified" not in out
    # The other table is shown, unless nothing is known of either.
    assert ("table a" in lines(out)) == (name != "manifest.json")
    status, out, err = shell.run(dumped, "--verify", "--json")
    assert (status, parsed(out)["damage"], parsed(out)["verified"]) == (1, [expected], True)
    # Sizes, the manifest and the JSON file are looked at by all calls; checksums of rows are not.
    noticed = harm is not flip or name.endswith(".json")
    for arguments in ([], ["--key=1"]):
        status, out, err = shell.run(dumped, *arguments)
        assert (status, err) == ((1, expected + "\n") if noticed else (0, ""))


def test_all_damage_is_listed_once(shell: Shell, dumped: Path) -> None:  # noqa: F811
    flip(dumped / "a_emb_values.rank_0.world_size_1")
    cut(dumped / "b_emb_values.rank_0.world_size_1")
    (dumped / "b_emb_scores.rank_0.world_size_1").unlink()
    (dumped / "z_emb_keys.rank_0.world_size_1").touch()
    status, out, err = shell.run(dumped, "--verify", "--key=1")
    names = [
        next(n for n in ("a_emb_values", "b_emb_values", "b_emb_scores", "z_emb_keys") if n in line)
        for line in err.splitlines()
    ]
    assert status == 1 and sorted(names) == ["a_emb_values", "b_emb_scores", "b_emb_values", "z_emb_keys"]
    # Of b, which misses a file, nothing is read.
    assert [line for line in lines(out) if line.startswith("table")] == ["table a"]
    status, out, err = shell.run(dumped, "--table=b", "--key=1")
    assert status == 1 and not any(line.startswith(("table", "id 1")) for line in lines(out))


def test_wrong_contents_with_right_checksums_are_damage(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    class Table:
        """Stands for a module: the checks of a load need no more."""

        @staticmethod
        def load(path: Path) -> None:
            from dynamicemb.checkpoint.disk.io import DISK
            from dynamicemb.checkpoint.ranks import Ranks
            from dynamicemb.checkpoint.reading.opened import open_dump
            from dynamicemb.checkpoint.reading.verify import verify
            from dynamicemb.inspection.dumped import dumped_table

            dump = open_dump(str(path), DISK)
            table = dumped_table(dump, "", "t", DISK)
            verify([table], [[dump.stored(table, DISK)]], Ranks(), DISK)

    def repeat(ids: np.ndarray) -> None:
        ids[1] = ids[0]

    def swap(ids: np.ndarray) -> None:
        ids[[0, -1]] = ids[[-1, 0]]

    def stray(ids: np.ndarray) -> None:
        ids[-1] += 1

    for number, (name, change, message) in enumerate([
        ("t_emb_keys", repeat, "expected every id once, got id "),
        ("t_emb_keys", swap, "expected ids in the order of their buckets, got another order"),
        ("t_emb_keys", stray, "expected ids of rank 1, got id "),
        ("t_counter_keys", stray, "expected ids of rank 1, got id "),
    ]):  # fmt: skip
        folder = make_dump(tmp_path / str(number), range(40), counted=dict.fromkeys(range(50, 60), 1))
        path = folder / f"{name}.rank_1.world_size_2"
        ids = np.fromfile(path, np.int64)
        change(ids)
        rewrite(path, ids.tobytes())
        assert shell.run(folder)[0] == 0
        status, out, err = shell.run(folder, "--verify")
        assert (status, err) == (1, what_a_load_says(Table, folder) + "\n") and message in err


def test_a_manifest_of_a_later_version_is_refused_as_by_a_load(shell: Shell, dumped: Path) -> None:  # noqa: F811
    rewrite_manifest(dumped, lambda m: m.update(format_version=3, package_version="9.9"))
    status, out, err = shell.run(dumped)
    assert (status, out) == (1, "") and err == what_a_load_says(module_of_two(), dumped) + "\n"
    rewrite_manifest(dumped, lambda m: m.update(format_version=2, clock="1"))
    assert shell.run(dumped) == (1, "", what_a_load_says(module_of_two(), dumped) + "\n")


def test_a_verified_dump_says_so(shell: Shell, dumped: Path) -> None:  # noqa: F811
    assert "verified: every file is as it was written" in lines(shell.text(dumped, "--verify"))
    assert shell.json(dumped, "--verify")["verified"] is True and shell.json(dumped)["verified"] is False
    text = shell.text(DUMPS / "adam_step.ws1", "--verify")
    assert "verified: all sizes fit; no checksums without a manifest" in lines(text)


# Chains


def chain_of(tmp_path: Path) -> list[Path]:
    module = trained(num_steps=1)
    paths = [tmp_path / "base", tmp_path / "1", tmp_path / "2"]
    module.dump(paths[0])
    for number in (1, 2):
        module(*bag_per_id([number, 7])).sum().backward()
        module.dump(paths[number], base=paths[:number])
    return paths


def test_a_chain_is_checked_as_a_whole(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    base, first, second = chain_of(tmp_path)
    facts = shell.json(base, first, second, "--verify")
    assert [dump["number"] for dump in facts["dumps"]] == [0, 1, 2]
    assert facts["dumps"][2]["chain"] == [dump["dump_id"] for dump in facts["dumps"][:2]]
    reader = trained(num_steps=1)
    for wrong in ([first, base], [base, second], [first, second], [base, first, first], [base, base]):
        status, out, err = shell.run(*wrong)
        assert (status, out, err) == (1, "", what_a_load_says(reader, wrong) + "\n")
    for item in ("emb_tombstones", "emb_keys"):
        path = first / f"a_{item}.rank_0.world_size_1"
        (path.unlink if not path.stat().st_size else lambda path=path: flip(path))()
        expected = what_a_load_says(reader, [base, first, second])
        assert expected in shell.run(base, first, second, "--verify")[2].splitlines()


def test_a_table_that_one_dump_of_a_chain_lacks_is_said(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    base, first, _ = chain_of(tmp_path)
    rewrite_manifest(base, lambda m: m["collections"][""].pop("b"))
    rewrite_manifest(base, lambda m: [m["files"].pop(name) for name in list(m["files"]) if name.startswith("b_")])
    for path in base.glob("b_*"):
        path.unlink()
    status, out, err = shell.run(base, first, "--key=1")
    assert status == 1 and err == f"dump '{base}' holds no table 'b', but the last one of the chain does\n"
    assert [line for line in lines(out) if line.startswith("table")] == ["table a"]


# Dumps of the reference implementation


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("users_emb_keys.rank_1.world_size_2", Path.unlink),
        ("users_emb_values.rank_0.world_size_2", cut),
        ("users_emb_opt_values.rank_1.world_size_2", lengthen),
        ("users_emb_scores.rank_0.world_size_2", cut),
        ("users_opt_args.json", lambda path: path.write_text("[1]")),
        ("users_emb_keys.rank_0.world_size_3", Path.touch),
        ("users_emb_tombstones.rank_0.world_size_2", Path.touch),
        ("users_counter_keys.rank_0.world_size_2", Path.touch),
    ],
)
def test_damaged_dumps_of_the_reference(shell: Shell, tmp_path: Path, name: str, harm: Any) -> None:  # noqa: F811
    folder = Path(shutil.copytree(DUMPS / "adam_step.ws2", tmp_path / "d"))
    harm(folder / name)
    expected = what_a_load_says(module_for("adam_step.ws2"), folder)
    status, out, err = shell.run(folder, "--verify")
    assert (status, err) == (1, expected + "\n")
    assert "table items" in lines(out) and "table users" not in lines(out)


def test_changed_ids_of_the_reference_are_refused_as_by_a_load(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    folder = Path(shutil.copytree(DUMPS / "adam_step.ws2", tmp_path / "d"))
    path = folder / "users_opt_args.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dist_type": "continuous"}))
    expected = what_a_load_says(module_for("adam_step.ws2"), folder)
    assert shell.run(folder, "--verify")[::2] == (1, expected + "\n") and "true ids cannot be told" in expected
    assert "routing continuous" in lines(shell.text(folder))


# No dumps, and wrong arguments


def test_what_is_no_dump_ends_with_two(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "my app"}')
    (tmp_path / "runs").mkdir()
    make_dump(tmp_path / "runs" / "monday", range(3))
    for name, message in {
        "nowhere": f"error: there is no dump in '{tmp_path}/nowhere'",
        "file": f"error: there is no dump in '{tmp_path}/file'",
        "empty": f"error: there is no dump in '{tmp_path}/empty'",
        "other": f"error: '{tmp_path}/other' is no dump: it has no manifest.json, and no file bears a name of "
        "the format",
        "app": f"error: '{tmp_path}/app' is no dump: its manifest.json is that of something else, and no other file "
        "bears a name of the format",
        "runs": f"error: '{tmp_path}/runs' is no dump, but holds ['monday']; give one of them, or a full one and its "
        "increments in order",
    }.items():
        for arguments in ([], ["--verify"], ["--json"], ["--key=1"]):
            assert shell.run(tmp_path / name, *arguments) == (2, "", message + "\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: PATH"),
        (["--key", "seven"], "argument --key: invalid _key value: 'seven'"),
        ([f"--key={2**64}"], f"argument --key: {2**64} has more than 64 bits"),
        ([f"--key={-(2**63) - 1}"], f"argument --key: {-(2**63) - 1} has more than 64 bits"),
        (["--rows", "0"], "argument --rows: 0 is not a number of rows; give 1 or more, or 'all'"),
        (["--rows", "some"], "argument --rows: invalid _rows value: 'some'"),
    ],
)
def test_wrong_arguments_end_with_two(shell: Shell, arguments: list[str], message: str) -> None:  # noqa: F811
    status, out, err = shell.run(*arguments, *(["d"] if arguments else []))
    assert (status, out) == (2, "") and message in err and "usage: python -m dynamicemb.inspect" in err


def test_help_names_every_option(shell: Shell) -> None:  # noqa: F811
    text = shell.text("--help")
    assert all(option in text for option in ("PATH", "--table", "--key", "--full", "--rows", "--verify", "--json"))


# Disks that fail


def test_a_disk_that_fails_is_said_without_a_traceback(shell: Shell, dumped: Path) -> None:  # noqa: F811
    for arguments in (["--verify", "--table=b", "--rows=1"], ["--table=a", "--key=1", "--key=2"]):
        shell.disk = counting = FailingDisk(-1, 0)
        assert shell.run(dumped, *arguments)[0] == 0
        seen = set()
        for number in range(1, counting.count + 1):
            shell.disk = FailingDisk(number, errno.EIO)
            status, out, err = shell.run(dumped, *arguments)
            assert status in (1, 2) and "Input/output error" in err and "Traceback" not in err, number
            seen.add(status)
        assert seen == {1, 2}


# The bar


@pytest.mark.parametrize("case", ["ours", "reference"])
def test_the_bar_of_a_check_ends_where_the_files_do(
    shell: Shell,  # noqa: F811
    dumped: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, desc: str, disable: bool | None, **more: Any) -> None:
            self.total, self.desc, self.disable, self.num = total, desc, disable, 0
            bars.append(self)

        def update(self, number: int) -> None:
            self.num += number

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(collect, "tqdm", Bar)
    shell.text(dumped if case == "ours" else DUMPS / "adam_step.ws2", "--verify")
    assert [(bar.desc, bar.disable) for bar in bars] == [("verify", None), ("look", None)]
    assert all(bar.num == bar.total > 0 for bar in bars)
    files = sum(path.stat().st_size for path in dumped.iterdir() if path.suffix != ".json")
    assert case == "reference" or bars[0].total > files
    del bars[:]
    shell.text(dumped, "--key=1")
    assert [bar.disable for bar in bars] == [True]


def test_the_checksum_of_what_the_tests_rewrite_is_right(tmp_path: Path) -> None:
    folder = make_dump(tmp_path / "d", range(4))
    path = folder / "t_emb_scores.rank_0.world_size_2"
    rewrite(path, b"\1" * path.stat().st_size)
    values = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    assert values["files"][path.name]["crc32"] == zlib.crc32(path.read_bytes())
    assert options(dim=3).dim == 3
