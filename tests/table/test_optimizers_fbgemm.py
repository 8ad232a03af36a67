"""Pooling and optimizers against FBGEMM's table-batched embeddings on the CPU, row id = embedding row."""

import pytest
import torch

from dynamicemb.optimizer import OptimizerKind, OptimizerSpec
from dynamicemb.table.cpu.pool import pool, pool_weights_grad
from dynamicemb.table.cpu.update import update
from dynamicemb.table.layout import POOLING_MEAN, POOLING_SUM
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.stepping.lookup import Lookup
from tests.support.row_cases import clock_at, make_batch, make_store, state_of, weights_of

pytest.importorskip("fbgemm_gpu")

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

DIMS = [64, 12]
FEATURES = [1, 2]


def step_rows(store, spec, lookup, grad, step, keys=None):
    update(store, spec, Gradients.of(lookup, grad), clock_at(step), torch.tensor([spec.learning_rate]), keys)


def tbe_for(store, optimizer, pooling, **options):
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(37 + t, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for t, dim in enumerate(DIMS)],
        feature_table_map=[0, 1, 1],
        optimizer=optimizer,
        pooling_mode=PoolingMode.MEAN if pooling == POOLING_MEAN else PoolingMode.SUM,
        stochastic_rounding=False,
        **options,
    )
    for t, weights in enumerate(tbe.split_embedding_weights()):
        weights.copy_(weights_of(store, t))
    return tbe


def ids_of(store, batch):
    tables = torch.arange(2).repeat_interleave(batch.table_ranges.diff())
    return batch.rows.long() - torch.tensor(store.first_rows)[tables]


@pytest.mark.parametrize("pooling, weighted", [(POOLING_SUM, False), (POOLING_SUM, True), (POOLING_MEAN, False)])
@pytest.mark.parametrize(
    "kind, optimizer",
    [
        (OptimizerKind.SGD, EmbOptimType.EXACT_SGD),
        (OptimizerKind.ADAGRAD, EmbOptimType.EXACT_ADAGRAD),
        (OptimizerKind.ROWWISE_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
)
def test_c13_ten_steps_equal_fbgemm(kind, optimizer, pooling, weighted):
    states = {OptimizerKind.SGD: [0, 0], OptimizerKind.ADAGRAD: DIMS, OptimizerKind.ROWWISE_ADAGRAD: [1, 1]}[kind]
    store = make_store(DIMS, torch.float32, states)
    for t in range(2):
        state_of(store, t).zero_()
    tbe = tbe_for(store, optimizer, pooling, learning_rate=0.1, eps=1e-3)
    spec = OptimizerSpec(kind=kind, learning_rate=0.1, eps=1e-3)
    for step in range(1, 11):
        batch = make_batch(store, FEATURES, 16, pooling, missing=0.0)
        weights = torch.rand(batch.rows.numel(), requires_grad=True) if weighted else None
        expected = tbe(ids_of(store, batch), batch.offsets, weights)
        values = None if weights is None else weights.detach()
        out = pool(store, batch.rows, batch.offsets, batch.layout, values, torch.zeros(2), torch.float32)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        grad = torch.randn_like(out)
        weights_grad = pool_weights_grad(store, batch.rows, batch.offsets, batch.layout, grad)
        expected.backward(grad)
        if weights is not None:
            torch.testing.assert_close(weights_grad, weights.grad, rtol=1e-5, atol=1e-5)
        lookup = Lookup(batch.rows.long(), batch.rows, batch.table_ranges, batch.offsets, batch.layout, values)
        step_rows(store, spec, lookup, grad, step)
        for t, expected_weights in enumerate(tbe.split_embedding_weights()):
            torch.testing.assert_close(weights_of(store, t), expected_weights, rtol=1e-6, atol=1e-6)


def test_weighted_mean_divides_by_the_length_as_fbgemm():
    """Only forward: FBGEMM's CPU backward leaves out the 1 / length that its forward applies."""
    store = make_store(DIMS, torch.float32)
    tbe = tbe_for(store, EmbOptimType.EXACT_SGD, POOLING_MEAN)
    batch = make_batch(store, FEATURES, 16, POOLING_MEAN, missing=0.0)
    weights = torch.rand(batch.rows.numel())
    out = pool(store, batch.rows, batch.offsets, batch.layout, weights, torch.zeros(2), torch.float32)
    torch.testing.assert_close(out, tbe(ids_of(store, batch), batch.offsets, weights), rtol=1e-6, atol=1e-6)


def test_clipping_equals_fbgemm():
    clip = 0.3
    store = make_store(DIMS, torch.float32)
    tbe = tbe_for(
        store, EmbOptimType.EXACT_SGD, POOLING_SUM, learning_rate=0.1, gradient_clipping=True, max_gradient=clip
    )
    spec = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, gradient_clipping=True, max_gradient=clip)
    batch = make_batch(store, FEATURES, 16, POOLING_SUM, missing=0.0)
    out = tbe(ids_of(store, batch), batch.offsets)
    grad = torch.randn_like(out)
    lookup = Lookup(batch.rows.long(), batch.rows, batch.table_ranges, batch.offsets, batch.layout)
    step_rows(store, spec, lookup, grad.clone(), 1)
    out.backward(grad)
    for t, expected_weights in enumerate(tbe.split_embedding_weights()):
        torch.testing.assert_close(weights_of(store, t), expected_weights, rtol=1e-6, atol=1e-6)
