"""The steps whose time on the host is measured."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.step_case import Case, workload_a

_SIZES = {"64": 64, "4100": 4_100, "65k": 65_536, "1m": 1_048_576}
_OPTIMIZERS = {"sgd": "exact_sgd", "adam": "adam"}


@dataclass(frozen=True)
class HostCase:
    """An eager training step that is run over and over without a wait.

    Attributes:
        step: the step.
    """

    step: Case

    @property
    def name(self) -> str:
        """The name of the step."""
        return self.step.name

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.step.device

    def shrink(self, rows: int, num_ids: int) -> "HostCase":
        """Return the same case with at most so many rows and ids."""
        return replace(self, step=self.step.shrink(rows, num_ids))


def _shape(pooling: str, num_ids: int) -> dict[str, Any]:
    """Return what a step of so many ids looks like; a short batch still has bags for ten tables."""
    length = 1 if pooling == "NONE" else 10 if num_ids > 1000 else 3
    return {"pooling": pooling, "bag_length": length, "num_ids": num_ids}


GPU_HOST = [
    HostCase(workload_a(f"host_{words}_{short}_{size}", optimizer=optimizer, **_shape(pooling, num_ids)))
    for words, pooling in (("sequence", "NONE"), ("sum", "SUM"))
    for short, optimizer in _OPTIMIZERS.items()
    for size, num_ids in _SIZES.items()
]
# FBGEMM has no Adam on the CPU, and the work itself covers the host's part of large steps.
CPU_HOST = [
    HostCase(Case(f"cpu_host_{words}_sgd_{size}", rows=20_000, **_shape(pooling, _SIZES[size])))
    for words, pooling in (("sequence", "NONE"), ("sum", "SUM"))
    for size in ("64", "4100")
]
