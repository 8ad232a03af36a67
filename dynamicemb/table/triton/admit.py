"""Admission: decide which new ids of a lookup get a row, and stage what the others read.

Between ``elect`` and ``insert``. ``elect`` has given every missing id a place, a leader and, where it matters, the sum
of its occurrences. The leaders are then judged by ``count``, ``draw``, or the user's own strategy. ``reject`` gives
every occurrence of an id that lost a staged row, so that nothing after it takes the id for missing. It lists the other
leaders for ``insert``.
"""

from dataclasses import dataclass

import torch

from dynamicemb.table.admission import (
    ADMIT_BY_CALL,
    ADMIT_BY_CHANCE,
    Admission,
    Candidates,
    ask_judge,
    fill_by_judge,
)
from dynamicemb.table.index import Index
from dynamicemb.table.rows import RowStore
from dynamicemb.table.stepping.staging import Stage, Staged
from dynamicemb.table.triton.count import count
from dynamicemb.table.triton.counting import MAX_FREQUENCY
from dynamicemb.table.triton.draw import draw
from dynamicemb.table.triton.elect import elect
from dynamicemb.table.triton.erase import erase
from dynamicemb.table.triton.find import find_and_list
from dynamicemb.table.triton.initialize import initialize_leaders
from dynamicemb.table.triton.insert import insert
from dynamicemb.table.triton.judged import Judged
from dynamicemb.table.triton.missing import MISSING_LENGTH, Leaders, Missing
from dynamicemb.table.triton.order import order
from dynamicemb.table.triton.reject import reject
from dynamicemb.table.triton.settle import settle
from dynamicemb.table.triton.transfer import read_rows, write_rows


@dataclass(frozen=True)
class Rejected:
    """The ids of a lookup that were not admitted; how many, the device alone knows.

    Attributes:
        stage: their staged rows.
        leaders: one leader for each.
        judged: the memory of the leaders.
        admission: what decided.
        positions: of a user's strategy: the losing occurrences that lead, i64 ``[M]``, ascending.
    """

    stage: Stage
    leaders: Leaders
    judged: Judged
    admission: Admission
    positions: torch.Tensor | None

    def initialize(self, table_ranges: torch.Tensor, state_values: torch.Tensor) -> None:
        """Fill the staged rows. Host sync: none, but for a user's strategy."""
        initialize_leaders(self.stage.store, self.admission.initializers, self.leaders, state_values)
        if self.positions is not None and self.admission.judge is not None:
            tables = torch.searchsorted(table_ranges, self.positions, right=True) - 1
            ranges = torch.searchsorted(self.positions, table_ranges)
            rows = self.stage.rows(tables, self.positions)
            fill_by_judge(self.admission.judge, (read_rows, write_rows), self.stage, ranges, rows)

    def settle(self, index: Index, table_ranges: torch.Tensor, rows: torch.Tensor, missing: Missing) -> Staged:
        """Do what ``settle.settle`` does, and leave -1 in ``rows`` where an id lost; returns what the lookup reads."""
        first_row = self.stage.first_row
        staged = settle(index, table_ranges, rows, missing, first_row)
        assert staged is not None
        return Staged(self.stage.store, staged, first_row, self.stage.memory)


def admit(
    index: Index,
    store: RowStore,
    admission: Admission,
    ids: torch.Tensor,
    table_ranges: torch.Tensor,
    rows: torch.Tensor,
    missing: Missing,
) -> Rejected:
    """Decide which leaders get a row; the rule is that of the CPU twin.

    Args:
        index: the group's index; the step must have begun.
        store: the group's rows.
        admission: how to decide; its counter changes.
        ids: i64 ``[N]``.
        table_ranges: i64 ``[T+1]``.
        rows: i32 ``[N]`` from ``elect``; the entries of ids that lose become staged rows.
        missing: the scratch memory; leaders that win are listed, unless ``missing.ordered``.

    Returns:
        The ids that lost; their rows are still to be initialised.

    Concurrency: a leader belongs to one lane, a place to its leader, a bucket of the counter to the program of
    ``insert`` that has it. Host sync: none, but for the user's own strategy. Bytes moved per missing occurrence: 40,
    and per leader those of a look-up in the counter; ids that are new to the counter cost what they cost ``insert``.
    """
    counter = admission.counter
    judged = Judged.allocate(missing, index if counter is None else counter)
    positions = None
    if admission.kind == ADMIT_BY_CALL:
        positions = _ask(index, admission, ids, table_ranges, rows, missing, judged)
    elif admission.kind == ADMIT_BY_CHANCE:
        draw(index, admission, ids, rows, missing, judged)
    else:
        assert counter is not None
        count(index, admission, ids, rows, missing, judged)
        slots = judged.slots()
        if missing.ordered:
            order(counter, ids, table_ranges, slots, judged.lists)
        insert(counter, slots, judged.lists)
    stage = reject(index, admission, store, ids, table_ranges, rows, missing, judged)
    return Rejected(stage, judged.losers(), judged, admission, positions)


def add_counts(counter: Index, ids: torch.Tensor, table_ranges: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
    """Add to the counts of ids, new ones included; return the counts after it.

    Args:
        counter: the counters; the step must have begun.
        ids: i64 ``[U]``, distinct in a table.
        table_ranges: i64 ``[T+1]``, the ids of each table.
        amounts: i64 ``[U]``.

    Returns:
        i64 ``[U]``; the amounts where a bucket is full of ids of this lookup.
    """
    missing = Missing.allocate(counter, ids.numel()).filled()
    # The kernels take amounts for frequencies of a batch, and clamp them; the rest is added below.
    within = amounts.clamp(max=MAX_FREQUENCY)
    slots = find_and_list(counter, ids, table_ranges, within, missing)
    if ids.numel():
        elect(counter, ids, slots, table_ranges, within, missing)
        if missing.ordered:
            order(counter, ids, table_ranges, slots, missing)
        insert(counter, slots, missing)
        settle(counter, table_ranges, slots, missing)
    placed, places = slots >= 0, slots.clamp(min=0).long()
    counter.scores.index_add_(0, places, torch.where(placed, amounts - within, 0))
    return torch.where(placed, counter.scores[places], amounts)


def _ask(
    index: Index, admission: Admission, ids: torch.Tensor, table_ranges: torch.Tensor, rows: torch.Tensor,
    missing: Missing, judged: Judged,
) -> torch.Tensor:  # fmt: skip
    """Ask the user's strategy about the leaders; mark those that lost, and return who they are, ascending."""
    number = int(missing.tensor("lengths", MISSING_LENGTH + 1)[MISSING_LENGTH]) + 1
    occurrences = missing.tensor("missed", number) & 0xFFFFFFFF
    places = -2 - rows[occurrences].long()
    leads = missing.tensor("claims", missing.num_claims)[places] == occurrences
    positions, by_position = occurrences[leads].sort()
    places = places[leads][by_position]
    amounts = missing.amounts
    if not isinstance(amounts, torch.Tensor):
        amounts = missing.tensor("amounts", missing.num_claims)
    candidates = Candidates(
        ids[positions],
        torch.searchsorted(table_ranges, positions, right=True) - 1,
        torch.searchsorted(positions, table_ranges),
        amounts[places],
    )
    admitted, totals = ask_judge(admission, (add_counts, erase), index.clock, candidates)
    amounts[places] = totals
    judged.lost()[positions] = (~admitted).to(torch.int32)
    return positions[~admitted]
