"""How the cases of each kind are run."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from benchmarks import runner
from benchmarks.cases import AnyCase, Case, HostCase, ShardedCase, SizeCase
from benchmarks.host import runner as host_runner
from benchmarks.sharded import runner as sharded_runner
from benchmarks.sizes import runner as size_runner
from benchmarks.timing import Sample
from benchmarks.turns import Effort

_RUNNERS: dict[type, Any] = {
    Case: runner,
    HostCase: host_runner,
    ShardedCase: sharded_runner,
    SizeCase: size_runner,
}


def run_case(case: AnyCase, effort: Effort) -> dict[str, Any]:
    """Measure a case; return the fields of its line of results."""
    line: dict[str, Any] = _RUNNERS[type(case)].run_case(case, effort)
    return line


def alone(case: AnyCase, effort: Effort) -> AbstractContextManager[Callable[[int], list[Sample]]]:
    """Return a context with our engine of a case, warmed up: what runs a turn of it, given the turn's number."""
    engine: AbstractContextManager[Callable[[int], list[Sample]]] = _RUNNERS[type(case)].alone(case, effort)
    return engine
