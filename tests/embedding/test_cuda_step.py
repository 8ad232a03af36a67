"""A training step on a GPU: no host synchronisation, and capturable in a CUDA graph."""

import sys

import pytest
import torch

from dynamicemb import DynamicEmbPoolingMode, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from tests.conftest import reason_to_skip

pytestmark = pytest.mark.cuda
OPTIMIZERS = ["sgd", "adam", "exact_adagrad", "exact_row_wise_adagrad"]
NUM_IDS = 96


@pytest.fixture(autouse=True)
def needs_cuda():
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)


def make(optimizer: str, pooling: DynamicEmbPoolingMode) -> BatchedDynamicEmbeddingTablesV2:
    dims = [16, 16] if pooling is DynamicEmbPoolingMode.NONE else [16, 5]
    options = [DynamicEmbTableOptions(dim=dim, max_capacity=256, bucket_capacity=32) for dim in dims]
    return BatchedDynamicEmbeddingTablesV2(
        options, ["a", "b"], [0, 0, 1], pooling_mode=pooling, optimizer=optimizer, learning_rate=0.1, seed=5
    )


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randint(-200, 200, (NUM_IDS,), device="cuda", generator=generator) for _ in range(count)]


OFFSETS = torch.arange(0, NUM_IDS + 1, 4)


def step(module: BatchedDynamicEmbeddingTablesV2, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    output = module(ids, offsets)
    output.backward(torch.ones_like(output))
    return output.detach()


@pytest.fixture(params=["ranked", "sorted"])
def grouping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Group these small batches as small ones are, or by torch's sort as large ones are."""
    if request.param == "sorted":
        # The launcher has the name of its module, so a dotted path would find the launcher.
        monkeypatch.setattr(sys.modules["dynamicemb.table.triton.update"], "MOST_RANKED", 0)
    return request.param


@pytest.mark.parametrize("pooling", list(DynamicEmbPoolingMode))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_never_waits_for_the_device(optimizer: str, pooling: DynamicEmbPoolingMode, grouping: str) -> None:
    module, offsets = make(optimizer, pooling), OFFSETS.cuda()
    sample = batches(6)
    # Compile first; the batches evict.
    for ids in sample[:3]:
        step(module, ids, offsets)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in sample[3:]:
            step(module, ids, offsets)
        module.eval()
        module(sample[0], offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert module.stats()["a"]["evicted"] > 0


def test_the_first_step_of_a_module_never_waits_either() -> None:
    step(make("adam", DynamicEmbPoolingMode.SUM), batches(1)[0], OFFSETS.cuda())
    module, offsets, ids = make("adam", DynamicEmbPoolingMode.SUM), OFFSETS.cuda(), batches(1)[0]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, ids, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert module.stats()["a"]["inserted"] > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_captured_step_equals_eager(optimizer: str, grouping: str) -> None:
    eager, captured = (make(optimizer, DynamicEmbPoolingMode.SUM) for _ in range(2))
    offsets, sample = OFFSETS.cuda(), batches(8)
    static = sample[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for ids in sample[:2]:
            static.copy_(ids)
            step(captured, static, offsets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(captured, static, offsets)
    for number, ids in enumerate(sample):
        expected = step(eager, ids, offsets)
        if number >= 2:
            static.copy_(ids)
            graph.replay()
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for table in ("a", "b"):
        got, want = captured.export_keys_values(table, "cpu"), eager.export_keys_values(table, "cpu")
        assert sorted(got[0].tolist()) == sorted(want[0].tolist())
        order = got[0].argsort(), want[0].argsort()
        torch.testing.assert_close(got[1][order[0]], want[1][order[1]], rtol=1e-5, atol=1e-5)
    assert captured.stats()["a"]["evicted"] == eager.stats()["a"]["evicted"] > 0


def test_c04_ids_on_the_cpu_are_an_error() -> None:
    module = make("sgd", DynamicEmbPoolingMode.SUM)
    with pytest.raises(ValueError, match="indices is on cpu"):
        module(torch.arange(3), torch.arange(4).cuda())


def test_rows_that_do_not_fit_name_what_is_missing() -> None:
    options = DynamicEmbTableOptions(dim=2048, max_capacity=2**27)
    with pytest.raises(torch.OutOfMemoryError, match="bytes of rows.*bytes free; lower max_capacity"):
        BatchedDynamicEmbeddingTablesV2([options], ["a"], device="cuda")
