"""Which files a dump has of a table: `find_files` and `get_loading_files`."""

import shutil
from pathlib import Path

import pytest
import torch

from dynamicemb import DynamicEmbDump, DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, KVCounter
from dynamicemb.batched_dynamicemb_tables import (
    encode_checkpoint_file_path,
    encode_counter_checkpoint_file_path,
    find_files,
    get_loading_files,
)
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from tests.support.lookups import bag_per_id, make_module, options

ITEMS = ("keys", "values", "scores", "opt_values")
# Letters that stand for others in patterns of files.
NAMES = ("t", "t[01]*?", "t_emb_keys.rank_0", "a b", ".t")


def write(folder: Path, table: str, world_size: int, items: tuple[str, ...] = ITEMS, counter: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    for rank in range(world_size):
        for item in items:
            Path(encode_checkpoint_file_path(str(folder), table, rank, world_size, item)).touch()
        for item in ("keys", "frequencies") if counter else ():
            Path(encode_counter_checkpoint_file_path(str(folder), table, rank, world_size, item)).touch()


def paths(folder: Path, table: str, item: str, ranks: range, world_size: int) -> list[str]:
    return [encode_checkpoint_file_path(str(folder), table, rank, world_size, item) for rank in ranks]


def refused(error: CheckpointCorruptError, path: str, words: str) -> None:
    assert error.path == path
    assert path in str(error) and words in str(error)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_a_table_are_found_in_the_order_of_the_ranks(tmp_path: Path, name: str) -> None:
    for table in NAMES:
        # Ranks of two digits, which names do not sort.
        write(tmp_path, table, 12)
    for suffix, item in (("emb_keys", "keys"), ("emb_scores", "scores"), ("opt_values", "opt_values")):
        assert find_files(str(tmp_path), name, suffix) == (paths(tmp_path, name, item, range(12), 12), 12)
    assert find_files(tmp_path, name, "emb_opt_values") == find_files(tmp_path, name, "opt_values")
    assert find_files(tmp_path, name, "counter_keys") == ([], 0)
    assert find_files(tmp_path, "t0", "emb_keys") == find_files(tmp_path / "none", name, "emb_keys") == ([], 0)
    with pytest.raises(ValueError, match="suffix must be one of counter_frequencies, .*, got 'keys'"):
        find_files(tmp_path, name, "keys")


def test_missing_and_stray_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, "t", 3)
    lost = paths(tmp_path, "t", "values", range(1, 2), 3)[0]
    Path(lost).unlink()
    with pytest.raises(CheckpointCorruptError) as caught:
        find_files(tmp_path, "t", "emb_values")
    refused(caught.value, lost, "expected a file, got none")
    stray = paths(tmp_path, "t", "keys", range(5, 6), 3)[0]
    Path(stray).touch()
    with pytest.raises(CheckpointCorruptError) as caught:
        find_files(tmp_path, "t", "emb_keys")
    refused(caught.value, stray, "expected a rank below 3, got rank 5")
    left_over = paths(tmp_path, "t", "scores", range(1, 2), 2)[0]
    Path(left_over).touch()
    with pytest.raises(CheckpointCorruptError) as caught:
        find_files(tmp_path, "t", "emb_scores")
    refused(caught.value, left_over, "expected files of one world size, got files of [2, 3]")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_reads_its_own_files_or_all(tmp_path: Path, world_size: int) -> None:
    write(tmp_path, "t", 2, counter=True)
    for rank in range(world_size):
        ranks = range(rank, rank + 1) if world_size == 2 else range(2)
        *rows, keys, frequencies = get_loading_files(str(tmp_path), "t", rank, world_size)
        assert rows == [paths(tmp_path, "t", item, ranks, 2) for item in ITEMS]
        for item, found in (("keys", keys), ("frequencies", frequencies)):
            assert found == [encode_counter_checkpoint_file_path(str(tmp_path), "t", r, 2, item) for r in ranks]
    assert get_loading_files(tmp_path, "u", 0, world_size) == ([], [], [], [], [], [])


def test_what_a_dump_lacks_is_an_empty_list_or_an_error(tmp_path: Path) -> None:
    write(tmp_path, "t", 2, items=("keys", "values"))
    found = get_loading_files(tmp_path, "t", 1, 2)
    assert found == (*(paths(tmp_path, "t", item, range(1, 2), 2) for item in ("keys", "values")), [], [], [], [])
    for there, lost in (("keys", "values"), ("values", "keys"), ("scores", "keys"), ("opt_values", "keys")):
        write(tmp_path / there, "t", 2, items=(there,))
        with pytest.raises(CheckpointCorruptError) as caught:
            get_loading_files(tmp_path / there, "t", 0, 2)
        refused(caught.value, paths(tmp_path / there, "t", lost, range(1), 2)[0], "expected a file beside ")
    Path(encode_counter_checkpoint_file_path(str(tmp_path), "t", 0, 1, "keys")).touch()
    with pytest.raises(CheckpointCorruptError) as caught:
        get_loading_files(tmp_path, "t", 0, 2)
    refused(caught.value, str(tmp_path / "t_counter_keys.rank_0.world_size_1"), "files of 2 ranks")
    Path(encode_counter_checkpoint_file_path(str(tmp_path), "t", 0, 1, "keys")).unlink()
    for rank in range(2):
        Path(encode_counter_checkpoint_file_path(str(tmp_path), "t", rank, 2, "keys")).touch()
    with pytest.raises(CheckpointCorruptError) as caught:
        get_loading_files(tmp_path, "t", 0, 2)
    refused(caught.value, str(tmp_path / "t_counter_frequencies.rank_0.world_size_2"), "got none")


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(DynamicEmbError, match=f"root_path '{tmp_path}/none' does not exist"):
        get_loading_files(tmp_path / "none", "t", 0, 1)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"rank must be in 0..1, the ranks of world_size=2, got {rank}"):
            get_loading_files(tmp_path, "t", rank, 2)


def test_the_files_of_our_dumps_are_found(tmp_path: Path) -> None:
    admission = {"admit_strategy": FrequencyAdmissionStrategy(2), "admission_counter": KVCounter(64)}
    table = options(score_strategy=DynamicEmbScoreStrategy.LFU, **admission)
    module = make_module([table], table_names=["t[0]*"], device="cpu")
    module(*bag_per_id([3, 4, 3])).sum().backward()
    DynamicEmbDump(tmp_path / "d", torch.nn.ModuleDict({"m": module}), optim=True, counter=True)
    shutil.copytree(tmp_path / "d" / "model.m", tmp_path / "copy")
    keys, values, scores, states, counter_keys, frequencies = get_loading_files(tmp_path / "copy", "t[0]*", 0, 1)
    sizes = [Path(path).stat().st_size for (path,) in (keys, values, scores, counter_keys, frequencies)]
    # Id 3 is admitted, id 4 has been seen once.
    assert sizes == [8, 4 * 4, 8, 8, 8]
    assert len(states) == 1
