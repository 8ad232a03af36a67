"""Benchmarks of TorchRec, host time and table sizes: engines do the same work, and lines say what was measured."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.__main__ import main, parse
from benchmarks.against import HERE, OTHER, THIS, Limits, run_against
from benchmarks.cases import CASES, select
from benchmarks.host import runner as host_runner
from benchmarks.host.breakdown import OUTSIDE, PhaseClock, count_calls, host_phases
from benchmarks.host.cases import GPU_HOST, HostCase
from benchmarks.kinds import alone, run_case
from benchmarks.report_kinds import print_kinds, remarks
from benchmarks.sharded import runner as sharded_runner
from benchmarks.sharded.batches import draw, filling, fresh
from benchmarks.sharded.cases import GPU_SHARDED, ShardedCase
from benchmarks.sharded.models import BUILDERS, CONSTANT, FIRST_VALUE, OURS, STATIC
from benchmarks.sharded.ranks import agree, on_ranks, process_group, slowest
from benchmarks.sizes import runner as size_runner
from benchmarks.sizes.cases import GPU_SIZES, SizeCase
from benchmarks.step_case import Case
from benchmarks.timing import Sample
from benchmarks.turns import Effort, take_turns

pytest.importorskip("fbgemm_gpu")

EFFORT = Effort(rounds=2, steps=2, quiet=0, phases=True, loop=5)
CPU = torch.device("cpu")
BAGS = ShardedCase("bags", True, (3, 200, 500), (2, 1, 5), 8, 40, "exact_row_wise_adagrad", device="cpu")
SEQUENCES = ShardedCase("sequences", False, (100, 500), (10, 10), 8, 20, "exact_sgd", device="cpu")


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", [BAGS, SEQUENCES], ids=lambda case: case.name)
@pytest.mark.parametrize("train", [True, False])
def test_sharded_engines_return_the_same_while_they_train(case: ShardedCase, train: bool) -> None:
    case = replace(case, train=train)
    with process_group("cpu") as device:
        batches = draw(case, 3, 0, device)
        models = {name: BUILDERS[name](case, device) for name in BUILDERS}
        for batch in [*batches, *batches]:
            outputs = {name: model.step(batch) for name, model in models.items()}
            for name in STATIC:
                torch.testing.assert_close(outputs[name], outputs[OURS], rtol=1e-5, atol=1e-6)
            assert [o.shape for o in outputs[CONSTANT]] == [o.shape for o in outputs[OURS]]
            assert all(bool((o == FIRST_VALUE).all()) for o in outputs[CONSTANT])
        (first,) = outputs[OURS][:1]
        # Rows were trained, so that equal outputs say something.
        assert first.unique().numel() > 100 if train else first.unique().numel() <= 3


def test_a_sharded_batch_has_the_lengths_of_its_features_and_ids_of_its_tables() -> None:
    (batch,) = draw(BAGS, 1, 0, CPU)
    assert batch.lengths().tolist() == [2] * 40 + [1] * 40 + [5] * 40
    for part, rows in zip(batch.values().split([80, 40, 200]), BAGS.rows, strict=True):
        assert 0 <= part.min() and part.max() < rows
    (other,) = draw(BAGS, 1, 1, CPU)
    assert not batch.values().equal(other.values())


def test_a_fresh_batch_has_forgotten_its_sums() -> None:
    (batch,) = draw(BAGS, 1, 0, CPU)
    assert batch.length_per_key() == [80, 40, 200] == batch.length_per_key_or_none()
    again = fresh(batch)
    assert again.length_per_key_or_none() is None and again.values() is batch.values() and again.stride() == 40
    sample = sharded_runner._sample([batch, batch], 3, EFFORT)
    assert len(sample) == 1 + EFFORT.steps and all(one.length_per_key_or_none() is None for one in sample)


def test_filling_has_every_id_of_every_table_once() -> None:
    parts: list[list[int]] = [[], [], []]
    for batch in filling(replace(BAGS, rows=(3, 200, 70_000)), CPU):
        for found, feature in zip(parts, batch.to_dict().values(), strict=True):
            found += feature.values().tolist()
    assert parts == [list(range(3)), list(range(200)), list(range(70_000))]


def test_a_sharded_case_takes_the_faster_static_plan_as_its_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    line = run_case(BAGS, EFFORT)
    assert list(line["engines"]) == [*STATIC, OURS, CONSTANT]
    times = {name: engine["ms"] for name, engine in line["engines"].items()}
    fastest = min(times[name] for name in STATIC)
    assert times[line["baseline"]] == fastest
    assert line["engines"][OURS]["ratio"] == pytest.approx(times[OURS] / fastest)
    assert line["torchrec_share"] == pytest.approx(times[CONSTANT] / times[OURS])
    assert line["engines"][OURS]["repetitions"] == 4
    assert line["inserted_per_step"] == line["evicted_per_step"] == line["failed_per_step"] == 0
    assert set(line["differences"]) == set(STATIC) and max(line["differences"].values()) < 1e-4
    assert {"find_or_insert", "read", "update", OUTSIDE, "total"} <= set(line["phases_ms"])
    assert line["counts"][OURS]["ops"] > line["counts"][CONSTANT]["ops"] > 0
    assert not line["errors"]
    assert any("constant lookup" in text for text in remarks(line))


def test_an_optimizer_that_static_tables_lack_leaves_our_times() -> None:
    line = run_case(replace(SEQUENCES, optimizer="adam"), replace(EFFORT, phases=False))
    assert list(line["engines"]) == [OURS, CONSTANT]
    assert set(line["errors"]) == set(STATIC) and line["baseline"] == ""
    assert line["engines"][OURS]["ratio"] is None


def test_a_sharded_case_runs_on_two_ranks() -> None:
    case = SEQUENCES.on_ranks(2)
    assert (case.name, case.ranks, SEQUENCES.on_ranks(1)) == ("sequences_2_ranks", 2, SEQUENCES)
    line = run_case(case, replace(EFFORT, phases=False))
    assert line["ranks"] == 2 and not line["errors"]
    assert set(line["engines"]) == {*STATIC, OURS, CONSTANT}
    assert max(line["differences"].values()) < 1e-5
    result = line["engines"][OURS]
    assert result["ids_per_s"] == pytest.approx(2 * line["ids"] / result["ms"] * 1e3)


def _ask_ranks(device: torch.device) -> tuple[list[float], bool]:
    rank = torch.distributed.get_rank()
    return slowest([1.0 + rank, 5.0 - rank]), agree(rank == 1)


def test_a_step_lasts_as_long_as_its_slowest_rank_and_rank_0_decides() -> None:
    assert on_ranks(2, "cpu", _ask_ranks) == ([2.0, 5.0], False)
    assert on_ranks(1, "cpu", _ask_ranks) == ([1.0, 5.0], False)


def test_workloads_under_torchrec_are_those_of_mlperf() -> None:
    ids = {case.name: case.num_ids for case in GPU_SHARDED if case.train}
    assert ids == {
        "torchrec_mlperf_train": 1_753_088,
        "torchrec_one_id_train": 212_992,
        "torchrec_sequences_train": 1_024_000,
    }
    for case in GPU_SHARDED:
        # Two static models and ours, with half again as many slots, and state of Adam, beside each other.
        state = 3 if case.optimizer == "adam" else 1
        assert 3.5 * sum(case.rows) * case.dim * 4 * state < 110e9


HOST = HostCase(Case("host", tables=2, rows=256, dim=8, num_ids=40, bag_length=2))


def test_host_time_is_of_the_best_loop_and_counts_calls() -> None:
    line = run_case(HOST, EFFORT)
    assert list(line["engines"]) == ["fbgemm TBE", "dynamicemb"] == [line["baseline"], line["ours"]]
    base, ours = line["engines"].values()
    assert ours["ms"] == ours["min_ms"] <= ours["median_ms"]
    assert ours["ratio"] == pytest.approx(ours["ms"] / base["ms"])
    assert ours["repetitions"] == 2 and ours["burst_ms"] > 0 and ours["device_ms"] is None
    assert ours["counts"]["ops"] > 0 and ours["counts"]["launches"] == ours["counts"]["kernels"] == 0
    phases = line["phases_ms"]
    assert list(phases)[-2:] == [OUTSIDE, "total"]
    assert {"check", "find_or_insert", "read", "update"} <= set(phases) and min(phases.values()) > 0


def test_engines_of_host_time_do_the_same_work() -> None:
    """Outputs agree after the same steps of rows that begin alike."""
    engines, sample, errors = host_runner._enter(HOST.step)
    assert not errors
    ours, tbe = engines["dynamicemb"].module, engines["fbgemm TBE"].module
    weights = tbe.split_embedding_weights()
    for name, weight in zip(ours.table_names, weights, strict=True):
        ids, rows = ours.export_keys_values(name, CPU)
        weight.data[ids] = rows
    for batch in sample[:3]:
        for engine in engines.values():
            engine.step(batch)
    ids, offsets = sample[3].ids, sample[3].offsets
    torch.testing.assert_close(ours(ids, offsets), tbe(ids, offsets), rtol=1e-5, atol=1e-6)


def test_a_loop_runs_so_many_steps_without_a_pause() -> None:
    engines, sample, _ = host_runner._enter(HOST.step)
    seen = []
    engine = replace(engines["dynamicemb"], step=seen.append)
    host_runner.loop(engine, sample[:3], 7)
    assert [id(batch) for batch in seen] == [id(sample[number % 3]) for number in range(7)]


def test_host_cases_have_the_sizes_optimizers_and_poolings_asked_for() -> None:
    shapes = [(case.step.pooling, case.step.optimizer, case.step.num_ids) for case in GPU_HOST]
    sizes = (64, 4_100, 65_536, 1_048_576)
    assert shapes == list(itertools.product(("NONE", "SUM"), ("exact_sgd", "adam"), sizes))
    assert parse(["--device", "cuda"]).loop == 300
    assert max(case.step.batch_size * sum(case.step.lengths) for case in GPU_HOST[::4]) == 60


def test_time_in_an_inner_phase_is_not_counted_in_the_outer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Outer from 0 to 9, inner from 2 to 5.
    monkeypatch.setattr("time.perf_counter", iter([0.0, 2.0, 5.0, 9.0]).__next__)
    clock = PhaseClock()
    with clock.phase("outer"), clock.phase("inner"):
        pass
    assert clock.seconds == {"outer": 6.0, "inner": 3.0}


def test_counted_ops_are_those_that_no_op_calls() -> None:
    values = torch.ones(4)
    # ``mean`` of an integer tensor and ``matmul`` call other ops.
    assert count_calls([lambda: (torch.matmul(values, values), values.add_(1))], "cpu")["ops"] == 2


def test_phases_leave_the_package_as_it_was() -> None:
    from dynamicemb.embedding import module
    from dynamicemb.embedding.phases import phase

    def look() -> None:
        assert module.phase is not phase

    assert host_phases([look], "cpu").keys() == {OUTSIDE, "total"}
    assert module.phase is phase


SIZES = SizeCase("sizes", (256, 1024, 4096), 8, 300, True, "cpu")


def test_the_largest_table_stands_beside_the_smallest() -> None:
    line = run_case(SIZES, EFFORT)
    assert list(line["engines"]) == ["256 rows", "1,024 rows", "4,096 rows"]
    assert (line["baseline"], line["ours"]) == ("256 rows", "4,096 rows")
    smallest, _, largest = line["engines"].values()
    assert largest["ratio"] == pytest.approx(largest["ms"] / smallest["ms"])
    assert line["inserted"] == dict.fromkeys(line["engines"], 0.0)
    assert line["unique"] > 100


def test_tables_of_all_sizes_return_the_same_rows_of_the_same_ids() -> None:
    engines, errors = size_runner._enter(SIZES, 0.5)
    sample = size_runner._batches(SIZES, list(engines.values()))
    size_runner._warm_up(engines, sample)
    assert not errors
    outputs = [engine.module(sample[0].ids, sample[0].offsets) for engine in engines.values()]
    assert outputs[0].abs().min() > 0
    assert outputs[0].equal(outputs[1]) and outputs[0].equal(outputs[2])
    fill = [engine.module.stats()["table_0"]["size"] for engine in engines.values()]
    assert fill == pytest.approx([0.8 * rows for rows in SIZES.rows], rel=0.02)


def test_memory_decides_which_sizes_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = 2 * (size_runner.bytes_of(SIZES, 256) + size_runner.bytes_of(SIZES, 1024)) + 1
    monkeypatch.setattr(size_runner, "free_bytes", lambda device: enough)
    engines, errors = size_runner._enter(SIZES, 0.5)
    assert list(engines) == ["256 rows", "1,024 rows"] and list(errors) == ["4,096 rows"]
    monkeypatch.setattr(size_runner, "free_bytes", lambda device: 1)
    with pytest.raises(MemoryError, match="256 rows"):
        size_runner._enter(SIZES, 0.5)


def test_bytes_of_a_table_are_what_it_takes() -> None:
    engine = size_runner._table(SIZES, 4096)
    assert sum(engine.memory.values()) == pytest.approx(size_runner.bytes_of(SIZES, 4096), rel=0.05)
    assert [case.rows[-1] for case in GPU_SIZES] == [10**9, 10**9, 10**8, 10**8]
    assert size_runner.bytes_of(GPU_SIZES[0], sum(GPU_SIZES[0].rows)) < 0.9 * 139 * 2**30


def test_turns_go_round_and_end_when_the_ranks_agree() -> None:
    order: list[str] = []

    def turn(number: int, name: str) -> list[Sample]:
        order.append(name)
        return [Sample(1.0, 1.0, True)]

    times = take_turns(["a", "b"], turn, Effort(rounds=3, steps=1, quiet=0))
    assert "".join(order) == "baabba" and len(times["a"].samples) == 3
    order.clear()
    take_turns(["a", "b"], turn, Effort(rounds=3, steps=1, quiet=0), agree=lambda wish: len(order) < 2)
    assert order == ["b", "a"]


@pytest.mark.parametrize("case", [HOST, SIZES, BAGS, HOST.step], ids=lambda case: case.name)
def test_our_engine_of_a_case_runs_alone(case: Any) -> None:
    with alone(case, EFFORT) as turn:
        for number in range(2):
            assert len(turn(number)) == (1 if case is HOST else 2)


@pytest.mark.usefixtures("threads_as_before")
def test_two_checkouts_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    # Another place for the same package.
    (other / "dynamicemb").symlink_to(HERE / "dynamicemb")
    out = ["--out", str(tmp_path), "--device", "cpu", "--max-rows", "300", "--max-ids", "60"]
    limits = ["--rounds", "2", "--steps", "1", "--quiet", "0", "--loop", "5"]
    assert main([*out, *limits, "--cases", "cpu_host_sum_sgd_64", "--against", str(other)]) == 0
    (line,) = (json.loads(text) for text in (tmp_path / "cpu_against.jsonl").read_text().splitlines())
    assert list(line["engines"]) == [OTHER, THIS] == [line["baseline"], line["ours"]]
    ours, base = line["engines"][THIS], line["engines"][OTHER]
    assert ours["ms"] == ours["min_ms"] and ours["ratio"] == pytest.approx(ours["ms"] / base["ms"], rel=1e-3)
    assert ours["repetitions"] == 2
    assert f"{OTHER} {base['ms']:.3f}, {THIS} {ours['ms']:.3f} ms; ratio" in capsys.readouterr().out


def test_another_checkout_must_have_the_package(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no folder dynamicemb"):
        run_against(HOST, EFFORT, tmp_path, Limits(1, 1, None))


def test_options_that_contradict_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--ranks", "0"], ["--ranks", "2", "--against", "x"], ["--against", "x", "--phases"]):
        with pytest.raises(SystemExit):
            parse(["--device", "cpu", *options])
    with pytest.raises(ValueError, match="--ranks 2 is for cases under TorchRec; sgd_train has one rank"):
        main(["--device", "cpu", "--ranks", "2", "--cases", "sgd_train", "--list"])


@pytest.mark.usefixtures("threads_as_before")
def test_the_command_runs_and_reports_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["cpu_torchrec_one_id_train", "cpu_host_sequence_sgd_64", "cpu_size_dim_16_find"]
    limits = ["--max-rows", "300", "--max-ids", "60", "--rounds", "2", "--steps", "1", "--quiet", "0", "--loop", "3"]
    where = ["--device", "cpu", "--out", str(tmp_path), "--cases", *cases]
    assert main([*where, *limits]) == 0
    lines = [json.loads(text) for text in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert sorted(line["kind"] for line in lines) == ["host", "size", "torchrec"]
    text = capsys.readouterr().out
    for title in ("steps under TorchRec", "time of an eager step on the host", "the same ids in tables of"):
        assert title in text
    assert main([*where, "--report"]) == 0


def test_a_report_says_where_the_work_was_not_the_same() -> None:
    engines = {"256 rows": {"ms": 1.0, "min_ms": 1.0, "ratio": 1.0}}
    line = {"case": "x", "kind": "size", "ids": 5, "engines": engines, "errors": {}, "inserted": {"256 rows": 3.0}}
    console = Console(width=200, record=True)
    print_kinds([line], console)
    assert "not the same work" in console.export_text()


def test_every_case_of_a_gpu_has_its_twin_in_kind_on_the_cpu() -> None:
    assert {type(case) for case in CASES["cuda"]} == {type(case) for case in CASES["cpu"]}
    assert select(["torchrec_*"], "cuda") == GPU_SHARDED
