"""``python -m dynamicemb.inspect``: what it says about a dump is what the tables held."""

import io
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from dynamicemb import DynamicEmbScoreStrategy
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.checkpoint.disk.io import DISK
from dynamicemb.inspection import health, sample, scores, units
from dynamicemb.inspection.collect import Inspection
from dynamicemb.inspection.command import main
from dynamicemb.inspection.health import num_repeated, num_repeated_in_buckets
from dynamicemb.inspection.report import Report
from dynamicemb.inspection.sample import blocks, num_looked_at
from tests.checkpoint.test_checkpoint_reference import CASES, DIMS, DUMPS
from tests.support.admitting import admitting
from tests.support.checkpoints import read_reference_files, records, train, trained
from tests.support.inspecting import CLOCK, Shell, lines, make_dump, shell  # noqa: F401
from tests.support.lookups import bag_per_id, make_module, options

TIMESTAMP, STEP, CUSTOMIZED, LFU, NO_EVICTION = DynamicEmbScoreStrategy
STRATEGIES = [TIMESTAMP, STEP, CUSTOMIZED, LFU, NO_EVICTION, (TIMESTAMP, LFU), (LFU, TIMESTAMP)]


def module_of(strategy: Any) -> BatchedDynamicEmbeddingTablesV2:
    capacity = {"init_capacity": 64, "capacity": None} if strategy is NO_EVICTION else {"capacity": 64}
    tables = [options(dim=5, score_strategy=strategy, **capacity)]
    module = make_module(tables, optimizer="adam")
    if strategy is CUSTOMIZED:
        module.set_score({"a": 1000})
    train(module, 2, seed=3)
    if strategy is CUSTOMIZED:
        module.set_score({"a": 2000})
    train(module, 1, seed=4)
    return module


def counts_of_bins(histogram: dict[str, Any], values: list[int]) -> list[int]:
    """Count values the slow way, by the limits of the bins."""
    highs = [math.inf if b["high"] is None else b["high"] for b in histogram["bins"]]
    return [sum(b["low"] <= v <= high for v in values) for b, high in zip(histogram["bins"], highs)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_facts_and_histograms_are_what_the_table_held(shell: Shell, tmp_path: Path, strategy: Any) -> None:  # noqa: F811
    module = module_of(strategy)
    module.dump(tmp_path / "d", optim=True)
    held = records(module, "a")
    facts = shell.json(tmp_path / "d")
    (dump,) = facts["dumps"]
    assert (dump["kind"], dump["number"], dump["chain"], dump["world_size"]) == ("full", 0, [], 1)
    assert abs(dump["clock"] - time.time_ns()) < 600 * 10**9 and dump["written"].startswith("20")
    (table,) = dump["tables"]
    names = [s.name for s in (strategy if isinstance(strategy, tuple) else (strategy,))]
    assert table["score_strategy"] == names == [h["column"] for h in table["scores"]]
    assert (table["dim"], table["dtype"], table["optimizer"]) == (5, "float32", "adam")
    assert table["optimizer_numbers"]["lr"] == 1.0 and (table["num_state"], table["updates"]) == (10, 3)
    assert table["rows"] == table["sizes"] == [len(held)] and table["capacities"] == [module.tables.capacities[0]]
    assert table["step_score"] == {STEP: 4, CUSTOMIZED: 2000, LFU: 1}.get(strategy, 0)
    files = {f.name: f.stat().st_size for f in (tmp_path / "d").iterdir() if f.name.startswith("a_")}
    assert sum(table["bytes"].values()) == dump["bytes"] == sum(files.values())
    assert table["bytes"]["emb_values"] == 20 * len(held)
    for column, histogram in enumerate(table["scores"]):
        values = [score[column] for _, _, score in held.values()]
        if names[column] in ("TIMESTAMP", "NO_EVICTION"):
            values = [dump["clock"] - value for value in values]
        assert histogram["unit"] == {"LFU": "count", "STEP": "number", "CUSTOMIZED": "number"}.get(names[column], "age")
        assert (histogram["min"], histogram["max"], histogram["looked_at"]) == (min(values), max(values), len(values))
        found = [b["count"] for b in histogram["bins"]]
        assert found == counts_of_bins(histogram, values) and sum(found) == len(values)
        assert found[0] > 0 and found[-1] > 0
    if strategy in (STEP, LFU):
        assert len(table["scores"][0]["bins"]) > 1
    weights = [np.frombuffer(w, np.float32).astype(np.float64) for w, _, _ in held.values()]
    norms = sorted(float(np.sqrt((w * w).sum())) for w in weights)
    looks = table["health"]
    expected = (norms[0], statistics.median(norms), norms[-1])
    assert (looks["norm_min"], looks["norm_median"], looks["norm_max"]) == pytest.approx(expected, rel=1e-12)
    wrong = ("non_finite_values", "non_finite_state", "zero_rows", "repeated_ids", "wrong_rank_ids")
    assert looks["looked_at"] == len(held) and all(looks[name] == 0 for name in wrong)


def test_the_report_says_what_the_facts_say(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    make_dump(tmp_path / "d", range(-5, 6), counted={100: 1, 101: 7, -102: 20})
    text = shell.text(tmp_path / "d")
    for line in (
        "kind full dump",
        f"id {'5' * 32}",
        "written 2023-11-14 22:13:20 UTC",
        "ranks 2",
        "format 2, by dynamicemb 0.1.0",
        "table t",
        "dim 3, float32",
        "optimizer sgd: lr 0.5",
        "state none in the dump, 4 updates",
        "strategy TIMESTAMP",
        "routing roundrobin of 50 rows",
        "ids 11 (5 to 6 a rank)",
        "capacity 224 (112 to 112 a rank), load 0.049",
        "counted 3 (1 to 2 a rank), not admitted",
        "norms 0 to 17.32, median 8.66; of all 11 rows",
        "rows 0 with NaN or infinity, 1 all zero, 0 with a repeated id, 0 at a wrong rank; of all 11",
        "TIMESTAMP: ages of 11 ids, 1 s to 11 s",
        "occurrences: counts of 3 ids, 1 to 20",
    ):
        assert line in lines(text), text
    # The longest bar is that of the largest bin.
    (nine, two) = [line for line in text.splitlines() if "█" in line][:2]
    assert nine.split()[:7] == ["1", "s", "-", "10", "s", "9", "81.8%"] and nine.count("█") == 32
    assert two.split()[:8] == ["10", "s", "-", "1", "min", "2", "18.2%", "█" * 7]
    bins = [line.split("%")[0].split() for line in text.splitlines() if "%" in line][2:]
    expected = ["1 1 33.3", "2 - 4 0 0.0", "5 - 9 1 33.3", "10 - 19 0 0.0", "20 - 49 1 33.3"]
    assert [" ".join(cells) for cells in bins] == expected


def test_ages_of_a_dump_are_those_at_its_time(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    make_dump(tmp_path / "d", range(11))
    (histogram,) = shell.table(tmp_path / "d")["scores"]
    assert (histogram["min"], histogram["max"]) == (10**9, 11 * 10**9)
    assert histogram["bins"] == [
        {"low": 10**9, "high": 10**10 - 1, "count": 9},
        {"low": 10**10, "high": 6 * 10**10 - 1, "count": 2},
    ]


# Which rows are looked at


@pytest.mark.parametrize("limit", [1, 2, 7, 63, 64, 65, 100, 999, 1000, None])
@pytest.mark.parametrize("counts", [[0], [1], [5, 0, 3], [1000], [64, 64], [10, 700, 290], [0, 0, 129]])
def test_blocks_are_apart_in_order_and_as_many_as_asked_for(counts: list[int], limit: int | None) -> None:
    found = list(blocks(counts, limit, 13))
    rows = [(b.rank, b.begin + k) for b in found for k in range(b.num_rows)]
    assert rows == sorted(set(rows)) and all(0 < b.num_rows <= 13 for b in found)
    assert all(position < counts[rank] for rank, position in rows)
    total = sum(counts)
    assert len(rows) == num_looked_at(counts, limit) <= total
    if limit is None or limit >= total:
        assert len(rows) == total
    else:
        assert limit - 64 < len(rows) <= limit
        # Spread over all: the last one looked at is in the last part of them.
        last = sum(counts[: rows[-1][0]]) + rows[-1][1]
        assert last >= total - total // min(64, limit) - 1


def test_rows_limits_what_is_looked_at(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    make_dump(tmp_path / "d", range(1000), num_buckets=90)
    for limit, looked_at in (("1", 1), ("100", 64), ("999", 960), ("1000", 1000), ("all", 1000)):
        table = shell.table(tmp_path / "d", "--rows", limit)
        assert table["health"]["looked_at"] == looked_at == table["scores"][0]["looked_at"]
        assert sum(b["count"] for b in table["scores"][0]["bins"]) == looked_at
    assert "of 64 of 1,000" in shell.text(tmp_path / "d", "--rows", "100")


# Health


def test_rows_that_are_not_finite_or_all_zero_are_counted(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    module = trained(num_tables=1)
    module.dump(tmp_path / "d", optim=True)
    values_path = tmp_path / "d" / "a_emb_values.rank_0.world_size_1"
    values = np.fromfile(values_path, np.float32).reshape(-1, 5)
    values[0, 1], values[1, 4], values[2, 0], values[2, 1] = np.nan, np.inf, -np.inf, np.inf
    values[5:9] = 0
    # Squares that float32 does not hold, above and below.
    values[9], values[10] = 3e38, 1e-40
    values.tofile(values_path)
    state_path = tmp_path / "d" / "a_emb_opt_values.rank_0.world_size_1"
    state = np.fromfile(state_path, np.float32).reshape(-1, 10)
    state[3, 9] = np.nan
    state[4] = 3e38
    state.tofile(state_path)
    looks = shell.table(tmp_path / "d")["health"]
    assert (looks["non_finite_values"], looks["non_finite_state"], looks["zero_rows"]) == (3, 1, 4)
    assert looks["norm_min"] == 0 and looks["norm_max"] == pytest.approx(3e38 * 5**0.5)
    text = shell.text(tmp_path / "d")
    assert "3 with NaN or infinity, 1 with such in their state, 4 all zero" in text
    # A key whose values JSON has no numbers for.
    ids = np.fromfile(tmp_path / "d" / "a_emb_keys.rank_0.world_size_1", np.int64)
    (found,) = shell.json(tmp_path / "d", f"--key={ids[2]}")["keys"]
    assert found["values"][:2] == ["-inf", "inf"]


def test_repeated_ids_and_ids_at_a_wrong_rank_are_counted(
    shell: Shell,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_dump(tmp_path / "d", range(40))
    path = tmp_path / "d" / "t_emb_keys.rank_1.world_size_2"
    ids = np.fromfile(path, np.int64)
    # Three times the same, and two of rank 0.
    ids[3], ids[4] = ids[2], ids[2]
    ids[7], ids[8] = 1000, -2
    ids.tofile(path)
    for size in (65536, 1, 2, 3):
        monkeypatch.setattr(health, "BATCH_SIZE_PER_DUMP", size)
        looks = shell.table(tmp_path / "d")["health"]
        assert (looks["repeated_ids"], looks["wrong_rank_ids"]) == (2, 2), size
    # Without a manifest nobody says in which order they are.
    (tmp_path / "d" / "manifest.json").unlink()
    ids[-1] = ids[2]
    ids.tofile(path)
    for number in (2**24, 7, 1):
        monkeypatch.setattr(health, "_MAX_IDS", number)
        looks = shell.table(tmp_path / "d")["health"]
        assert (looks["repeated_ids"], looks["wrong_rank_ids"]) == (3, None), number


def test_repeated_ids_are_found_in_any_batches_of_one_bucket() -> None:
    generator = np.random.default_rng(2)
    for _ in range(50):
        ids = generator.integers(0, 12, 40)
        cuts = np.sort(generator.integers(1, 40, 5))

        def batches(ids: np.ndarray = ids, cuts: np.ndarray = cuts) -> Any:
            return ((0, part) for part in np.split(ids, cuts) if part.size)

        expected = ids.size - len(set(ids.tolist()))
        assert num_repeated_in_buckets(batches, [1]) == num_repeated(batches, 40) == expected > 0


def test_a_median_of_many_norms_is_that_of_some(
    shell: Shell,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_dump(tmp_path / "d", range(400))
    monkeypatch.setattr(health, "_MAX_NORMS", 50)
    looks = shell.table(tmp_path / "d")["health"]
    assert (looks["norm_min"], looks["norm_max"]) == pytest.approx((0, 399 * 3**0.5))
    assert looks["norm_median"] == pytest.approx(200 * 3**0.5, rel=0.4)
    scan = health._Scan(every=8)
    scan.add_values(np.ones((400, 1), np.float32))
    assert sum(norms.size for norms in scan.norms) == 50


# Dumps of the reference implementation


@pytest.mark.parametrize("case", CASES)
def test_dumps_of_the_reference_are_shown_as_far_as_they_tell(shell: Shell, case: str) -> None:  # noqa: F811
    optimizer, strategy, state_dim, _ = CASES[case]
    (dump,) = shell.json(DUMPS / case)["dumps"]
    assert [dump[name] for name in ("kind", "dump_id", "clock", "format_version")] == [None] * 4
    assert dump["world_size"] == int(case[-1]) and "no manifest.json" in dump["notes"][0]
    assert [table["name"] for table in dump["tables"]] == sorted(DIMS)
    for table in dump["tables"]:
        stored = read_reference_files(DUMPS / case, table["name"], table["dim"], state_dim(table["dim"]))
        assert table["dim"] == DIMS[table["name"]] and sum(table["rows"]) == len(stored["ids"])
        assert (table["optimizer"], table["num_state"]) == (optimizer, state_dim(table["dim"]))
        assert (table["dtype"], table["sizes"], table["capacities"], table["counted"]) == (None,) * 4
        # KCustomized may be one of three.
        assert table["score_strategy"] == (None if strategy == "STEP" else [strategy])
        assert table["step_score"] == stored["meta"]["step_score"]
        (histogram,) = table["scores"]
        found = [b["count"] for b in histogram["bins"]]
        assert found == counts_of_bins(histogram, stored["scores"][:, 0].tolist()) and sum(found) == len(stored["ids"])
        norms = np.linalg.norm(stored["values"].astype(np.float64), axis=1)
        assert table["health"]["norm_median"] == pytest.approx(np.median(norms))
        assert table["health"]["wrong_rank_ids"] is None
    text = shell.text(DUMPS / case)
    assert "what is not said is not recorded" in text and "dtype not recorded" in text
    if strategy == "STEP":
        assert "strategy   not recorded; eviction rule EvictStrategy.KCustomized, step score 5" in text


@pytest.mark.parametrize("order", [(TIMESTAMP, LFU), (LFU, TIMESTAMP)])
def test_the_columns_of_a_compound_are_told_apart_without_a_manifest(
    shell: Shell,  # noqa: F811
    tmp_path: Path,
    order: Any,
) -> None:
    module = module_of(order)
    module.dump(tmp_path / "d")
    (tmp_path / "d" / "manifest.json").unlink()
    table = shell.table(tmp_path / "d", "--verify")
    assert table["score_strategy"] == [strategy.name for strategy in order]
    ages, counts = table["scores"] if order[0] is TIMESTAMP else reversed(table["scores"])
    # There is no clock: ages are those beside the newest.
    held = records(module, "a").values()
    times = [score[order.index(TIMESTAMP)] for _, _, score in held]
    assert (ages["min"], ages["max"]) == (0, max(times) - min(times))
    assert counts["max"] == max(score[order.index(LFU)] for _, _, score in held)
    # Two counts: nobody knows which is which.
    scores_path = tmp_path / "d" / "a_emb_scores.rank_0.world_size_1"
    np.ones(len(held) * 2, np.int64).tofile(scores_path)
    table = shell.table(tmp_path / "d")
    assert table["score_strategy"] is None and [h["column"] for h in table["scores"]] == ["unknown 1", "unknown 2"]


# Which tables


def test_table_limits_what_is_shown(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    from dynamicemb import DynamicEmbDump

    module = trained()
    DynamicEmbDump(tmp_path / "d", module)
    for name, path in (("b", "d"), ("model/b", "d"), ("b", "d/model")):
        (table,) = shell.json(tmp_path / path, "--table", name)["dumps"][0]["tables"]
        assert (table["folder"], table["name"]) == ("model", "b")
    both = [t["name"] for t in shell.json(tmp_path / "d", "--table", "b", "--table", "a")["dumps"][0]["tables"]]
    assert both == ["a", "b"] == [t["name"] for t in shell.json(tmp_path / "d/model")["dumps"][0]["tables"]]
    text = shell.text(tmp_path / "d", "--table", "b")
    assert "table model/b" in text and "table model/a" not in text
    status, out, err = shell.run(tmp_path / "d", "--table", "c")
    assert (status, out) == (2, "") and "holds no table 'c', it holds ['model/a', 'model/b']" in err


def test_a_dump_that_was_being_replaced_is_read_from_where_it_is(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    make_dump(tmp_path / ".d.dynamicemb-previous", range(4))
    text = shell.text(tmp_path / "d")
    assert "the dump before is read from" in text and "ids        4 (2 to 2 a rank)" in text


def test_tables_without_rows_are_shown(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    module = make_module([admitting(3, dim=3), admitting(3, dim=2)], optimizer="adam")
    module.dump(tmp_path / "d", optim=True, counter=True)
    for table in shell.json(tmp_path / "d", "--verify")["dumps"][0]["tables"]:
        assert table["rows"] == [0] and table["scores"] == [] and table["counts"] is None
        assert (table["health"]["looked_at"], table["health"]["norm_min"]) == (0, None)
    assert shell.text(tmp_path / "d").count("load 0.000") == 2
    assert "not in a, b" in shell.text(tmp_path / "d", "--key=0")
    (tmp_path / "d" / "manifest.json").unlink()
    (tmp_path / "d" / "b_opt_args.json").unlink()
    text = shell.text(tmp_path / "d", "--verify")
    assert text.count("not known: there are no rows") == 2 and "optimizer  unknown" in text


@pytest.mark.parametrize("name", ["[red]x", ":smile: [bold]", "Tabelle ä 表"])
def test_names_are_printed_as_they_are(shell: Shell, tmp_path: Path, name: str) -> None:  # noqa: F811
    module = make_module([options()], table_names=[name])
    module(*bag_per_id([1, 2])).sum().backward()
    module.dump(tmp_path / "[blue]" / name)
    for arguments in ([], ["--key=1"]):
        text = shell.text(tmp_path / "[blue]" / name, *arguments)
        assert f"{tmp_path}/[blue]/{name}" in text and f"{name}\n" in text
    status, _, err = shell.run(tmp_path / "[blue]")
    assert status == 2 and f"[blue]' is no dump, but holds ['{name}']; give one of them" in err


def test_a_path_that_is_no_text_is_printed_nevertheless(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    make_dump(tmp_path / "\udcff", range(3))
    assert f"{tmp_path}/\\udcff" in shell.text(tmp_path / "\udcff")
    assert shell.json(tmp_path / "\udcff")["dumps"][0]["path"] == f"{tmp_path}/\udcff"


# Terminals


@pytest.mark.parametrize("width", [1, 20, 40, 59, 60, 80, 250])
def test_any_width_of_a_terminal_will_do(
    shell: Shell,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    make_dump(tmp_path / "d", range(30), counted={77: 4})
    text = shell.text(tmp_path / "d") + shell.text(tmp_path / "d", "--key=3", "--key=77")
    path = str(tmp_path / "d")
    assert text.splitlines().count(path) == 2
    assert max(len(line) for line in text.splitlines() if line != path) <= width
    assert ("█" in text) == (width >= 60)
    if width >= 20:
        assert "TIMESTAMP" in text and "counted" in text
    if width >= 40:
        assert "4 times, not admitted" in text and "81" not in text


def test_a_pipe_gets_no_colours_and_no_bar(tmp_path: Path) -> None:
    make_dump(tmp_path / "d", range(30))
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    environment |= {"PYTHONPATH": os.getcwd(), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "dynamicemb.inspect", "--verify"]
    done = subprocess.run([*command, str(tmp_path / "d")], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and b"\x1b" not in done.stdout
    assert "█" in done.stdout.decode() and b"verified: every file" in done.stdout
    assert subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True).returncode == 2


def printed(folder: Path, console: Console) -> str:
    """Return what the report of a dump's only table is on a console."""
    Report(console).table(Inspection.open([str(folder)], [], DISK).facts(None)[0].tables[0])
    file = console.file
    assert isinstance(file, io.TextIOWrapper)
    file.flush()
    return file.buffer.getvalue().decode()  # type: ignore[attr-defined]


def test_a_terminal_gets_colours_and_what_it_can_show(tmp_path: Path) -> None:
    make_dump(tmp_path / "d", range(30))
    for encoding, bar in (("utf-8", "█"), ("ascii", "#")):
        for force_terminal in (True, False):
            file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
            text = printed(tmp_path / "d", Console(force_terminal=force_terminal, file=file, width=80))
            assert ("\x1b" in text) == force_terminal and bar * 8 in text


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--key=1"]])
def test_a_reader_that_goes_away_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    make_dump(tmp_path / "d", range(30))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit):
            main([str(tmp_path / "d"), *arguments])


# Numbers


def test_numbers_read_well() -> None:
    ns = [0, 999, 1500, 10**6, 1234 * 10**6, 90 * 10**9, 86399 * 10**9, 86400 * 10**9, 400 * 86400 * 10**9]
    assert [units.duration(n) for n in ns] == [
        "0 ns", "999 ns", "1.5 us", "1 ms", "1.23 s", "1.5 min", "24 h", "1 d", "400 d",
    ]  # fmt: skip
    sizes = [0, 1, 1023, 1024, 1536, 5 * 2**30, 2**40, 2**63]
    assert [units.size(n) for n in sizes] == ["0 B", "1 B", "1023 B", "1 KiB", "1.5 KiB", "5 GiB", "1 TiB", "8 EiB"]
    assert units.date(CLOCK) == "2023-11-14 22:13:20 UTC" and units.date(2**63 - 1) == "2262-04-11 23:47:16 UTC"
    assert units.date(10**30) == f"{10**30} ns"
    assert units.number(1234567) == "1,234,567"


def test_scores_at_the_ends_of_their_range_have_bins() -> None:
    top = 2**63 - 1
    for unit, values in (("number", [0, top]), ("number", [top]), ("count", [1, top]), ("age", [0, top])):
        array = np.array(values, np.int64)
        histogram = scores._histogram("x", unit, lambda array=array: iter([array]))
        assert sum(b.count for b in histogram.bins) == len(values)
        assert (histogram.bins[0].count, histogram.bins[-1].count) == (1, 1)
        assert histogram.bins[0].low <= values[0] and (histogram.bins[-1].high or top) >= values[-1]
    # Of the reference, whose scores are unsigned.
    assert scores.clipped(np.array([-1, 5])).tolist() == [top, 5]


def test_the_examples_of_blocks_hold() -> None:
    assert list(blocks([5, 3], None, 4)) == [(0, 0, 4), (0, 4, 1), (1, 0, 3)]
    assert list(blocks([100, 100], 2, 9)) == [(0, 0, 1), (1, 0, 1)]
    assert sample.Block(1, 2, 3).num_rows == 3
    assert torch.equal(torch.tensor([num_looked_at([5, 3], 3)]), torch.tensor([3]))
