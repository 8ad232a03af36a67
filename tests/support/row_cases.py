"""Row stores with known contents, ragged batches, and plain references for the tests of the row kernels."""

from dataclasses import dataclass

import torch

from dynamicemb.table.index import CLOCK_SIZE, UPDATES
from dynamicemb.table.layout import POOLING_MEAN, POOLING_NONE, FeatureLayout
from dynamicemb.table.rows import RowFormat, RowStore

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")


def table_bytes(store: RowStore, table: int) -> torch.Tensor:
    """View the rows of a table, u8 ``[rows, row_bytes]``."""
    return store.chunks[table].view(-1, int(store.row_bytes[table]))


def weights_of(store: RowStore, table: int) -> torch.Tensor:
    """View the weights of a table, ``[rows, D]`` in the store's dtype."""
    size = store.formats[table].dim * store.dtype.itemsize
    return table_bytes(store, table).view(store.dtype)[:, : size // store.dtype.itemsize]


def state_of(store: RowStore, table: int) -> torch.Tensor:
    """View the optimizer state of a table, f32 ``[rows, num_state]``."""
    begin = int(store.state_offsets[table]) // 4
    return table_bytes(store, table).view(torch.float32)[:, begin : begin + store.formats[table].num_state]


def make_store(
    dims: list[int], dtype: torch.dtype, num_states: list[int] | None = None, num_rows: int = 37
) -> RowStore:
    """Make a store of random weights; the bytes of padding and state are a pattern that reads as NaN."""
    formats = [RowFormat(dim, state) for dim, state in zip(dims, num_states or [0] * len(dims))]
    store = RowStore([num_rows + t for t in range(len(dims))], formats, dtype, CPU)
    for table in range(len(dims)):
        table_bytes(store, table).fill_(0xFF)
        weights = weights_of(store, table)
        weights.copy_(torch.randn(weights.shape))
    return store


@dataclass
class Batch:
    """A ragged batch: ``rows``, ``offsets``, ``layout`` as the kernels take them and the bag of each occurrence."""

    rows: torch.Tensor
    offsets: torch.Tensor
    layout: FeatureLayout
    ids: torch.Tensor

    @property
    def table_ranges(self) -> torch.Tensor:
        return self.layout.table_ranges(self.offsets)

    def bags(self):
        """Yield ``(table, sample, columns, occurrences)`` of every bag."""
        tables, columns = self.layout.feature_tables.tolist(), self.layout.column_offsets.tolist()
        offsets = self.offsets.tolist()
        for k in range(len(offsets) - 1):
            feature, sample = divmod(k, self.layout.batch_size)
            yield (
                tables[feature],
                sample,
                slice(columns[feature], columns[feature + 1]),
                range(offsets[k], offsets[k + 1]),
            )

    def factors(self, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the factor of each occurrence's gradient, f32 ``[N]``."""
        factors = torch.ones(self.rows.numel())
        for *_, occurrences in self.bags():
            for i in occurrences:
                if self.layout.pooling == POOLING_MEAN:
                    factors[i] = torch.ones(()) / torch.tensor(float(len(occurrences)))
                if weights is not None:
                    factors[i] *= weights[i]
        return factors


def make_batch(
    store: RowStore,
    features_per_table: list[int],
    batch_size: int,
    pooling: int,
    longest: int = 6,
    missing: float = 0.15,
) -> Batch:
    """Make a batch with empty bags, repeated rows and rows of -1."""
    tables = [t for t, count in enumerate(features_per_table) for _ in range(count)]
    dims = [store.formats[t].dim for t in tables]
    lengths = torch.randint(0, longest + 1, (len(tables) * batch_size,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    layout = FeatureLayout(
        feature_tables=torch.tensor(tables, dtype=torch.int32),
        column_offsets=torch.tensor([0, *dims]).cumsum(0),
        table_features=torch.tensor([0, *features_per_table]).cumsum(0),
        batch_size=batch_size,
        pooling=pooling,
        width=sum(dims),
    )
    rows = torch.empty(int(offsets[-1]), dtype=torch.int32)
    ranges = layout.table_ranges(offsets).tolist()
    for t in range(store.num_tables):
        count = ranges[t + 1] - ranges[t]
        # A third of the rows, so that most repeat.
        rows[ranges[t] : ranges[t + 1]] = store.first_rows[t] + torch.randint(0, 12, (count,))
    rows[torch.rand(rows.numel()) < missing] = -1
    return Batch(rows, offsets, layout, rows.long() * 7919 - (1 << 40))


def row_values(store: RowStore, batch: Batch, missing_values: torch.Tensor) -> list[torch.Tensor]:
    """Return the fp32 weights each occurrence reads."""
    values = []
    ranges = batch.table_ranges.tolist()
    for t in range(store.num_tables):
        weights = weights_of(store, t).float()
        for i in range(ranges[t], ranges[t + 1]):
            row = int(batch.rows[i])
            missing = missing_values[t].expand(store.formats[t].dim)
            values.append(weights[row - store.first_rows[t]] if row >= 0 else missing)
    return values


def row_gradients(
    store: RowStore, batch: Batch, grad: torch.Tensor, weights: torch.Tensor | None = None, clip: float | None = None
) -> dict[int, tuple[int, torch.Tensor]]:
    """Sum the gradient of each row in the order of its occurrences: ``{row: (table, fp32 gradient)}``."""
    grad = grad.float() if clip is None else grad.float().clamp(-clip, clip)
    sums: dict[int, tuple[int, torch.Tensor]] = {}
    factors = batch.factors(weights)
    for table, sample, columns, occurrences in batch.bags():
        for i in occurrences:
            row = int(batch.rows[i])
            if row >= 0:
                own = grad[i] if batch.layout.pooling == POOLING_NONE else grad[sample, columns]
                _, total = sums.get(row, (table, torch.zeros(store.formats[table].dim)))
                sums[row] = (table, total + factors[i] * own)
    return sums


def clock_at(updates: int) -> torch.Tensor:
    """Return a clock whose next optimizer step is the given one."""
    clock = torch.zeros(CLOCK_SIZE, dtype=torch.int64)
    clock[UPDATES] = updates - 1
    return clock
