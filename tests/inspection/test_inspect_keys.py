"""``python -m dynamicemb.inspect --key``: where an id is, in a dump or a chain, and what its row holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy
from dynamicemb.checkpoint.disk.io import DISK
from dynamicemb.checkpoint.disk.watched import WatchedDisk
from dynamicemb.inspection import keys
from dynamicemb.table.layout import locate
from tests.checkpoint.test_checkpoint_ranks import case_for, train_and_dump
from tests.checkpoint.test_checkpoint_reference import CASES, DIMS, DUMPS
from tests.checkpoint.test_increments import ids_in
from tests.support.admitting import admitting
from tests.support.checkpoints import read_reference_files, records, train, trained
from tests.support.inspecting import CLOCK, Shell, lines, make_dump, rewrite, shell  # noqa: F401
from tests.support.lookups import EXTREME, bag_per_id, make_module, options
from tests.support.placements import owner_of
from tests.support.ranks import RankPool, ranks  # noqa: F401

TIMESTAMP, STEP, CUSTOMIZED, LFU, NO_EVICTION = DynamicEmbScoreStrategy


def wanted(ids: Any) -> list[str]:
    return [f"--key={i}" for i in ids]


def found_in(facts: dict[str, Any], table: str = "a") -> dict[int, dict[str, Any]]:
    return {found["key"]: found for found in facts["keys"] if found["table"] == table}


@pytest.mark.parametrize("strategy", [TIMESTAMP, STEP, LFU, NO_EVICTION, (LFU, TIMESTAMP)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "exact_row_wise_adagrad"])
def test_a_key_shows_what_its_row_held(shell: Shell, tmp_path: Path, strategy: Any, optimizer: str) -> None:  # noqa: F811
    capacity = {"init_capacity": 64, "capacity": None} if strategy is NO_EVICTION else {"capacity": 128}
    module = make_module([options(dim=9, score_strategy=strategy, **capacity)], optimizer=optimizer)
    train(module, 2)
    held = records(module, "a")
    module.dump(tmp_path / "d", optim=True)
    facts = shell.json(tmp_path / "d", "--full", *wanted(held))
    clock = facts["dumps"][0]["clock"]
    found = found_in(facts)
    assert found.keys() == held.keys() >= {-(2**63), 2**63 - 1}
    order = np.fromfile(tmp_path / "d" / "a_emb_keys.rank_0.world_size_1", np.int64).tolist()
    names = [s.name for s in (strategy if isinstance(strategy, tuple) else (strategy,))]
    for i, (weights, state, score) in held.items():
        row = found[i]
        assert (row["found"], row["rank"], row["position"], row["repeats"]) == ("row", 0, order.index(i), 1)
        assert np.array(row["values"], np.float32).tobytes() == weights
        parts = [value for part in row["optimizer_state"].values() for value in part]
        assert np.array(parts, np.float32).tobytes() == state
        assert list(row["optimizer_state"]) == {"sgd": [], "adam": ["moments", "squares"]}.get(optimizer, ["state"])
        times = {name: value for name, value in zip(names, score) if name in ("TIMESTAMP", "NO_EVICTION")}
        assert row["ages"] == {name: clock - value for name, value in times.items()}
        raw = {name: clock - value if names == ["TIMESTAMP"] else value for name, value in zip(names, score)}
        assert row["scores"] == raw
    # Unless all are wanted, the first few.
    (few,) = shell.json(tmp_path / "d", "--key=-4")["keys"]
    assert few["values"] == found[-4]["values"][:8] and few["dim"] == 9
    assert all(len(part) in (1, 8) for part in few["optimizer_state"].values())


def test_the_report_of_a_key(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    make_dump(tmp_path / "d", range(-20, 20), dim=10, counted={100: 12, -102: 1234, 19: 5})
    text = shell.text(tmp_path / "d", "--key", "19", "--key=-20", "--key=100", "--key=-102", "--key=0x7f", "--key=19")
    parts = [lines(part) for part in text.split("\n\n")]
    position = np.fromfile(tmp_path / "d" / "t_emb_keys.rank_1.world_size_2", np.int64).tolist().index(19)
    assert parts[0][0] == f"{tmp_path}/d" and not any("table" in line for line in parts[0])
    assert parts[1:] == [
        ["id 19", "table t", f"row {position} of rank 1 of the dump"]
        + ["TIMESTAMP 40 s before the dump, 2023-11-14 22:12:40 UTC", "values 39 39 39 39 39 39 39 39 ... (10 in all)"],
        ["id -20", "table t"]
        + [next(line for line in parts[2] if line.startswith("row"))]
        + ["TIMESTAMP 1 s before the dump, 2023-11-14 22:13:19 UTC", "values 0 0 0 0 0 0 0 0 ... (10 in all)"],
        ["id 100", "table t", "counted 12 times, not admitted; by rank 0 of the dump"],
        ["id -102", "table t", "counted 1,234 times, not admitted; by rank 0 of the dump"],
        ["id 127", "not in t"],
    ]
    assert "values 39 39 39 39 39 39 39 39 39 39" in lines(shell.text(tmp_path / "d", "--key=19", "--full"))
    # Unsigned numbers, by their bits.
    assert "id -20\n" in shell.text(tmp_path / "d", f"--key={2**64 - 20}")


@pytest.mark.parametrize("dist_type", ["roundrobin", "hash_roundrobin", "continuous"])
@pytest.mark.parametrize("num_buckets", [1, 90])
def test_every_id_is_found_by_its_bucket(
    shell: Shell,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_buckets: int,
    dist_type: str,
) -> None:
    ids = [*EXTREME, *range(20, 220)]
    owners = owner_of(torch.tensor(ids), 3, dist_type, 50).tolist()
    make_dump(tmp_path / "d", ids, world_size=3, num_buckets=num_buckets, dist_type=dist_type)
    for batch in (4096, 3):
        monkeypatch.setattr(keys, "_BUCKET_BATCH", batch)
        found = found_in(shell.json(tmp_path / "d", "--verify", *wanted([*ids, *range(300, 340)])), "t")
        for number, i in enumerate(ids):
            assert (found[i]["found"], found[i]["values"], found[i]["rank"]) == ("row", [number] * 3, owners[number])
        assert {found[i]["found"] for i in range(300, 340)} == {"absent"}


def test_a_large_file_is_not_read_for_a_key(
    shell: Shell,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_dump(tmp_path / "d", range(20_000), world_size=1, num_buckets=1000)
    monkeypatch.setattr(keys, "_BUCKET_BATCH", 64)
    num_bytes: list[int] = []
    shell.disk = WatchedDisk(DISK, num_bytes.append)
    found = shell.json(tmp_path / "d", "--key=7777", "--key=-1")["keys"]
    assert [f["found"] for f in found] == ["row", "absent"]
    # Beside the manifest and the JSON file, which is read twice: 15 ids on the way to a bucket of 20, and 64 there.
    small = (tmp_path / "d" / "manifest.json").stat().st_size + 2 * (tmp_path / "d" / "t_opt_args.json").stat().st_size
    assert small < sum(num_bytes) <= small + 2 * 8 * (16 + 2 * 64) + 8 + 12


@pytest.mark.distributed
def test_a_sharded_model_is_found_in_the_files_of_its_ranks(
    shell: Shell,  # noqa: F811
    tmp_path: Path,
    ranks: RankPool,  # noqa: F811
) -> None:
    held = ranks.run(2, train_and_dump, case_for("continuous"), str(tmp_path / "d"))
    facts = shell.json(tmp_path / "d", "--verify")
    assert [(t["folder"], t["name"]) for t in facts["dumps"][0]["tables"]] == [
        ("model.collection", "things"), ("model.collection", "users"),
    ]  # fmt: skip
    for table in facts["dumps"][0]["tables"]:
        assert table["rows"] == [len(part[table["name"]]) for part in held] and min(table["rows"]) > 0
        assert table["num_embeddings"] == 300 and table["health"]["wrong_rank_ids"] == 0
    for name in ("users", "things"):
        ids = [i for part in held for i in part[name]]
        found = found_in(shell.json(tmp_path / "d", "--full", "--table", name, *wanted(ids)), name)
        for rank, part in enumerate(held):
            for i, (weights, _, _) in part[name].items():
                assert found[i]["rank"] == rank and np.array(found[i]["values"], np.float32).tobytes() == weights


# Chains


def test_a_chain_shows_the_newest_row_or_since_when_it_is_gone(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    module = trained(num_steps=1, num_tables=1)
    chain = [tmp_path / "base"]
    module.dump(chain[0], optim=True)
    gone: dict[int, int] = {}
    newest = dict.fromkeys(records(module, "a"), 0)
    for number in range(1, 4):
        before = records(module, "a")
        victims = sorted(before)[number : number + 3]
        module.erase("a", torch.tensor(victims))
        train(module, 1, num_ids=12, seed=number)
        chain.append(tmp_path / str(number))
        module.dump(chain[-1], optim=True, base=chain[:-1])
        after = records(module, "a")
        for i in before.keys() | after.keys():
            if i not in after:
                gone[i] = number
            elif after[i] != before.get(i):
                gone.pop(i, None)
                newest[i] = number
    held = records(module, "a")
    assert len(gone) > 2 and len(set(gone.values())) > 1 and {newest[i] for i in held} == {0, 1, 2, 3}
    facts = shell.json(*chain, "--full", *wanted([*newest, 10**12]))
    found = found_in(facts)
    for i, (weights, state, _) in held.items():
        row = found[i]
        assert (row["found"], row["number"], row["path"]) == ("row", newest[i], str(chain[newest[i]]))
        assert np.array(row["values"], np.float32).tobytes() == weights
        assert np.array([*row["optimizer_state"].values()], np.float32).tobytes() == state
        assert row["ages"]["TIMESTAMP"] == row["scores"]["TIMESTAMP"]
    for i, number in gone.items():
        assert (found[i]["found"], found[i]["number"], found[i]["path"]) == ("gone", number, str(chain[number]))
    assert (found[10**12]["found"], found[10**12]["path"]) == ("absent", None)
    i, number = next(iter(gone.items()))
    assert f"gone   since increment {number} '{chain[number]}'" in shell.text(*chain, f"--key={i}")
    i = next(i for i in held if newest[i] == 0)
    assert f"of rank 0 of the full dump '{chain[0]}'" in shell.text(*chain, f"--key={i}")
    # Of the chain without its last dumps.
    assert {f["number"] for f in shell.json(*chain[:2], *wanted(held))["keys"]} <= {0, 1, None}


def test_an_increment_alone_says_that_it_is_not_all(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    module = trained(num_steps=1, num_tables=1)
    module.dump(tmp_path / "base")
    untouched = max(records(module, "a"))
    module(*bag_per_id([3])).sum().backward()
    module.dump(tmp_path / "1", base=tmp_path / "base")
    assert ids_in(tmp_path / "1") == {3}
    base = shell.json(tmp_path / "base")["dumps"][0]["dump_id"]
    text = shell.text(tmp_path / "1", f"--key={untouched}", "--verify")
    assert "kind       increment 1 of its chain" in text and f"base       {base}" in text
    assert f"a load takes the dumps before it too (1), from base {base} on" in text
    assert "not in a; the dumps before it may have it" in text
    table = shell.table(tmp_path / "1")
    assert table["rows"] == [1] and table["sizes"] == [len(records(module, "a"))] and table["tombstones"] == [0]
    assert {"changed 1", "gone 0"} <= set(lines(shell.text(tmp_path / "1")))


# Counters


def test_counts_are_those_of_the_last_dump_and_of_ids_without_a_row(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    module = make_module([admitting(3)])
    module(*bag_per_id([1, 1, -5, 6])).sum().backward()
    module.dump(tmp_path / "base", counter=True)
    module(*bag_per_id([1, -5])).sum().backward()
    module.dump(tmp_path / "1", base=tmp_path / "base", counter=True)
    found = found_in(shell.json(tmp_path / "base", *wanted([1, -5, 6, 7])))
    assert {i: (f["found"], f["count"]) for i, f in found.items()} == {
        1: ("counted", 2), -5: ("counted", 1), 6: ("counted", 1), 7: ("absent", None),
    }  # fmt: skip
    found = found_in(shell.json(tmp_path / "base", tmp_path / "1", *wanted([1, -5, 6, 7])))
    assert {i: (f["found"], f["count"], f["number"]) for i, f in found.items()} == {
        1: ("row", None, 1), -5: ("counted", 2, 1), 6: ("counted", 1, 1), 7: ("absent", None, None),
    }  # fmt: skip
    table = shell.table(tmp_path / "base", tmp_path / "1")
    assert table["counted"] == [2] and table["counts"]["looked_at"] == 2
    assert [(b["low"], b["high"], b["count"]) for b in table["counts"]["bins"]] == [(1, 1, 1), (2, 4, 1)]
    # Erased, and counted anew: gone as a row.
    module.erase("a", torch.tensor([1]))
    module(*bag_per_id([1])).sum().backward()
    chain = [tmp_path / "base", tmp_path / "1", tmp_path / "2"]
    module.dump(chain[2], base=chain[:2], counter=True)
    (found_1,) = shell.json(*chain, "--key=1")["keys"]
    assert (found_1["found"], found_1["count"], found_1["number"]) == ("counted", 1, 2)
    module.dump(tmp_path / "3", base=chain)
    (found_1,) = shell.json(*chain, tmp_path / "3", "--key=1")["keys"]
    assert (found_1["found"], found_1["number"]) == ("gone", 2)


# Without a manifest


@pytest.mark.parametrize("case", CASES)
def test_keys_of_reference_dumps(shell: Shell, case: str) -> None:  # noqa: F811
    _, strategy, state_dim, _ = CASES[case]
    facts = shell.json(DUMPS / case, "--full", "--key=1000003", *wanted(EXTREME))
    for table, dim in DIMS.items():
        stored = read_reference_files(DUMPS / case, table, dim, state_dim(dim))
        ids = stored["ids"].tolist()
        found = found_in(facts, table)
        assert found[1000003]["found"] == "absent"
        for i in EXTREME:
            assert (found[i]["found"] == "row") == (i in ids)
            if i in ids:
                row = ids.index(i)
                assert np.array(found[i]["values"], np.float32).tobytes() == stored["values"][row].tobytes()
                parts = [value for part in found[i]["optimizer_state"].values() for value in part]
                assert np.array(parts, np.float32).tobytes() == stored["state"][row].tobytes()
                (score,) = found[i]["scores"].values()
                assert score == stored["scores"][row, 0] and found[i]["repeats"] == 1
                # An age needs no clock.
                assert bool(found[i]["ages"]) == (strategy == "TIMESTAMP")
    assert any(f["found"] == "row" for f in facts["keys"])
    if strategy == "TIMESTAMP":
        row = next(f for f in facts["keys"] if f["found"] == "row")
        text = lines(shell.text(DUMPS / case, f"--key={row['key']}"))
        assert any(line.startswith("TIMESTAMP") and line.endswith("before the dump") for line in text)


def test_the_last_row_of_a_repeated_id_counts(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    make_dump(tmp_path / "d", range(12))
    (tmp_path / "d" / "manifest.json").unlink()
    path = tmp_path / "d" / "t_emb_keys.rank_1.world_size_2"
    ids = np.fromfile(path, np.int64)
    ids[[1, 4]] = ids[0]
    ids.tofile(path)
    (found,) = shell.json(tmp_path / "d", f"--key={ids[0]}")["keys"]
    values = np.fromfile(tmp_path / "d" / "t_emb_values.rank_1.world_size_2", np.float32).reshape(-1, 3)
    assert (found["position"], found["repeats"], found["values"]) == (4, 3, values[4].tolist())
    assert "3 rows have this id; the last one counts" in shell.text(tmp_path / "d", f"--key={ids[0]}")


def test_times_beyond_the_clock_have_no_age(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    make_dump(tmp_path / "d", [5, 6], world_size=1, num_buckets=1)
    path = tmp_path / "d" / "t_emb_scores.rank_0.world_size_1"
    rewrite(path, np.array([-1, 0], np.int64).tobytes())
    ids = np.fromfile(tmp_path / "d" / "t_emb_keys.rank_0.world_size_1", np.int64).tolist()
    assert locate(np.array(ids), 1, 1)[0].tolist() == [0, 0]
    found = found_in(shell.json(tmp_path / "d", "--verify", *wanted(ids)), "t")
    assert [found[i]["ages"]["TIMESTAMP"] for i in ids] == [2**63 - 1, 0]
    assert f"{CLOCK - (2**63 - 1)}" not in shell.text(tmp_path / "d", f"--key={ids[1]}")
    assert "before the dump" in shell.text(tmp_path / "d", f"--key={ids[0]}")
