"""Engines take turns: what disturbs the machine for a while disturbs all of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from benchmarks.timing import Sample, Times

Turn = Callable[[int, str], list[Sample]]


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        rounds: turns of each engine.
        steps: timed steps of a turn.
        quiet: undisturbed repetitions wanted of each engine; there are more turns until they are reached.
        seconds: after this time turns end, on a busy machine with fewer repetitions than wanted.
        phases: add the breakdown of our step.
        loop: steps without a wait, where the host's time is measured.
    """

    rounds: int = 15
    steps: int = 4
    quiet: int = 24
    seconds: float = 30.0
    phases: bool = False
    loop: int = 300


def take_turns(
    names: Sequence[str],
    turn: Turn,
    effort: Effort,
    title: str = "turns",
    agree: Callable[[bool], bool] = bool,
) -> dict[str, Times]:
    """Let every engine take its turn, in an order that turns round each time, until the effort is spent.

    Args:
        names: of the engines.
        turn: runs one turn of an engine, given the number of the turn and the engine's name.
        effort: at least two turns; then until the rounds are done and enough of them were quiet, or the time is up.
        title: beside the bar of progress, which only a terminal shows.
        agree: what all ranks do about the wish of one to go on; they must take as many turns each.

    Returns:
        The repetitions of every engine.
    """
    times = {name: Times() for name in names}
    deadline = time.monotonic() + effort.seconds
    number = 0
    with tqdm(total=effort.rounds, desc=title, unit=" turns", disable=None, leave=False) as progress:
        while agree(number < 2 or (time.monotonic() < deadline and (number < effort.rounds or _few(times, effort)))):
            for name in names if number % 2 else reversed(names):
                times[name].samples += turn(number, name)
            number += 1
            progress.update()
    return times


def _few(times: dict[str, Times], effort: Effort) -> bool:
    return min(engine.num_quiet for engine in times.values()) < effort.quiet


def result(times: Times, base: Times | None) -> dict[str, Any]:
    """Return what a line of results says of an engine: its times in ms, and their ratios to those of the baseline."""
    return {
        "ms": times.median,
        "min_ms": times.minimum,
        "cpu_ms": times.cpu_median,
        "repetitions": len(times.samples),
        "quiet": times.num_quiet,
        "ratio": times.median / base.median if base else None,
        "min_ratio": times.minimum / base.minimum if base else None,
        "cpu_ratio": _quotient(times.cpu_median, base.cpu_median) if base else None,
    }


def _quotient(ours: float, base: float) -> float | None:
    # A clock of processes may not see a step that is short.
    return ours / base if base else None
