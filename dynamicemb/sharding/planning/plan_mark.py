"""A mark that a dynamic table leaves in plans, for whoever does not know dynamic tables to stumble over.

TorchRec's planner copies the ``cache_params`` of a constraint into the plan, and every one of its collections reads
them there when it is sharded: on all ranks, before it communicates. A dynamic table has no cache, so the mark stands in
their place, and reading it raises. Without it such a table would become a static one, and nobody would be told.
"""

from typing import Any

from torchrec.distributed.types import CacheParams

_SHARDERS = (
    "DynamicEmbeddingBagCollectionSharder for an EmbeddingBagCollection, "
    "DynamicEmbeddingCollectionSharder for an EmbeddingCollection"
)


class DynamicTableMark(CacheParams):
    """Stands where TorchRec keeps the cache parameters of a table, and raises when they are read.

    Args:
        table: name of the table, if it is known.
        module: path of its module in the model, if it is known.
        planned: whether `DynamicEmbeddingShardingPlanner` made the plan.
        given: cache parameters that somebody gave all the same.
    """

    def __init__(
        self,
        table: str | None = None,
        module: str | None = None,
        planned: bool = False,
        given: CacheParams | None = None,
    ) -> None:
        super().__init__()
        self.given = given
        self.table = table
        self.module = module
        self.planned = planned

    @property
    def reserved_memory(self) -> Any:
        """Raise: every sharder of TorchRec reads it, and nobody does while planning.

        Raises:
            ValueError: names the table, as far as it is known, and the remedy.
        """
        if not self.planned:
            raise not_planned_by_us(self.table, self.module)
        raise ValueError(
            f"{title_of_table(self.table, self.module)} came to a sharder that does not know dynamic tables; "
            "pass the sharders that the planner got to DistributedModelParallel, shard or shard_modules as well: "
            f"{_SHARDERS}"
        )

    @reserved_memory.setter
    def reserved_memory(self, value: Any) -> None:
        # The constructor of the base class.
        assert value is None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DynamicTableMark) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.table, self.module, self.planned))

    def __repr__(self) -> str:
        return f"DynamicTableMark(table={self.table!r}, module={self.module!r}, planned={self.planned})"


def not_planned_by_us(table: str | None, module: str | None) -> ValueError:
    """Return the error of a dynamic table whose plan somebody else made."""
    return ValueError(
        f"{title_of_table(table, module)} is marked with use_dynamicemb=True, but its plan is not that of a "
        "DynamicEmbeddingShardingPlanner and would make it static; plan with DynamicEmbeddingShardingPlanner, which "
        "takes the same arguments as TorchRec's planner, and eb_configs"
    )


def title_of_table(table: str | None, module: str | None) -> str:
    """Return how messages name a dynamic table, as far as its name and module are known."""
    name = "a dynamic table" if table is None else f"dynamic table {table!r}"
    return name if module is None else f"{name} of {title_of_module(module)}"


def title_of_module(path: str) -> str:
    """Return how messages name a module; the model itself has an empty path."""
    return f"module {path!r}" if path else "the model itself"
