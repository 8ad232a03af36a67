"""Training through the module: gradients and outstanding steps (lines 2 and 14)."""

import gc
import threading
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy
from tests.support.lookups import (
    MEAN,
    SUM,
    bag_per_id,
    batch,
    constant,
    contents,
    make_module,
    options,
    row_of,
)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [SUM, MEAN])
def test_c02_outputs_and_gradients_equal_embedding_bag(pooling, weighted: bool) -> None:
    module = make_module([options(5)], pooling_mode=pooling, output_dtype=torch.float32)
    ids, offsets = batch([1, 1, 4], [], [9], [4, 4, 4, 1, 2], [9, 9])
    weights = (
        torch.randn(ids.numel(), requires_grad=True, generator=torch.Generator().manual_seed(2)) if weighted else None
    )
    output = module(ids, offsets, weights)
    table = torch.zeros(10, 5)
    for key in (1, 2, 4, 9):
        table[key] = row_of(module, "a", key)[0]
    table.requires_grad_()
    plain = None if weights is None else weights.detach().clone().requires_grad_()
    scale = 1 / offsets.diff().clamp(min=1)[:, None] if pooling is MEAN else 1
    reference = (
        F.embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=plain, include_last_offset=True) * scale
    )
    torch.testing.assert_close(output, reference, rtol=1e-6, atol=1e-6)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    output.backward(grad)
    reference.backward(grad)
    for key in (1, 2, 4, 9):
        torch.testing.assert_close(
            row_of(module, "a", key)[0], (table - table.grad)[key].detach(), rtol=1e-6, atol=1e-6
        )
    if weighted:
        torch.testing.assert_close(weights.grad, plain.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling", [SUM, MEAN])
@pytest.mark.parametrize("training", [True, False])
def test_c02_gradient_of_the_weights_equals_finite_differences(pooling, training: bool) -> None:
    module = make_module(
        [options(3, eval_initializer_args=constant(2.0)), options(2, eval_initializer_args=constant(-1.0))],
        pooling_mode=pooling, learning_rate=0.0,
    )  # fmt: skip
    module(*batch([1, 2], [3], [1], [4, 2]))
    ids, offsets = batch([1, 2, 2], [3], [], [4, 2, 1])
    if not training:
        # These miss: their weights weigh a constant.
        ids[1], ids[-1] = 77, 78
    module.train(training)
    weights = torch.tensor([0.5, -1.0, 2.0, 3.0, 1.0, -0.25, 0.0], dtype=torch.float64, requires_grad=True)
    factor = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    (module(ids, offsets, weights) * factor).sum().backward()
    assert weights.grad.dtype is torch.float64
    with torch.no_grad():
        for i in range(ids.numel()):
            moved = weights.clone()
            moved[i] += 1.0
            # Linear in every weight, so a large step is exact up to fp32 rounding.
            difference = ((module(ids, offsets, moved) - module(ids, offsets, weights)) * factor).sum()
            assert abs(difference - weights.grad[i]) < 1e-5


def test_c02_weights_may_be_strided_half_or_not_finite() -> None:
    module = make_module()
    ids, offsets = batch([1], [2], [3])
    rows = module(ids, offsets).detach()
    weights = torch.stack([torch.tensor([2.0, float("nan"), -1.0]), torch.zeros(3)], 1).half()[:, 0]
    output = module(ids, offsets, weights)
    assert torch.equal(output[[0, 2]], rows[[0, 2]] * torch.tensor([[2.0], [-1.0]])) and output[1].isnan().all()
    assert torch.equal(module(ids, offsets, torch.tensor(2.0).expand(3)), rows * 2)


@pytest.mark.parametrize("kind", ["expanded", "strided", "transposed", "half", "sparse"])
def test_c14_any_form_of_gradient_trains(kind: str) -> None:
    module = make_module([options(4)], output_dtype=torch.float16 if kind == "half" else torch.float32)
    output = module(*bag_per_id([1, 2]))
    before = output.detach().float()
    expected = torch.ones(2, 4)
    if kind == "expanded":
        output.sum().backward()
    elif kind == "sparse":
        F.embedding(torch.tensor([0, 1]), output, sparse=True).sum().backward()
    else:
        wide = torch.arange(64.0, dtype=output.dtype).view(8, 8)
        grad = wide[:4, :2].T if kind == "transposed" else wide[::4, ::2]
        output.backward(grad)
        expected = grad.float()
    after = torch.stack([row_of(module, "a", i)[0] for i in (1, 2)])
    torch.testing.assert_close(after, before - expected, rtol=1e-3 if kind == "half" else 0, atol=1e-3)


def test_c14_the_output_may_be_changed_in_place() -> None:
    module = make_module([options(4, initializer_args=constant(-1.0))])
    F.relu(module(*bag_per_id([1])).mul_(-2.0), inplace=True).sum().backward()
    assert torch.equal(row_of(module, "a", 1)[0], torch.full((4,), 1.0))


def test_c14_ids_overwritten_before_backward_are_an_error_not_a_wrong_gradient() -> None:
    module = make_module()
    ids, offsets = bag_per_id([1, 2])
    weights = torch.ones(2)
    for tensor in (ids, offsets, weights):
        output = module(ids, offsets, weights)
        before = contents(module)
        if tensor is offsets:
            # As a buffer of NumPy does, unseen by autograd: the lookup has its own copy.
            offsets.numpy()[:] = 10**15
            output.backward(torch.zeros_like(output))
            offsets.copy_(torch.arange(3))
            continue
        tensor += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
        assert contents(module) == before


# Steps


@pytest.mark.parametrize("newest_first", [False, True])
def test_c14_two_forwards_then_two_backwards(newest_first: bool) -> None:
    module = make_module([options(capacity=16)])
    outputs = [module(*bag_per_id(ids)) for ids in (range(8), range(4, 16))]
    before = [row_of(module, "a", i)[0] for i in range(16)]
    module(*bag_per_id(range(100, 110)))
    assert module.stats()["a"]["evicted"] == 0
    for k in (1, 0) if newest_first else (0, 1):
        (outputs[k] * (k + 1)).sum().backward()
    for i, row in enumerate(before):
        grad = (i < 8) + 2 * (i >= 4)
        torch.testing.assert_close(row_of(module, "a", i)[0], row - grad, rtol=0, atol=1e-6)


def test_c14_a_forward_without_backward_pins_nothing_once_its_graph_is_freed() -> None:
    module = make_module([options(capacity=16)])
    steps = module.tables.steps
    waiting = [module(*bag_per_id(range(16))) for _ in range(3)]
    assert steps.num_outstanding == 3
    del waiting[0]
    gc.collect()
    assert steps.num_outstanding == 2
    loss = waiting.pop().sum() + waiting.pop().sum()
    assert steps.num_outstanding == 2
    del loss
    gc.collect()
    assert steps.num_outstanding == 0
    module(*bag_per_id(range(100, 116)))
    assert module.stats()["a"]["evicted"] == 16


def test_c14_retained_graphs_train_twice_and_others_refuse() -> None:
    module = make_module([options(capacity=16)])
    output = module(*bag_per_id([1]))
    before = row_of(module, "a", 1)[0]
    output.sum().backward(retain_graph=True)
    output.sum().backward(retain_graph=True)
    torch.testing.assert_close(row_of(module, "a", 1)[0], before - 2, rtol=0, atol=1e-6)
    # Whoever keeps the graph may come again: the id keeps its row.
    assert module.tables.steps.num_outstanding == 1
    module(*bag_per_id(range(100, 116))).sum().backward()
    assert module.stats()["a"]["failed"] == 1
    output.sum().backward()
    torch.testing.assert_close(row_of(module, "a", 1)[0], before - 3, rtol=0, atol=1e-6)
    assert module.stats()["a"]["dropped_gradients"] == 0 and module.tables.steps.num_outstanding == 0
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()
    # Without a backward that lets go of it, the step ends with the graph.
    output = module(*bag_per_id([100]))
    output.sum().backward(retain_graph=True)
    assert module.tables.steps.num_outstanding == 1
    del output
    assert module.tables.steps.num_outstanding == 0


def test_c08_a_second_backward_does_not_train_the_next_life_of_an_id() -> None:
    module = make_module([options(capacity=16)])
    output = module(*bag_per_id([5]))
    output.sum().backward(retain_graph=True)
    module.erase("a", torch.tensor([5]))
    module(*bag_per_id([5]))
    kept = contents(module)
    output.sum().backward()
    assert contents(module) == kept and module.stats()["a"]["dropped_gradients"] == 1


def test_c14_a_gradient_whose_id_was_erased_is_dropped_and_counted() -> None:
    module = make_module([options(capacity=16), options(capacity=16)], optimizer="adam")
    output = module(*batch([1, 2, 2], [7]))
    assert module.erase("a", torch.tensor([2, 7])) == 1
    other = module(*batch([2, 55], [])).detach()
    row = row_of(module, "a", 55)[0]
    fresh = contents(module)["a"][2]
    output.sum().backward()
    assert contents(module)["a"][2] == fresh and torch.equal(row_of(module, "a", 55)[0], row)
    assert row_of(module, "a", 1)[1].any() and row_of(module, "b", 7)[1].any()
    assert module.stats()["a"]["dropped_gradients"] == 2 and module.stats()["b"]["dropped_gradients"] == 0
    assert other.isfinite().all() and module.tables.steps.num_outstanding == 0


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "frozen"])
def test_c14_without_gradients_a_forward_inserts_but_does_not_train_or_pin(mode: str) -> None:
    module = make_module([options(score_strategy=DynamicEmbScoreStrategy.LFU)])
    if mode == "frozen":
        module.requires_grad_(False)
        output = module(*bag_per_id([1, 1]))
    else:
        with getattr(torch, mode)():
            output = module(*bag_per_id([1, 1]))
    assert not output.requires_grad and module.tables.steps.num_outstanding == 0
    assert contents(module)["a"][1][0] == 2
    module.requires_grad_(True)
    module(*bag_per_id([1])).sum().backward()
    assert torch.equal(row_of(module, "a", 1)[0], output.clone()[0] - 1)


@pytest.mark.parametrize("frozen", [True, False])
def test_c14_rows_that_do_not_train_still_give_the_weights_their_gradient(frozen: bool) -> None:
    module = make_module()
    module(*bag_per_id([1]))
    module = module.requires_grad_(False) if frozen else module.eval()
    kept = contents(module)["a"][1][1]
    weights = torch.ones(1, requires_grad=True)
    module(*bag_per_id([1]), weights).sum().backward()
    torch.testing.assert_close(weights.grad[0], row_of(module, "a", 1)[0].sum())
    assert contents(module)["a"][1][1] == kept and module.tables.steps.num_outstanding == 0


@pytest.mark.parametrize("kernel", ["find", "insert", "pool", "update"])
def test_c14_a_failing_kernel_leaves_no_step_outstanding(kernel: str, monkeypatch) -> None:
    module = make_module([options(capacity=16)])
    module(*bag_per_id(range(16))).sum().backward()

    def fail(*arguments, **more) -> None:
        raise MemoryError("no memory")

    inner = import_module("dynamicemb.table.cpu.find_or_insert")
    monkeypatch.setattr(inner if kernel in ("find", "insert") else module.tables.kernels, kernel, fail)
    with pytest.raises(MemoryError) as held:
        module(*bag_per_id([1, 99])).sum().backward()
    monkeypatch.undo()
    # The exception, and the frames it holds, are alive.
    assert held.value is not None and module.tables.steps.num_outstanding == 0
    module(*bag_per_id(range(200, 216))).sum().backward()
    assert module.stats()["a"]["failed"] == 0
    module.tables.check_invariants()


def test_c14_autocast_and_a_larger_model() -> None:
    model = nn.ModuleDict(
        {"tables": make_module([options(8)]), "head": nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, offsets = bag_per_id([1, 2, 3])
    model["tables"](ids, offsets)
    before = row_of(model["tables"], "a", 1)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model["tables"](ids, offsets)
        loss = model["head"](output).sum()
    assert output.dtype is torch.float32
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(row_of(model["tables"], "a", 1)[0], before)


def test_c14_threads_that_train_one_module_lose_no_gradient() -> None:
    module = make_module([options(4, 4096, initializer_args=constant(0.0))])
    errors = []

    def train(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(40):
                output = module(*bag_per_id(torch.randint(0, 300, (64,), generator=generator).tolist()))
                output.sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and module.tables.steps.num_outstanding == 0
    ids, rows = module.export_keys_values("a", "cpu")
    assert ids.numel() > 200 and rows[:, 0].sum() == -4 * 40 * 64
