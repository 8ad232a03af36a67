"""Tables of a model, found without knowing TorchRec, and what their files are called."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamicemb.checkpoint.format import check_folder, check_table_name
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.embedding.module import BatchedDynamicEmbeddingTablesV2
from dynamicemb.score_strategy import DynamicEmbScoreStrategy, ScoreStrategy
from dynamicemb.table.group import TableGroup
from dynamicemb.table.index import Index
from dynamicemb.table.placement import Placement, Rule
from dynamicemb.table.rows import RowFormat
from dynamicemb.types import Counter
from dynamicemb.warn import warn

# A sharded collection lists the modules that hold its dynamic tables on this rank under the first name; under the
# second one how many rows each table has over all ranks; and under the third one where tables are, also those of which
# this rank has no part. A table that is not named there has a part of its rows on every rank.
MODULES = "dynamic_embedding_modules"
SIZES = "dynamic_table_sizes"
PLACEMENTS = "dynamic_table_placements"


@dataclass(frozen=True)
class Collection:
    """What one folder of a dump holds.

    Attributes:
        path: ``model``, or ``model.a.b`` of a collection below the root; the folder's name.
        modules: groups of tables; none on a rank without a part of any.
        sizes: rows of each table over all ranks, where they are known.
        placements: where each table is, where that was said.
        module: the collection itself.
    """

    path: str
    modules: list[BatchedDynamicEmbeddingTablesV2]
    sizes: Mapping[str, int]
    placements: Mapping[str, Placement]
    module: nn.Module


@dataclass(frozen=True)
class Table:
    """A table, of which this rank may have no part. Then only folder, name and placement are known here.

    Attributes:
        folder: of its files inside the dump.
        name: the table's name.
        held_by: the group that holds this rank's part, None if there is none.
        index: its place in the group, -1 without one.
        num_embeddings: rows over all ranks, where known.
        given: where the table is, None for a part of its rows on every rank.
    """

    folder: str
    name: str
    held_by: BatchedDynamicEmbeddingTablesV2 | None
    index: int
    num_embeddings: int | None
    given: Placement | None = None

    @property
    def is_here(self) -> bool:
        """Whether this rank has a part of the table; all attributes below want one."""
        return self.held_by is not None

    @property
    def module(self) -> BatchedDynamicEmbeddingTablesV2:
        """The group that holds this rank's part."""
        assert self.held_by is not None, f"this rank has no part of table {self}"
        return self.held_by

    @property
    def group(self) -> TableGroup:
        """The tables of the module."""
        return self.module.tables

    @property
    def options(self) -> DynamicEmbTableOptions:
        """The options of the table."""
        return self.module.table_options[self.index]

    @property
    def dim(self) -> int:
        """D."""
        return self.module.dims[self.index]

    @property
    def row_format(self) -> RowFormat:
        """What a row in memory holds."""
        return self.group.store.formats[self.index]

    @property
    def num_state(self) -> int:
        """Values of optimizer state of a row in memory."""
        return self.row_format.num_state

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name in dumps."""
        return self.module.optimizer_settings.name

    @property
    def counter(self) -> Index | None:
        """The index of the ids that are not admitted yet, if there is one of ours."""
        return None if self.group.admission is None else self.group.admission.counter

    @property
    def own_counter(self) -> Counter | None:
        """The counter of such ids that the user wrote, if there is one."""
        counter = self.options.admission_counter
        return counter if isinstance(counter, Counter) and self.options.admit_strategy is not None else None

    @property
    def has_counter(self) -> bool:
        """Whether there is either."""
        return self.counter is not None or self.own_counter is not None

    @property
    def strategy(self) -> ScoreStrategy:
        """The score strategy."""
        strategy = self.options.score_strategy
        assert strategy is not None
        return strategy

    @property
    def strategy_names(self) -> list[str]:
        """Names of the strategies, in the order of a dump's columns."""
        strategy = self.strategy
        return [strategy.name] if isinstance(strategy, DynamicEmbScoreStrategy) else [s.name for s in strategy]

    def placement(self, world_size: int) -> Placement:
        """Return where the table is; unless that was said, a part of its rows is on each of so many ranks.

        Raises:
            ValueError: the routing is ``continuous`` and nobody knows the table's size.
        """
        if self.given is not None:
            return self.given
        return Placement.row_wise(Rule(self.options.dist_type, self.num_embeddings), world_size, self.dim)

    def is_first(self, ranks: Ranks) -> bool:
        """Return whether this one of the ranks has the table's first part, and so speaks for it."""
        return self.is_here and self.placement(ranks.world_size).ranks[0] == ranks.rank

    def owns(self, ids: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return which of some ids i64 ``[M]`` belong to this one of the ranks, bool ``[M]``."""
        return self.placement(ranks.world_size).owns(ids, ranks.rank)

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}" if self.folder else self.name


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedModelParallel and DistributedDataParallel."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_dmp_wrapped_module", None), nn.Module):
            module = module._dmp_wrapped_module  # type: ignore[assignment]
        else:
            return module


def find_collections(model: nn.Module) -> list[Collection]:
    """Return the collections with dynamic tables in a model, and modules of dynamic tables that stand alone."""
    found: list[Collection] = []
    _collect(model, "model", found, set())
    return found


def _collect(module: nn.Module, path: str, found: list[Collection], seen: set[int]) -> None:
    module = unwrapped(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    modules = getattr(module, MODULES, None)
    if isinstance(module, BatchedDynamicEmbeddingTablesV2):
        found.append(Collection(path, [module], {}, getattr(module, PLACEMENTS, {}), module))
    elif modules is not None:
        placements = getattr(module, PLACEMENTS, {})
        if modules or placements:
            found.append(Collection(path, list(modules), getattr(module, SIZES, {}), placements, module))
    else:
        for name, child in module.named_children():
            _collect(child, f"{path}.{name}", found, seen)


def find_sharded_modules(module: nn.Module, path: str = "") -> list[tuple[str, str, nn.Module]]:
    """Return ``(path, last component of the path, collection)`` of every collection with dynamic tables."""
    found: list[Collection] = []
    _collect(module, path or "model", found, set())
    return [(collection.path, collection.path.rsplit(".", 1)[-1], collection.module) for collection in found]


def get_dynamic_emb_module(model: nn.Module) -> list[BatchedDynamicEmbeddingTablesV2]:
    """Return all modules of dynamic tables of this rank."""
    return [module for collection in find_collections(model) for module in collection.modules]


def check_emb_collection_modules(
    module: nn.Module, ret_list: list[BatchedDynamicEmbeddingTablesV2], visited: set[int] | None = None
) -> list[BatchedDynamicEmbeddingTablesV2]:
    """Append the modules of dynamic tables in a model, or in a part of one, to a list.

    Args:
        module: the model, or a part of it.
        ret_list: extended in place.
        visited: ``id()`` of modules that are left out; extended by those that are appended. None leaves out none.

    Returns:
        ``ret_list``.

    Raises:
        TypeError: ``module`` is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}; pass the model or a part of it")
    visited = set() if visited is None else visited
    for tables in get_dynamic_emb_module(module):
        if id(tables) not in visited:
            visited.add(id(tables))
            ret_list.append(tables)
    return ret_list


def tables_of_model(
    model: nn.Module, table_names: Mapping[str, Iterable[str]] | None, ranks: Ranks | None = None
) -> list[Table]:
    """Return the tables of a model that are meant, ordered by folder and name.

    Args:
        model: the model.
        table_names: names per collection path; all tables of a collection that is not in it, None is all.
        ranks: who calls; None asks nobody.

    Raises:
        TypeError: ``table_names`` is not a mapping to names.
        ValueError: it names a collection or table that is not there, files and folders cannot have such names, or the
            tables are spread over other ranks.
    """
    collections = find_collections(model)
    if ranks is not None:
        _check_ranks(collections, ranks)
    if not collections:
        warn(
            "model has no dynamic tables: nothing is dumped or loaded; pass the model after DistributedModelParallel",
        )
    if table_names is not None and not isinstance(table_names, Mapping):
        raise TypeError(f"table_names must map collection paths to lists of tables, got {table_names!r}")
    paths = [collection.path for collection in collections]
    for path in table_names or {}:
        if path not in paths:
            raise ValueError(f"table_names: there is no collection {path!r} with dynamic tables; there are {paths}")
    tables = []
    for collection in collections:
        names = None if table_names is None else table_names.get(collection.path)
        tables += tables_of_collection(collection, names)
    if collections:
        _check_files(tables, table_names)
    return tables


def _check_ranks(collections: list[Collection], ranks: Ranks) -> None:
    """Refuse ranks that would find a part of the rows, or put rows where no lookup finds them."""
    for collection in collections:
        if isinstance(collection.module, BatchedDynamicEmbeddingTablesV2):
            # Whoever has it routes ids as they like.
            continue
        module: Any = collection.module
        spread = module.state_dict_ranks().global_ranks
        if spread != ranks.global_ranks:
            raise ValueError(
                f"pg: the tables of {collection.path} are spread over the ranks {spread}, the process group has "
                f"{ranks.global_ranks}; pass the process group over which the model is sharded, all of whose ranks call"
            )


def tables_of_module(module: BatchedDynamicEmbeddingTablesV2, table_names: Iterable[str] | None) -> list[Table]:
    """Return the tables of a module without a model around it that are meant, ordered by name; None is all.

    Raises:
        TypeError: ``table_names`` is a string.
        ValueError: there is no such table, or a table's name cannot begin a file name.
    """
    tables = tables_of_modules([module], "", table_names, placements=getattr(module, PLACEMENTS, {}))
    _check_files(tables, table_names)
    return tables


def _check_files(tables: list[Table], table_names: Any) -> None:
    """Check that there are tables to dump or load, and that files and folders may have their names."""
    if not tables:
        warn(
            f"table_names {table_names!r} names no table: nothing is dumped or loaded; None means all tables",
        )
    for table in tables:
        check_folder(table.folder)
        check_table_name(table.name)


def tables_of_collection(collection: Collection, names: Iterable[str] | None = None) -> list[Table]:
    """Return the tables of a collection that are meant, ordered by name; errors are those of ``tables_of_modules``."""
    return tables_of_modules(collection.modules, collection.path, names, collection.sizes, collection.placements)


def tables_of_modules(
    modules: list[BatchedDynamicEmbeddingTablesV2],
    folder: str,
    names: Iterable[str] | None = None,
    sizes: Mapping[str, int] | None = None,
    placements: Mapping[str, Placement] | None = None,
) -> list[Table]:
    """Return the tables of some modules that are meant, ordered by name; and those that are placed on other ranks.

    Raises:
        TypeError: ``names`` is a string.
        ValueError: there is no such table.
    """
    sizes, placements = sizes or {}, placements or {}

    def table(name: str, module: BatchedDynamicEmbeddingTablesV2 | None, index: int) -> Table:
        given = placements.get(name)
        size = sizes.get(name)
        if size is None and given is not None:
            size = given.rule.num_embeddings
        return Table(folder, name, module, index, size, given)

    tables = [table(name, module, index) for module in modules for index, name in enumerate(module.table_names)]
    held = {table.name for table in tables}
    tables += [table(name, None, -1) for name in placements if name not in held]
    if isinstance(names, str):
        raise TypeError(f"table_names must be a list of names, got {names!r}")
    wanted = [table.name for table in tables] if names is None else list(names)
    missing = set(wanted) - {table.name for table in tables}
    if missing:
        raise ValueError(
            f"table_names: {folder or 'the module'} has no dynamic tables {sorted(missing)}; "
            f"it has {sorted(table.name for table in tables)}"
        )
    return sorted((table for table in tables if table.name in wanted), key=lambda table: table.name)


def here(tables: Iterable[Table]) -> list[Table]:
    """Return the tables of which this rank has a part."""
    return [table for table in tables if table.is_here]
