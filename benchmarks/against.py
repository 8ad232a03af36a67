"""The same case with the package of two checkouts, in turns: ``python -m benchmarks --against FOLDER``.

Each checkout has a process of its own, and both run the benchmarks of this one. A process that has no turn waits for
its input, and leaves the device alone; both hold their tables.
"""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import AnyCase
from benchmarks.host.cases import HostCase
from benchmarks.machine import commit_of, load
from benchmarks.timing import Sample
from benchmarks.turns import Effort, result, take_turns

HERE = Path(__file__).resolve().parent.parent
THIS, OTHER = "this checkout", "the other checkout"
_MOST_LOOPS = 5


@dataclass(frozen=True)
class Limits:
    """How a case is shrunk, and with how many threads it runs; see the options of the command line."""

    max_rows: int
    max_ids: int
    threads: int | None


class Worker:
    """A process with our engine of a case, warmed up.

    Args:
        checkout: folder that has the package ``dynamicemb``.
        case: the case, by its name.
        effort: of a turn.
        limits: of the case.

    Raises:
        RuntimeError: the process ended before it was ready, or has the package from elsewhere.
    """

    def __init__(self, checkout: Path, case: AnyCase, effort: Effort, limits: Limits) -> None:
        command = [sys.executable, str(HERE / "benchmarks" / "worker.py")]
        paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )
        asked = {"case": case.name, "device": case.device, "effort": dataclasses.asdict(effort)}
        package = Path(self._ask(json.dumps({**asked, **dataclasses.asdict(limits)}))["package"])
        if not package.is_relative_to(checkout):
            self.close()
            raise RuntimeError(f"the package came from {package}, not from {checkout}; is there dynamicemb/ in it?")

    def turn(self, number: int) -> list[Sample]:
        """Run a turn."""
        return [Sample(*fields) for fields in self._ask(str(number))]

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of a checkout ended with {self._process.wait()}; its last words are above")
        return json.loads(answer)


def run_against(case: AnyCase, effort: Effort, other: Path, limits: Limits) -> dict[str, Any]:
    """Measure our engine of a case with the packages of two checkouts; the ratio is this to the other.

    Raises:
        ValueError: ``other`` has no package.
    """
    other = other.resolve()
    if not (other / "dynamicemb" / "__init__.py").exists():
        raise ValueError(f"against is {other}, which has no folder dynamicemb; name the root of a checkout")
    if isinstance(case, HostCase):
        effort = dataclasses.replace(effort, rounds=min(effort.rounds, _MOST_LOOPS), quiet=0, seconds=math.inf)
    load_before = load()
    with _both(case, effort, other, limits) as workers:
        times = take_turns(list(workers), lambda number, name: workers[name].turn(number), effort, case.name)
    engines = {name: result(engine, times[OTHER]) for name, engine in times.items()}
    if isinstance(case, HostCase):
        # The best loop is the time, as where the case is run alone.
        engines = {name: {**line, "ms": line["min_ms"], "ratio": line["min_ratio"]} for name, line in engines.items()}
    return {
        "case": case.name,
        "kind": "against",
        "device": case.device,
        "other_commit": commit_of(other),
        "engines": engines,
        "baseline": OTHER,
        "ours": THIS,
        "ours_eager": THIS,
        "errors": {},
        "targets": {},
        "note": "this checkout beside another",
        "load": [load_before, load()],
    }


@contextlib.contextmanager
def _both(case: AnyCase, effort: Effort, other: Path, limits: Limits) -> Iterator[dict[str, Worker]]:
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, checkout in ((OTHER, other), (THIS, HERE)):
            workers[name] = Worker(checkout, case, effort, limits)
            stack.callback(workers[name].close)
        yield workers
