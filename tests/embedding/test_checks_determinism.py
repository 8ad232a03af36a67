"""Deterministic mode: equal inputs give bitwise equal tables and losses (line 16 of the contract)."""

from collections.abc import Iterator

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy
from dynamicemb.dynamicemb_config import is_deterministic
from dynamicemb.table.index import CLOCK_SIZE
from tests.support.lookups import MEAN, bag_per_id, make_module, options, snapshot
from tests.support.tables import device_of, kernels_of

VARIABLE = "DEMB_DETERMINISM_MODE"


@pytest.fixture(params=["torch", "0", ""])
def deterministic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ask for deterministic mode: with torch's flag, or with a value of the variable, any value."""
    if request.param == "torch":
        torch.use_deterministic_algorithms(True)
    else:
        monkeypatch.setenv(VARIABLE, request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


def test_c16_deterministic_mode_is_asked_for_by_a_flag_or_a_variable(deterministic: str) -> None:
    assert is_deterministic()


def test_c16_deterministic_mode_is_off_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not is_deterministic()


def make(backend: str, **arguments):
    module = make_module(device=device_of(backend), **arguments)
    if backend == "interpret":
        # As they are: ``use_backend`` would make them deterministic.
        module.tables.kernels = kernels_of(backend)
    return module


@pytest.mark.usefixtures("tensors_on_device")
def test_c16_the_same_ids_fail_on_every_backend(backend: str, deterministic: str) -> None:
    module = make(backend, tables=[options(capacity=16)])
    ids = [int(i) for i in torch.randperm(24, generator=torch.Generator(device="cpu").manual_seed(1), device="cpu")]
    assert module(*bag_per_id(ids)).any(1).tolist() == [True] * 16 + [False] * 8
    module = make(backend, tables=[options(capacity=16)])
    assert not module.insert("a", torch.tensor(ids), torch.ones(24, 4))[16:].any()


def train(strategy: DynamicEmbScoreStrategy, optimizer: str) -> list[torch.Tensor]:
    """Train full tables; return all outputs, the whole index, and all rows."""
    tables = [options(8, 256, score_strategy=strategy), options(5, 64, score_strategy=strategy)]
    module = make_module(tables, optimizer=optimizer, pooling_mode=MEAN, device="cuda", learning_rate=0.1)
    generator = torch.Generator().manual_seed(3)
    outputs = []
    for _ in range(20):
        ids = torch.randint(0, 900, (2, 512), generator=generator).flatten().cuda()
        output = module(ids, torch.arange(0, 1025, 4).cuda())
        (output**2).sum().backward()
        outputs.append(output.detach().clone())
    stats = module.stats()
    assert all(stats[name][count] > 100 for name in "ab" for count in ("failed", "evicted"))
    return [*outputs, *snapshot(module)]


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "exact_row_wise_adagrad"])
@pytest.mark.parametrize("strategy", [DynamicEmbScoreStrategy.STEP, DynamicEmbScoreStrategy.LFU])
def test_c16_runs_repeat_bit_for_bit_on_a_gpu(strategy, optimizer: str, deterministic: str) -> None:
    first, second = (train(strategy, optimizer) for _ in range(2))
    clock = [i for i, tensor in enumerate(first) if tensor.dtype == torch.int64 and tensor.numel() == CLOCK_SIZE]
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        # The clock holds the time of day.
        assert number in clock or torch.equal(one, other)
