"""Optimizers through the module: exact, repeatable, and confined to the rows of the batch (lines 13, 16 and 18)."""

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy
from tests.support.lookups import MEAN, NONE, OPTIMIZERS, SUM, batch, contents, make_module, options, row_of


class PlainRows:
    """Rows in a dict, trained one by one with torch: the reference for every optimizer."""

    def __init__(
        self, kind: str, rate: float, eps: float, beta1: float, beta2: float, decay: float, state: float
    ) -> None:
        self.kind, self.rate, self.eps, self.decay, self.state_value = kind, rate, eps, decay, state
        self.beta1, self.beta2 = beta1, beta2
        self.rows: dict[int, torch.Tensor] = {}
        self.states: dict[int, torch.Tensor] = {}
        self.step = 0

    def update(self, grads: dict[int, torch.Tensor]) -> None:
        self.step += 1
        for key, grad in grads.items():
            row, grad = self.rows[key], grad.double()
            if self.kind == "sgd":
                row -= self.rate * grad
                continue
            size = 1 if self.kind == "exact_row_wise_adagrad" else row.numel() * (2 if self.kind == "adam" else 1)
            state = self.states.setdefault(key, torch.full((size,), self.state_value, dtype=torch.float64))
            if self.kind == "adam":
                first, second = state.chunk(2)
                first += (1 - self.beta1) * (grad - first)
                second += (1 - self.beta2) * (grad**2 - second)
                root = (second / (1 - self.beta2**self.step)).sqrt() + self.eps
                row -= self.rate * (first / (1 - self.beta1**self.step) / root + self.decay * row)
            else:
                state += (grad**2).mean() if self.kind == "exact_row_wise_adagrad" else grad**2
                row -= self.rate * grad / (state.sqrt() + self.eps)


@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c13_ten_steps_equal_a_plain_per_row_reference(optimizer: str, pooling) -> None:
    adam, adagrad = optimizer == "adam", "adagrad" in optimizer
    more = {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95} if adam else {}
    more |= {"initial_accumulator_value": 0.25} if adagrad else {}
    module = make_module(
        [options(7, capacity=128)] * 2, optimizer=optimizer, pooling_mode=pooling, learning_rate=0.125,
        feature_table_map=[0, 0, 1], **({"eps": 1e-3} if adam or adagrad else {}), **more,
    )  # fmt: skip
    plain = [PlainRows(optimizer, 0.125, 1e-3, 0.8, 0.95, 0.1, 0.25 if adagrad else 0.0) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        if step == 5:
            module.set_learning_rate(0.03125)
            plain[0].rate = plain[1].rate = 0.03125
        sizes = torch.randint(0, 5, (12,), generator=generator)
        bags = [torch.randint(0, 30, (int(size),), generator=generator).tolist() for size in sizes]
        output = module(*batch(*bags))
        flat = [(k // 8, key) for k, bag in enumerate(bags) for key in bag]
        for t, key in flat:
            if key not in plain[t].rows:
                plain[t].rows[key] = row_of(module, "ab"[t], key)[0].double()
        grad = torch.randn(output.shape, generator=generator)
        kept = grad.clone()
        output.backward(grad)
        assert torch.equal(grad, kept)
        sums: list[dict[int, torch.Tensor]] = [{}, {}]
        i = 0
        for k, bag in enumerate(bags):
            for key in bag:
                column = 7 * (k // 4)
                part = grad[i] if pooling is NONE else grad[k % 4, column : column + 7]
                part = part.double() / (len(bag) if pooling is MEAN else 1)
                sums[k // 8][key] = sums[k // 8].get(key, 0) + part
                i += 1
        for t in range(2):
            plain[t].update(sums[t])
    for t in range(2):
        for key, row in plain[t].rows.items():
            torch.testing.assert_close(row_of(module, "ab"[t], key)[0].double(), row, rtol=1e-6, atol=1e-6)


def test_c13_clipping_bounds_each_element_and_leaves_the_callers_gradient() -> None:
    module = make_module([options(4)], gradient_clipping=True, max_gradient=0.5)
    output = module(*batch([1], [1], [2]))
    rows = [row_of(module, "a", i)[0] for i in (1, 2)]
    grad = torch.tensor([[3.0, -3, 0.25, 0], [3, 0.25, 0.25, 0], [float("inf"), float("-inf"), -0.25, 0.5]])
    kept = grad.clone()
    output.backward(grad)
    assert torch.equal(grad, kept)
    torch.testing.assert_close(
        row_of(module, "a", 1)[0], rows[0] - torch.tensor([1.0, -0.25, 0.5, 0]), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        row_of(module, "a", 2)[0], rows[1] - torch.tensor([0.5, -0.5, -0.25, 0.5]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c18_a_gradient_that_is_not_finite_stays_in_its_row(optimizer: str, value: float) -> None:
    modules = [make_module([options(8), options(8)], optimizer=optimizer) for _ in range(2)]
    # Sums over two occurrences and single gradients take different ways.
    bags = [*([key, key] for key in range(6)), *([key] for key in range(6, 12))]
    for module, bad in zip(modules, (1.0, value), strict=True):
        output = module(*batch(*bags, *bags))
        grad = torch.ones_like(output)
        grad[2, 3] = grad[8, 12] = bad
        output.backward(grad)
    expected, got = contents(modules[0]), contents(modules[1])
    for name, key in ((name, key) for name in "ab" for key in range(12)):
        if (name, key) in (("a", 2), ("b", 8)):
            assert not row_of(modules[1], name, key)[0].isfinite().all()
        else:
            assert expected[name][key][1] == got[name][key][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c16_runs_repeat_bit_for_bit_with_any_number_of_threads(optimizer: str, dtype: torch.dtype) -> None:
    def run(threads: int) -> tuple[list[bytes], dict]:
        torch.set_num_threads(threads)
        tables = [options(d, 256, embedding_dtype=dtype, score_strategy=DynamicEmbScoreStrategy.STEP) for d in (8, 3)]
        module = make_module(tables, optimizer=optimizer, learning_rate=0.1)
        generator = torch.Generator().manual_seed(4)
        losses = []
        for _ in range(4):
            ids = torch.randint(0, 900, (6000,), generator=generator)
            output = module(ids, torch.arange(0, 6001, 2))
            losses.append(output.detach().numpy().tobytes())
            output.square().sum().backward()
        return losses, contents(module)

    before = torch.get_num_threads()
    try:
        first, second = run(1), run(2)
        assert first == second == run(2)
    finally:
        torch.set_num_threads(before)
