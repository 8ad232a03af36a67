"""The page of the measurements: a template with hand-written text, filled with tables of the results.

``python -m benchmarks --page`` writes ``docs/measurements.md``. A place to fill is ``{{what: argument, ...}}``:

    {{steps: h200, training}}     times and ratios to FBGEMM on a GPU
    {{policies: h200, policies}}  the same, beside plain tables
    {{cpu: cpu, cpu_spinning}}    times and ratios to FBGEMM on the CPU, from two files
    {{plain: cpu, policies}}      the same, beside plain tables
    {{growth: h200, cpu}}         time of growth
    {{phases: h200, CASE=words, ...}}   phases of the last lines of these cases that have some
    {{torchrec: h200, cpu}}       times under TorchRec, of every machine that has some
    {{host: h200, cpu}}           times of the host, the same
    {{size: h200, cpu}}           times in tables of several sizes, the same
    {{value: h200, a_eval, engines/dynamicemb graph/ms, .3f}}   one number of the last line of a case
"""

import functools
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.questions import QUESTIONS, Line, Question, Times, answered, target_of
from benchmarks.report import read_all

TEMPLATE = Path(__file__).resolve().parent / "measurements.md"
PAGE = TEMPLATE.parent.parent / "docs" / "measurements.md"

_PLACE = re.compile(r"\{\{(\w+): ([^}]*)\}\}")
_WIDTH = 120


def write(results: Path, page: Path) -> None:
    """Write a page from the results in a folder."""
    page.write_text(fill(TEMPLATE.read_text(), results))


def fill(template: str, results: Path) -> str:
    """Return a template with every place filled.

    Raises:
        KeyError: a place that names nothing, or a result that is not there.
    """
    makers: dict[str, Callable[..., str]] = {
        "steps": _steps,
        "policies": _policies,
        "cpu": _cpu,
        "plain": _plain,
        "growth": _growth,
        "phases": _phases,
        "torchrec": functools.partial(_of_machines, "torchrec", _torchrec),
        "host": functools.partial(_of_machines, "host", _host),
        "size": functools.partial(_of_machines, "size", _size),
        "value": _value,
    }

    def made(place: re.Match[str]) -> str:
        arguments = [argument.strip() for argument in place[2].split(",")]
        return makers[place[1]](_Results(results), *arguments)

    # Only prose is wrapped: a table or a picture stands alone in its paragraph.
    paragraphs = template.split("\n\n")
    return "\n\n".join(_filled(paragraph, made) for paragraph in paragraphs)


def _filled(paragraph: str, made: Callable[[re.Match[str]], str]) -> str:
    text = _PLACE.sub(made, paragraph)
    is_prose = "{{value:" in paragraph and not paragraph.startswith("|")
    return _wrapped(text) + "\n" * paragraph.endswith("\n") if is_prose else text


def _wrapped(text: str) -> str:
    words = " ".join(text.split())
    return "\n".join(textwrap.wrap(words, _WIDTH, break_long_words=False, break_on_hyphens=False))


class _Results:
    """The files of results in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def all(self, name: str) -> list[Line]:
        """Return the lines of a file that have a result."""
        return [line for line in read_all(self._folder / f"{name}.jsonl") if "error" not in line]

    def latest(self, name: str) -> dict[str, Line]:
        """Return the last line of each case."""
        return {line["case"]: line for line in self.all(name)}

    def answered(self, name: str, question: str) -> tuple[Question, list[tuple[str, Line]]]:
        """Return a question, and words and last line of each of its cases."""
        lines = list(self.latest(name).values())
        device = lines[0]["device"]
        (found,) = [entry for entry in QUESTIONS if (entry.name, entry.device) == (question, device)]
        return found, answered(found, lines)


def source(name: str, lines: Iterable[Line]) -> str:
    """Return where lines of a file come from: one sentence for each machine, set of versions, commit and day."""
    sentences = dict.fromkeys(_origin(name, line) for line in lines)
    return _wrapped(" ".join(sentences))


def _origin(name: str, line: Line) -> str:
    gpu = f"{line['gpu']}, driver {line['driver']}, CUDA {line['cuda']}; " if "gpu" in line else ""
    cpu = f"{line['cpu']}, {line['cores']} cores, {line['threads']} threads, OMP_WAIT_POLICY {line['omp_wait_policy']}"
    packages = {"torch": "torch", "triton": "Triton", "fbgemm": "fbgemm_gpu", "numba": "numba"}
    versions = ", ".join(f"{words} {line[field]}" for field, words in packages.items() if line[field])
    where = f"`{name}.jsonl`, commit {line['commit'][:7]}, {line['date'][:10]}"
    return f"{where}: {gpu}{cpu}; Python {line['python']}, {versions}."


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, *rows]]
    lines.insert(1, "|---" + "|---:" * (len(header) - 1) + "|")
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:#.3g}".rstrip(".")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _target(ratio: float | None, target: float | None) -> str:
    if target is None or ratio is None:
        return ""
    return f"{target:.2f}" + ("" if ratio <= target else ", missed")


def _section(name: str, question: Question, table: str, lines: Iterable[Line]) -> str:
    """Return a table, where it comes from, and its picture."""
    picture = f"![The ratios of the table](../benchmarks/results/{name}_{question.name}.png)"
    return f"{table}\n\n{source(name, lines)}\n\n{picture}"


def _steps(results: _Results, name: str, question_name: str) -> str:
    question, pairs = results.answered(name, question_name)
    if not pairs:
        return _not_measured(question)
    header = ["step, ms", "TBE eager", "TBE graph", "ours eager", "ours graph"]
    header += ["eager / eager", "graph / eager", "graph / graph", "target"]
    rows = []
    for words, line in pairs:
        times = Times.of(line)
        target = _target(times.graph_to_eager, target_of(line))
        if eager := _target(times.eager, target_of(line, eager=True)):
            target += f"; eager {eager}"
        ms = (times.base_eager, times.base_graph, times.our_eager, times.our_graph)
        ratios = (times.eager, times.graph_to_eager, times.graph)
        rows.append([words, *map(_ms, ms), *map(_ratio, ratios), target])
    return _section(name, question, _table(header, rows), [line for _, line in pairs])


def _policies(results: _Results, name: str, question_name: str) -> str:
    question, pairs = results.answered(name, question_name)
    header = ["step, ms", "plain eager", "plain graph", "eager", "graph"]
    header += ["eager / eager", "graph / graph", "evicted a step", "target"]
    rows = []
    for words, line in pairs:
        times = Times.of(line)
        ms = (times.base_eager, times.base_graph, times.our_eager, times.our_graph)
        evicted = f"{line['evicted_per_step']:,.0f}"
        target = _target(times.graph, target_of(line))
        rows.append([words, *map(_ms, ms), _ratio(times.eager), _ratio(times.graph), evicted, target])
    return _section(name, question, _table(header, rows), [line for _, line in pairs])


def _cpu(results: _Results, name: str, spinning: str) -> str:
    question, pairs = results.answered(name, "steps")
    spins = results.latest(spinning)
    header = ["step, ms", "TBE, sleeping", "ours", "ratio", "TBE, spinning", "ours", "ratio", "target"]
    rows = []
    for words, line in pairs:
        times = Times.of(line)
        cells = [_ms(times.base_eager), _ms(times.our_eager), _ratio(times.eager)]
        spin = Times.of(spins[line["case"]]) if line["case"] in spins else Times(None, None, None, None)
        cells += [_ms(spin.base_eager), _ms(spin.our_eager), _ratio(spin.eager)]
        rows.append([words, *cells, _target(times.eager, target_of(line))])
    table = _section(name, question, _table(header, rows), [line for _, line in pairs])
    origin = source(spinning, [spins[line["case"]] for _, line in pairs if line["case"] in spins])
    return table.replace("\n\n![", f"\n\n{origin}\n\n![")


def _plain(results: _Results, name: str, question_name: str) -> str:
    question, pairs = results.answered(name, question_name)
    rows = []
    for words, line in pairs:
        times = Times.of(line)
        cells = [_ms(times.base_eager), _ms(times.our_eager), _ratio(times.eager)]
        rows.append([words, *cells, f"{line['evicted_per_step']:,.0f}", _target(times.eager, target_of(line))])
    table = _table(["step, ms", "plain", "ours", "ratio", "evicted a step", "target"], rows)
    return _section(name, question, table, [line for _, line in pairs])


def _growth(results: _Results, *names: str) -> str:
    rows, origins = [], []
    for name in names:
        ((_, line),) = results.answered(name, "growth")[1]
        times = Times.of(line)
        held = line["tables"] * line["rows"]
        cells = [f"{held:,} ids", _ms(times.base_eager), _ms(times.our_eager), f"{line['growth_ns_per_id']:.1f}"]
        rows.append([line.get("gpu") or line["cpu"], *cells])
        origins.append(source(name, [line]))
    table = _table(["machine", "held", "step, ms", "step that doubles the table, ms", "ns for each id held"], rows)
    return "\n\n".join([table, *origins])


def _not_measured(question: Question) -> str:
    cases = os.path.commonprefix(list(question.cases)).rpartition("_")[0] + "_*"
    return f"Not measured yet: `python -m benchmarks --device {question.device} --cases '{cases}'`."


Pairs = list[tuple[str, Line]]


def _of_machines(question_name: str, table_of: Callable[[Pairs], str], results: _Results, *names: str) -> str:
    """Return the tables and pictures of a question, of every file that answers it."""
    answers = [(name, *results.answered(name, question_name)) for name in names]
    parts = [
        _section(name, question, table_of(pairs), [line for _, line in pairs])
        for name, question, pairs in answers
        if pairs
    ]
    return "\n\n".join(parts) or _not_measured(answers[0][1])


def _engine(line: Line, name: str, key: str = "ms") -> str:
    return _ms(line["engines"].get(name, {}).get(key))


def _torchrec(pairs: Pairs) -> str:
    engines = ("static, table-wise", "static, row-wise", "dynamicemb", "a constant lookup")
    header = ["step, ms", *engines, "dynamicemb / faster static", "constant / dynamicemb"]
    rows = []
    for words, line in pairs:
        ratio, share = line["engines"][line["ours"]]["ratio"], line.get("torchrec_share")
        rows.append([words, *(_engine(line, name) for name in engines), _ratio(ratio), _ratio(share)])
    return _table(header, rows)


def _host(pairs: Pairs) -> str:
    header = ["step, ms", "TBE host", "ours host", "ratio", "TBE, short loop", "ours", "TBE device", "ours"]
    header += ["TBE launches", "ours", "TBE torch ops", "ours"]
    rows = []
    for words, line in pairs:
        base, ours = line["engines"][line["baseline"]], line["engines"][line["ours"]]
        cells = [_ms(base["ms"]), _ms(ours["ms"]), _ratio(ours["ratio"])]
        cells += [_ms(engine[key]) for key in ("burst_ms", "device_ms") for engine in (base, ours)]
        cells += [f"{engine['counts'][key]:.0f}" for key in ("launches", "ops") for engine in (base, ours)]
        rows.append([words, *cells])
    phases = dict.fromkeys(name for _, line in pairs for name in line["phases_ms"] if name != "total")
    names = [*phases, "total"]
    by_phase = [[words, *(_phase(line["phases_ms"].get(name)) for name in names)] for words, line in pairs]
    return f"{_table(header, rows)}\n\n{_table(['our step on the host, ms', *names], by_phase)}"


def _size(pairs: Pairs) -> str:
    sizes = sorted({rows for _, line in pairs for rows in line["rows"]})
    header = ["step, ms", *(f"{rows:,} rows" for rows in sizes), "largest / smallest"]
    rows = []
    for words, line in pairs:
        cells = [_engine(line, f"{rows:,} rows") for rows in sizes]
        rows.append([words, *cells, _ratio(line["engines"][line["ours"]]["ratio"])])
    return _table(header, rows)


def _phases(results: _Results, name: str, *cases: str) -> str:
    words = dict(case.split("=") for case in cases)
    lines = {line["case"]: line for line in results.all(name) if "phases_ms" in line}
    measured = [lines[case] for case in words]
    phases = dict.fromkeys(phase for line in measured for phase in line["phases_ms"] if phase != "total")
    rows = [[phase, *(_phase(line["phases_ms"].get(phase)) for line in measured)] for phase in [*phases, "total"]]
    return f"{_table(['phase, ms', *words.values()], rows)}\n\n{source(name, measured)}"


def _phase(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _value(results: _Results, name: str, case: str, path: str, form: str) -> str:
    value: Any = results.latest(name)[case]
    for key in path.split("/"):
        value = value[key]
    return f"{value:{form.replace(';', ',')}}"
