"""What the module needs from its kernels: written rows, torch's global defaults, threads."""

import os
import subprocess
import sys

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy as Score
from tests.support.lookups import (
    EXTREME,
    NONE,
    OPTIMIZERS,
    assert_unchanged,
    bag_per_id,
    batch,
    contents,
    make_module,
    options,
    row_of,
    score_of,
    snapshot,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 3, 4, 64, 257, 2048])
def test_insert_writes_weights_and_write_rows_writes_state(optimizer: str, dtype: torch.dtype, dim: int) -> None:
    module = make_module(
        [options(2), options(dim)] if dim == 3 else [options(dim, embedding_dtype=dtype)], optimizer=optimizer
    )
    name, dtype = ("b", torch.float32) if dim == 3 else ("a", dtype)
    rows = torch.randn(len(EXTREME), dim, generator=torch.Generator().manual_seed(0))
    assert module.insert(name, torch.tensor(EXTREME), rows).all()
    group = module.tables
    for key, row in zip(EXTREME, rows, strict=True):
        weights, state = row_of(module, name, key)
        assert torch.equal(weights, row.to(dtype).float()) and not state.any()
    t = group.names.index(name)
    slots = group.scan(t)
    wanted = torch.randn(slots.numel(), group.store.formats[t].num_state, generator=torch.Generator().manual_seed(1))
    before, _ = group.read(t, group.index.rows[slots])
    group.kernels.write_rows(group.store, t, group.index.rows[slots], before, wanted)
    weights, state = group.read(t, group.index.rows[slots])
    assert torch.equal(state, wanted) and torch.equal(weights, before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_insert_takes_any_float_strides_and_gradients_and_the_last_of_repeated_ids(dtype: torch.dtype) -> None:
    module = make_module([options(4, 16), options(4, 16)], optimizer="adam")
    rows = torch.arange(48.0).view(4, 12).T.to(dtype).requires_grad_()
    ids = torch.tensor([5, 6, 5, 7, 5, 6, 1, 1, 1, 1, 1, 2], dtype=torch.int32)
    assert module.insert("b", ids, rows).all()
    assert sorted(contents(module)["b"]) == [1, 2, 5, 6, 7] and not contents(module)["a"]
    for key, position in {5: 4, 6: 5, 7: 3, 1: 10, 2: 11}.items():
        assert torch.equal(row_of(module, "b", key)[0], rows[position].detach().float())
    assert rows.grad is None
    nothing = module.insert("a", ids[:0], torch.zeros(0, 4))
    assert nothing.shape == (0,) and not contents(module)["a"]


def test_insert_keeps_state_overwrites_trained_rows_and_reports_what_found_no_place() -> None:
    module = make_module([options(4, 16)], optimizer="exact_adagrad", pooling_mode=NONE)
    waiting = module(*bag_per_id(range(10)))
    waiting.sum().backward(retain_graph=True)
    state = row_of(module, "a", 3)[1]
    other = module(*bag_per_id(range(10)))
    placed = module.insert("a", torch.arange(30), torch.ones(30, 4))
    assert placed.sum() == 16 and placed[:10].all()
    assert torch.equal(row_of(module, "a", 3)[0], torch.ones(4)) and torch.equal(row_of(module, "a", 3)[1], state)
    module.eval()
    assert torch.equal(module(*bag_per_id(range(30)))[:, 0], placed.float())
    module.train()
    other.sum().backward()
    assert (row_of(module, "a", 3)[0] < 1).all() and module.stats()["a"]["dropped_gradients"] == 0


@pytest.mark.parametrize("strategy", [Score.TIMESTAMP, Score.STEP, Score.CUSTOMIZED, Score.LFU])
def test_imported_ids_have_a_score_and_train(strategy: Score) -> None:
    module = make_module([options(score_strategy=strategy)])
    if strategy is Score.CUSTOMIZED:
        module.set_score({"a": 7})
    module(*bag_per_id([1, 1])).sum().backward()
    module.insert("a", torch.tensor([1, 2]), torch.zeros(2, 4))
    expected = {Score.STEP: (2, 2), Score.CUSTOMIZED: (7, 7), Score.LFU: (3, 1)}
    got = score_of(module, "a", 1), score_of(module, "a", 2)
    assert got == expected[strategy] if strategy in expected else got[0] == got[1] < module.get_score()["a"]
    module(*bag_per_id([1, 2])).sum().backward()
    assert torch.equal(row_of(module, "a", 2)[0], torch.full((4,), -1.0))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooling", [0, 1, 2])
def test_the_default_dtype_does_not_matter(default: torch.dtype, pooling: int) -> None:
    def run() -> dict:
        module = make_module(
            [options(257, 128, embedding_dtype=torch.bfloat16)] * 2, pooling_mode=pooling, optimizer="adam"
        )
        for step in range(3):
            ids, offsets = torch.arange(400) % 50 + step, torch.arange(0, 401, 2)
            weights = None if pooling == 2 else torch.ones(400, dtype=torch.float32, requires_grad=True)
            output = module(ids, offsets, weights)
            output.sum().backward()
            assert output.dtype is torch.float32
            assert weights is None or weights.grad.dtype is torch.float32
        module.insert("a", torch.arange(3), torch.ones(3, 257, dtype=torch.float32))
        assert module.export_keys_values("a", "cpu")[1].dtype is torch.float32
        return contents(module)

    expected = run()
    torch.set_default_dtype(default)
    try:
        got = run()
    finally:
        torch.set_default_dtype(torch.float32)
    # TIMESTAMP scores differ between runs.
    assert [{k: row for k, (_, row) in table.items()} for table in got.values()] == [
        {k: row for k, (_, row) in table.items()} for table in expected.values()
    ]


@pytest.mark.parametrize("pooling", [0, 2])
def test_the_default_device_does_not_matter(pooling: int) -> None:
    module = make_module([options()] * 2, pooling_mode=pooling)
    ids, offsets = batch([1, 2, 3], [4], [], [1])
    weights = None if pooling == 2 else torch.ones(5, requires_grad=True)
    with torch.device("meta"):
        output = module(ids, offsets, weights)
        output.sum().backward()
        module.erase("a", ids[:1])
        module.insert("a", ids[:2], torch.ones(2, 4, device="cpu"))
        keys, rows = module.export_keys_values("a", "cpu")
        assert module.contains("b", ids).sum() == 1 + 1
    assert output.device.type == rows.device.type == "cpu" and keys.numel() == 4
    before = snapshot(module)
    with torch.device("meta"):
        module.eval()(ids, offsets)
    assert_unchanged(module, before)


WORKQUEUE = """
import threading, torch
from tests.support.lookups import make_module, options
torch.set_num_threads(2)
def work():
    module = make_module([options(16, 8192)])
    for step in range(6):
        module(torch.arange(5000) + 97 * step, torch.arange(5001)).sum().backward()
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print("done")
"""


def test_threads_survive_the_threading_layer_that_aborts() -> None:
    environment = {
        **os.environ, "PYTHONPATH": os.getcwd(), "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", WORKQUEUE], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert result.stdout == "done\n", result.stderr[-500:]
