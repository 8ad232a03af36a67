"""Methods and arguments for callers of the reference implementation: most have nothing to do here, and say so once."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

from dynamicemb.embedding.inputs import Batch, asks_to_freeze, check_batch_sizes
from dynamicemb.table.group import TableGroup
from dynamicemb.table.importing.filling import fill
from dynamicemb.table.layout import FeatureLayout
from dynamicemb.warn import warn

# Above this load most ids find their bucket full.
_MAX_FILL = 0.95

_PREFETCH = (
    "all rows are in the memory of their device, so there is nothing to fetch ahead, and the forward does all of the "
    "work"
)


class ReferenceCalls:
    """The part of a module that exists for callers of the reference implementation."""

    training: bool
    feature_num: int
    dims: list[int]
    _group: TableGroup
    # Subjects of warnings that have been given.
    _said: set[str]
    _prefetches: bool

    def _begin_saying(self, prefetch_pipeline: bool) -> None:
        """Start with nothing said."""
        self._said = set()
        self._prefetches = prefetch_pipeline

    def _say_once(self, subject: str, message: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            warn(message)

    # What the module itself provides

    def _checked(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        frequency_counters: torch.Tensor | None,
        wait: bool = False,
    ) -> tuple[Batch, FeatureLayout]:
        raise NotImplementedError

    def _check_arguments(self, batch: Batch) -> None:
        raise NotImplementedError

    def _check_scores(self, tables: Iterable[int]) -> None:
        raise NotImplementedError

    # Prefetch

    @property
    def enable_prefetch(self) -> bool:
        """Whether prefetching was asked for; it changes nothing."""
        return self._prefetches

    @enable_prefetch.setter
    def enable_prefetch(self, enable_prefetch: bool) -> None:
        if not isinstance(enable_prefetch, bool):
            raise TypeError(f"enable_prefetch must be a bool, got {enable_prefetch!r}")
        self._prefetches = enable_prefetch
        if enable_prefetch:
            self._say_once("enable_prefetch", f"enable_prefetch=True has no effect: {_PREFETCH}; leave it False")

    @torch.compiler.disable
    def prefetch(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        frequency_counters: torch.Tensor | None = None,
    ) -> None:
        """Check the arguments of the forward to come, and change nothing; warns once that the forward does the work.

        Args:
            indices: see ``forward``.
            offsets: see ``forward``.
            forward_stream: not read.
            batch_size_per_feature_per_rank: see ``forward``.
            frequency_counters: see ``forward``; tables that do not count may get them too.

        Raises:
            Exception: what ``forward`` raises for these arguments.
        """
        batch, _ = self._checked(indices, offsets, None, frequency_counters)
        if not self._group.counts_occurrences:
            batch = batch._replace(frequencies=None)
        self._check_arguments(batch)
        check_batch_sizes(batch_size_per_feature_per_rank, self.feature_num, batch.batch_size)
        self._say_once("prefetch", f"prefetch() has no effect: {_PREFETCH}; leave the call out")

    # Cache

    @property
    def cache(self) -> None:
        """None: one index serves all memories, there is no separate cache."""
        return None

    def flush(self) -> None:
        """Write cached rows back: none are, rows have one place."""

    def reset_cache_states(self) -> None:
        """Drop what is cached: nothing is, so all rows stay; warns once."""
        self._say_once("reset_cache_states", "reset_cache_states() has no effect: there is no cache, and all rows stay")

    def set_record_cache_metrics(self, record: bool) -> None:
        """Ask for ``cache_metrics``, which stay None as there is no cache; warns once.

        Raises:
            TypeError: not a bool.
        """
        if not isinstance(record, bool):
            raise TypeError(f"record must be a bool, got {record!r}")
        if record:
            self._say_once(
                "cache_metrics",
                "set_record_cache_metrics(True) has no effect: there is no cache, and cache_metrics stay None; stats() "
                "has the hits and misses of the tables",
            )

    @property
    def cache_metrics(self) -> torch.Tensor | None:
        """None: there is no cache; ``stats()`` has the hits and misses of the tables."""
        return None

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """Return one empty ``(1, 1)`` placeholder per table, where TorchRec expects weights."""
        return [torch.empty(1, 1, device=self._group.device) for _ in self.dims]

    # Contents

    def fill_tables(self, load_factor: float = 0.95, tolerance: float = 1e-5) -> None:
        """Fill every table with random ids, for example to measure full tables.

        Ids are drawn from 0 to 2^63 - 2, by the seed and the name of the table, and get the rows that a lookup would
        give them; ids that are there stay, count, and are not evicted. A table that may grow is filled as large as it
        is. It ends with ``int(load_factor * capacity)`` ids, where it had fewer and enough places are free: those of
        ids that were erased may still be protected by outstanding steps. ``protect_steps`` protects the new ids as
        those of the last step. Each bucket gets as many ids as random ones would bring it, until it is full.

        Args:
            load_factor: share of used slots to reach, in (0, 1]; more than 0.95 is taken for 0.95.
            tolerance: how far the load may stay below without a warning.

        Raises:
            TypeError: not a number.
            ValueError: out of range.
            DynamicEmbError: a CUSTOMIZED table without a score; nothing has changed.
        """
        for name, value in (("load_factor", load_factor), ("tolerance", tolerance)):
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < load_factor <= 1:
            raise ValueError(f"load_factor must be in (0, 1], got {load_factor}; use for example 0.95")
        if not 0 <= tolerance <= 1:
            raise ValueError(f"tolerance must be in 0..1, got {tolerance}; use for example 1e-5")
        group = self._group
        self._check_scores(range(len(group.names)))
        for t, name in enumerate(group.names):
            target = int(min(load_factor, _MAX_FILL) * group.capacities[t])
            size = fill(group, t, target)
            if size < target - tolerance * group.capacities[t]:
                warn(
                    f"fill_tables: table {name!r} holds {size} ids, {target} were wanted: places of erased ids are "
                    "protected by outstanding steps; run their backwards, or let go of their outputs, and call it again"
                )

    # Arguments of a lookup

    def _say_what_is_idle(
        self,
        batch: Batch,
        feature_requires_grad: torch.Tensor | None,
        batch_size_per_feature_per_rank: list[list[int]] | None,
        total_unique_indices: int | None,
    ) -> None:
        """Check the arguments that only static tables act on, and name those that do nothing."""
        check_batch_sizes(batch_size_per_feature_per_rank, self.feature_num, batch.batch_size)
        if feature_requires_grad is not None and asks_to_freeze(feature_requires_grad):
            self._say_once(
                "feature_requires_grad",
                "feature_requires_grad has no effect: all features train; freeze a table by requires_grad_(False) on "
                "its weight in the sharded collection, or all of them by requires_grad_(False) on the module",
            )
        if total_unique_indices is not None:
            self._say_once(
                "total_unique_indices",
                "total_unique_indices has no effect: a lookup finds the distinct ids by itself; leave it None",
            )

    def _say_what_counts(self) -> None:
        """Name what integer weights are taken for."""
        if self._group.counts_occurrences:
            message = (
                "per_sample_weights of integers are taken for how often each occurrence counts, and weigh nothing; "
                "name them frequency_counters, or give floating weights to weigh rows"
            )
        else:
            message = (
                "per_sample_weights of integers have no effect: they are taken for how often each occurrence counts, "
                "but only score_strategy LFU and admission count; leave them out, or give floating weights to weigh "
                "rows"
            )
        self._say_once("counts", message)
