"""What reading a dump needs to know of a table: the same whether it is in memory or only on the disk."""

from typing import Protocol

from dynamicemb.score_strategy import ScoreStrategy
from dynamicemb.table.placement import Placement


class DescribedTable(Protocol):
    """A table by its description: ``tables.Table``, or ``inspection.dumped.DumpedTable``, which no memory holds."""

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

    def placement(self, world_size: int) -> Placement:
        """Return where the table is; unless that was said, a part of its rows is on each of so many ranks."""
