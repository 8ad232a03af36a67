"""The benchmarks run on tiny sizes, compare the same work, and write what they say they write."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.cases import CASES, Case, select
from benchmarks.engines import dynamic, dynamic_sgd
from benchmarks.runner import Effort, run_case
from benchmarks.timing import ENOUGH_QUIET, Sample, Times
from benchmarks.workloads import batches, bytes_moved

TINY = Case("tiny", tables=2, rows=512, dim=8, num_ids=200, bag_length=5, baseline=dynamic_sgd)
EFFORT = Effort(rounds=2, steps=2, quiet=0, phases=True)


def test_case_names_are_distinct() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_select_matches_patterns_and_refuses_unknown_ones() -> None:
    assert [case.name for case in select(["adam_train", "batch_64_*"])] == [
        "adam_train",
        "batch_64_train",
        "batch_64_eval",
    ]
    assert select([]) == CASES
    with pytest.raises(ValueError, match="no case matches 'sdg'"):
        select(["sdg"])


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


def test_new_ids_are_new_in_every_batch() -> None:
    case = Case("new", tables=2, rows=64, dim=4, num_ids=2000, bag_length=5, new_share=0.1)
    first, second = itertools.islice(batches(case, [torch.arange(64)] * 2, seed=1), 2)
    new = [batch.ids[batch.ids != batch.known_ids] for batch in (first, second)]
    assert all(120 < ids.numel() < 280 for ids in new)
    assert torch.cat(new).unique().numel() == new[0].numel() + new[1].numel()
    assert first.known_ids.max() < 32


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
    ],
    ids=lambda case: case.name,
)
def test_a_case_runs(case: Case) -> None:
    line = run_case(case, EFFORT)
    assert line["repetitions"] == 4
    assert line["ratio"] == line["ours"]["ms"] / line["baseline"]["ms"]
    assert 25 <= line["index_bytes_per_slot"] < 25.5
    assert {"find", "python", "total"} <= set(line["phases_ms"])
    phases = line["phases_ms"]
    assert ("insert" in phases) == case.train
    assert ("gather" if case.pooling == "NONE" else "pool") in phases
    if case.new_share:
        assert line["evicted_per_step"] > 0
        assert "initialize" in phases


def test_phases_leave_the_module_as_it_was() -> None:
    engine = dynamic(TINY)
    kernels = engine.module.tables.kernels
    run_case(Case("tiny", 2, 512, 8, 200, 5, baseline=dynamic_sgd, ours=lambda case: engine), EFFORT)
    assert engine.module.tables.kernels is kernels


def test_command_line_writes_json_lines_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    threads = torch.get_num_threads()
    limits = ["--max-rows", "512", "--max-ids", "200", "--rounds", "2", "--steps", "2", "--quiet", "0", "--phases"]
    try:
        assert main(["--cases", "sgd_train", "eval", "--out", str(tmp_path), *limits]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == ["sgd_train", "eval"]
    assert {"commit", "cpu", "torch", "numba", "fbgemm", "date", "threads", "load", "copy_gbps"} <= set(lines[0])
    assert lines[0]["baseline"]["name"] == "fbgemm TBE"
    assert report.plot(lines, tmp_path / "again.png") == (tmp_path / "cpu.png").exists()
