"""A lookup as a value that passes through four functions: decide, place, read, and in backward train.

::

    plan   = decide(batch)          host: checks, room, the number of the step, what shall be refused
    placed = place(plan)            device: ids are found or inserted; every occurrence has a row, and who protects it
    output = read(placed)           device: gather or pool
    train(placed, gradients)        device: the gradients of each row are summed, the optimizer is applied

An evaluation is placed and read, and needs no decision. Plans are placed in the order in which they were decided.
"""

from typing import NamedTuple, Protocol

import torch

from dynamicemb.embedding.checks import InsertChecks
from dynamicemb.embedding.inputs import Batch
from dynamicemb.embedding.optimizer_settings import OptimizerSettings
from dynamicemb.embedding.phases import phase
from dynamicemb.table.group import TableGroup
from dynamicemb.table.layout import POOLING_NONE, FeatureLayout
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.stepping.lookup import Lookup, rows_without
from dynamicemb.table.stepping.results import OpenBatch
from dynamicemb.table.stepping.staging import Staged
from dynamicemb.table.stepping.tracker import Step


class OptimizerOwner(Protocol):
    """Who knows the present optimizer settings when backward runs, and which tables are frozen then."""

    optimizer_settings: OptimizerSettings

    def frozen_tables(self) -> tuple[int, ...]:
        """Return the tables that are not trained."""


class Training(NamedTuple):
    """What a lookup that trains keeps for its backward.

    Attributes:
        step: protects the rows until backward has run, or the graph is gone.
        owner: holds the optimizer settings.
        frozen: tables that are frozen at forward.
    """

    step: Step
    owner: OptimizerOwner
    frozen: tuple[int, ...] = ()


class Plan(NamedTuple):
    """A training batch whose lookup may begin.

    Attributes:
        batch: the checked batch.
        layout: its features.
        training: its step, which has its number.
        lag: how many steps before this one the oldest protected step is.
    """

    batch: Batch
    layout: FeatureLayout
    training: Training
    lag: int


class Placed(NamedTuple):
    """A lookup whose occurrences have rows.

    Attributes:
        lookup: occurrences and rows.
        number: the last step that had begun at the time of the lookup.
        epoch: ``group.epoch`` then: if the group has another one, an id may have lost its row.
        training: None is an evaluation, which protects nothing and trains nothing.
        staged: what is read where ids were not admitted; None: the rows of the lookup.
    """

    lookup: Lookup
    number: int
    epoch: int
    training: Training | None = None
    staged: Staged | None = None


class Reading(NamedTuple):
    """How rows become an output.

    Attributes:
        missing_values: f32 ``[T]``, what an occurrence without a row reads.
        dtype: dtype of the output.
    """

    missing_values: torch.Tensor
    dtype: torch.dtype


def decide(group: TableGroup, checks: InsertChecks, batch: Batch, layout: FeatureLayout, owner: OptimizerOwner) -> Plan:
    """Decide on the host what a training lookup may do: tables that must grow do so, and the step gets its number.

    Raises:
        InsertFailedError: ids of a table of ``safe_check_mode`` ERROR would find no slot.

    Host sync: none while no table must grow and none has mode ERROR. Launches: none then.
    """
    group.make_room(batch.ids, batch.offsets, layout)
    checks.before_insert(batch.ids, batch.offsets, layout, batch.frequencies)
    step, lag = group.next_step()
    return Plan(batch, layout, Training(step, owner, owner.frozen_tables()), lag)


def place(group: TableGroup, plan: Plan) -> Placed:
    """Find the rows of a training batch; ids that have none are inserted and initialised, or read a staged row.

    Host sync: none, but for admission by the user's own strategy.
    """
    batch, layout = plan.batch, plan.layout
    opened = group.open_batch(batch.offsets, layout, batch.ids.numel(), plan.lag)
    with phase("find_or_insert"):
        rows, events = group.find_or_insert(
            batch.ids, opened.table_ranges, batch.frequencies, opened.scratch, admit_all=False
        )
    lookup = _lookup(batch, layout, opened, rows)
    return Placed(lookup, plan.training.step.number, group.epoch, plan.training, events.staged)


def place_evaluation(group: TableGroup, batch: Batch, layout: FeatureLayout) -> Placed:
    """Find the rows of a batch; ids that have none read a constant. Host sync: none."""
    opened = group.open_batch(batch.offsets, layout, batch.ids.numel())
    with phase("find"):
        rows = group.find(batch.ids, opened.table_ranges)
    return Placed(_lookup(batch, layout, opened, rows), group.steps.current, group.epoch)


def read(group: TableGroup, placed: Placed, reading: Reading) -> torch.Tensor:
    """Return the output of a lookup: ``[N, D]`` without pooling, else ``[B, total_D]``. Host sync: none."""
    kernels, lookup, staged = group.kernels, placed.lookup, placed.staged
    store, rows = (group.store, lookup.rows) if staged is None else (staged.store, staged.rows)
    missing, dtype = reading.missing_values, reading.dtype
    with phase("read"):
        if lookup.layout.pooling == POOLING_NONE:
            return kernels.gather(store, rows, lookup.table_ranges, missing, dtype)
        return kernels.pool(store, rows, lookup.offsets, lookup.layout, lookup.per_sample_weights, missing, dtype)


def place_and_read(group: TableGroup, batch: Batch, layout: FeatureLayout, reading: Reading) -> torch.Tensor:
    """Evaluate without pooling, ``[N, D]``, in one launch: what ``place_evaluation`` and ``read`` do in four."""
    missing, dtype = reading.missing_values, reading.dtype
    with phase("find_and_read"):
        return group.kernels.find_and_gather(group.index, group.store, batch.ids, batch.offsets, layout, missing, dtype)


def present(group: TableGroup, placed: Placed, lookup: Lookup) -> Lookup:
    """Return a lookup as it is at the time of its backward: rows that have gone to other ids are -1, and counted.

    Args:
        group: the tables.
        placed: how it was placed.
        lookup: its occurrences.
    """
    training = placed.training
    if training is None:
        return group.still_owned(lookup, placed.number)
    if placed.epoch == group.epoch and not training.step.finished:
        return lookup
    now = group.still_owned(lookup, placed.number)
    group.count_dropped(lookup, now)
    return now


def train(group: TableGroup, placed: Placed, gradients: Gradients) -> None:
    """Train the tables that were not frozen at forward and are not now, as autograd treats a parameter.

    An update in which no table takes part, be it frozen or replaced by a load, is not counted.

    Args:
        group: the tables.
        placed: a training lookup.
        gradients: of its occurrences, with the rows that ``present`` returns.
    """
    training = placed.training
    assert training is not None
    frozen = {*training.frozen, *training.owner.frozen_tables(), *group.steps.replaced_since(placed.number)}
    if len(frozen) == len(group.names):
        return
    if frozen:
        gradients = gradients._replace(rows=rows_without(gradients.rows, gradients.table_ranges, frozen))
    group.update(training.owner.optimizer_settings.hand_on(), gradients)


def _lookup(batch: Batch, layout: FeatureLayout, opened: OpenBatch, rows: torch.Tensor) -> Lookup:
    weights = batch.per_sample_weights
    weights = None if weights is None else weights.detach().float().contiguous()
    return Lookup(batch.ids, rows, opened.table_ranges, opened.offsets, layout, weights)
