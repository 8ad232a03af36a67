"""What ``safe_check_mode`` asks of a module's lookups."""

from collections.abc import Iterable, Sequence

import torch

from dynamicemb.dynamicemb_config import DynamicEmbCheckMode
from dynamicemb.embedding.phases import phase
from dynamicemb.errors import DynamicEmbError, InsertFailedError
from dynamicemb.table.group import TableGroup
from dynamicemb.table.growing.plan import InsertPlan
from dynamicemb.table.index import FAILED
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.warn import warn

_REMEDY = "raise max_capacity (with a planner num_embeddings), lower protect_steps, or send fewer distinct ids per step"


class InsertChecks:
    """The check modes of one module's tables.

    ERROR plans the inserts of a batch and raises before anything changes. WARNING looks at the counters of failed
    inserts that have arrived on the host, and never waits for a GPU. IGNORE leaves the counting to ``stats()``.

    Attributes:
        left_to_ranks: a sharded lookup plans for all of its modules and ranks, so that all raise; the module itself
            then need not.
    """

    def __init__(self, group: TableGroup, modes: Sequence[DynamicEmbCheckMode]) -> None:
        """Check the tables of ``group`` as ``modes`` say, T of them."""
        self._group = group
        self._raising = [t for t, mode in enumerate(modes) if mode is DynamicEmbCheckMode.ERROR]
        self._warning = [t for t, mode in enumerate(modes) if mode is DynamicEmbCheckMode.WARNING]
        # Failed occurrences that have been warned about.
        self._warned = dict.fromkeys(self._warning, 0)
        self._warned_of_graph = False
        self.left_to_ranks = False

    @property
    def has_error_tables(self) -> bool:
        """Whether a table has mode ERROR."""
        return bool(self._raising)

    @property
    def raises_here(self) -> bool:
        """Whether the module itself must look before it changes anything."""
        return bool(self._raising) and not self.left_to_ranks

    def refuse_capture(self) -> None:
        """Raise while a CUDA graph is being captured, if a table has mode ERROR."""
        if not self._raising or self._group.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return
        names = ", ".join(self._group.names[t] for t in self._raising)
        raise DynamicEmbError(
            f"safe_check_mode ERROR of table {names} waits for the GPU before every lookup, which a CUDA graph cannot; "
            "capture with WARNING or IGNORE"
        )

    def plan(
        self, ids: torch.Tensor, table_ranges: torch.Tensor, frequencies: torch.Tensor | None = None
    ) -> list[InsertPlan]:
        """Return what a lookup of a batch would insert into each ERROR table; changes nothing and waits for a GPU."""
        with phase("plan"):
            return self._group.plan_inserts(ids, table_ranges, self._raising, frequencies, admit_all=False)

    def before_insert(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        layout: FeatureLayout,
        frequencies: torch.Tensor | None = None,
    ) -> None:
        """Look before a batch is inserted; its offsets have been checked if a table has mode ERROR.

        Raises:
            InsertFailedError: ids of an ERROR table would find no slot.
        """
        self._warn()
        if self.raises_here:
            plans = self.plan(ids, layout.table_ranges(offsets), frequencies)
            raise_failed((self._group.names[plan.table], plan) for plan in plans)

    def before_import(self, table: int, ids: torch.Tensor) -> None:
        """Look before ids of one table are inserted.

        Raises:
            InsertFailedError: it is an ERROR table and some of them would find no slot.
        """
        self.refuse_capture()
        self._warn()
        if table in self._raising:
            raise_failed([(self._group.names[table], self._group.plan_import(table, ids))])

    def after_insert(self) -> None:
        """Note what became of a batch: warn on the CPU, send for the counters on a GPU."""
        if not self._warning:
            return
        if self._group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._warn_of_graph()
            return
        self._group.tally_reader.send()
        self._warn()

    def _warn(self) -> None:
        if not self._warning:
            return
        counts = self._group.tally_reader.latest()
        for t in self._warning:
            failed = counts[t][FAILED]
            new = failed - self._warned[t]
            if new > 0:
                self._warned[t] = failed
                warn(
                    f"table {self._group.names[t]!r}: {new} occurrences of new ids found no slot that may be evicted, "
                    f"{failed} since construction; they read zeros and are not trained; {_REMEDY}",
                )

    def _warn_of_graph(self) -> None:
        if self._warned_of_graph:
            return
        self._warned_of_graph = True
        names = ", ".join(self._group.names[t] for t in self._warning)
        warn(
            f"safe_check_mode WARNING of table {names}: no warning comes while a CUDA graph is replayed; the next "
            "lookup outside of it warns, and stats() counts",
        )


def raise_failed(plans: Iterable[tuple[str, InsertPlan]]) -> None:
    """Raise for the first table, by name, some of whose ids would find no slot.

    Raises:
        InsertFailedError: with the numbers.
    """
    for name, plan in plans:
        if plan.failed:
            raise InsertFailedError(name, plan.failed, plan.total)
