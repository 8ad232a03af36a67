"""Print what there is to say about a dump, for people."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynamicemb.checkpoint.format import INCREMENT, inside
from dynamicemb.inspection.describe import needs
from dynamicemb.inspection.facts import (
    ABSENT,
    AGE,
    COUNT,
    COUNTED,
    GONE,
    Bin,
    DumpFacts,
    Health,
    Histogram,
    KeyFacts,
    TableFacts,
)
from dynamicemb.inspection.units import date, duration, number, size
from dynamicemb.score_strategy import DynamicEmbScoreStrategy

_MAX_BAR = 32
# Narrower, there is no place for bars.
_LEAST_WIDTH_WITH_BARS = 60
_NOT_RECORDED = "not recorded"
_STEP = DynamicEmbScoreStrategy.STEP.name
_CUSTOMIZED = DynamicEmbScoreStrategy.CUSTOMIZED.name


class Report:
    """Prints facts on a console. Names come from files, so nothing is taken for markup."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = "█" if console.encoding.startswith("utf") else "#"

    def dump(self, facts: DumpFacts) -> None:
        """Print what a dump is, without its tables."""
        # Whole even where it is longer than a line, so that it can be copied.
        self._console.print(Text(facts.path, "bold"), soft_wrap=True)
        grid = _grid()
        if facts.kind is None:
            ranks = _NOT_RECORDED if facts.world_size is None else number(facts.world_size)
            _row(grid, "kind", "no manifest, as of the reference implementation: what is not said is not recorded")
            _row(grid, "ranks", ranks)
        else:
            _row(grid, "kind", "full dump" if facts.kind != INCREMENT else f"increment {facts.number} of its chain")
            _row(grid, "id", facts.dump_id or "")
            if facts.chain:
                _row(grid, "continues", facts.chain[-1])
                _row(grid, "base", facts.chain[0])
            _row(grid, "written", facts.written or "")
            _row(grid, "ranks", number(facts.world_size or 0))
            _row(grid, "format", f"{facts.format_version}, by dynamicemb {facts.package_version}")
        _row(grid, "on disk", size(facts.bytes))
        for note in facts.notes:
            _row(grid, "note", note, "yellow")
        self._console.print(grid)

    def alone(self, facts: DumpFacts) -> None:
        """Say what a dump that was given alone needs."""
        text = needs(facts)
        if text is not None:
            self._line(text, "yellow")

    def table(self, facts: TableFacts) -> None:
        """Print a table of a dump."""
        self._line("")
        self._line(f"table {inside(facts.folder, facts.name)}", "bold cyan")
        grid = _grid()
        dim = number(facts.dim) if facts.dim else "not known: there are no rows"
        _row(grid, "dim", f"{dim}, {facts.dtype or 'dtype not recorded'}")
        numbers = ", ".join(f"{name} {value}" for name, value in facts.optimizer_numbers.items())
        _row(grid, "optimizer", f"{facts.optimizer}: {numbers}" if numbers else facts.optimizer)
        state = "none in the dump" if facts.num_state is None else f"{number(facts.num_state)} values a row"
        _row(grid, "state", state + ("" if facts.updates is None else f", {number(facts.updates)} updates"))
        _row(grid, "strategy", _strategy(facts))
        _row(grid, "routing", _routing(facts))
        rows = facts.sizes if facts.sizes is not None else facts.rows
        _row(grid, "ids", _per_rank(rows))
        if facts.tombstones is not None:
            _row(grid, "changed", _per_rank(facts.rows))
            _row(grid, "gone", _per_rank(facts.tombstones))
        if facts.capacities is not None:
            load = sum(rows) / max(1, sum(facts.capacities))
            _row(grid, "capacity", f"{_per_rank(facts.capacities)}, load {load:.3f}")
        counted = "no counters in the dump" if facts.counted is None else f"{_per_rank(facts.counted)}, not admitted"
        _row(grid, "counted", counted)
        files = ", ".join(f"{item} {size(value)}" for item, value in facts.bytes.items())
        _row(grid, "on disk", f"{size(sum(facts.bytes.values()))}: {files}")
        if facts.health is not None:
            _health(grid, facts.health, sum(facts.rows))
        self._console.print(grid)
        for histogram in facts.scores:
            self._histogram(histogram)
        if facts.counts is not None:
            self._histogram(facts.counts)

    def _histogram(self, facts: Histogram) -> None:
        noun = {AGE: "ages", COUNT: "counts"}.get(facts.unit, "scores")
        low, high = _value(facts.min, facts.unit), _value(facts.max, facts.unit)
        self._line(f"  {facts.column}: {noun} of {number(facts.looked_at)} ids, {low} to {high}")
        grid = Table.grid(padding=(0, 2, 0, 0))
        width = self._console.width
        for justify in ("right", "right", "right", "left"):
            grid.add_column(justify=justify, overflow="fold")  # type: ignore[arg-type]
        largest = max(bin.count for bin in facts.bins)
        for bin in facts.bins:
            bar = self._bar * round(_MAX_BAR * bin.count / largest)
            cells = [f"    {_range(bin, facts.unit)}", number(bin.count), f"{bin.count / facts.looked_at:.1%}"]
            grid.add_row(*map(Text, cells), *([Text(bar, "cyan")] if width >= _LEAST_WIDTH_WITH_BARS else []))
        self._console.print(grid)

    def keys(self, found: list[KeyFacts], dumps: list[DumpFacts]) -> None:
        """Print where ids are."""
        for key in dict.fromkeys(facts.key for facts in found):
            self._line("")
            self._line(f"id {key}", "bold cyan")
            present = [facts for facts in found if facts.key == key and facts.found != ABSENT]
            if not present:
                tables = [inside(facts.folder, facts.table) for facts in found if facts.key == key]
                rest = "; the dumps before it may have it" if needs(dumps[0]) else ""
                self._line(f"  not in {', '.join(tables)}{rest}")
            for facts in present:
                self._key(facts, len(dumps) > 1, {dump.path: dump.clock for dump in dumps})

    def _key(self, facts: KeyFacts, is_chain: bool, clocks: dict[str, int | None]) -> None:
        grid = _grid()
        _row(grid, "table", inside(facts.folder, facts.table))
        where = f"increment {facts.number}" if facts.number else "the full dump" if is_chain else "the dump"
        if is_chain or facts.found == GONE:
            where += f" {facts.path!r}"
        if facts.found == GONE:
            _row(grid, "gone", f"since {where}")
        elif facts.found == COUNTED:
            _row(grid, "counted", f"{number(facts.count or 0)} times, not admitted; by rank {facts.rank} of {where}")
        else:
            _row(grid, "row", f"{number(facts.position or 0)} of rank {facts.rank} of {where}")
            if facts.repeats > 1:
                _row(grid, "repeated", f"{facts.repeats} rows have this id; the last one counts, shown here", "red")
            for name, score in facts.scores.items():
                _row(grid, name, _score(name, score, facts.ages.get(name), clocks.get(facts.path or "")))
            _row(grid, "values", _values(facts.values, facts.dim))
            for title, values in facts.optimizer_state.items():
                _row(grid, title, _values(values, facts.num_state // len(facts.optimizer_state)))
        self._console.print(grid)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style))


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _row(grid: Table, label: str, value: str, style: str = "") -> None:
    grid.add_row(Text(f"  {label}", "dim"), Text(value, style))


def _per_rank(values: list[int]) -> str:
    """Return the sum, and of several ranks the least and the greatest."""
    if len(values) < 2:
        return number(sum(values))
    return f"{number(sum(values))} ({number(min(values))} to {number(max(values))} a rank)"


def _strategy(facts: TableFacts) -> str:
    if facts.score_strategy is None:
        return f"{_NOT_RECORDED}; eviction rule {facts.evict_strategy or _NOT_RECORDED}, step score {facts.step_score}"
    names = ", ".join(facts.score_strategy)
    if facts.score_strategy == [_STEP] and facts.step_score is not None:
        return f"{names}, the next step is {number(facts.step_score)}"
    if facts.score_strategy == [_CUSTOMIZED] and facts.step_score:
        return f"{names}, the score is {number(facts.step_score)}"
    return names


def _routing(facts: TableFacts) -> str:
    routing = facts.dist_type or _NOT_RECORDED
    return routing if facts.num_embeddings is None else f"{routing} of {number(facts.num_embeddings)} rows"


def _health(grid: Table, health: Health, total: int) -> None:
    if health.looked_at == 0:
        return
    some = f"all {number(total)}" if health.looked_at == total else f"{number(health.looked_at)} of {number(total)}"
    if health.norm_min is not None:
        norms = f"{health.norm_min:.4g} to {health.norm_max:.4g}, median {health.norm_median:.4g}; of {some} rows"
        _row(grid, "norms", norms)
    found = [
        (health.non_finite_values, "with NaN or infinity"),
        (health.non_finite_state, "with such in their state"),
        (health.zero_rows, "all zero"),
        (health.repeated_ids, "with a repeated id"),
        (health.wrong_rank_ids, "at a wrong rank"),
    ]
    text = ", ".join(f"{number(value)} {what}" for value, what in found if value is not None)
    _row(grid, "rows", f"{text}; of {some}", "red" if health.is_bad else "green")


def _value(value: int, unit: str) -> str:
    return duration(value) if unit == AGE else number(value)


def _range(bin: Bin, unit: str) -> str:
    if bin.high is None:
        return f"from {_value(bin.low, unit)}"
    if bin.low == bin.high and unit != AGE:
        return _value(bin.low, unit)
    # Of ages the first one that is outside: 1 h rather than 59.999 min.
    return f"{_value(bin.low, unit)} - {_value(bin.high + (unit == AGE), unit)}"


def _score(name: str, score: int, age: int | None, clock: int | None) -> str:
    if age is None:
        return number(score)
    return f"{duration(age)} before the dump" + (f", {date(clock - age)}" if clock else "")


def _values(values: Iterable[float], total: int) -> str:
    shown = [f"{value:.6g}" for value in values]
    return " ".join(shown) + (f" ... ({number(total)} in all)" if len(shown) < total else "")
