"""What a module of dynamic tables tells about itself."""

import torch

from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode, DynamicEmbTableOptions
from dynamicemb.embedding.construct import strategy_name
from dynamicemb.embedding.optimizer_settings import OptimizerSettings
from dynamicemb.table.group import TableGroup


class TableReports:
    """The part of a module that reports: counts, loads, bytes."""

    table_options: list[DynamicEmbTableOptions]
    pooling_mode: DynamicEmbPoolingMode
    optimizer_settings: OptimizerSettings
    _group: TableGroup

    def stats(self, wait: bool = True) -> dict[str, dict[str, float]]:
        """Return per table name: size, capacity, load, hits, misses, inserted, evicted, failed, erased,
        dropped_gradients, clamped_inputs, expired and non_admitted; with a ``KVCounter`` also counter_size,
        counter_evicted and counter_failed.

        Since construction, training lookups and ``insert()`` of this rank only. hits, misses, failed, non_admitted and
        dropped_gradients count occurrences (with ``use_index_dedup`` those of one rank in a lookup are one); inserted,
        evicted, erased and expired count ids. An id new to a batch is a miss at each of its occurrences. inserted
        includes ids that took the place of another. failed ids found their bucket full of ids that may not be evicted.
        load is size / capacity. clamped_inputs counts offsets and frequencies on a GPU that were out of range, of
        evaluations too. counter_size is the ids that the counter knows now, counter_evicted those that it had to
        forget, counter_failed those for which it had no place.

        Args:
            wait: True waits for a GPU. False never does: it returns the last values that have arrived, zeros at first,
                and sends for newer ones, which the next call finds.
        """
        return self._group.stats(wait)

    def bucket_loads(self, table_name: str) -> torch.Tensor:
        """Return how many buckets of a table hold 0, 1, ... ids, i64 ``[bucket_capacity + 1]`` on the CPU; waits.

        Ids fail, or evict others, where a bucket is full, so the end of the histogram says more than the load does.
        """
        return self._group.bucket_loads(self._group.number_of(table_name))

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes allocated for ``rows`` and ``index``, and for a ``KVCounter`` as ``counter``."""
        return self._group.memory_usage()

    def extra_repr(self) -> str:
        """One line about the tables; their sizes where the host knows them without waiting."""
        group = self._group
        stats = group.stats(wait=False) if group.device.type == "cpu" else {}
        tables = []
        for name, capacity, option in zip(group.names, group.capacities, self.table_options, strict=True):
            size = f" ({stats[name]['size']} ids, {stats[name]['load']:.0%})" if stats else ""
            tables.append(f"{name}: {capacity}x{option.dim} {strategy_name(option)}{size}")
        return ", ".join([*tables, self.optimizer_settings.name, self.pooling_mode.name, f"device={group.device}"])
