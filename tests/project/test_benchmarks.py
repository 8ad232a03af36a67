"""The benchmarks run on tiny sizes, compare the same work, and write what they say they write."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import plot, report
from benchmarks.__main__ import main, parse
from benchmarks.cases import CASES, CPU_CASES, GPU_CASES, Case, select
from benchmarks.engines import Engine, dynamic, dynamic_sgd
from benchmarks.machine import describe
from benchmarks.runner import run_case
from benchmarks.timing import ENOUGH_QUIET, Sample, Times
from benchmarks.turns import Effort
from benchmarks.workloads import DTYPES, MLPERF_LENGTHS, batches, bytes_moved, state_bytes
from tests.conftest import reason_to_skip

TINY = Case("tiny", tables=2, rows=512, dim=8, num_ids=200, bag_length=5, baseline=dynamic_sgd)
EFFORT = Effort(rounds=2, steps=2, quiet=0, phases=True)


def broken(case: Case) -> Engine:
    raise RuntimeError("this engine\nis broken")


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_case_names_are_distinct() -> None:
    names = [case.name for cases in CASES.values() for case in cases]
    assert len(set(names)) == len(names)


def test_cases_are_of_their_device_and_workload_a_is_what_it_says() -> None:
    assert all(case.device == device for device, cases in CASES.items() for case in cases)
    (case,) = select(["a_sgd_train"], "cuda")
    assert isinstance(case, Case)
    assert (case.tables, case.rows, case.dim, case.dtype, case.alpha) == (10, 1_677_721, 128, "fp32", 1.05)
    assert case.batch_size * case.tables == 1_048_570
    for case in GPU_CASES:
        assert case.tables * case.rows <= 16_777_210
        rows = case.tables * (case.capacity or case.rows) * (case.dim * DTYPES[case.dtype].itemsize + state_bytes(case))
        # FBGEMM's rows and ours, with twice an output of 1.05 M rows, fit the 141 GB of an H200.
        assert 2 * rows + 4 * 1_100_000 * case.dim * 4 < 120e9
        assert bool(max(case.lengths) > 1) == (case.pooling == "SUM")


def test_gpu_cases_cover_what_was_asked_for() -> None:
    known = [case for case in GPU_CASES if not case.changes and not case.cold and not case.loop]
    for pooling in ("NONE", "SUM"):
        trained = {case.optimizer for case in known if case.train and case.pooling == pooling and case.dim == 128}
        assert trained == {"exact_sgd", "adam", "exact_adagrad", "exact_row_wise_adagrad"}
    assert {case.dim for case in known} == {16, 64, 128, 256}
    assert {case.tables for case in known} == {1, 10, 26, 100}
    assert {case.dtype for case in known} == {"fp32", "bf16"}
    targets = {case.name: case.target for case in GPU_CASES if case.target is not None}
    assert (targets["a_sgd_train"], targets["a_adam_train"]) == (0.60, 0.62)
    assert (targets["a_eval"], targets["a_first_step"], targets["small_train"]) == (0.35, 1.5, 0.5)


def test_select_matches_patterns_and_refuses_unknown_ones() -> None:
    assert [case.name for case in select(["adam_train", "batch_64_*"], "cpu")] == [
        "adam_train",
        "batch_64_train",
        "batch_64_eval",
    ]
    assert select([], "cpu") == CASES["cpu"]
    assert select([], "cuda") == CASES["cuda"]
    assert set(CPU_CASES) < set(CASES["cpu"])
    with pytest.raises(ValueError, match="no case of cpu matches 'sdg'"):
        select(["sdg"], "cpu")


def test_effort_depends_on_the_device_and_on_what_is_asked_for() -> None:
    assert (parse(["--device", "cpu"]).rounds, parse(["--device", "cpu"]).threads) == (15, 2)
    args = parse(["--device", "cuda", "--rounds", "5"])
    assert (args.rounds, args.quiet, args.threads) == (5, 0, None)
    assert parse(["--device", "cuda", "--quick"]).rounds < parse(["--device", "cuda"]).rounds


def small_on_cpu(case: Case) -> Case:
    """Return a GPU case as the CPU can run it, against ourselves: FBGEMM has no Adam there."""
    return replace(case.shrink(512, 20 * case.tables), device="cpu", baseline=dynamic_sgd)


@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_every_gpu_case_runs_a_step_on_the_cpu(case: Case) -> None:
    small = small_on_cpu(case)
    assert small.full == case.full
    engine = small.ours(small)
    batch = next(batches(small, engine.residents, seed=1))
    assert batch.ids.numel() == small.batch_size * sum(small.lengths)
    assert batch.grad.dtype == DTYPES[case.dtype]
    if engine.prepare is not None:
        engine.prepare(engine, batch)
    assert engine.module.output_dtype == engine.module.embedding_dtype == DTYPES[case.dtype]
    before = engine.module.stats()
    assert not case.cold or sum(table["size"] for table in before.values()) == 0
    engine.step(batch)
    inserted = sum(after["inserted"] - before[name]["inserted"] for name, after in engine.module.stats().items())
    evicted = sum(after["evicted"] - before[name]["evicted"] for name, after in engine.module.stats().items())
    if case.cold:
        assert inserted == batch.num_unique
    elif case.policy in ("admission", "chance"):
        # Few of so few new ids come twice.
        assert 0 <= inserted <= batch.num_unique
        return
    elif case.changes:
        assert 0 < inserted <= batch.num_unique
    else:
        assert inserted == 0
    # A tiny table of several buckets may evict a little earlier than its share of free slots says.
    assert evicted > 0 if case.population else evicted < 5


def test_batches_hold_only_resident_ids_table_by_table() -> None:
    residents = [torch.tensor([3, 5, 9]), torch.tensor([100, 200])]
    batch = next(batches(TINY, residents, seed=1))
    assert batch.ids.numel() == 2 * TINY.batch_size * 5 == 200
    assert batch.ids.equal(batch.known_ids)
    assert set(batch.ids[:100].tolist()) == {3, 5, 9}
    assert set(batch.ids[100:].tolist()) == {100, 200}
    assert batch.num_unique == 5
    assert batch.offsets.tolist() == list(range(0, 201, 5))
    assert batch.grad.shape == (20, 16)


def test_tables_may_have_bags_of_different_lengths() -> None:
    case = replace(TINY, num_ids=24, bag_lengths=(1, 3))
    batch = next(batches(case, [torch.arange(10), torch.arange(100, 120)], seed=1))
    assert case.batch_size == 6
    assert batch.offsets.tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 12, 15, 18, 21, 24]
    assert batch.ids[:6].max() < 10 and batch.ids[6:].min() >= 100
    assert batch.num_unique == batch.ids[:6].unique().numel() + batch.ids[6:].unique().numel()
    assert batch.grad.shape == (6, 16)
    (mixed,) = select(["a_mix_sgd_train"], "cuda")
    assert isinstance(mixed, Case) and mixed.lengths == MLPERF_LENGTHS
    assert (min(mixed.lengths), max(mixed.lengths), sum(mixed.lengths)) == (1, 100, 214)


def test_new_ids_are_new_in_every_batch() -> None:
    case = Case("new", tables=2, rows=64, dim=4, num_ids=2000, bag_length=5, new_share=0.1)
    first, second = itertools.islice(batches(case, [torch.arange(64)] * 2, seed=1), 2)
    new = [batch.ids[batch.ids != batch.known_ids] for batch in (first, second)]
    assert all(120 < ids.numel() < 280 for ids in new)
    assert torch.cat(new).unique().numel() == new[0].numel() + new[1].numel()
    assert first.known_ids.max() < 32


def test_with_room_left_all_known_ids_are_drawn() -> None:
    case = Case("roomy", tables=1, rows=64, dim=4, num_ids=2000, bag_length=5, new_share=0.1, capacity=128)
    assert next(batches(case, [torch.arange(64)], seed=1)).known_ids.max() >= 32


def test_a_population_has_more_ids_than_rows_and_static_tables_read_rows() -> None:
    case = Case("crowd", tables=2, rows=64, dim=4, num_ids=2000, bag_length=1, population=10_000)
    batch = next(batches(case, [torch.arange(64).flip(0)] * 2, seed=1))
    assert 9000 < batch.ids.max() < 10_000
    assert batch.known_ids.equal(63 - batch.ids % 64)


def test_a_power_law_prefers_few_ids() -> None:
    case = Case("skewed", tables=1, rows=10_000, dim=4, num_ids=5000, bag_length=1, alpha=1.05)
    batch = next(batches(case, [torch.arange(10_000)], seed=1))
    assert (batch.ids < 100).float().mean() > 0.4
    assert batch.ids.max() < 10_000


def test_bytes_of_a_step_are_counted_by_hand() -> None:
    batch = next(batches(TINY, [torch.tensor([3, 5, 9]), torch.tensor([100, 200])], seed=1))
    inputs, outputs, rows = 8 * (200 + 41), 20 * 16 * 4, 5 * 8 * 4
    evaluate = Case("tiny", tables=2, dim=8, train=False)
    assert bytes_moved(evaluate, batch, 0) == inputs + rows + outputs
    assert bytes_moved(TINY, batch, 32) == inputs + rows + 2 * outputs + 2 * (rows + 5 * 32)
    half = Case("tiny", tables=2, dim=8, dtype="bf16")
    batch = replace(batch, grad=batch.grad.bfloat16())
    assert bytes_moved(half, batch, 32) == inputs + rows // 2 + outputs + 2 * (rows // 2 + 5 * 32)


def test_statistics_prefer_quiet_repetitions_if_there_are_enough() -> None:
    busy = [Sample(9.0, 5.0, False)] * 20
    assert Times([*busy, *[Sample(1.0, 1.0, True)] * (ENOUGH_QUIET - 1)]).median == 9.0
    times = Times([*busy, *[Sample(1.0, 1.0, True)] * ENOUGH_QUIET])
    assert (times.median, times.minimum, times.cpu_median, times.num_quiet) == (1.0, 1.0, 5.0, ENOUGH_QUIET)


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        Case("tiny_eval", 2, 512, 8, 200, 5, train=False, baseline=dynamic_sgd),
        Case("tiny_adam", 2, 512, 8, 200, 5, optimizer="adam", baseline=dynamic_sgd),
        Case("tiny_sequence", 2, 512, 8, 200, 1, pooling="NONE", baseline=dynamic_sgd),
        Case("tiny_new", 2, 512, 8, 200, 5, new_share=0.5, baseline=dynamic_sgd),
        Case("tiny_cold", 2, 512, 8, 200, 1, pooling="NONE", cold=True, baseline=dynamic_sgd),
        Case("tiny_crowd", 2, 512, 8, 200, 5, population=10_000, alpha=1.05, baseline=dynamic_sgd),
        Case("tiny_mix", 2, 512, 8, 200, bag_lengths=(1, 9), baseline=dynamic_sgd),
        Case("tiny_bf16", 2, 512, 8, 200, 5, dtype="bf16", baseline=dynamic_sgd),
    ],
    ids=lambda case: case.name,
)
def test_a_case_runs(case: Case) -> None:
    line = run_case(case, EFFORT)
    names = ["dynamicemb SGD", "dynamicemb"]
    assert list(line["engines"]) == names == [line["baseline"], line["ours"]]
    base, ours = line["engines"].values()
    assert base["ratio"] == 1
    assert ours["ratio"] == ours["ms"] / base["ms"]
    assert ours["gbps"] == pytest.approx(line["bytes"] / ours["ms"] / 1e6)
    assert ours["repetitions"] == (2 if case.cold else 4)
    # Clock and counters of tiny tables weigh half a byte a slot.
    assert 25 <= line["index_bytes_per_slot"] < 26
    phases = line["phases_ms"]
    assert {"find", "python", "total"} <= set(phases)
    assert ("insert" in phases) == case.train
    assert ("gather" if case.pooling == "NONE" else "pool") in phases
    assert ("initialize" in phases) == bool(case.changes or case.cold)
    if case.changes:
        assert line["evicted_per_step"] > 0
    elif case.cold:
        assert line["inserted_per_step"] == line["unique"]
    else:
        assert line["inserted_per_step"] == line["evicted_per_step"] == 0


def test_a_missing_baseline_leaves_our_times_without_ratios() -> None:
    line = run_case(replace(TINY, baseline=broken, target=0.5), Effort(2, 2, 0))
    assert list(line["engines"]) == ["dynamicemb"]
    assert line["engines"]["dynamicemb"]["ratio"] is None
    assert line["errors"] == {"baseline": "RuntimeError: this engine"}
    console = Console(width=200, record=True)
    report.print_results([{**describe("cpu"), **line}], console)
    assert "tiny: baseline did not run: RuntimeError: this engine" in console.export_text()


def test_phases_leave_the_module_as_it_was() -> None:
    engine = dynamic(TINY)
    kernels = engine.module.tables.kernels
    run_case(Case("tiny", 2, 512, 8, 200, 5, baseline=dynamic_sgd, ours=lambda case: engine), EFFORT)
    assert engine.module.tables.kernels is kernels


LIMITS = ["--max-rows", "512", "--max-ids", "200", "--rounds", "2", "--steps", "2", "--quiet", "0", "--phases"]


@pytest.mark.usefixtures("threads_as_before")
def test_command_line_writes_json_lines_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fbgemm_gpu")
    where = ["--device", "cpu", "--out", str(tmp_path)]
    assert main([*where, "--cases", "sgd_train", "eval", "--commit", "abc", *LIMITS]) == 0
    lines = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == ["sgd_train", "eval"]
    assert {"commit", "cpu", "torch", "numba", "fbgemm", "date", "threads", "load", "copy_gbps"} <= set(lines[0])
    assert lines[0]["commit"] == "abc"
    assert lines[0]["baseline"] == "fbgemm TBE"
    assert lines[0]["targets"] == {"dynamicemb": 1.5}
    pictures = plot.plot(lines, tmp_path / "again", "cpu")
    assert [path.name for path in pictures] == [path.name for path in tmp_path.glob("*.png")]
    # The report is the same when it is made from the file.
    tables = capsys.readouterr().out.split("copy bandwidth")[1]
    assert main([*where, "--report"]) == 0
    assert capsys.readouterr().out.split("copy bandwidth")[1] == tables
    assert "1.50" in tables and "phases of our eager step" in tables


@pytest.mark.usefixtures("threads_as_before")
def test_a_case_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "cpu", [replace(TINY, name="bad", ours=broken), TINY])
    assert main(["--device", "cpu", "--out", str(tmp_path), *LIMITS]) == 1
    bad, good = (json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines())
    assert (bad["case"], bad["error"]) == ("bad", "RuntimeError: this engine")
    assert good["case"] == "tiny" and good["engines"]["dynamicemb"]["ms"] > 0
    assert "bad FAILED: RuntimeError: this engine" in capsys.readouterr().out


def gpu_line(**changes: Any) -> dict[str, Any]:
    """Return a line as a GPU writes it: TBE 2.0 and 1.0 ms, ours 3.0 and 0.8 ms, eager and in a graph."""
    line = {**describe("cpu"), **run_case(TINY, Effort(2, 2, 0))}
    result = line["engines"]["dynamicemb"]
    times = {"fbgemm TBE eager": 2.0, "fbgemm TBE graph": 1.0, "dynamicemb eager": 3.0, "dynamicemb graph": 0.8}
    engines = {name: {**result, "ms": ms, "ratio": ms / 2} for name, ms in times.items()}
    names = {"baseline": "fbgemm TBE eager", "ours": "dynamicemb graph", "ours_eager": "dynamicemb eager"}
    targets = {"dynamicemb graph": 0.5, "dynamicemb eager": 1.0}
    return {**line, **names, "device": "cuda", "engines": engines, "targets": targets, **changes}


def test_a_gpu_report_compares_eager_with_eager_and_graph_with_both() -> None:
    console = Console(width=250, record=True)
    line = gpu_line(clock="wall, loop of steps", inserted_per_step=7.0)
    report.print_results([line], console)
    text = console.export_text()
    (row,) = [row for row in text.splitlines() if "0.40" in row and "1.50" in row]
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[2] == "7"
    assert cells[4:] == ["2.000", "1.000", "3.000", "0.800", "1.50", "0.40", "0.80", "0.50 ok", "1.00 MISSED"]
    assert "the host bounds eager steps" in text
    assert report.one_line(line).endswith("ratio 0.40 0.50 ok")


def check_growth(case: Case) -> None:
    line = run_case(case, Effort(rounds=2, steps=2, quiet=0))
    # No graph: a table that may grow refuses it.
    suffix = " eager" if case.device == "cuda" else ""
    assert list(line["engines"]) == [f"dynamicemb, grown{suffix}", f"dynamicemb, growing{suffix}"]
    assert not line["errors"] and line["evicted_per_step"] == 0 < line["inserted_per_step"] < case.num_ids
    ours, base = line["engines"][line["ours"]], line["engines"][line["baseline"]]
    assert line["growth_ns_per_id"] == pytest.approx((ours["ms"] - base["ms"]) * 1e6 / (case.tables * case.rows))
    assert f"growth takes {line['growth_ns_per_id']:.1f} ns for each id held" in report._remarks(line)


def test_a_case_of_growth_doubles_the_tables_in_every_step() -> None:
    (case,) = select(["growth"], "cpu")
    assert isinstance(case, Case)
    small = case.shrink(1 << 11, 500)
    check_growth(small)
    engine = small.ours(small)
    batch = next(batches(small, engine.residents, 1))
    for _ in range(2):
        assert engine.prepare is not None
        engine.prepare(engine, batch)
        assert engine.module.tables.capacities == [2 << 11]
        engine.step(batch)
        assert engine.module.tables.capacities == [4 << 11]
        assert engine.module.memory_usage()["index"] == engine.memory["index"]


@pytest.mark.cuda
def test_a_gpu_case_of_growth_runs() -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    (case,) = select(["a_growth"], "cuda")
    assert isinstance(case, Case)
    check_growth(case.shrink(1 << 14, 500))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", ["a_adam_train", "a_eval", "a_first_step", "a_new_ids_train", "a_full_train", "small_sum_train"]
)
def test_a_gpu_case_runs_eager_and_in_a_graph(name: str) -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    (case,) = select([name], "cuda")
    assert isinstance(case, Case)
    small = replace(case.shrink(20_000, 20_000), baseline=dynamic_sgd)
    line = run_case(small, Effort(2, 2, 0, phases=True))
    assert not line["errors"]
    assert list(line["engines"]) == [
        "dynamicemb SGD eager",
        "dynamicemb SGD graph",
        "dynamicemb eager",
        "dynamicemb graph",
    ]
    assert (line["evicted_per_step"] > 0) == (name == "a_full_train")
    assert (line["inserted_per_step"] > 0) == (case.changes or case.cold)
    if case.cold:
        assert line["inserted_per_step"] == line["unique"]
    phases = line["phases_ms"]
    assert ("update" in phases) == case.train
    assert 0 < sum(ms for phase, ms in phases.items() if phase != "total")
