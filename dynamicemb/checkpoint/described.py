"""What reading a dump needs to know of a table: the same whether it is in memory or only on the disk."""

from typing import Protocol

import torch

from dynamicemb.score_strategy import ScoreStrategy


class DescribedTable(Protocol):
    """A table by its description: ``sources.Table``, or ``inspection.dumped.DumpedTable``, which no memory holds."""

    @property
    def folder(self) -> str:
        """Folder of its files inside the dump."""

    @property
    def name(self) -> str:
        """The table's name."""

    @property
    def dim(self) -> int:
        """D."""

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name in dumps."""

    @property
    def strategy(self) -> ScoreStrategy | None:
        """The score strategy, None if a dump does not tell."""

    @property
    def strategy_names(self) -> list[str]:
        """Names of the strategies, in the order of a dump's columns."""

    def owners(self, ids: torch.Tensor, world_size: int) -> torch.Tensor:
        """Return the rank that owns each id, of so many ranks."""
