"""Triton's gather, pool, lookups that read, and transfer against their CPU twins."""

from dataclasses import replace

import pytest
import torch

from dynamicemb.table import cpu
from dynamicemb.table.admission import Newcomers
from dynamicemb.table.growing.relocation import rebuild
from dynamicemb.table.index import CLAMPED, Index
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.layout import DIGEST_ERASED, POOLING_MEAN, POOLING_NONE, POOLING_SUM, FeatureLayout
from dynamicemb.table.rows import RowFormat, RowStore
from dynamicemb.table.scores import SCORE_STEP
from dynamicemb.table.stepping.lookup import Lookup
from dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from tests.conftest import HAS_CUDA
from tests.support.row_cases import state_of, weights_of
from tests.support.twins import TENSORS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
# The interpreter takes milliseconds for what a GPU does at once.
DIMS = (1, 3, 4, 16, 64, 100, 128, 257, 2048) if HAS_CUDA else (1, 16, 100)
BATCH_SIZE = 300 if HAS_CUDA else 7


@pytest.fixture
def kernels(backend):
    if backend == "cpu":
        pytest.skip("cpu: these tests compare a backend with the CPU")
    return pytest.importorskip("dynamicemb.table.triton")


def make_store(
    dims: list[int], dtype: torch.dtype, num_states: list[int], num_rows: int = 50, state: float = 0.0
) -> RowStore:
    """Make a CPU store of random weights; all padding is 0xFF bytes, state is ``state`` plus noise of its sign."""
    formats = [RowFormat(dim, num_state) for dim, num_state in zip(dims, num_states)]
    store = RowStore([num_rows + t for t in range(len(dims))], formats, dtype, CPU)
    for t, row_format in enumerate(formats):
        store.chunks[t].fill_(0xFF)
        weights_of(store, t).copy_(torch.randn(num_rows + t, row_format.dim))
        state_of(store, t).copy_(torch.rand(num_rows + t, row_format.num_state) * state)
    return store


def copy_store(store: RowStore, device: torch.device) -> RowStore:
    """Return a store on a device with equal bytes."""
    capacities = [chunk.numel() // f.num_bytes(store.dtype) for chunk, f in zip(store.chunks, store.formats)]
    copy = RowStore(capacities, store.formats, store.dtype, device)
    assert copy.chunk_shift == store.chunk_shift
    for target, source in zip(copy.chunks, store.chunks):
        target.copy_(source)
    return copy


def make_lookup(
    store: RowStore,
    features_per_table: list[int],
    batch_size: int,
    pooling: int,
    longest: int = 6,
    distinct: int = 20,
    weighted: bool = False,
    missing: float = 0.1,
) -> Lookup:
    """Make a ragged batch on the CPU with empty bags, repeated rows and rows of -1."""
    tables = [t for t, count in enumerate(features_per_table) for _ in range(count)]
    columns = [0, *(store.formats[t].dim for t in tables)]
    lengths = torch.randint(0, longest + 1, (len(tables) * batch_size,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    layout = FeatureLayout(
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor(columns).cumsum(0),
        torch.tensor([0, *features_per_table]).cumsum(0),
        batch_size,
        pooling,
        sum(columns),
    )
    ranges = layout.table_ranges(offsets)
    num = int(offsets[-1])
    rows = torch.empty(num, dtype=torch.int32)
    for t in range(store.num_tables):
        part = slice(int(ranges[t]), int(ranges[t + 1]))
        rows[part] = store.first_rows[t] + torch.randint(0, distinct, (part.stop - part.start,)).int()
    rows[torch.rand(num) < missing] = -1
    weights = torch.randn(num) if weighted else None
    return Lookup(rows.long() * 7919 - (1 << 40), rows, ranges, offsets, layout, weights)


def to_device(lookup: Lookup, device: torch.device) -> Lookup:
    layout = lookup.layout
    moved = FeatureLayout(
        layout.feature_tables.to(device),
        layout.column_offsets.to(device),
        layout.table_features.to(device),
        layout.batch_size,
        layout.pooling,
        layout.width,
    )
    weights = lookup.per_sample_weights
    return Lookup(
        *(x.to(device) for x in (lookup.ids, lookup.rows, lookup.table_ranges, lookup.offsets)),
        moved,
        None if weights is None else weights.to(device),
    )


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_states", [[0, 0, 0], [0, 2, 1]])
def test_gather_equals_the_cpu(kernels, device, dim, dtype, num_states):
    store = make_store([dim] * 3, dtype, num_states)
    lookup = make_lookup(store, [1, 2, 1], BATCH_SIZE, POOLING_NONE)
    missing_values = torch.tensor([0.0, 0.5, -3.0])
    own, here = copy_store(store, device), to_device(lookup, device)
    for output_dtype in DTYPES:
        expected = cpu.gather(store, lookup.rows, lookup.table_ranges, missing_values, output_dtype)
        out = kernels.gather(own, here.rows, here.table_ranges, missing_values.to(device), output_dtype)
        assert torch.equal(out.cpu(), expected)


def test_c09_gather_reads_no_missing_row(kernels, device):
    store = make_store([4, 4], torch.float32, [0, 0])
    own = copy_store(store, device)
    rows = torch.full((70,), -1, dtype=torch.int32, device=device)
    ranges = torch.tensor([0, 0, 70], device=device)
    out = kernels.gather(own, rows, ranges, torch.tensor([1.0, 2.0], device=device), torch.float32)
    assert torch.equal(out.cpu(), torch.full((70, 4), 2.0))


@pytest.mark.parametrize("num", [0, 1, 63, 100])
def test_c03_gather_takes_any_number(kernels, device, num):
    store = make_store([4], torch.float32, [0])
    rows = torch.randint(-1, 50, (num,)).int()
    arguments = (rows, torch.tensor([0, num]), torch.tensor([3.0]))
    expected = cpu.gather(store, *arguments, torch.float32)
    out = kernels.gather(copy_store(store, device), *(x.to(device) for x in arguments), torch.float32)
    assert torch.equal(out.cpu(), expected)


def test_gather_keeps_special_values(kernels, device):
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 6e-8, -6e-5, 65504.0])
    for dtype in DTYPES:
        store = make_store([8], dtype, [0])
        rows = torch.tensor([0], dtype=torch.int32)
        weights_of(store, 0)[0] = special.to(dtype)
        arguments = (rows, torch.tensor([0, 1]), torch.zeros(1))
        for output_dtype in DTYPES:
            expected = cpu.gather(store, *arguments, output_dtype)
            out = kernels.gather(copy_store(store, device), *(x.to(device) for x in arguments), output_dtype).cpu()
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out.nan_to_num(), expected.nan_to_num())
            finite = ~out.isnan()
            assert torch.equal(out.signbit()[finite], expected.signbit()[finite])


# Sums of up to 14 values of size 1 in another order: 14 * 2^-24 relative to the sum of magnitudes.
SUM_TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dims", [[dim, dim] for dim in DIMS] + [[5, 64], [1, 257]])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_c02_c13_pool_equals_the_cpu(kernels, device, dims, dtype, pooling, weighted):
    store = make_store(dims, dtype, [1, 0])
    lookup = make_lookup(store, [2, 1], BATCH_SIZE, pooling, longest=13, weighted=weighted)
    missing_values = torch.tensor([0.25, -1.0])
    own, here = copy_store(store, device), to_device(lookup, device)
    for output_dtype in DTYPES if dtype == torch.float32 else (dtype,):
        expected = cpu.pool(
            store, lookup.rows, lookup.offsets, lookup.layout, lookup.per_sample_weights, missing_values, output_dtype
        )
        out = kernels.pool(
            own,
            here.rows,
            here.offsets,
            here.layout,
            here.per_sample_weights,
            missing_values.to(device),
            output_dtype,
        )
        tolerance = SUM_TOLERANCE[output_dtype]
        torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("batch_size", [0, 5])
def test_c03_pool_of_empty_bags_is_zero(kernels, device, batch_size):
    store = copy_store(make_store([4, 8], torch.float32, [0, 0]), device)
    lookup = to_device(make_lookup(make_store([4, 8], torch.float32, [0, 0]), [1, 1], batch_size, 1, longest=0), device)
    missing_values = torch.ones(2, device=device)
    out = kernels.pool(store, lookup.rows, lookup.offsets, lookup.layout, None, missing_values, torch.float32)
    assert torch.equal(out.cpu(), torch.zeros(batch_size, 12))


def test_pool_docstring_example(kernels, device):
    store = make_store([2], torch.float32, [0])
    weights_of(store, 0)[:2] = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    own = copy_store(store, device)
    rows = torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 3, 3, 4], device=device)
    for pooling, first in ((POOLING_SUM, [12.0, 24.0]), (POOLING_MEAN, [4.0, 8.0])):
        layout = FeatureLayout(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.tensor([0, 2], device=device),
            torch.tensor([0, 1], device=device),
            3,
            pooling,
            2,
        )
        out = kernels.pool(own, rows, offsets, layout, None, torch.zeros(1, device=device), torch.float32)
        torch.testing.assert_close(out.cpu(), torch.tensor([first, [0.0, 0.0], [10.0, 20.0]]))


@pytest.mark.parametrize("dims", [[16, 16], [5, 64]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_c02_bags_of_at_most_one_id_are_copied_bit_for_bit(kernels, device, dims, dtype, pooling, weighted):
    """Also where they are beside longer bags; a sum is never -0."""
    store = make_store(dims, dtype, [1, 0])
    for t in range(2):
        weights_of(store, t)[:12, ::2] = -0.0
    lookup = make_lookup(store, [2, 1], 37, pooling, longest=1, weighted=weighted)
    longer = make_lookup(store, [1, 1], 9, pooling, longest=2, weighted=weighted)
    missing_values = torch.tensor([0.25, -1.0])
    for batch in (lookup, longer):
        arguments = (batch.rows, batch.offsets, batch.layout, batch.per_sample_weights)
        expected = cpu.pool(store, *arguments, missing_values, dtype)
        here = to_device(batch, device)
        arguments = (here.rows, here.offsets, here.layout, here.per_sample_weights)
        out = kernels.pool(copy_store(store, device), *arguments, missing_values.to(device), dtype).cpu()
        # Two values have one sum, whatever their order; pooling weights are multiplied before.
        assert torch.equal(out, expected) and torch.equal(out.signbit(), expected.signbit())


@pytest.mark.parametrize("missing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_c02_pool_takes_long_bags_and_many(kernels, device, missing, weighted):
    """More rows than are looked at side by side, more bags than a program takes."""
    store = make_store([16, 16], torch.float32, [0, 0])
    lookup = make_lookup(store, [1, 1], 10, POOLING_SUM, longest=90, weighted=weighted, missing=missing)
    here = to_device(lookup, device)
    missing_values = torch.tensor([0.25, -1.0])
    expected = cpu.pool(
        store, lookup.rows, lookup.offsets, lookup.layout, lookup.per_sample_weights, missing_values, torch.float32
    )
    out = kernels.pool(
        copy_store(store, device),
        here.rows,
        here.offsets,
        here.layout,
        here.per_sample_weights,
        missing_values.to(device),
        torch.float32,
    )
    # Sums of up to 90 values of size 1.
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=5e-5)


def make_tables(dims: list[int], dtype: torch.dtype, bucket_capacity: int = 32) -> tuple[Index, RowStore]:
    """Make CPU tables of random weights, two thirds full of ids from -40 to 39, with erased slots."""
    capacity, num_tables = 2 * bucket_capacity, len(dims)
    store = make_store(dims, dtype, [t % 2 for t in range(num_tables)], capacity)
    # ``make_store`` adds rows to later tables; those have no slots.
    index = Index.create([2] * num_tables, bucket_capacity, store.first_rows, [SCORE_STEP] * num_tables, CPU)
    mode = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.0)
    initializers = InitializerTable.create([mode] * num_tables, [str(t) for t in range(num_tables)], 0, CPU)
    ids = torch.cat([torch.randperm(80)[: capacity * 2 // 3] - 40 for _ in dims])
    ranges = torch.arange(num_tables + 1) * (capacity * 2 // 3)
    cpu.advance(index, 0)
    rows, _ = cpu.find_or_insert(index, store, Newcomers(initializers, torch.zeros(num_tables)), ids, ranges, None)
    assert bool((rows >= 0).all())
    cpu.erase(index, ids[:5], torch.tensor([0] + [5] * num_tables))
    for t in range(num_tables):
        weights_of(store, t).copy_(torch.randn(weights_of(store, t).shape))
    return index, store


def copy_index(index: Index, device: torch.device) -> Index:
    return replace(index, **{name: getattr(index, name).to(device) for name in TENSORS})


def asked(index: Index, lookup: Lookup) -> Lookup:
    """Return the lookup of other ids, a fifth of them missing, with their rows."""
    ids = torch.randint(-40, 40, (lookup.rows.numel(),))
    rows = cpu.find(index, ids, lookup.table_ranges, False)
    assert 0 < int((rows < 0).sum()) < rows.numel()
    return lookup._replace(ids=ids, rows=rows)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_c11_find_and_gather_equals_find_then_gather(kernels, device, dim, dtype):
    index, store = make_tables([dim] * 3, dtype)
    lookup = asked(index, make_lookup(store, [1, 2, 1], BATCH_SIZE + 20, POOLING_NONE))
    missing_values = torch.tensor([0.0, 0.5, -3.0])
    mine, own, here = copy_index(index, device), copy_store(store, device), to_device(lookup, device)
    for output_dtype in DTYPES:
        expected = cpu.gather(store, lookup.rows, lookup.table_ranges, missing_values, output_dtype)
        out = kernels.find_and_gather(
            mine, own, here.ids, here.offsets, here.layout, missing_values.to(device), output_dtype
        )
        assert torch.equal(out.cpu(), expected)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(mine.tensors(), index.tensors(), strict=True))


def test_rows_that_have_moved_are_found(kernels, device):
    # With one group of slots to a bucket, ids move into erased slots before them.
    index, store = make_tables([4] * 3, torch.float32, bucket_capacity=16)
    lookup = asked(index, make_lookup(store, [1, 2, 1], BATCH_SIZE + 20, POOLING_NONE))
    here, missing_values = to_device(lookup, device), torch.zeros(3)
    expected = cpu.gather(store, lookup.rows, lookup.table_ranges, missing_values, torch.float32)
    assert not index.moved
    rows = index.rows.clone()
    # Nothing protects the erased slots any more.
    cpu.advance(index, 0)
    for table in range(3):
        rebuild(index, cpu, table)
    assert bool((index.rows != rows)[index.digests > DIGEST_ERASED].any())
    mine, own = copy_index(index, device), copy_store(store, device)
    out = kernels.find_and_gather(
        mine, own, here.ids, here.offsets, here.layout, missing_values.to(device), torch.float32
    )
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(kernels.find(mine, here.ids, here.table_ranges, False).cpu(), lookup.rows)


@pytest.mark.parametrize("num", [0, 1, 63, 100])
@pytest.mark.parametrize("bucket_capacity", [16, 48, 128])
def test_c03_find_and_gather_takes_any_number_and_bucket(kernels, device, num, bucket_capacity):
    index, store = make_tables([4, 4], torch.float32, bucket_capacity)
    ids, ranges = torch.randint(-40, 40, (num,)), torch.tensor([0, num // 3, num])
    missing_values = torch.tensor([3.0, 4.0])
    expected = cpu.gather(store, cpu.find(index, ids, ranges, False), ranges, missing_values, torch.float32)
    ids, offsets, missing_values = (x.to(device) for x in (ids, ranges, missing_values))
    layout = FeatureLayout(*(torch.tensor(x, device=device) for x in ([0, 1], [0], [0, 1, 2])), 1, POOLING_NONE, 0)
    out = kernels.find_and_gather(
        copy_index(index, device), copy_store(store, device), ids, offsets, layout, missing_values, torch.float32
    )
    assert torch.equal(out.cpu(), expected)


def test_c04_an_evaluation_makes_illegal_offsets_safe_and_counts_them(kernels, device):
    index, store = make_tables([4] * 3, torch.float32)
    # What open_batch does with them is tested against Python; four features, two of them of table 1.
    layout = FeatureLayout(
        *(torch.tensor(x, device=device) for x in ([0, 1, 1, 2], [0], [0, 1, 3, 4])), 8, POOLING_NONE, 0
    )
    missing_values = torch.tensor([3.0, 4.0, 5.0], device=device)
    counted = 0
    for seed in range(40 if device.type == "cuda" else 6):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 8, (32,), generator=generator) * (seed != 1)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        num = int(offsets[-1])
        wild = torch.tensor([-1, num + 1, -(2**62), 2**62, num // 2, 0, num, num // 3])
        if seed % 2:
            # Table 2 begins a little before table 1 does.
            offsets[8], offsets[24] = num // 2 + 3, num // 2 - 3
        else:
            offsets[torch.randint(0, 33, (1 + seed % 8,), generator=generator)] = wild[: 1 + seed % 8]
        # The same step by step; each of the two counts for itself.
        both = [copy_index(index, device) for _ in range(2)]
        own, ids = copy_store(store, device), torch.randint(-40, 40, (num,), generator=generator).to(device)
        opened = kernels.open_batch(both[0], offsets.to(device), layout, num)
        rows = kernels.find(both[0], ids, opened.table_ranges, False)
        expected = kernels.gather(own, rows, opened.table_ranges, missing_values, torch.float32)
        out = kernels.find_and_gather(both[1], own, ids, offsets.to(device), layout, missing_values, torch.float32)
        assert torch.equal(out, expected)
        assert torch.equal(both[0].tallies, both[1].tallies)
        counted += int((both[1].tallies[:, CLAMPED] > 0).sum())
    assert counted >= 10


@pytest.mark.parametrize("dims", [[dim, dim] for dim in DIMS] + [[5, 64], [1, 257]])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN])
def test_gradient_of_pooling_weights_equals_the_cpu(kernels, device, dims, dtype, pooling):
    store = make_store(dims, dtype, [1, 0])
    lookup = make_lookup(store, [1, 2], BATCH_SIZE, pooling)
    grad = torch.randn(BATCH_SIZE, lookup.layout.width).to(dtype)
    expected = cpu.pool_weights_grad(store, lookup.rows, lookup.offsets, lookup.layout, grad)
    here = to_device(lookup, device)
    own = copy_store(store, device)
    out = kernels.pool_weights_grad(own, here.rows, here.offsets, here.layout, grad.to(device))
    # A dot product of D terms of size 1: relative to sqrt(D) of them.
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6 * max(dims) ** 0.5 * 4)


@pytest.mark.parametrize("dims", [[1, 3], [16, 100], [257, 2048]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_and_written_bit_for_bit(kernels, device, dims, dtype):
    store = make_store(dims, dtype, [1, 2 * dims[1]], state=1.0)
    own = copy_store(store, device)
    for t, row_format in enumerate(store.formats):
        places = torch.randperm(30)[:17]
        here = (places + store.first_rows[t]).int().to(device)
        weights, state = kernels.read_rows(own, t, here)
        assert torch.equal(weights.cpu(), weights_of(store, t)[places].float())
        assert torch.equal(state.cpu(), state_of(store, t)[places])
        weights = torch.randn(17, row_format.dim)
        weights_of(store, t)[places] = weights.to(dtype)
        state = torch.randn(17, row_format.num_state) if t else None
        if state is not None:
            state_of(store, t)[places] = state
        kernels.write_rows(own, t, here, weights.to(device), None if state is None else state.to(device))
        assert torch.equal(own.chunks[t].cpu(), store.chunks[t])
