"""Send every distinct id of a table once, with the number of its occurrences."""

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.embedding.inputs import MAX_FREQUENCY


class Deduplication:
    """Keeps one occurrence of every id per table.

    Args:
        features_per_table: number of features of each of T tables, sum F; features of a table are beside each other.
        with_counts: attach the number of occurrences as weights, see `pack_counts`. Attached to an empty batch too.
        device: of the batches.
    """

    def __init__(self, features_per_table: list[int], with_counts: bool, device: torch.device) -> None:
        self._features_per_table = features_per_table
        self._with_counts = with_counts
        # Of every feature: its table, its place in it, how many features that has. Made once: a copy to a GPU waits.
        tables = [table for table, number in enumerate(features_per_table) for _ in range(number)]
        places = [place for number in features_per_table for place in range(number)]
        numbers = [features_per_table[table] for table in tables]
        self._tables = torch.tensor(tables, dtype=torch.int64, device=device)
        self._places = torch.tensor(places, dtype=torch.int64, device=device)[:, None]
        self._num_features = torch.tensor(numbers, dtype=torch.int64, device=device)[:, None]
        # Narrow: a radix sort takes one pass for each 8 bits of the type.
        self._narrow_tables = self._tables.to(torch.int16)[:, None]

    def __call__(
        self, features: KeyedJaggedTensor, counts: torch.Tensor | None = None
    ) -> tuple[KeyedJaggedTensor, torch.Tensor]:
        """Deduplicate a batch.

        Args:
            features: ids ``[N]`` of F features and B samples.
            counts: i64 ``[N]``, how often each occurrence counts; None is once.

        Returns:
            ``(unique, reverse)``: ids ``[U]``, spread evenly over the bags of their table so that it stays a valid
            input, and i64 ``[N]``, which unique id an occurrence is.

        Example::

            one table, two features, B = 2, lengths [2, 0, 1, 1], ids [7, 5, 7, 7]
            -> ids [5, 7], lengths [1, 1, 0, 0], reverse [1, 0, 1, 1], counts [1, 3]

        Host sync: one, for the number of distinct ids.
        """
        ids, batch_size = features.values(), features.stride()
        if ids.device.type == "cpu":
            unique = unique_per_table(ids, self._ids_per_table(features))
            num_unique = unique.per_table.tolist()
        else:
            tables = self._narrow_tables.expand(-1, batch_size).flatten()
            tables = torch.repeat_interleave(tables, features.lengths(), output_size=ids.numel())
            unique = unique_per_table_by_sorting(ids, tables, len(self._features_per_table))
            num_unique = unique.per_table.tolist()
            unique = unique.cut(sum(num_unique))
        deduplicated = KeyedJaggedTensor(
            keys=features.keys(),
            values=unique.ids,
            lengths=self._spread(unique.per_table, batch_size).to(features.lengths().dtype),
            weights=pack_counts(_summed(unique, counts)) if self._with_counts else None,
            stride=batch_size,
            length_per_key=self._length_per_key(num_unique, batch_size),
        )
        return deduplicated, unique.reverse

    def _ids_per_table(self, features: KeyedJaggedTensor) -> list[int]:
        per_key = iter(features.length_per_key())
        return [sum(next(per_key) for _ in range(number)) for number in self._features_per_table]

    def _spread(self, num_unique: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Return lengths i64 ``[F*B]`` that differ by at most one inside a table and sum to its ``num_unique``."""
        num_ids, num_bags = num_unique[self._tables, None], self._num_features * max(batch_size, 1)
        bags = self._places * batch_size + torch.arange(batch_size, device=num_unique.device)
        return (num_ids // num_bags + (bags < num_ids % num_bags)).flatten()

    def _length_per_key(self, num_unique: list[int], batch_size: int) -> list[int]:
        """Return the sum of each feature's lengths, as `_spread` makes them, without asking the device."""
        sums = []
        for number, num_features in zip(num_unique, self._features_per_table, strict=True):
            share, rest = divmod(number, max(num_features * batch_size, 1))
            for place in range(num_features):
                sums.append(share * batch_size + min(max(rest - place * batch_size, 0), batch_size))
        return sums


@dataclass(frozen=True)
class Unique:
    """The distinct ids of T tables.

    Attributes:
        ids: ``[U]``, sorted inside a table, tables beside each other.
        reverse: i64 ``[N]``, which of them an occurrence is.
        counts: i64 ``[U]``, occurrences of each.
        per_table: i64 ``[T]``, how many of them a table has.
    """

    ids: torch.Tensor
    reverse: torch.Tensor
    counts: torch.Tensor
    per_table: torch.Tensor

    def cut(self, num_unique: int) -> "Unique":
        """Return the first ids only; what stands behind them is padding."""
        return Unique(self.ids[:num_unique], self.reverse, self.counts[:num_unique], self.per_table)


def _summed(unique: Unique, counts: torch.Tensor | None) -> torch.Tensor:
    """Return how often each distinct id counts, i64 ``[U]``."""
    if counts is None:
        return unique.counts
    # One lookup takes no more.
    return torch.zeros_like(unique.counts).index_add_(0, unique.reverse, counts).clamp_(max=MAX_FREQUENCY)


def unique_per_table(ids: torch.Tensor, ids_per_table: list[int]) -> Unique:
    """Find the distinct ids of each table, one table after the other: the faster way on a CPU.

    Args:
        ids: ``[N]``, tables beside each other.
        ids_per_table: N by table.
    """
    values, reverse, counts, num_unique = [], [], [], 0
    for part in torch.split(ids, ids_per_table):
        unique, inverse, count = torch.unique(part, return_inverse=True, return_counts=True)
        values.append(unique)
        reverse.append(inverse + num_unique)
        counts.append(count)
        num_unique += unique.numel()
    per_table = torch.tensor([unique.numel() for unique in values])
    return Unique(torch.cat(values), torch.cat(reverse), torch.cat(counts), per_table)


def unique_per_table_by_sorting(ids: torch.Tensor, tables: torch.Tensor, num_tables: int) -> Unique:
    """Find the distinct ids of all tables in one sort.

    Args:
        ids: ``[N]``, tables beside each other.
        tables: i16 ``[N]``, the table of each occurrence.
        num_tables: T.

    Returns:
        The same as `unique_per_table`, but ``ids`` and ``counts`` have N entries, those behind the first U undefined.

    Host sync: none.
    """
    num_ids, device = ids.numel(), ids.device
    sorted_ids, order = torch.sort(ids, stable=True)
    is_first = torch.ones(num_ids, dtype=torch.bool, device=device)
    if num_tables > 1:
        sorted_tables, by_table = torch.sort(tables[order], stable=True)
        order, sorted_ids = order[by_table], sorted_ids[by_table]
        is_first[1:] = (sorted_ids[1:] != sorted_ids[:-1]) | (sorted_tables[1:] != sorted_tables[:-1])
    else:
        sorted_tables = tables
        is_first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    # Of every occurrence, in sorted order: how many distinct ids there are up to and including it.
    rank = is_first.cumsum(0)
    reverse = torch.empty_like(order).scatter_(0, order, rank - 1)
    # Where each distinct id starts; N for the padding.
    starts = torch.searchsorted(rank, torch.arange(1, num_ids + 2, device=device))
    unique = sorted_ids[starts[:-1].clamp(max=max(num_ids - 1, 0))]
    table_ends = torch.searchsorted(
        sorted_tables, torch.arange(num_tables, dtype=torch.int16, device=device), right=True
    )
    unique_until = torch.cat([rank.new_zeros(1), rank])[table_ends]
    return Unique(unique, reverse, starts.diff(), unique_until.diff(prepend=rank.new_zeros(1)))


def pack_counts(counts: torch.Tensor) -> torch.Tensor:
    """Return i64 counts as float64 with the same bits: FBGEMM's permutations move floating weights only.

    Nothing computes with the result, so that counts stay exact at any size.
    """
    return counts.to(torch.int64).view(torch.float64)


def unpack_counts(weights: torch.Tensor) -> torch.Tensor:
    """Return the i64 counts that `pack_counts` got."""
    return weights.view(torch.int64)
