"""Optimizer updates against a plain per-row reference, and what rounding, clipping and threads may not change."""

import numpy as np
import pytest
import torch

from dynamicemb.optimizer import OptimizerKind, OptimizerSpec
from dynamicemb.table.cpu.rules import round_bf16, round_f16
from dynamicemb.table.cpu.update import update
from dynamicemb.table.layout import POOLING_MEAN, POOLING_NONE, POOLING_SUM
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.stepping.lookup import Lookup
from tests.support.row_cases import clock_at, make_batch, make_store, row_gradients, state_of, table_bytes, weights_of

KINDS = list(OptimizerKind)
KEYS = torch.tensor([0x0123456789ABCDEF, -5, 7])


def step_rows(store, spec, lookup, grad, step, keys=None):
    update(store, spec, Gradients.of(lookup, grad), clock_at(step), torch.tensor([spec.learning_rate]), keys)


def num_state(kind: OptimizerKind, dim: int) -> int:
    return {0: 0, 1: 2 * dim, 2: dim, 3: 1}[int(kind)]


def spec_of(kind, **changes) -> OptimizerSpec:
    values = {"kind": kind, "learning_rate": 0.1, "eps": 1e-3, "weight_decay": 0.02, "stochastic_rounding": False}
    return OptimizerSpec(**{**values, **changes})


def store_for(kind, dims, dtype=torch.float32):
    store = make_store(dims, dtype, [num_state(kind, dim) for dim in dims])
    for t in range(len(dims)):
        state_of(store, t).zero_()
    return store


def lookup_of(batch, weights=None) -> Lookup:
    return Lookup(batch.ids, batch.rows, batch.table_ranges, batch.offsets, batch.layout, weights)


def grad_for(batch, store, dtype=torch.float32):
    if batch.layout.pooling == POOLING_NONE:
        return torch.randn(batch.rows.numel(), store.formats[0].dim).to(dtype)
    return torch.randn(batch.layout.batch_size, int(batch.layout.column_offsets[-1])).to(dtype)


def reference_step(spec, w, g, s, t):
    """Return new weights and state of one row, in float64."""
    w, g, s = w.double(), g.double(), s.double()
    lr, eps = spec.learning_rate, spec.eps
    if spec.kind == OptimizerKind.SGD:
        return w - lr * g, s
    if spec.kind == OptimizerKind.ADAM:
        m, v = s.split(len(w))
        m = spec.beta1 * m + (1 - spec.beta1) * g
        v = spec.beta2 * v + (1 - spec.beta2) * g**2
        m_hat, v_hat = m / (1 - spec.beta1**t), v / (1 - spec.beta2**t)
        return w - lr * (m_hat / (v_hat.sqrt() + eps) + spec.weight_decay * w), torch.cat([m, v])
    s = s + (g**2 if spec.kind == OptimizerKind.ADAGRAD else (g**2).mean())
    return w - lr * g / (s.sqrt() + eps), s


def snapshot(store):
    return [table_bytes(store, t).clone() for t in range(store.num_tables)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [[1, 3], [4, 64], [100, 257]])
@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN])
def test_c13_ten_steps_equal_a_plain_reference(kind, dims, pooling):
    store = store_for(kind, dims)
    weights = [weights_of(store, t).double() for t in range(2)]
    states = [state_of(store, t).double() for t in range(2)]
    for step in range(1, 11):
        batch = make_batch(store, [1, 2], 8, pooling)
        factors = torch.rand(batch.rows.numel()) if step % 2 else None
        grad = grad_for(batch, store)
        for row, (t, g) in row_gradients(store, batch, grad, factors).items():
            r = row - store.first_rows[t]
            weights[t][r], states[t][r] = reference_step(spec_of(kind), weights[t][r], g, states[t][r], step)
        step_rows(store, spec_of(kind), lookup_of(batch, factors), grad, step)
    for t in range(2):
        torch.testing.assert_close(weights_of(store, t).double(), weights[t], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state_of(store, t).double(), states[t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [3, 100])
def test_c13_half_weights_are_rounded_once(kind, dtype, dim):
    store, wide = store_for(kind, [dim], dtype), store_for(kind, [dim])
    batch = make_batch(store, [2], 8, POOLING_SUM)
    weights_of(wide, 0).copy_(weights_of(store, 0))
    grad = grad_for(batch, store, dtype)
    step_rows(store, spec_of(kind), lookup_of(batch), grad, 1)
    step_rows(wide, spec_of(kind), lookup_of(batch), grad.float(), 1)
    assert torch.equal(weights_of(store, 0), weights_of(wide, 0).to(dtype))
    assert torch.equal(state_of(store, 0), state_of(wide, 0))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN, POOLING_NONE])
@pytest.mark.parametrize("features", [[1, 1], [3, 2]])
def test_c02_gradients_are_summed_in_the_order_of_occurrences(grad_dtype, pooling, features):
    store = store_for(OptimizerKind.SGD, [32, 32])
    batch = make_batch(store, features, 20, pooling)
    before, expected = snapshot(store), [weights_of(store, t).clone() for t in range(2)]
    grad = grad_for(batch, store, grad_dtype)
    for row, (t, g) in row_gradients(store, batch, grad).items():
        expected[t][row - store.first_rows[t]] -= np.float32(0.1) * g
    step_rows(store, spec_of(OptimizerKind.SGD), lookup_of(batch), grad, 1)
    for t in range(2):
        assert torch.equal(weights_of(store, t), expected[t])
        assert not torch.equal(table_bytes(store, t), before[t])


@pytest.mark.parametrize("pooling", [POOLING_MEAN, POOLING_NONE])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_clipping_clamps_each_incoming_value_and_leaves_the_gradient_alone(pooling, grad_dtype):
    store = store_for(OptimizerKind.SGD, [20, 20])
    batch = make_batch(store, [1, 1], 16, pooling)
    grad = grad_for(batch, store, grad_dtype)
    original = grad.clone()
    expected = [weights_of(store, t).clone() for t in range(2)]
    for row, (t, g) in row_gradients(store, batch, grad, clip=0.5).items():
        expected[t][row - store.first_rows[t]] -= np.float32(0.1) * g
    spec = spec_of(OptimizerKind.SGD, gradient_clipping=True, max_gradient=0.5)
    step_rows(store, spec, lookup_of(batch), grad, 1)
    assert torch.equal(grad, original)
    assert all(torch.equal(weights_of(store, t), expected[t]) for t in range(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [False, True])
def test_c18_non_finite_gradients_touch_only_their_rows(kind, clip):
    store, other = store_for(kind, [9]), store_for(kind, [9])
    table_bytes(other, 0).copy_(table_bytes(store, 0))
    batch = make_batch(store, [1], 50, POOLING_NONE)
    grad = grad_for(batch, store)
    poisoned = int(batch.rows.max())
    hit = batch.rows == poisoned
    spec = spec_of(kind, gradient_clipping=clip)
    step_rows(other, spec, lookup_of(batch), grad, 1)
    grad[hit] = float("nan")
    step_rows(store, spec, lookup_of(batch), grad, 1)
    r = poisoned - store.first_rows[0]
    assert weights_of(store, 0)[r].isnan().all()
    table_bytes(store, 0)[r] = table_bytes(other, 0)[r]
    assert torch.equal(table_bytes(store, 0), table_bytes(other, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_no_occurrence_are_untouched(kind):
    store = store_for(kind, [5, 5])
    batch = make_batch(store, [1, 1], 6, POOLING_SUM)
    before = snapshot(store)
    step_rows(store, spec_of(kind), lookup_of(batch), grad_for(batch, store), 1)
    for t in range(2):
        touched = {int(r) - store.first_rows[t] for r in batch.rows if r >= 0}
        rest = [r for r in range(37) if r not in touched]
        assert torch.equal(table_bytes(store, t)[rest], before[t][rest])
    nothing = make_batch(store, [1, 1], 6, POOLING_SUM, missing=1.0)
    before = snapshot(store)
    step_rows(store, spec_of(kind), lookup_of(nothing), grad_for(nothing, store), 1)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(store)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", [POOLING_MEAN, POOLING_NONE])
def test_results_do_not_depend_on_threads(kind, dtype, pooling):
    results = []
    threads = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.manual_seed(0)
        store = store_for(kind, [24, 24], dtype)
        batch = make_batch(store, [2, 1], 1000, pooling)
        assert batch.rows.numel() > 4096
        torch.set_num_threads(num_threads)
        step_rows(store, spec_of(kind, stochastic_rounding=True), lookup_of(batch), grad_for(batch, store), 3, KEYS[:2])
        results.append(snapshot(store))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_is_unbiased_and_a_function_of_key_id_and_step(dtype):
    spec = spec_of(OptimizerKind.SGD, stochastic_rounding=True, learning_rate=1.0)

    def train(key, step, shift=0):
        torch.manual_seed(0)
        store = store_for(OptimizerKind.SGD, [2048], dtype)
        weights_of(store, 0).fill_(1.0)
        batch = make_batch(store, [1], 20, POOLING_NONE, missing=0.0)
        batch.ids += shift
        # A quarter of the way from 1 down to the next value.
        grad = torch.full((batch.rows.numel(), 2048), 0.0)
        grad[batch.rows == batch.rows[0]] = torch.finfo(dtype).eps / 8 / int((batch.rows == batch.rows[0]).sum())
        step_rows(store, spec, lookup_of(batch), grad, step, torch.tensor([key]))
        return weights_of(store, 0)[int(batch.rows[0])].float()

    one = train(5, 1)
    assert set(one.tolist()) == {1.0, 1.0 - torch.finfo(dtype).eps / 2}
    # 2048 draws of probability 1/4: the standard deviation is 20.
    assert abs(int((one < 1).sum()) - 512) < 100
    assert torch.equal(one, train(5, 1))
    for other in (train(6, 1), train(5, 2), train(5, 1, shift=1 << 33)):
        assert not torch.equal(one, other)


def test_stochastic_rounding_needs_keys():
    store = store_for(OptimizerKind.SGD, [4], torch.bfloat16)
    batch = make_batch(store, [1], 5, POOLING_SUM, missing=0.0)
    with pytest.raises(ValueError, match="table_keys"):
        step_rows(
            store, spec_of(OptimizerKind.SGD, stochastic_rounding=True), lookup_of(batch), grad_for(batch, store), 1
        )


@pytest.mark.parametrize("rounding, dtype, bits", [(round_bf16, torch.bfloat16, 16), (round_f16, torch.float16, 13)])
def test_stochastic_rounding_gives_a_neighbour_with_the_right_odds(rounding, dtype, bits):
    values = [1.0 + 2**-9, -1.2345, 3e-5, -6.1e-5, 5.9e-8, 2.0**-25, 0.0, -0.0, 65519.0, 65504.0, 1e-7, 333.3]
    for value in np.float32(values):
        draws = np.linspace(0, (1 << bits) - 1, 513).astype(np.uint32)
        words = np.array([rounding(value, draw | np.uint32(0xFFFF0000)) for draw in draws], np.uint16)
        results = torch.from_numpy(words.view(np.int16)).view(dtype).double().numpy()
        near = {float(x) for x in results}
        assert len(near) <= 2 and all(np.isfinite(list(near)))
        if torch.tensor(value).to(dtype).item() == value:
            assert near == {float(value)}
        elif abs(value) < 65504:
            assert min(near) <= value <= max(near)
            assert abs(results.mean() - value) <= (max(near) - min(near)) / 256


@pytest.mark.parametrize("rounding, dtype", [(round_bf16, torch.bfloat16), (round_f16, torch.float16)])
def test_stochastic_rounding_keeps_non_finite_values(rounding, dtype):
    for value in (float("inf"), -float("inf"), float("nan"), 3.4028e38, -65520.0):
        word = np.array([rounding(np.float32(value), np.uint32(0xFFFFFFFF))], np.uint16)
        result = torch.from_numpy(word.view(np.int16)).view(dtype).item()
        expected = torch.tensor(value).to(dtype).item()
        if not np.isfinite(expected):
            assert result == expected or np.isnan(result) and np.isnan(expected)
