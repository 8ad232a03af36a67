"""Whole modules on the CPU and on Triton's kernels, step by step on the same random batches; contract 16."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbPoolingMode, DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from tests.conftest import reason_to_skip
from tests.support.tables import UNIFORM, device_of, use_backend
from tests.support.twins import EXTREME

NAMES = ["a", "b", "c"]
FEATURE_TABLES = [0, 0, 1, 2]
# A step sums each gradient in another order and contracts multiply-adds: a few units in the last place of the largest
# term, of which up to 60 add up in a row here, over up to 125 steps.
FP32 = {"rtol": 1e-4, "atol": 2e-4}
BF16 = {"rtol": 2e-2, "atol": 2e-2}


@dataclass(frozen=True)
class Case:
    strategy: DynamicEmbScoreStrategy
    optimizer: str
    pooling: DynamicEmbPoolingMode
    dims: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bucket_capacity: int = 16
    buckets: tuple[int, ...] = (4, 2, 6)


S, P = DynamicEmbScoreStrategy, DynamicEmbPoolingMode
CASES = [
    Case(S.TIMESTAMP, "sgd", P.NONE, (16, 16, 16)),
    Case(S.STEP, "adam", P.SUM, (4, 37, 128)),
    Case(S.CUSTOMIZED, "exact_adagrad", P.MEAN, (1, 8, 64)),
    Case(S.LFU, "exact_row_wise_adagrad", P.SUM, (12, 12, 12)),
    Case(S.LFU, "adam", P.NONE, (64, 64, 64), bucket_capacity=128, buckets=(2, 1, 1)),
    Case(S.TIMESTAMP, "exact_row_wise_adagrad", P.MEAN, (256, 3, 20), bucket_capacity=48),
    Case(S.STEP, "sgd", P.SUM, (32, 32, 32), torch.bfloat16),
    Case(S.TIMESTAMP, "adam", P.NONE, (24, 24, 24), torch.float16),
]


def make(case: Case, backend: str) -> BatchedDynamicEmbeddingTablesV2:
    options = [
        DynamicEmbTableOptions(
            dim=dim,
            max_capacity=buckets * case.bucket_capacity,
            bucket_capacity=case.bucket_capacity,
            score_strategy=case.strategy,
            initializer_args=UNIFORM,
            embedding_dtype=case.dtype,
        )
        for dim, buckets in zip(case.dims, case.buckets, strict=True)
    ]
    # Rounding to nearest: a stochastic one turns a last bit of difference into a step of the whole dtype.
    module = BatchedDynamicEmbeddingTablesV2(
        options, NAMES, FEATURE_TABLES, pooling_mode=case.pooling, optimizer=case.optimizer, learning_rate=0.01,
        eps=1e-3, seed=11, stochastic_rounding=False, device=device_of(backend),
    )  # fmt: skip
    use_backend(module.tables, backend)
    if case.strategy is S.CUSTOMIZED:
        module.set_score({"a": 3, "b": 1, "c": 2})
    return module


def draw(rng: np.random.Generator, longest: int, universe: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch_size = int(rng.integers(0, 5))
    lengths = rng.integers(0, longest + 1, len(FEATURE_TABLES) * batch_size)
    ids = rng.integers(0, universe, lengths.sum()) ** 2 // universe
    extreme = rng.random(ids.size) < 0.1
    ids[extreme] = rng.choice(EXTREME, extreme.sum())
    return torch.from_numpy(ids), torch.tensor([0, *lengths.cumsum()])


def contents(module: BatchedDynamicEmbeddingTablesV2, table: int) -> dict[int, tuple[int, torch.Tensor]]:
    group = module.tables
    slots = group.scan(table)
    rows = torch.cat(group.read(table, group.index.rows[slots]), 1).cpu()
    keys, scores = group.index.keys[slots].tolist(), group.index.scores[slots].tolist()
    return {key: (score, row) for key, score, row in zip(keys, scores, rows, strict=True)}


def ranks(scores: list[int]) -> list[int]:
    """Return the place of every score among the distinct ones: what two clocks agree on."""
    order = {score: place for place, score in enumerate(sorted(set(scores)))}
    return [order[score] for score in scores]


def assert_same_tables(case: Case, cpu, other, bound: dict[str, float]) -> None:
    for t, name in enumerate(NAMES):
        expected, actual = contents(cpu, t), contents(other, t)
        assert actual.keys() == expected.keys(), name
        keys = sorted(expected)
        scores = [[side[key][0] for key in keys] for side in (expected, actual)]
        if case.strategy is S.TIMESTAMP:
            scores = [ranks(column) for column in scores]
        assert scores[0] == scores[1], name
        if keys:
            rows = [torch.stack([side[key][1] for key in keys]) for side in (expected, actual)]
            torch.testing.assert_close(rows[1], rows[0], **bound)


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{n}-{c.optimizer}") for n, c in enumerate(CASES)])
def test_c16_cpu_and_gpu_hold_the_same_after_random_batches(backend: str, case: Case) -> None:
    if backend == "cpu":
        pytest.skip("cpu: is what the others are compared with")
    on_gpu = backend == "cuda"
    steps, longest, universe = (125, 12, 400) if on_gpu else (3, 2, 100)
    cpu, other = make(case, "cpu"), make(case, backend)
    bound = FP32 if case.dtype == torch.float32 else BF16
    rng = np.random.default_rng(CASES.index(case))
    for step in range(steps):
        ids, offsets = draw(rng, longest, universe)
        counts = torch.from_numpy(rng.integers(1, 9, ids.numel())) if case.strategy is S.LFU and step % 2 else None
        outputs = []
        for module in (cpu, other):
            device = module.tables.device
            sent = [None if x is None else x.to(device) for x in (ids, offsets, counts)]
            outputs.append(module(sent[0], sent[1], frequency_counters=sent[2]))
        torch.testing.assert_close(outputs[1].cpu(), outputs[0], **bound)
        grad = torch.from_numpy(rng.standard_normal(outputs[0].shape).astype(np.float32)).to(outputs[0].dtype)
        for output in outputs:
            output.backward(grad.to(output.device))
        if step % 5 == 4 or step == steps - 1:
            assert_same_tables(case, cpu, other, bound)
        if step % 7 == 6:
            for module in (cpu, other):
                module.erase("a", torch.arange(0, 40, 3).to(module.tables.device))
    stats = [module.stats() for module in (cpu, other)]
    assert stats[0] == stats[1]
    assert not on_gpu or min(table["evicted"] for table in stats[0].values()) > 0


def test_c16_first_rows_are_the_same_bit_for_bit(backend: str) -> None:
    if backend == "cpu":
        pytest.skip("cpu: is what the others are compared with")
    case = CASES[1]
    ids = torch.arange(-20, 20) if backend == "interpret" else torch.arange(-3000, 3000)
    offsets = torch.tensor([0, ids.numel(), ids.numel(), ids.numel(), ids.numel()])
    tables = []
    for which in ("cpu", backend):
        module = make(case, which)
        device = module.tables.device
        with torch.no_grad():
            module(ids.to(device), offsets.to(device))
        tables.append(contents(module, 0))
    assert tables[0].keys() == tables[1].keys() and len(tables[0]) >= min(40, ids.numel())
    for key, (score, row) in tables[0].items():
        assert tables[1][key][0] == score and torch.equal(tables[1][key][1], row)


@pytest.mark.cuda
def test_c16_a_gpu_repeats_itself_bit_for_bit() -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    torch.use_deterministic_algorithms(True)
    try:
        digests = []
        for _ in range(2):
            module = make(CASES[1], "cuda")
            rng = np.random.default_rng(5)
            for _ in range(40):
                ids, offsets = draw(rng, 40, 400)
                output = module(ids.cuda(), offsets.cuda())
                output.backward(torch.ones_like(output))
            digests.append([contents(module, t) for t in range(3)])
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*digests, strict=True):
        assert first.keys() == second.keys()
        for key in first:
            assert first[key][0] == second[key][0] and torch.equal(first[key][1], second[key][1])
