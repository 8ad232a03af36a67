"""Triton's grouping and optimizer updates against their CPU twins."""

import importlib

import pytest
import torch

from dynamicemb.optimizer import OptimizerKind, OptimizerSpec
from dynamicemb.table import cpu
from dynamicemb.table.cpu.segments import group_by_row
from dynamicemb.table.index import CLOCK_SIZE, UPDATES
from dynamicemb.table.layout import POOLING_MEAN, POOLING_NONE, POOLING_SUM
from dynamicemb.table.stepping.gradients import Gradients
from tests.conftest import HAS_CUDA
from tests.support.row_cases import state_of, weights_of
from tests.table.test_triton_rows import DIMS, DTYPES, copy_store, make_lookup, make_store, to_device

KINDS = list(OptimizerKind)
KEYS = torch.tensor([0x0123456789ABCDEF, -5, 7])
BATCH_SIZE = 200 if HAS_CUDA else 6

# fp32 rows after one step, relative to |w| + |change|: sums of up to 100 gradients in another order, and a quotient.
ROW_TOLERANCE = 1e-5


@pytest.fixture
def kernels(backend):
    if backend == "cpu":
        pytest.skip("cpu: these tests compare a backend with the CPU")
    return pytest.importorskip("dynamicemb.table.triton")


def update_module():
    # Its package has a function of the same name.
    return importlib.import_module("dynamicemb.table.triton.update")


@pytest.fixture(params=[True, False], ids=["ranked", "sorted"])
def ranked(request, monkeypatch):
    """Group the occurrences by comparing each with all others, or by sorting them."""
    if not request.param:
        monkeypatch.setattr(update_module(), "MOST_RANKED", -1)
    return request.param


def num_state(kind, dim):
    return {0: 0, 1: 2 * dim, 2: dim, 3: 1}[int(kind)]


def spec_of(kind, **changes) -> OptimizerSpec:
    values = {"kind": kind, "eps": 1e-3, "weight_decay": 0.02, "stochastic_rounding": False}
    return OptimizerSpec(**{**values, **changes})


def case(kind, dims, dtype, pooling, features=(1, 2), seed=0, **options):
    """Return ``(store, lookup, grad)`` on the CPU."""
    torch.manual_seed(seed)
    store = make_store(dims, dtype, [num_state(kind, dim) for dim in dims], state=1.0)
    lookup = make_lookup(store, list(features), options.pop("batch_size", BATCH_SIZE), pooling, **options)
    wide = pooling != POOLING_NONE
    shape = (lookup.layout.batch_size, lookup.layout.width) if wide else (lookup.rows.numel(), dims[0])
    return store, lookup, torch.randn(shape)


def run(kernels, device, store, spec, lookup, grad, *, step=3, rate=0.1):
    clock = torch.zeros(CLOCK_SIZE, dtype=torch.int64)
    clock[UPDATES] = step - 1
    arguments = (clock, torch.tensor([rate]), KEYS[: store.num_tables].clone())
    gradients = Gradients.of(to_device(lookup, device), grad.to(device))
    kernels.update(store, spec, gradients, *(x.to(device) for x in arguments))


def assert_rows_close(own, store, weights_tolerance=ROW_TOLERANCE):
    for t in range(store.num_tables):
        mine = store.__class__.attach([c.cpu() for c in own.chunks], own.formats, own.dtype, own.chunk_shift)
        torch.testing.assert_close(
            weights_of(mine, t).float(), weights_of(store, t).float(), rtol=weights_tolerance, atol=weights_tolerance
        )
        torch.testing.assert_close(state_of(mine, t), state_of(store, t), rtol=ROW_TOLERANCE, atol=ROW_TOLERANCE)


def check(kernels, device, kind, dims, dtype, pooling, grad_dtype=torch.float32, spec=None, **options):
    store, lookup, grad = case(kind, dims, dtype, pooling, **options)
    grad = grad.to(grad_dtype)
    own = copy_store(store, device)
    spec = spec or spec_of(kind)
    run(kernels, device, own, spec, lookup, grad)
    run(cpu, torch.device("cpu"), store, spec, lookup, grad)
    # Half weights: one unit in the last place, where a sum near a tie rounds the other way.
    assert_rows_close(own, store, {torch.float32: ROW_TOLERANCE, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", DIMS)
def test_c16_rows_equal_the_cpu(kernels, device, kind, dim):
    check(kernels, device, kind, [dim, dim], torch.float32, POOLING_NONE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [[1, 3], [16, 64], [257, 4]])
@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_c02_c13_pooled_rows_of_mixed_dims_equal_the_cpu(kernels, device, kind, dims, pooling, weighted):
    check(kernels, device, kind, dims, torch.float32, pooling, weighted=weighted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("dim", [3, 64, 100])
@pytest.mark.parametrize("stochastic", [False, True])
def test_c13_half_rows_equal_the_cpu(kernels, device, kind, dtype, dim, stochastic):
    spec = spec_of(kind, stochastic_rounding=stochastic)
    check(kernels, device, kind, [dim, dim], dtype, POOLING_NONE, grad_dtype=dtype, spec=spec)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_stochastic_rounding_is_the_cpus_bit_for_bit(kernels, device, dtype):
    # Every row occurs once, so there is no sum whose order could differ.
    store, lookup, grad = case(OptimizerKind.SGD, [20, 20], dtype, POOLING_NONE, missing=0.0, longest=1)
    for t in range(2):
        part = slice(int(lookup.table_ranges[t]), int(lookup.table_ranges[t + 1]))
        lookup.rows[part] = store.first_rows[t] - 1
        count = min(50, part.stop - part.start)
        lookup.rows[part][:count] = store.first_rows[t] + torch.randperm(50)[:count].int()
    lookup.rows[lookup.rows < 0] = -1
    lookup.rows[(lookup.rows == store.first_rows[1] - 1)] = -1
    own = copy_store(store, device)
    # 2^-3 makes lr * g exact, so a fused multiply-add gives the same bits.
    run(kernels, device, own, spec_of(OptimizerKind.SGD, stochastic_rounding=True), lookup, grad, rate=0.125)
    before = [chunk.clone() for chunk in store.chunks]
    run(cpu, torch.device("cpu"), store, spec_of(OptimizerKind.SGD, stochastic_rounding=True), lookup, grad, rate=0.125)
    for mine, expected, old in zip(own.chunks, store.chunks, before):
        assert torch.equal(mine.cpu(), expected)
        assert not torch.equal(expected, old)


@pytest.mark.parametrize("pooling", [POOLING_NONE, POOLING_MEAN])
def test_clipping_equals_the_cpu(kernels, device, pooling):
    spec = spec_of(OptimizerKind.SGD, gradient_clipping=True, max_gradient=0.5)
    check(kernels, device, OptimizerKind.SGD, [16, 16], torch.float32, pooling, spec=spec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distinct", [1, 2, 9])
@pytest.mark.parametrize("batch_size", [33, 600])
def test_long_segments_equal_the_cpu(kernels, device, ranked, kind, distinct, batch_size):
    if not HAS_CUDA and distinct == 2:
        pytest.skip("interpret: the other two are enough")
    check(
        kernels,
        device,
        kind,
        [8, 8],
        torch.float32,
        POOLING_NONE,
        distinct=distinct,
        longest=2 if batch_size > 100 else 6,
        batch_size=batch_size,
        # Sums of hundreds of gradients.
        seed=distinct,
    )


@pytest.mark.parametrize("pooling", [POOLING_NONE, POOLING_MEAN])
def test_c16_ranked_and_sorted_occurrences_give_the_same_bits(kernels, device, pooling, monkeypatch):
    for distinct, batch_size in ((1, 20), (4, 30), (50, 20), (50, 1)):
        store, lookup, grad = case(
            OptimizerKind.ADAM, [8, 8], torch.float32, pooling, distinct=distinct, batch_size=batch_size
        )
        stores = [copy_store(store, device), copy_store(store, device)]
        for own, most in zip(stores, (8192, -1)):
            monkeypatch.setattr(update_module(), "MOST_RANKED", most)
            run(kernels, device, own, spec_of(OptimizerKind.ADAM), lookup, grad)
        assert all(torch.equal(a, b) for a, b in zip(stores[0].chunks, stores[1].chunks))
        assert not all(torch.equal(a, b.to(device)) for a, b in zip(stores[0].chunks, store.chunks))


@pytest.mark.parametrize("kind", [OptimizerKind.SGD, OptimizerKind.ADAM])
def test_c16_updates_repeat_bit_for_bit_and_ignore_the_rest_of_the_batch(kernels, device, kind):
    store, lookup, grad = case(kind, [16, 16], torch.float32, POOLING_NONE, distinct=5, batch_size=100)
    first, second = copy_store(store, device), copy_store(store, device)
    run(kernels, device, first, spec_of(kind), lookup, grad)
    run(kernels, device, second, spec_of(kind), lookup, grad)
    assert all(torch.equal(a, b) for a, b in zip(first.chunks, second.chunks))
    # Without the occurrences of one row, all others end up the same.
    gone = int(lookup.rows.max())
    lookup.rows[lookup.rows == gone] = -1
    third = copy_store(store, device)
    run(kernels, device, third, spec_of(kind), lookup, grad)
    stores = [
        store.__class__.attach([c.cpu() for c in s.chunks], s.formats, s.dtype, s.chunk_shift) for s in (first, third)
    ]
    kept = torch.arange(50 + 1) != gone - store.first_rows[1]
    assert torch.equal(weights_of(stores[0], 0), weights_of(stores[1], 0))
    assert torch.equal(weights_of(stores[0], 1)[kept], weights_of(stores[1], 1)[kept])
    assert not torch.equal(weights_of(stores[0], 1), weights_of(stores[1], 1))


def test_c18_non_finite_gradients_touch_only_their_rows(kernels, device):
    store, lookup, grad = case(OptimizerKind.ADAM, [16, 16], torch.float32, POOLING_NONE, missing=0.5)
    grad[lookup.rows < 0] = float("nan")
    own = copy_store(store, device)
    run(kernels, device, own, spec_of(OptimizerKind.ADAM), lookup, grad)
    run(cpu, torch.device("cpu"), store, spec_of(OptimizerKind.ADAM), lookup, grad)
    assert_rows_close(own, store)
    assert not any(weights_of(store, t).isnan().any() for t in range(2))


def test_update_of_missing_rows_only_changes_nothing(kernels, device):
    store, lookup, grad = case(OptimizerKind.SGD, [16, 16], torch.float32, POOLING_NONE, missing=1.1)
    own = copy_store(store, device)
    run(kernels, device, own, spec_of(OptimizerKind.SGD), lookup, grad)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(own.chunks, store.chunks))


def test_stochastic_rounding_needs_keys(kernels, device):
    store, lookup, grad = case(OptimizerKind.SGD, [16, 16], torch.bfloat16, POOLING_NONE)
    spec = spec_of(OptimizerKind.SGD, stochastic_rounding=True)
    with pytest.raises(ValueError, match="table_keys"):
        kernels.update(
            store, spec, Gradients.of(lookup, grad), torch.zeros(CLOCK_SIZE, dtype=torch.int64), torch.ones(1)
        )


def units_of(groups):
    """Return ``(begin, count, table, first, whole)`` of every unit, by begin."""
    few, many = groups.counts.tolist()
    units = groups.words[: groups.order.numel()].tolist()
    units = units[:few] + units[len(units) - many :]
    fields = [(u & (2**31 - 1), (u >> 31) & 255, (u >> 39) & (2**22 - 1), (u >> 61) & 1, u >> 62) for u in units]
    return sorted(fields)


def check_grouping(device, store, lookup):
    from dynamicemb.table.triton.segments import PIECE
    from dynamicemb.table.triton.segments import group_by_row as group_on_device

    order, starts = group_by_row(lookup.rows)
    groups = group_on_device(copy_store(store, device), to_device(lookup, device))
    skipped = lookup.rows.numel() - order.numel()
    assert torch.equal(groups.order[skipped:].cpu(), order.long())
    expected, segments = [], []
    for begin, end in zip(starts.tolist(), starts.tolist()[1:]):
        table = int(lookup.rows[order[begin]] >= store.first_rows[1])
        if end - begin > PIECE:
            segments += [(begin + skipped, end - begin)] * -(-(end - begin) // PIECE)
        for piece in range(begin, end, PIECE):
            count = min(PIECE, end - piece)
            expected.append((piece + skipped, count, table, int(piece == begin), int(end - begin <= PIECE)))
    assert units_of(groups) == expected
    num, num_many = lookup.rows.numel(), int(groups.counts[1])
    units, firsts = groups.words[num - num_many : num], groups.words[3 * num - num_many : 3 * num]
    of_pieces = firsts[units >> 62 == 0]
    assert sorted(zip((of_pieces & 0xFFFFFFFF).tolist(), (of_pieces >> 32).tolist())) == sorted(segments)
    assert not groups.words[3 * num : 3 * num + -(-num // PIECE)].any()


@pytest.mark.parametrize("num", [1, 63, 100, 1024, 1025, 3000, 8200])
@pytest.mark.parametrize("distinct", [1, 40])
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_grouping_equals_the_cpu(kernels, device, num, distinct, missing):
    store = make_store([4, 4], torch.float32, [0, 0])
    check_grouping(
        device, store, make_lookup(store, [1, 1], num, POOLING_NONE, distinct=distinct, missing=missing, longest=1)
    )


@pytest.mark.parametrize("runs", [[1024, 1024], [1023, 1025], [1, 1024, 1023], [1, 2048, 5], [4096], [1000, 2072, 30]])
def test_grouping_finds_both_ends_of_segments_that_cross_blocks(kernels, device, runs):
    store = make_store([4, 4], torch.float32, [0, 0])
    lookup = make_lookup(store, [1, 0], sum(runs), POOLING_NONE, longest=0)
    num = sum(runs)
    rows = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))[torch.randperm(num)].int()
    ranges = torch.tensor([0, num, num])
    check_grouping(device, store, lookup._replace(ids=rows.long(), rows=rows, table_ranges=ranges))


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("pooling", [POOLING_NONE, POOLING_MEAN])
def test_a_captured_update_reads_clock_rate_and_rows_on_the_device(pooling):
    from dynamicemb.table import triton as kernels

    device = torch.device("cuda")
    spec = spec_of(OptimizerKind.ADAM)
    store, lookup, grad = case(OptimizerKind.ADAM, [16, 16], torch.float32, pooling, distinct=30)
    own, here = copy_store(store, device), to_device(lookup, device)
    clock = torch.zeros(CLOCK_SIZE, dtype=torch.int64, device=device)
    rate = torch.zeros(1, device=device)
    gradients = Gradients.of(here, grad.to(device))
    kernels.update(own, spec, gradients, clock, rate)
    own = copy_store(store, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.update(own, spec, gradients, clock, rate)
    for step in range(1, 4):
        # Another batch in the same tensors: what ids read changes, so do the segments.
        swap = torch.arange(30).roll(7 * step).int()
        ranges = lookup.table_ranges.tolist()
        for t, first in enumerate(store.first_rows):
            part = lookup.rows[ranges[t] : ranges[t + 1]]
            part[part >= 0] = swap[part[part >= 0].long() - first] // step + first
        here.rows.copy_(lookup.rows)
        grad = torch.randn_like(grad)
        clock[UPDATES] = step - 1
        rate.fill_(0.1 * step)
        gradients.values.copy_(grad)
        graph.replay()
        run(cpu, torch.device("cpu"), store, spec, lookup, grad, step=step, rate=0.1 * step)
    assert_rows_close(own, store)
