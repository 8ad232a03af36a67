"""A full dump and its increments, in order, are what a full dump would be (contract 26)."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.tables import tables_of_modules
from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from tests.support.checkpoints import Records, records, shift_between, without_scores
from tests.support.failing_disk import FailingDisk
from tests.support.lookups import bag_per_id, make_module, options
from tests.support.ranks import RankPool, ranks  # noqa: F401

TIMESTAMP, STEP, CUSTOMIZED, LFU, _ = DynamicEmbScoreStrategy
STRATEGIES = [TIMESTAMP, STEP, LFU, (TIMESTAMP, LFU)]


def module_of(strategy: Any = TIMESTAMP, **more: Any) -> BatchedDynamicEmbeddingTablesV2:
    return make_module([options(**{"capacity": 64, "score_strategy": strategy, **more})], optimizer="adam")


def train(module: BatchedDynamicEmbeddingTablesV2, seed: int, spread: int = 120) -> None:
    """Train on ids of both signs, more than the table holds over the steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        ids = (torch.randn(30, generator=generator) * spread / 3).long()
        module(*bag_per_id(ids.tolist())).pow(2).sum().backward()


def assert_same_tables(before: Records, after: Records) -> None:
    assert without_scores(before) == without_scores(after)
    for column in range(len(next(iter(before.values()))[2])):
        shift_between(before, after, column)


def ids_in(folder: Path, item: str = "keys") -> set[int]:
    import numpy as np

    return {int(i) for f in folder.rglob(f"a_emb_{item}.rank_*") for i in np.fromfile(f, "<i8")}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c26_a_base_and_its_increments_equal_a_full_dump(tmp_path: Path, strategy: Any) -> None:
    module = module_of(strategy)
    train(module, 0)
    chain = [tmp_path / "base"]
    module.dump(chain[0], optim=True)
    for number in range(1, 5):
        before = records(module, "a")
        train(module, number)
        gone = sorted(before)[:3]
        module.erase("a", torch.tensor(gone))
        # One of them comes back, with a fresh row.
        module(*bag_per_id(gone[:1])).sum().backward()
        after = records(module, "a")
        path = tmp_path / f"increment {number}"
        module.dump(path, optim=True, base=chain)
        chain.append(path)
        changed = {i for i in after if after[i] != before.get(i)}
        assert ids_in(path) == changed and len(changed) < len(after)
        assert ids_in(path, "tombstones") == before.keys() - after.keys()
        module.dump(tmp_path / f"full {number}", optim=True)
        # The increments go on from the chain, not from the dump beside it.
        module.tables.marks[0] = last_mark(module, path)
        for source in (chain, tmp_path / f"full {number}"):
            copy = module_of(strategy)
            train(copy, 77)
            report = copy.load(source, optim=True)
            assert report["a"].num_lost == report["a"].num_repeated == 0
            assert_same_tables(after, records(copy, "a"))
            copy.tables.check_invariants()
    assert module.stats()["a"]["evicted"] > 20


def last_mark(module: BatchedDynamicEmbeddingTablesV2, path: Path) -> Any:
    """Return the mark that a dump left, for tests that write another dump beside a chain."""
    import json

    from dynamicemb.table.touched import Mark, next_change

    text = (path / "manifest.json").read_text()
    return Mark(json.loads(text)["manifest"]["dump_id"], next_change(module.tables.steps), 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c26_a_chain_goes_on_in_another_process(tmp_path: Path, strategy: Any) -> None:
    module = module_of(strategy)
    train(module, 0)
    chain = [tmp_path / "0"]
    module.dump(chain[0], optim=True)
    for number in range(1, 4):
        module = module_of(strategy)
        module.load(chain, optim=True)
        train(module, number)
        chain.append(tmp_path / str(number))
        module.dump(chain[-1], optim=True, base=chain[:-1])
    copy = module_of(strategy)
    copy.load(chain, optim=True)
    assert_same_tables(records(module, "a"), records(copy, "a"))


def test_c26_what_an_outstanding_step_changes_is_in_the_next_increment(tmp_path: Path) -> None:
    module = module_of()
    module(*bag_per_id([1, 2, 3])).sum().backward()
    out = module(*bag_per_id([2]))
    module.dump(tmp_path / "base", optim=True)
    module(*bag_per_id([3])).sum().backward()
    out.sum().backward()
    module.dump(tmp_path / "next", optim=True, base=tmp_path / "base")
    assert ids_in(tmp_path / "next") == {2, 3}
    copy = module_of()
    copy.load([tmp_path / "base", tmp_path / "next"], optim=True)
    assert_same_tables(records(module, "a"), records(copy, "a"))


def test_c26_an_increment_without_changes_is_empty(tmp_path: Path) -> None:
    module = module_of()
    train(module, 0)
    module.dump(tmp_path / "base", optim=True)
    module.eval()(*bag_per_id([1, 2]))
    module.dump(tmp_path / "next", optim=True, base=tmp_path / "base")
    assert ids_in(tmp_path / "next") == set() == ids_in(tmp_path / "next", "tombstones")


def test_c26_into_a_smaller_table_go_the_highest_scores_of_the_whole_chain(tmp_path: Path) -> None:
    module = module_of(LFU, capacity=16)
    module(*bag_per_id(range(16))).sum().backward()
    # Of the base the small table would keep what counts most, the even ids; those are gone afterwards.
    module(*bag_per_id(range(0, 16, 2))).sum().backward()
    big = make_module([options(capacity=64, score_strategy=LFU)], optimizer="adam")
    big(*bag_per_id(range(32))).sum().backward()
    big(*bag_per_id(range(0, 32, 2))).sum().backward()
    big.dump(tmp_path / "base", optim=True)
    big.erase("a", torch.arange(0, 32, 2))
    big.dump(tmp_path / "next", optim=True, base=tmp_path / "base")
    module.load([tmp_path / "base", tmp_path / "next"], optim=True)
    assert records(module, "a") == records(big, "a") and len(records(big, "a")) == 16


def test_c19_a_table_grows_for_the_end_of_a_chain_not_for_its_length(tmp_path: Path) -> None:
    module = module_of(capacity=1024, bucket_capacity=128)
    chain = []
    for number in range(6):
        module(*bag_per_id(range(100 + number))).sum().backward()
        chain.append(tmp_path / str(number))
        module.dump(chain[-1], optim=True, base=chain[:-1] or None)
    copy = module_of(capacity=1024, bucket_capacity=128, init_capacity=128, max_load_factor=0.5)
    copy.load(chain, optim=True)
    assert_same_tables(records(module, "a"), records(copy, "a"))
    assert copy.tables.capacities == [256]


def test_c26_rows_that_a_load_brought_need_a_full_dump(tmp_path: Path) -> None:
    module = module_of()
    train(module, 0)
    module.dump(tmp_path / "base", optim=True)
    for arguments in ({"merge": True}, {"fresh_scores": True}, {"optim": False}):
        module.load(tmp_path / "base", **{"optim": True, **arguments})
        with pytest.raises(DynamicEmbError, match="last dump or load of the table was none.*full dump"):
            module.dump(tmp_path / "next", optim=True, base=tmp_path / "base")
    assert not (tmp_path / "next").exists()


def test_c26_a_failed_increment_can_be_repeated(tmp_path: Path) -> None:
    module = module_of()
    train(module, 0)
    module.dump(tmp_path / "base", optim=True)
    train(module, 1)
    request = DumpRequest(str(tmp_path / "next"), optim=True, base=(str(tmp_path / "base"),))
    tables = tables_of_modules([module], "")
    expected = records(module, "a")
    for number in range(1, 200):
        disk = FailingDisk(number, errno.EIO)
        try:
            dump_tables(request, tables, Ranks(), disk)
        except OSError:
            if (tmp_path / "next").exists():
                # The last operations come after the new folder has its place.
                assert number > 40
                break
        else:
            raise AssertionError("nothing failed")
    copy = module_of()
    copy.load([tmp_path / "base", tmp_path / "next"], optim=True)
    assert_same_tables(expected, records(copy, "a"))


def test_c26_gaps_repeats_wrong_orders_and_wrong_bases_are_errors_that_name_both(tmp_path: Path) -> None:
    module = module_of()
    paths = [tmp_path / name for name in ("base", "first", "second", "third")]
    for number, path in enumerate(paths):
        train(module, number)
        module.dump(path, optim=True, base=paths[:number] or None)
    other = module_of()
    train(other, 9)
    other.dump(tmp_path / "other", optim=True)
    base, first, second, third = paths
    copy = module_of()
    train(copy, 5)
    before = records(copy, "a")
    for chain, names in (
        ([first], ("first", "missing")),
        ([base, second], ("second", "base")),
        ([base, first, first], ("first", "first")),
        ([base, second, first], ("second", "base")),
        ([base, base], ("base", "base")),
        ([tmp_path / "other", first], ("first", "other")),
        ([base, first, second, third, base], ("base", "third")),
    ):
        with pytest.raises(DynamicEmbError, match=f"{names[0]}' is .*before it is .*{names[1]}"):
            copy.load(chain, optim=True)
    with pytest.raises(ValueError, match="the list of dumps is empty"):
        copy.load([], optim=True)
    assert records(copy, "a") == before
    for chain in ([base], [base, first, second], [tmp_path / "other"]):
        with pytest.raises(DynamicEmbError, match=r"base ends with .*dump [0-9a-f]{32}.*last dump or load"):
            module.dump(tmp_path / "next", optim=True, base=chain)
    with pytest.raises(DynamicEmbError, match=r"written with optim=True"):
        module.dump(tmp_path / "next", base=paths)
    with pytest.raises(ValueError, match="an increment needs a folder of its own"):
        module.dump(first, optim=True, base=paths, allow_overwrite=True)
    module.dump(tmp_path / "next", optim=True, base=paths)


def test_c22_damage_in_a_chain_is_noticed(tmp_path: Path) -> None:
    module = module_of()
    train(module, 0)
    base, following = tmp_path / "base", tmp_path / "next"
    module.dump(base, optim=True)
    train(module, 1)
    module.dump(following, optim=True, base=base)
    train(module, 2)
    copy = module_of()
    for folder in (base, following):
        for path in sorted(folder.glob("a_emb_*")):
            data = bytearray(path.read_bytes())
            assert data or "tombstones" in path.name
            data[len(data) // 2] ^= 16
            path.write_bytes(data)
            with pytest.raises(CheckpointCorruptError, match=path.name):
                copy.load([base, following], optim=True)
            if "keys" in path.name or "tombstones" in path.name:
                with pytest.raises(CheckpointCorruptError, match=path.name):
                    module.dump(tmp_path / "more", optim=True, base=[base, following])
            data[len(data) // 2] ^= 16
            path.write_bytes(data)
    (following / "manifest.json").rename(tmp_path / "away")
    with pytest.warns(UserWarning), pytest.raises(CheckpointCorruptError, match="manifest.json beside an increment"):
        copy.load(following, optim=True)


def chain_on_rank(rank: int, world_size: int, path: str, done: int, steps: int) -> Records:
    """Load a chain of so many dumps, train and go on with it."""
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad
    from tests.checkpoint.test_checkpoint_ranks import case_for, held, make
    from tests.checkpoint.test_checkpoint_ranks import steps as train_model

    case = case_for("hash_roundrobin")
    model = make(case, world_size)
    paths = [f"{path}/{number}" for number in range(done + steps)]
    if done:
        DynamicEmbLoad(paths[:done], model, optim=True)
    for number in range(done, done + steps):
        train_model(model, case, rank, range(2 * number, 2 * number + 2))
        DynamicEmbDump(paths[number], model, optim=True, base=paths[:number] or None)
    return held(model)["users"]


@pytest.mark.distributed
@pytest.mark.slow
def test_c26_a_chain_goes_on_over_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(1, chain_on_rank, str(tmp_path), 0, 2)
    before = ranks.run(2, chain_on_rank, str(tmp_path), 2, 2)
    after = ranks.run(3, chain_on_rank, str(tmp_path), 4, 0)
    assert all(before) and all(after)
    assert_same_tables({**before[0], **before[1]}, {i: r for part in after for i, r in part.items()})
