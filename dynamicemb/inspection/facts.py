"""What there is to say about a dump; ``--json`` prints these fields."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bin:
    """Scores from ``low`` to ``high``, both included; ``high`` None is no limit."""

    low: int
    high: int | None
    count: int


@dataclass(frozen=True)
class Histogram:
    """Scores of one column, or counts of ids without a row.

    Attributes:
        column: the strategy, or what is counted.
        unit: AGE, COUNT or NUMBER; ages are nanoseconds before the dump, or before the newest time of a dump without a
            clock.
        looked_at: of how many rows.
        min: the least.
        max: the greatest.
        bins: from the first to the last that is not empty.
    """

    column: str
    unit: str
    looked_at: int
    min: int
    max: int
    bins: list[Bin]


@dataclass(frozen=True)
class Health:
    """What rows look like.

    Attributes:
        looked_at: rows that were read, spread evenly over the files.
        norm_min: least Euclidean norm of the weights of a row without NaN and infinity; None if there is none.
        norm_median: the median, of at most a million of them.
        norm_max: the greatest.
        non_finite_values: rows with NaN or infinity among their weights.
        non_finite_state: rows with such in their optimizer state; None without state.
        zero_rows: rows whose weights are all zero.
        repeated_ids: rows whose id another of them has too, but for one of each id.
        wrong_rank_ids: ids that the routing gives to another rank; None if the routing is not known.
    """

    looked_at: int
    norm_min: float | None
    norm_median: float | None
    norm_max: float | None
    non_finite_values: int
    non_finite_state: int | None
    zero_rows: int
    repeated_ids: int
    wrong_rank_ids: int | None

    @property
    def is_bad(self) -> bool:
        """Whether something is there that should not be."""
        return bool(self.non_finite_values or self.non_finite_state or self.repeated_ids or self.wrong_rank_ids)


@dataclass(frozen=True)
class TableFacts:
    """A table of a dump. Lists have an entry for each rank; what the dump does not tell is None.

    Attributes:
        folder: of its files.
        name: the table's name.
        dim: D.
        dtype: of the weights in memory.
        optimizer: its name.
        optimizer_numbers: learning rate and so on, as the JSON file has them.
        num_state: values of optimizer state of a row in the files, None if there are none.
        score_strategy: names of the columns of the scores.
        evict_strategy: rule of eviction in the JSON file of a dump without a manifest.
        step_score: of STEP the number of the next step, of CUSTOMIZED the score that was set last; 0 or None for none.
        dist_type: routing of the ranks.
        num_embeddings: rows over all ranks, as the model asked for them.
        seed: of initial values.
        updates: optimizer applications.
        rows: rows in the files.
        sizes: ids in the table; an increment has fewer rows.
        capacities: rows at most.
        num_buckets: buckets.
        counted: ids with an admission count and no row.
        tombstones: ids that an increment says are gone.
        bytes: of its files, per kind of file.
        scores: a histogram for each column.
        counts: a histogram of the admission counts.
        health: of its rows. This and the histograms are missing where nobody looked.
    """

    folder: str
    name: str
    dim: int
    dtype: str | None
    optimizer: str
    optimizer_numbers: dict[str, Any]
    num_state: int | None
    score_strategy: list[str] | None
    evict_strategy: str | None
    step_score: int | None
    dist_type: str | None
    num_embeddings: int | None
    seed: int | None
    updates: int | None
    rows: list[int]
    sizes: list[int] | None
    capacities: list[int] | None
    num_buckets: list[int] | None
    counted: list[int] | None
    tombstones: list[int] | None
    bytes: dict[str, int]
    scores: list[Histogram] = field(default_factory=list)
    counts: Histogram | None = None
    health: Health | None = None


@dataclass(frozen=True)
class DumpFacts:
    """A dump.

    Attributes:
        path: as it was given.
        kind: FULL or INCREMENT; None without a manifest.
        number: place in its chain, 0 for a full dump.
        dump_id: the dump's name; chain has those of the dumps before it.
        chain: base first.
        format_version: of the files.
        package_version: of the writer.
        world_size: ranks that wrote.
        clock: Unix nanoseconds of the dump.
        written: the same as a date.
        bytes: of all files of the tables that were asked for.
        notes: what a load would warn about.
        tables: ordered by folder and name.
    """

    path: str
    kind: str | None
    number: int
    dump_id: str | None
    chain: list[str]
    format_version: int | None
    package_version: str | None
    world_size: int | None
    clock: int | None
    written: str | None
    bytes: int
    notes: list[str]
    tables: list[TableFacts]


@dataclass(frozen=True)
class KeyFacts:
    """Where an id is in a table of a dump, or of a chain of them.

    Attributes:
        key: the id.
        folder: of the table.
        table: its name.
        found: ROW, COUNTED, GONE or ABSENT.
        path: the dump that says so, the newest that names the id; None if none does.
        number: its place in the chain.
        rank: whose files hold the row or count, or say that the id is gone.
        position: of the row in them.
        repeats: how many rows of the dump have the id; the last one counts.
        scores: as the files have them, by the strategy's name.
        ages: nanoseconds before the dump, by the same name, of scores that are times.
        dim: D.
        num_state: values of optimizer state.
        values: weights; the first few, or all.
        optimizer_state: parts of the state by their names, of each the first few values, or all.
        count: occurrences so far, of an id that was not admitted.
    """

    key: int
    folder: str
    table: str
    found: str
    path: str | None = None
    number: int | None = None
    rank: int | None = None
    position: int | None = None
    repeats: int = 1
    scores: dict[str, int] = field(default_factory=dict)
    ages: dict[str, int] = field(default_factory=dict)
    dim: int = 0
    num_state: int = 0
    values: list[float] = field(default_factory=list)
    optimizer_state: dict[str, list[float]] = field(default_factory=dict)
    count: int | None = None


AGE = "age"
COUNT = "count"
NUMBER = "number"

ROW = "row"
COUNTED = "counted"
GONE = "gone"
ABSENT = "absent"
