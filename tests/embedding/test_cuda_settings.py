"""Freezing and learning rates on a GPU: no wait for the device, and what a captured CUDA graph sees of them."""

from typing import Any

import pytest
import torch
from torch import nn

from dynamicemb import DynamicEmbPoolingMode
from dynamicemb.errors import DynamicEmbError
from tests.conftest import reason_to_skip
from tests.embedding.test_cuda_step import OFFSETS, batches, make, step

pytestmark = pytest.mark.cuda
SUM = DynamicEmbPoolingMode.SUM


@pytest.fixture(autouse=True)
def needs_cuda():
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)


def weights_of(module: Any) -> list[nn.Parameter]:
    """Give a module a weight for each table, as a sharded collection does."""
    for dim in module.dims:
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.empty(0, dim, device="cuda"))
        module.weight_holders.append(holder)
    return [holder.weight for holder in module.weight_holders]


def rows_of(module: Any, table: str) -> dict[int, torch.Tensor]:
    ids, rows = module.export_keys_values(table, "cpu")
    return dict(zip(ids.tolist(), rows, strict=True))


def captured_step(module: Any, static: torch.Tensor, offsets: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Train once on a side stream, then capture a step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(module, static, offsets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(module, static, offsets)
    return graph


def test_c14_freezing_and_setting_rates_never_waits() -> None:
    module, offsets, sample = make("adam", SUM), OFFSETS.cuda(), batches(6)
    weights, tensor = weights_of(module), torch.tensor(0.5, device="cuda")
    # Compile first.
    for frozen in (False, True):
        weights[1].requires_grad_(not frozen)
        step(module, sample[0], offsets)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, sample[1], offsets)
        weights[1].requires_grad_(True)
        for rate in (0.25, torch.tensor(0.125), tensor):
            module.set_learning_rate(rate)
            step(module, sample[2], offsets)
        tensor.mul_(0.5)
        step(module, sample[3], offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert module.optimizer.learning_rate == 0.25


@pytest.mark.parametrize("how", ["number", "tensor"])
def test_replays_train_with_the_rate_of_their_moment(how: str) -> None:
    eager, captured = make("sgd", SUM), make("sgd", SUM)
    offsets, ids = OFFSETS.cuda(), batches(1)[0]
    tensor = torch.tensor(0.1, device="cuda")
    if how == "tensor":
        captured.set_learning_rate(tensor)
    graph = captured_step(captured, ids, offsets)
    step(eager, ids, offsets)
    for rate in (0.5, 0.25, 0.0, 2.0):
        eager.set_learning_rate(rate)
        if how == "tensor":
            tensor.fill_(rate)
        else:
            captured.set_learning_rate(rate)
        step(eager, ids, offsets)
        graph.replay()
        assert captured.optimizer.learning_rate == rate
    for table in ("a", "b"):
        got, want = rows_of(captured, table), rows_of(eager, table)
        assert got.keys() == want.keys()
        for key, row in want.items():
            torch.testing.assert_close(got[key], row, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_c27_a_capture_refuses_to_set_a_rate_at_every_replay() -> None:
    module, offsets, ids = make("sgd", SUM), OFFSETS.cuda(), batches(1)[0]
    captured_step(module, ids, offsets)
    with pytest.raises(DynamicEmbError, match="learning_rate: set it to 0.5 outside of the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            module.set_learning_rate(0.5)
    assert module.optimizer.learning_rate == 0.1 and float(module.tables.learning_rate) == pytest.approx(0.1)


def test_a_captured_graph_keeps_the_tables_that_were_frozen() -> None:
    module, offsets, ids = make("adam", SUM), OFFSETS.cuda(), batches(1)[0]
    weights = weights_of(module)
    step(module, ids, offsets)
    weights[1].requires_grad_(False)
    before = rows_of(module, "a"), rows_of(module, "b")
    graph = captured_step(module, ids, offsets)
    weights[1].requires_grad_(True)
    graph.replay()
    after = rows_of(module, "a"), rows_of(module, "b")
    assert all(torch.equal(row, after[1][key]) for key, row in before[1].items())
    assert not any(torch.equal(row, after[0][key]) for key, row in before[0].items())
    step(module, ids, offsets)
    assert not any(torch.equal(row, rows_of(module, "b")[key]) for key, row in before[1].items())
