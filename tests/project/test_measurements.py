"""docs/measurements.md and the pictures say what the results say."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page, plot
from benchmarks.__main__ import RESULTS, main
from benchmarks.cases import CASES, select
from benchmarks.questions import QUESTIONS, Question, Times, answered, target_of

MACHINE = {
    "date": "2026-11-30T11:19:13+00:00",
    "commit": "f61574d00000",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "cpu": "Xeon",
    "cores": 32,
    "threads": 16,
    "omp_wait_policy": "default",
    "python": "3.12.3",
    "torch": "2.11.0",
    "numba": "0.68.0",
    "triton": "3.6.0",
    "fbgemm": "1.6.0",
}


def gpu_line(case: str, base: str = "fbgemm TBE", **changes: Any) -> dict[str, Any]:
    """Return a result: the baseline 2.0 ms eager and 1.0 in a graph, ours 3.0 and 0.8."""
    times = {f"{base} eager": 2.0, f"{base} graph": 1.0, "dynamicemb eager": 3.0, "dynamicemb graph": 0.8}
    return {
        **MACHINE,
        "case": case,
        "device": "cuda",
        "engines": {name: {"ms": ms} for name, ms in times.items()},
        "baseline": f"{base} eager",
        "ours": "dynamicemb graph",
        "ours_eager": "dynamicemb eager",
        "targets": {"dynamicemb graph": 0.5, "dynamicemb eager": 1.0},
        "evicted_per_step": 8764.7,
        **changes,
    }


def cpu_line(case: str, **changes: Any) -> dict[str, Any]:
    """Return a result: the baseline 4.0 ms, ours 3.0."""
    machine = {key: value for key, value in MACHINE.items() if key not in ("gpu", "driver", "cuda")}
    return {
        **machine,
        "case": case,
        "device": "cpu",
        "engines": {"fbgemm TBE": {"ms": 4.0}, "dynamicemb": {"ms": 3.0}},
        "baseline": "fbgemm TBE",
        "ours": "dynamicemb",
        "ours_eager": "dynamicemb",
        "targets": {"dynamicemb": 1.5},
        "evicted_per_step": 0.0,
        **changes,
    }


def fill(template: str, folder: Path, **files: list[dict[str, Any]]) -> str:
    """Return a filled template, with these lines as results."""
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return page.fill(template, folder)


def test_the_page_is_what_the_command_writes() -> None:
    wanted = page.fill(page.TEMPLATE.read_text(), RESULTS)
    assert page.PAGE.read_text() == wanted, "run python -m benchmarks --page"


def test_the_command_writes_page_and_pictures_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    for file in RESULTS.glob("*.jsonl"):
        (tmp_path / file.name).write_text(file.read_text())
    assert main(["--page", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "page.md").read_text() == page.fill(page.TEMPLATE.read_text(), RESULTS)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures in (set(), {path.name for path in RESULTS.glob("*.png")})


def test_every_case_belongs_to_one_question_of_its_device() -> None:
    for device, cases in CASES.items():
        asked = [case for question in QUESTIONS if question.device == device for case in question.cases]
        assert sorted(asked) == sorted(case.name for case in cases)


def test_the_page_has_every_question_that_results_answer() -> None:
    text = page.PAGE.read_text()
    measured = {
        json.loads(line).get("case") for file in RESULTS.glob("*.jsonl") for line in file.read_text().splitlines()
    }
    assert len(measured) > 50
    for question in QUESTIONS:
        for case, words in question.cases.items() if question.pictured else ():
            assert f"| {words} |" in text or case not in measured


def test_a_row_has_times_ratios_and_missed_targets(tmp_path: Path) -> None:
    text = fill("{{steps: gpu, training}}", tmp_path, gpu=[gpu_line("a_adam_train"), gpu_line("a_sgd_train")])
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    numbers = "2.00 | 1.00 | 3.00 | 0.800 | 1.50 | 0.40 | 0.80 | 0.50; eager 1.00, missed |"
    assert rows == [f"| SGD | {numbers}", f"| Adam | {numbers}"]
    missed = gpu_line("a_sgd_train", targets={"dynamicemb graph": 0.39})
    assert "| 0.39, missed |" in fill("{{steps: gpu, training}}", tmp_path, gpu=[missed])


def test_policies_stand_beside_plain_tables_in_the_same_mode(tmp_path: Path) -> None:
    line = gpu_line("a_full_lfu", "dynamicemb LRU", targets={"dynamicemb graph": 0.7})
    text = fill("{{policies: gpu, policies}}", tmp_path, gpu=[line])
    assert "| LFU | 2.00 | 1.00 | 3.00 | 0.800 | 1.50 | 0.80 | 8,765 | 0.70, missed |" in text


def test_the_cpu_table_joins_two_files(tmp_path: Path) -> None:
    spinning = cpu_line("eval", engines={"fbgemm TBE": {"ms": 2.0}, "dynamicemb": {"ms": 4.0}})
    lines = [cpu_line("sgd_train"), cpu_line("eval")]
    text = fill("{{cpu: sleeping, spinning}}", tmp_path, sleeping=lines, spinning=[spinning])
    assert "| SGD | 4.00 | 3.00 | 0.75 |  |  |  | 1.50 |" in text
    assert "| evaluation | 4.00 | 3.00 | 0.75 | 2.00 | 4.00 | 2.00 | 1.50 |" in text
    assert "`sleeping.jsonl`" in text and "`spinning.jsonl`" in text


def test_the_last_line_of_a_case_counts_and_errors_do_not(tmp_path: Path) -> None:
    old, new = gpu_line("a_eval", unique=1), gpu_line("a_eval", unique=123456)
    failed = {**MACHINE, "case": "a_eval", "device": "cuda", "error": "RuntimeError: no"}
    text = fill("{{value: gpu, a_eval, unique, ;d}} ids", tmp_path, gpu=[old, new, failed])
    assert text == "123,456 ids"


def test_phases_are_those_of_the_last_line_that_has_some(tmp_path: Path) -> None:
    measured = gpu_line("a_eval", phases_ms={"find": 0.04, "total": 0.3}, commit="aaaaaaa")
    text = fill("{{phases: gpu, a_eval=evaluation}}", tmp_path, gpu=[measured, gpu_line("a_eval")])
    assert "| phase, ms | evaluation |\n|---|---:|\n| find | 0.040 |\n| total | 0.300 |" in text
    assert "commit aaaaaaa" in text


def kind_line(case: str, engines: dict[str, Any], ours: str, **changes: Any) -> dict[str, Any]:
    """Return a result of another kind than a step of tables alone; its baseline is the first engine."""
    return gpu_line(case, engines=engines, baseline=next(iter(engines)), ours=ours, ours_eager=ours, **changes)


def test_a_question_without_results_names_the_command(tmp_path: Path) -> None:
    patterns = {"torchrec: gpu": "torchrec_*", "host: gpu": "host_*", "size: gpu": "size_dim_*"}
    for place, pattern in {**patterns, "steps: gpu, mix": "a_mix_*"}.items():
        text = fill(f"{{{{{place}}}}}", tmp_path, gpu=[gpu_line("a_eval")])
        assert text == f"Not measured yet: `python -m benchmarks --device cuda --cases '{pattern}'`."
        named = {case.name for case in select([pattern], "cuda")}
        assert named in [set(question.cases) for question in QUESTIONS]


def test_torchrec_stands_beside_both_static_plans_and_a_constant(tmp_path: Path) -> None:
    times = {"static, table-wise": 2.0, "static, row-wise": 4.0, "dynamicemb": 3.0, "a constant lookup": 1.5}
    engines = {name: {"ms": ms, "ratio": ms / 2} for name, ms in times.items()}
    line = kind_line("torchrec_mlperf_train", engines, "dynamicemb", torchrec_share=0.5)
    text = fill("{{torchrec: gpu}}", tmp_path, gpu=[line])
    assert "| MLPerf's bags, training | 2.00 | 4.00 | 3.00 | 1.50 | 1.50 | 0.50 |" in text
    assert "gpu_torchrec.png" in text
    assert plot.points(question("torchrec", "cuda"), line) == {
        "dynamicemb, eager": 1.5,
        "TorchRec around a constant lookup": 0.75,
    }


def test_host_time_has_loops_device_launches_and_phases(tmp_path: Path) -> None:
    def engine(ms: float) -> dict[str, Any]:
        counts = {"launches": 10 * ms, "copies": 0.0, "kernels": 9.0, "ops": 20 * ms}
        return {"ms": ms, "ratio": ms / 2, "burst_ms": ms / 4, "device_ms": ms / 8, "counts": counts}

    phases = {"find": 0.5, "outside of phases": 0.25, "total": 0.75}
    engines = {"fbgemm TBE": engine(2.0), "dynamicemb": engine(1.0)}
    line = kind_line("host_sum_adam_65k", engines, "dynamicemb", phases_ms=phases, targets={})
    text = fill("{{host: gpu}}", tmp_path, gpu=[line])
    numbers = "2.00 | 1.00 | 0.50 | 0.500 | 0.250 | 0.250 | 0.125 | 20 | 10 | 40 | 20 |"
    assert f"| SUM, Adam, 65 thousand ids | {numbers}" in text
    assert "| our step on the host, ms | find | outside of phases | total |" in text
    assert "| SUM, Adam, 65 thousand ids | 0.500 | 0.250 | 0.750 |" in text


def test_a_table_size_that_did_not_fit_is_left_empty(tmp_path: Path) -> None:
    engines = {f"{rows:,} rows": {"ms": ms, "ratio": ms} for rows, ms in ((10**6, 1.0), (10**7, 1.1))}
    smaller = kind_line("size_dim_16_find", engines, "10,000,000 rows", rows=[10**6, 10**7])
    engines = {**engines, "100,000,000 rows": {"ms": 1.2, "ratio": 1.2}}
    larger = kind_line("size_dim_16_train", engines, "100,000,000 rows", rows=[10**6, 10**7, 10**8])
    text = fill("{{size: gpu}}", tmp_path, gpu=[smaller, larger])
    assert "| step, ms | 1,000,000 rows | 10,000,000 rows | 100,000,000 rows | largest / smallest |" in text
    assert "| evaluation, D = 16 | 1.00 | 1.10 |  | 1.10 |" in text
    assert "| training, D = 16 | 1.00 | 1.10 | 1.20 | 1.20 |" in text


def test_growth_is_told_for_each_machine(tmp_path: Path) -> None:
    line = cpu_line("growth", tables=2, rows=500, growth_ns_per_id=129.73)
    assert "| Xeon | 1,000 ids | 4.00 | 3.00 | 129.7 |" in fill("{{growth: cpu}}", tmp_path, cpu=[line])


def test_a_source_names_machine_versions_commit_and_day_once() -> None:
    text = page.source("h200", [gpu_line("a_eval"), gpu_line("a_sgd_train"), gpu_line("a_eval", commit="abc")])
    assert text.replace("\n", " ").startswith(
        "`h200.jsonl`, commit f61574d, 2026-11-30: NVIDIA H200, driver 580.1, CUDA 13.0; Xeon, 32 cores, 16 threads, "
        "OMP_WAIT_POLICY default; Python 3.12.3, torch 2.11.0, Triton 3.6.0, fbgemm_gpu 1.6.0, numba 0.68.0. "
        "`h200.jsonl`, commit abc, "
    )
    assert text.count("NVIDIA H200") == 2
    assert max(map(len, text.splitlines())) <= 120


def test_prose_is_wrapped_after_it_is_filled(tmp_path: Path) -> None:
    template = "one {{value: gpu, a_eval, case, s}}\ntwo\n\n| {{value: gpu, a_eval, case, s}} |\n| cell |\n"
    text = fill(template, tmp_path, gpu=[gpu_line("a_eval")])
    assert text == "one a_eval two\n\n| a_eval |\n| cell |\n"


def test_a_place_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="stepz"):
        fill("{{stepz: gpu, training}}", tmp_path)
    with pytest.raises(KeyError, match="a_eval"):
        fill("{{value: gpu, a_eval, unique, d}}", tmp_path, gpu=[gpu_line("a_sgd_train")])


def question(name: str, device: str) -> Question:
    """Return the question of this name and device."""
    (found,) = [entry for entry in QUESTIONS if (entry.name, entry.device) == (name, device)]
    return found


def test_a_picture_shows_the_ratios_of_the_table() -> None:
    assert plot.points(question("training", "cuda"), gpu_line("a_sgd_train")) == {
        "dynamicemb, in a graph": 0.4,
        "dynamicemb, eager": 1.5,
        "FBGEMM, in a graph": 0.5,
        "target, in a graph": 0.5,
    }
    policy = gpu_line("a_full_lfu", "dynamicemb LRU", targets={})
    assert plot.points(question("policies", "cuda"), policy) == {
        "dynamicemb, in a graph": 0.8,
        "dynamicemb, eager": 1.5,
    }
    assert plot.points(question("steps", "cpu"), cpu_line("eval")) == {"dynamicemb": 0.75, "target": 1.5}


def test_one_picture_for_each_question_with_an_answer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [gpu_line("a_eval"), gpu_line("a_sgd_train"), gpu_line("a_growth"), gpu_line("unknown")]
    lines.append({**MACHINE, "case": "small_eval", "device": "cuda", "error": "RuntimeError: no"})
    pictures = plot.plot(lines, tmp_path, "gpu")
    assert [path.name for path in pictures] == ["gpu_training.png", "gpu_evaluation.png"]
    assert all(path.exists() for path in pictures)


def test_a_result_without_a_graph_or_a_baseline() -> None:
    engines = {"fbgemm TBE eager": {"ms": 2.0}, "dynamicemb eager": {"ms": 1.0}}
    line = gpu_line("a_eval", engines=engines, ours="dynamicemb eager", targets={"dynamicemb eager": 0.7})
    assert Times.of(line) == Times(2.0, None, 1.0, None)
    assert (Times.of(line).eager, Times.of(line).graph_to_eager, Times.of(line).graph) == (0.5, None, None)
    assert (target_of(line), target_of(line, eager=True)) == (0.7, None)
    assert answered(question("evaluation", "cuda"), [gpu_line("a_eval", baseline="")]) == []


def test_a_case_that_fails_leaves_its_last_result_in_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    failed = {**MACHINE, "case": "a_eval", "device": "cuda", "error": "RuntimeError: no"}
    lines = [gpu_line("a_eval"), failed]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(page, "write", lambda folder, path: None)
    assert main(["--page", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["gpu_evaluation.png"]
