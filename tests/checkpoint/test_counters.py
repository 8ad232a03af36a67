"""Admission counters in dumps: what was counted goes on counting, over any number of ranks, into any counter."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, KVCounter
from dynamicemb.checkpoint import load as load_path
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from dynamicemb.table.layout import fmix64, locate
from tests.embedding.test_admission_own import DictCounter
from tests.support.admitting import admitting, holds, lengths_of, module_on
from tests.support.checkpoints import Records, load_quietly, records, without_scores
from tests.support.lookups import EXTREME, batch, make_module, options
from tests.support.ranks import RankPool, ranks  # noqa: F401

LFU = DynamicEmbScoreStrategy.LFU
KEYS, COUNTS = "a_counter_keys.rank_0.world_size_1", "a_counter_frequencies.rank_0.world_size_1"


def step(module: Any, *bags: list[int]) -> torch.Tensor:
    """Run a whole training step on ids of each table; returns what was read."""
    ids, offsets = batch(*bags)
    out = module(ids.to(module.tables.device), offsets.to(module.tables.device))
    out.pow(2).sum().backward()
    return out.detach().cpu()


def stored(folder: Path) -> dict[int, int]:
    keys, counts = (np.fromfile(folder / name, "<i8").tolist() for name in (KEYS, COUNTS))
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, counts, strict=True))


def test_c12_what_was_counted_goes_on_counting(backend: str, tmp_path: Path) -> None:
    def make() -> Any:
        return module_on(backend, admitting(3, score_strategy=LFU), admitting(3, dim=3), optimizer="adam")

    module = make()
    step(module, [1, 1, *EXTREME], [5, 6])
    step(module, [2, 2, 2, 1], [5])
    module.dump(tmp_path / "d", optim=True, counter=True)
    # 1 reached the threshold: it has a row, and is counted no more.
    expected = dict.fromkeys(set(EXTREME) - {1}, 1)
    assert stored(tmp_path / "d") == expected == lengths_of(module)
    copy = make()
    step(copy, [7, 8], [9])
    report = copy.load(tmp_path / "d", optim=True, counter=True)
    assert report["a"].num_counts_lost == 0
    assert (lengths_of(copy, 0), lengths_of(copy, 1)) == (lengths_of(module, 0), lengths_of(module, 1))
    assert copy.stats()["a"]["counter_size"] == copy.stats(wait=False)["a"]["counter_size"] == len(expected)
    assert copy.stats()["a"]["misses"] == 2
    copy.tables.check_invariants()
    for bags in ([[0, -4], [5]], [[0, -4, -1], [6, 6, 6]]):
        assert torch.equal(step(copy, *bags), step(module, *bags))
    assert holds(copy, [0, -4, -1]) == [True, True, False] and holds(copy, [5, 6], "b") == [True, True]
    assert records(copy, "a") == records(module, "a") and lengths_of(copy) == lengths_of(module)


def test_c12_a_load_without_counters_begins_to_count_anew(tmp_path: Path) -> None:
    module = make_module([admitting(3)])
    step(module, [1, 1, 2])
    module.dump(tmp_path / "with", counter=True)
    module.dump(tmp_path / "without")
    assert not (tmp_path / "without" / KEYS).exists()
    other = make_module([admitting(3)])
    for folder, arguments, expected in (
        ("with", {}, {}),
        ("with", {"merge": True}, {1: 1, 7: 2}),
        ("without", {}, {}),
        ("with", {"counter": True}, {1: 2, 2: 1}),
        # What both have counted is added up.
        ("with", {"counter": True, "merge": True}, {1: 3, 2: 1, 7: 2}),
    ):
        other.load(tmp_path / "without")
        step(other, [1, 7, 7])
        other.load(tmp_path / folder, **arguments)
        assert lengths_of(other) == expected
        other.tables.check_invariants()
    with pytest.warns(UserWarning, match="table a: the dump has no admission counts; write it with counter=True"):
        other.load(tmp_path / "without", counter=True)
    plain = make_module([options()])
    for call in (plain.dump, plain.load):
        with pytest.warns(UserWarning, match="counter=True has no effect: no table has an admission counter"):
            call(tmp_path / ("plain" if call == plain.dump else "without"), counter=True)


def test_c12_an_id_is_in_the_table_or_counted_never_both(backend: str, tmp_path: Path) -> None:
    module, other = (module_on(backend, admitting(2)) for _ in range(2))
    step(module, [1, 1, 2])
    module.dump(tmp_path / "d", counter=True)
    step(other, [2, 2, 1, 3])
    other.load(tmp_path / "d", counter=True, merge=True)
    assert records(other, "a").keys() == {1, 2} and lengths_of(other) == {3: 1}
    other.tables.check_invariants()


def strongest(counts: dict[int, int], num_buckets: int, capacity: int) -> dict[int, int]:
    ids = np.array(list(counts), dtype=np.int64)
    ranked = sorted(zip(counts.values(), fmix64(ids).tolist(), ids.tolist(), locate(ids, num_buckets, 1)[0].tolist()))
    kept: dict[int, int] = {}
    for bucket in range(num_buckets):
        kept |= {i: count for count, _, i, b in [entry for entry in ranked if entry[3] == bucket][-capacity:]}
    return kept


@pytest.mark.parametrize("merge", [False, True])
def test_c12_a_smaller_counter_keeps_the_highest_counts(
    backend: str, tmp_path: Path, merge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamicemb.checkpoint.reading import rows as read

    # In batches that displace what came before.
    monkeypatch.setattr(read, "BATCH_SIZE_PER_DUMP", 9)
    module = module_on(backend, admitting(100, counter=128))
    ids = list(range(-30, 30))
    step(module, [i for i in ids for _ in range(1 + i * 7 % 5)])
    counts = lengths_of(module)
    assert len(counts) == 60
    module.dump(tmp_path / "d", counter=True)
    small = module_on(backend, admitting(100, counter=32))
    # What is there has few occurrences, of which some come again: their sums count.
    step(small, ids[:20] if merge else [99])
    if merge:
        counts |= {i: counts[i] + 1 for i in lengths_of(small)}
    with pytest.warns(
        UserWarning, match=r"\d+ ids that were not admitted yet found no place.*capacity of its KVCounter"
    ):
        report = small.load(tmp_path / "d", counter=True, merge=merge)["a"]
    assert len(lengths_of(small)) == 32
    small.tables.check_invariants()
    if not merge:
        assert lengths_of(small) == strongest(counts, 2, 16) and report.num_counts_lost == 28
    else:
        assert all(counts[i] == count for i, count in lengths_of(small).items() if i not in ids[:20])
    # The counter works on, and an imported id may be forgotten at once.
    step(small, list(range(1000, 1016)))
    assert lengths_of(small).keys() & set(range(1000, 1016)) == set(range(1000, 1016))
    small.tables.check_invariants()


def test_c22_damage_in_counter_files_is_noticed(tmp_path: Path) -> None:
    module = make_module([admitting(3)])
    step(module, [1, 1, 2])
    module.dump(tmp_path / "d", counter=True)
    before = lengths_of(module)
    for name in (KEYS, COUNTS):
        path = tmp_path / "d" / name
        data = path.read_bytes()
        for damaged in (bytes([data[0] ^ 4]) + data[1:], data[:8], data + data[:8]):
            path.write_bytes(damaged)
            # Also for those who would not read it.
            for counter in (False, True):
                with pytest.raises(CheckpointCorruptError, match=name):
                    module.load(tmp_path / "d", counter=counter)
        path.write_bytes(data)
    assert lengths_of(module) == before


def test_c24_counters_of_a_folder_without_a_manifest(tmp_path: Path) -> None:
    module = make_module([admitting(3)])
    step(module, [1, 1, 2])
    module.dump(tmp_path / "d", counter=True)
    (tmp_path / "d" / "manifest.json").unlink()
    # Another counter may have seen an id that has a row, nothing of an id, and more than 2^63 of another.
    np.array([1, 2, 3, 4], "<i8").tofile(tmp_path / "d" / KEYS)
    np.array([2, 1, 0, -1], "<i8").tofile(tmp_path / "d" / COUNTS)
    copy = make_module([admitting(3)])
    load_quietly(copy, tmp_path / "d", counter=True)
    assert lengths_of(copy) == {1: 2, 2: 1, 4: 2**62}
    load_quietly(copy, tmp_path / "d", counter=True, merge=True)
    assert lengths_of(copy) == {1: 4, 2: 2, 4: 2**62}
    (tmp_path / "d" / COUNTS).write_bytes(bytes(24))
    with pytest.raises(CheckpointCorruptError, match=f"{COUNTS}.*32 bytes.*24 bytes"):
        load_quietly(copy, tmp_path / "d", counter=True)
    (tmp_path / "d" / KEYS).unlink()
    with pytest.raises(CheckpointCorruptError, match=f"{KEYS}.*no file"):
        load_quietly(copy, tmp_path / "d", counter=True)


def test_c26_an_increment_has_all_counts(tmp_path: Path) -> None:
    module = make_module([admitting(3)])
    step(module, [1, 1, 2])
    module.dump(tmp_path / "base", counter=True)
    step(module, [1, 3])
    module.dump(tmp_path / "next", counter=True, base=tmp_path / "base")
    assert stored(tmp_path / "next") == {2: 1, 3: 1}
    copy = make_module([admitting(3)])
    copy.load([tmp_path / "base", tmp_path / "next"], counter=True)
    assert lengths_of(copy) == {2: 1, 3: 1} and without_scores(records(copy, "a")) == without_scores(
        records(module, "a")
    )


class FileCounter(DictCounter):
    """A counter of the user that can be dumped; what it loads replaces what it holds."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken

    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        found = {key: count for (table, key), count in self.counts.items() if table == table_id}
        np.array(list(found), "<i8").tofile(key_file)
        if not self.broken:
            np.array(list(found.values()), "<i8").tofile(counter_file)

    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        pairs = zip(np.fromfile(key_file, "<i8").tolist(), np.fromfile(counter_file, "<i8").tolist(), strict=True)
        self.counts = {(table_id, key): count for key, count in pairs}


def own(counter: Any) -> Any:
    return make_module([options(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=counter)])


def test_c12_a_counter_of_the_user_writes_and_reads_its_own_files(tmp_path: Path) -> None:
    first, second = FileCounter(), FileCounter()
    module = own(first)
    step(module, [1, 1, -5, 2**63 - 1])
    module.dump(tmp_path / "d", counter=True)
    assert stored(tmp_path / "d") == {1: 2, -5: 1, 2**63 - 1: 1}
    copy = own(second)
    step(copy, [7, -5, -5, -5])
    copy.load(tmp_path / "d", counter=True, merge=True)
    # -5 has a row.
    assert second.counts == {(0, 1): 2, (0, 2**63 - 1): 1}
    step(copy, [1])
    assert holds(copy, [1, -5, 7]) == [True, True, False]
    # A KVCounter takes the same files.
    ours = make_module([admitting(3)])
    ours.load(tmp_path / "d", counter=True)
    assert lengths_of(ours) == stored(tmp_path / "d")
    for name in (KEYS, COUNTS):
        data = (tmp_path / "d" / name).read_bytes()
        (tmp_path / "d" / name).write_bytes(data[:-1] + b"x")
        with pytest.raises(CheckpointCorruptError, match=name):
            copy.load(tmp_path / "d", counter=True)
        (tmp_path / "d" / name).write_bytes(data)


def test_c27_a_counter_that_no_strategy_asks_is_not_dumped(tmp_path: Path) -> None:
    for counter in (FileCounter(), KVCounter(64, 16)):
        with pytest.warns(UserWarning, match="admission_counter has no effect without an admit_strategy"):
            module = make_module([options(admission_counter=counter)])
        step(module, [1, 1])
        path = tmp_path / type(counter).__name__
        with pytest.warns(UserWarning, match="counter"):
            module.dump(path, counter=True)
        assert not [name for name in os.listdir(path) if "counter" in name]
        assert holds(module, [1]) == [True]


def test_c21_a_counter_of_the_user_that_writes_something_else_leaves_the_dump_before(tmp_path: Path) -> None:
    module = own(FileCounter())
    step(module, [1, 2])
    module.dump(tmp_path / "d", counter=True)
    broken = own(FileCounter(broken=True))
    step(broken, [1, 2])
    message = r"table a: FileCounter.dump must write int64 ids and as many int64 counts.*\[16, -1\] bytes"
    with pytest.raises(DynamicEmbError, match=message):
        broken.dump(tmp_path / "d", counter=True, allow_overwrite=True)
    assert stored(tmp_path / "d") == {1: 1, 2: 1}
    assert {path.name for path in tmp_path.iterdir()} == {"d"}
    module.load(tmp_path / "d", counter=True)


def on_rank(rank: int, world_size: int, routing: str, path: str, onward: str | None) -> tuple[Records, dict[int, int]]:
    """Load a dump, or else train; dump onward; return what this rank holds and counts of table "users"."""
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad
    from tests.checkpoint.test_checkpoint_ranks import make
    from tests.checkpoint.test_checkpoint_ranks import steps as train
    from tests.support.sharded_model import Case, Table, dynamic_modules

    table = Table("users", ("u",), dim=4, dist_type=routing, score="LFU", num_embeddings=300, admit=4)
    case = Case((table,), pooled=False, batch_sizes=(5, 3))
    model = make(case, world_size)
    if onward is None or Path(path).exists():
        DynamicEmbLoad(path, model, optim=True, counter=True)
    else:
        train(model, case, rank, range(4))
    if onward is not None:
        DynamicEmbDump(onward, model, optim=True, counter=True)
    (module,) = dynamic_modules(model)
    module.tables.check_invariants()
    return records(module, "users"), lengths_of(module)


@pytest.mark.distributed
@pytest.mark.slow
def test_c23_counts_reach_their_ranks_whatever_the_routing(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    paths = [str(tmp_path / str(number)) for number in range(4)]
    routings = ("roundrobin", "continuous", "hash_roundrobin")
    results = []
    for number, (world_size, routing) in enumerate(zip((2, 3, 1), routings, strict=True)):
        parts = ranks.run(world_size, on_rank, routing, paths[number], paths[number + 1])
        results.append(tuple({i: v for part in parts for i, v in part[side].items()} for side in (0, 1)))
        assert sum(len(part[1]) for part in parts) == len(results[-1][1])
    assert results[0] == results[1] == results[2]
    rows, counts = results[0]
    assert len(counts) >= 3 and len(rows) >= 3 and not rows.keys() & counts.keys()


def test_a_load_shows_how_much_is_verified_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Bar(load_path.tqdm):  # type: ignore[name-defined, misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{**arguments, "disable": False, "file": io.StringIO()})
            bars.append(self)

    module = make_module([admitting(2, score_strategy=LFU), admitting(2, dim=3)], optimizer="adam")
    step(module, [1, 1, 2], [3, 3, 4])
    module.dump(tmp_path / "d", optim=True, counter=True)
    monkeypatch.setattr(load_path, "tqdm", Bar)
    shares: list[int] = []
    verify = load_path.verify

    def verified(tables: Any, stored: Any, *rest: Any) -> Any:
        pairs = [(table, part) for table, parts in zip(tables, stored, strict=True) for part in parts]
        for world_size in (1, 2, 3):
            sharing = [SimpleNamespace(rank=rank, world_size=world_size) for rank in range(world_size)]
            shares.append(sum(load_path.bytes_to_verify(*pair, rank) for pair in pairs for rank in sharing))
        return verify(tables, stored, *rest)

    monkeypatch.setattr(load_path, "verify", verified)
    for foreign in (False, True):
        bars.clear()
        load_quietly(module, tmp_path / "d", optim=True, counter=True)
        assert [bar.desc for bar in bars] == ["verify", "load"]
        assert all(bar.n == bar.total > 0 for bar in bars), [(bar.desc, bar.n, bar.total) for bar in bars]
        if not foreign:
            (tmp_path / "d" / "manifest.json").unlink()
    # Ranks share the files of all writers.
    assert len(set(shares[:3])) == len(set(shares[3:])) == 1 and shares[3] > 0
