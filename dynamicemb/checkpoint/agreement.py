"""What ranks must agree on before they dump or load together: the tables, where they are, and what was asked for."""

from typing import Any, NamedTuple

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.tables import Table
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.placement import CONTINUOUS, Placement


class TableShape(NamedTuple):
    """What the ranks that have a part of a table must agree on.

    Attributes:
        dim: D.
        dtype: of the weights in memory.
        optimizer: its name.
        num_state: values of optimizer state of a row in memory.
        strategy_names: of the columns of scores.
        dist_type: routing.
        num_embeddings: rows over all ranks, where known.
        has_counter: whether ids are counted for admission.
    """

    dim: int
    dtype: str
    optimizer: str
    num_state: int
    strategy_names: list[str]
    dist_type: str
    num_embeddings: int | None
    has_counter: bool


class Described(NamedTuple):
    """A table as one rank sees it.

    Attributes:
        folder: of its files inside the dump.
        name: the table's name.
        given: its placement, where that was said.
        shape: None on a rank that has no part of the table.
    """

    folder: str
    name: str
    given: Placement | None
    shape: TableShape | None


def describe(tables: list[Table]) -> list[Described]:
    """Return what all ranks must agree on about their tables, see ``disagree``."""
    return [Described(t.folder, t.name, t.given, _shape(t) if t.is_here else None) for t in tables]


def _shape(t: Table) -> TableShape:
    return TableShape(
        t.dim, str(t.module.embedding_dtype), t.module.optimizer.name, t.num_state, t.strategy_names,
        t.options.dist_type, t.num_embeddings, t.has_counter,
    )  # fmt: skip


def disagree(descriptions: list[list[Described]]) -> bool:
    """Return whether ranks name other tables, or those with a part of a table other shapes."""
    if any([d[:3] for d in of_rank] != [d[:3] for d in descriptions[0]] for of_rank in descriptions):
        return True
    wanted = shapes(descriptions)
    return any(
        d.shape not in (None, shape) for of_rank in descriptions for d, shape in zip(of_rank, wanted, strict=True)
    )


def shapes(descriptions: list[list[Described]]) -> list[TableShape | None]:
    """Return the shape of each table, by the first rank that has a part of it."""
    of_tables = zip(*descriptions, strict=True)
    return [next((d.shape for d in of_ranks if d.shape is not None), None) for of_ranks in of_tables]


def check_agreement(descriptions: list[list[Described]], requests: list[Any], purpose: str) -> None:
    """Refuse ranks that want to do different things.

    Args:
        descriptions: the tables as each rank describes them.
        requests: what was asked for on each rank.
        purpose: "dump" or "load".

    Raises:
        DynamicEmbError: the ranks disagree about the tables or the request.
    """
    if disagree(descriptions):
        raise DynamicEmbError(f"the ranks disagree about the tables to {purpose}: {descriptions}")
    if any(of_rank != requests[0] for of_rank in requests):
        raise DynamicEmbError(f"the ranks disagree about the options to {purpose}: {requests}")


def check_placement(table: Table, ranks: Ranks) -> None:
    """Refuse a placement that nobody knows, or that contradicts what this rank holds.

    Raises:
        ValueError: as said; or columns are on several ranks.
    """
    if table.given is None:
        if table.options.dist_type == CONTINUOUS and ranks.world_size > 1 and table.num_embeddings is None:
            raise ValueError(
                f"table {table}: dist_type 'continuous' over {ranks.world_size} ranks needs the table's "
                "num_embeddings, which a module outside a sharded collection does not know; use 'roundrobin'"
            )
        return
    placement, remedy = table.given, "give all ranks the placement by which the tables were made"
    if len(placement.columns) > 1:
        raise ValueError(f"table {table}: placement has several column shards, {placement.columns}; give it one")
    if max(placement.ranks) >= ranks.world_size:
        raise ValueError(
            f"table {table}: placement names rank {max(placement.ranks)} of {ranks.world_size} ranks; {remedy}"
        )
    if (ranks.rank in placement.ranks) != table.is_here:
        there = "no part of it, but a module has one" if table.is_here else "a part of it, but no module has one"
        raise ValueError(
            f"table {table}: placement over the ranks {placement.ranks} gives rank {ranks.rank} {there}; {remedy}"
        )
    if table.is_here and (table.dim, table.options.dist_type) != (placement.dim, placement.rule.dist_type):
        raise ValueError(
            f"table {table} has dim {table.dim} and dist_type {table.options.dist_type!r}, its placement "
            f"{placement.dim} and {placement.rule.dist_type!r}; {remedy}"
        )


def check_everywhere(tables: list[Table], purpose: str) -> None:
    """Refuse tables of which this rank has no part.

    Raises:
        DynamicEmbError: as said.
    """
    absent = [str(table) for table in tables if not table.is_here]
    if absent:
        raise DynamicEmbError(
            f"{purpose}: this rank has no part of the tables {absent}; use DynamicEmbDump and DynamicEmbLoad for "
            "tables that are placed on some of the ranks"
        )
