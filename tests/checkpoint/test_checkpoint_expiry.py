"""Dumps and loads of tables that forget ids: one point in time for rows, counts and marks of what is gone."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy
from dynamicemb.table.group import TableGroup
from dynamicemb.table.importing.rows import RowImport
from dynamicemb.table.index import NOW, SEEN
from dynamicemb.table.scores import SCORE_COMPOUND, SCORE_TIMESTAMP
from tests.support.checkpoints import records, shift_between, without_scores
from tests.support.lookups import make_module, options
from tests.support.tables import device_of, make_group, use_backend

TIMESTAMP, LFU = DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU
# Later than any clock, so that time passes only where a test says so.
LATE = 4 * 10**18
SECOND = 10**9


def make(backend: str, ttl: float | None = 100.0, strategy: Any = TIMESTAMP, **more: Any) -> Any:
    """Make a module whose clock stands still; table "a" forgets, "b" does not."""
    tables = [options(ttl=ttl, score_strategy=strategy, **more), options(score_strategy=strategy, **more)]
    module = make_module(tables, optimizer="adam", device=device_of(backend))
    use_backend(module.tables, backend)
    module.tables.index.clock[[NOW, SEEN]] = LATE
    return module


def wait(module: BatchedDynamicEmbeddingTablesV2, seconds: int) -> None:
    module.tables.index.clock[SEEN] += seconds * SECOND


def step(module: BatchedDynamicEmbeddingTablesV2, *ids: int) -> None:
    """Train on ids of both tables."""
    device = module.tables.device
    both = torch.tensor([*ids, *ids], device=device)
    module(both, torch.arange(len(both) + 1, device=device)).pow(2).sum().backward()


def ids_in(folder: Path, item: str = "keys", table: str = "a") -> set[int]:
    return set(np.fromfile(folder / f"{table}_emb_{item}.rank_0.world_size_1", "<i8").tolist())


def entry_of(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())["manifest"]["collections"][""]["a"]


@pytest.mark.parametrize("strategy", [TIMESTAMP, (LFU, TIMESTAMP)])
def test_c10_an_expired_id_is_not_in_a_dump(backend: str, tmp_path: Path, strategy: Any) -> None:
    module = make(backend, strategy=strategy)
    step(module, 1, 2, -(2**63))
    wait(module, 60)
    step(module, 2, 3)
    wait(module, 60)
    # Nobody has looked: the places of 1 and the smallest id are taken still.
    assert module.tables.size(0) == 4
    module.dump(tmp_path / "d", optim=True)
    assert ids_in(tmp_path / "d") == {2, 3} and ids_in(tmp_path / "d", table="b") == {1, 2, 3, -(2**63)}
    assert entry_of(tmp_path / "d")["counts"] == entry_of(tmp_path / "d")["sizes"] == [2]
    copy = make(backend, strategy=strategy)
    report = copy.load(tmp_path / "d", optim=True)["a"]
    assert (report.num_rows, report.num_lost, report.num_expired) == (2, 0, 0)
    before, after = records(module, "a"), records(copy, "a")
    assert without_scores(before) == without_scores(after) and before.keys() == {2, 3}
    # Ages stay: what was 60 seconds old lives for 40 more, whatever time passed between.
    wait(copy, 39)
    assert copy.contains("a", torch.tensor([2, 3], device=copy.tables.device)).all()
    wait(copy, 2)
    assert not copy.contains("a", torch.tensor([2, 3], device=copy.tables.device)).any()
    copy.tables.check_invariants()


def test_c26_an_id_that_expired_since_is_marked_as_gone(backend: str, tmp_path: Path) -> None:
    module = make(backend)
    step(module, 1, 2, 3)
    chain = [tmp_path / "base"]
    module.dump(chain[0], optim=True)
    wait(module, 60)
    step(module, 2, 4)
    wait(module, 60)
    # 1 and 3 have expired; 3 returns, afresh.
    step(module, 3)
    chain.append(tmp_path / "first")
    module.dump(chain[1], optim=True, base=chain[:1])
    assert ids_in(chain[1]) == {2, 3, 4} and ids_in(chain[1], "tombstones") == {1}
    assert entry_of(chain[1])["sizes"] == [3]
    # 2 and 4 expire, and nothing has touched them since.
    wait(module, 60)
    chain.append(tmp_path / "second")
    module.dump(chain[2], optim=True, base=chain[:2])
    assert ids_in(chain[2]) == set() and ids_in(chain[2], "tombstones") == {2, 4}
    assert entry_of(chain[2])["sizes"] == [1]
    rows, _ = module.incremental_dump({"a": 0})
    assert rows["a"][0].tolist() == [3]
    copy = make(backend)
    report = copy.load(chain, optim=True)["a"]
    assert report.num_expired == 0
    before, after = records(module, "a"), records(copy, "a")
    assert without_scores(before) == without_scores(after) and after.keys() == {3}
    assert without_scores(records(copy, "b")) == without_scores(records(module, "b"))
    shift_between(before, after)


def test_c26_time_that_passes_during_a_dump_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamicemb.checkpoint.writing import chain as increment

    module = make("cpu")
    step(module, 1, 2, 3)
    base, following = tmp_path / "base", tmp_path / "next"
    module.dump(base)
    step(module, 2)
    read = increment.FileReader.read

    def slow(self: Any, begin: int, count: int) -> np.ndarray:
        # The system's clock goes on by more than the time to live.
        monkeypatch.setattr("time.time_ns", lambda: LATE + 200 * SECOND)
        return read(self, begin, count)

    monkeypatch.setattr(increment.FileReader, "read", slow)
    module.dump(following, base=base)
    monkeypatch.setattr(increment.FileReader, "read", read)
    assert ids_in(following) == {2} and ids_in(following, "tombstones") == set()
    assert entry_of(following)["sizes"] == [3]
    assert not module.contains("a", torch.tensor([1, 2, 3])).any()


def test_c27_a_load_of_expired_ids_alone_warns(tmp_path: Path) -> None:
    module = make("cpu", ttl=None)
    step(module, 1, 2)
    wait(module, 50)
    module.dump(tmp_path / "d", table_names=["a"])
    copy = make("cpu", ttl=20.0)
    with pytest.warns(UserWarning, match=r"table a: all 2 ids of the dump have expired, by the ttl of 20.0 s"):
        report = copy.load(tmp_path / "d", table_names=["a"])["a"]
    assert (report.num_expired, records(copy, "a")) == (2, {})
    step(module, 3)
    module.dump(tmp_path / "e", table_names=["a"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert copy.load(tmp_path / "e", table_names=["a"])["a"].num_expired == 2


def test_c10_a_table_with_a_shorter_life_takes_the_young_ids_of_a_dump(tmp_path: Path) -> None:
    module = make("cpu", ttl=None, capacity=16, strategy=(TIMESTAMP, LFU))
    step(module, *range(8), *range(8))
    wait(module, 60)
    step(module, *range(8, 16))
    wait(module, 10)
    module.dump(tmp_path / "d", optim=True)
    copy = make("cpu", ttl=30.0, capacity=16, strategy=(TIMESTAMP, LFU))
    step(copy, *range(100, 108), *range(100, 108), *range(100, 108))
    wait(copy, 20)
    # Ids there, which are more frequent, stay beside the young ones; the old ones do not compete.
    report = copy.load(tmp_path / "d", optim=True, merge=True, table_names=["a"])["a"]
    assert (report.num_rows, report.num_lost, report.num_expired) == (16, 0, 8)
    assert records(copy, "a").keys() == {*range(8, 16), *range(100, 108)}
    copy.tables.check_invariants()
    # Expired ids of the table make room, and one that the dump has old keeps what the table has.
    wait(copy, 20)
    step(copy, 0)
    kept = records(copy, "a")[0]
    report = copy.load(tmp_path / "d", optim=True, merge=True, table_names=["a"])["a"]
    assert (report.num_lost, report.num_expired) == (0, 8)
    assert records(copy, "a").keys() == {0, *range(8, 16)}
    assert without_scores({0: records(copy, "a")[0]}) == without_scores({0: kept})
    assert copy.stats()["a"]["size"] == 9
    copy.tables.check_invariants()


@pytest.mark.parametrize("strategy", [SCORE_TIMESTAMP, SCORE_COMPOUND])
@pytest.mark.usefixtures("tensors_on_device")
def test_c10_an_import_of_old_and_young_ids_never_fails(backend: str, strategy: int) -> None:
    group: TableGroup = make_group(backend, [16], strategy=strategy, ttls=(100,), protect_steps=2)
    group.index.clock[[NOW, SEEN]] = LATE
    generator = torch.Generator(device="cpu").manual_seed(5)
    young: dict[int, int] = {}
    lost = 0
    for number in range(6):
        now = int(group.index.clock[SEEN])
        ids = torch.randint(0, 60, (40,), generator=generator, device="cpu")
        # Every second id of a batch is too old; ids repeat inside a batch and over batches.
        times = now - torch.randint(0, 30, (40,), generator=generator, device="cpu") - 200 * (ids % 2)
        columns = [times, times % 7 + 1] if strategy == SCORE_COMPOUND else [times]
        rows = torch.ones(40, 4)
        with RowImport(group, 0, True, 40, 0.0) as importer:
            for part in torch.split(torch.arange(40, device="cpu"), 10):
                importer.add(
                    ids[part].to(group.device), rows[part], None, [column[part].to(group.device) for column in columns]
                )
        assert importer.num_expired == int((ids % 2).sum())
        lost += importer.num_lost
        young |= {i: number for i in ids.tolist() if i % 2 == 0}
        held = group.index.keys[group.scan(0)].tolist()
        assert set(held) <= young.keys() and len(held) > 10
        # Ids of the last steps are protected where they lie, erased ones too, but no backward will come.
        token = group.begin_step()
        group.find_or_insert(torch.tensor(held[:6]), torch.tensor([0, 6]))
        token.finish()
        assert group.erase(0, torch.tensor(held[:3])) == 3
        group.index.clock[SEEN] += 60
        group.check_invariants()
    assert lost > 10
