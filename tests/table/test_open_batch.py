"""How a lookup begins: ranges of the tables, safe offsets, the step's clock, filled scratch memory; contract 4."""

import random

import pytest
import torch

from dynamicemb import DynamicEmbPoolingMode, DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.table.index import CLAMPED, NOW, OLDEST, STEP
from dynamicemb.table.layout import POOLING_NONE, POOLING_SUM, FeatureLayout
from dynamicemb.table.scores import SCORE_LFU, SCORE_STEP, SCORE_TIMESTAMP
from tests.conftest import reason_to_skip
from tests.support.admitting import admitting, lengths_of, module_on
from tests.support.tables import make_group, ranges

FEATURES = [2, 1, 3]
BATCH_SIZE = 3
NUM_BOUNDARIES = sum(FEATURES) * BATCH_SIZE + 1


def layout(pooling: int, device: torch.device) -> FeatureLayout:
    tables = [t for t, count in enumerate(FEATURES) for _ in range(count)]
    first = torch.tensor([0, *FEATURES], device=device).cumsum(0)
    columns = torch.arange(0, 4 * len(tables) + 1, 4, device=device)
    return FeatureLayout(
        torch.tensor(tables, dtype=torch.int32, device=device), columns, first, BATCH_SIZE, pooling, 24
    )


def legal_offsets(seed: int) -> list[int]:
    rng = random.Random(seed)
    offsets = [0]
    for _ in range(NUM_BOUNDARIES - 1):
        offsets.append(offsets[-1] + rng.choice([0, 0, 1, 2, 5]))
    return offsets


def spoilt_offsets(seed: int) -> tuple[list[int], int]:
    """Return boundaries of which some are anything, and N."""
    rng = random.Random(seed)
    offsets = legal_offsets(seed)
    num_ids = offsets[-1]
    for _ in range(rng.choice([1, 2, 9])):
        wild = [-1, num_ids + 1, -(2**62), 2**62, rng.randrange(num_ids + 2)]
        offsets[rng.randrange(len(offsets))] = rng.choice(wild)
    return offsets, num_ids


def expected(offsets: list[int], num_ids: int) -> tuple[list[int], list[int], list[int]]:
    """Return safe offsets, ranges and the wrong boundaries of each table."""
    first_bags = [0]
    for count in FEATURES:
        first_bags.append(first_bags[-1] + count * BATCH_SIZE)
    bounds = [0]
    for bag in first_bags[1:-1]:
        bounds.append(max(bounds[-1], min(max(offsets[bag], 0), num_ids)))
    bounds.append(num_ids)
    safe, wrong = [], [0] * len(FEATURES)
    for k, value in enumerate(offsets):
        t = sum(k >= bag for bag in first_bags[1:-1])
        low, high = (num_ids, num_ids) if k == len(offsets) - 1 else (bounds[t], bounds[t + 1])
        safe.append(min(max(value, low), high))
        bad = value < 0 or value > num_ids or (k > 0 and value < offsets[k - 1])
        wrong[t] += bad or (k == 0 and value != 0) or (k == len(offsets) - 1 and value != num_ids)
    return safe, bounds, wrong


@pytest.fixture
def group(backend: str):
    return make_group(backend, [32, 32, 32], strategy=SCORE_STEP)


@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_NONE])
def test_a_step_begins_with_its_batch(group, device: torch.device, pooling: int) -> None:
    for seed in range(3):
        offsets = legal_offsets(seed)
        given = torch.tensor(offsets, device=device)
        step, lag = group.next_step()
        opened = group.open_batch(given, layout(pooling, device), offsets[-1], lag)
        _, bounds, _ = expected(offsets, offsets[-1])
        assert opened.table_ranges.tolist() == bounds
        if pooling == POOLING_SUM:
            given.fill_(-7)
            assert opened.offsets.tolist() == offsets
        assert group.index.clock[[STEP, OLDEST]].tolist() == [seed + 1, seed + 1]
        assert group.index.score_values.tolist() == [seed + 1] * 3
        step.finish()
    assert group.index.tallies[:, CLAMPED].tolist() == [0, 0, 0]


def test_an_evaluation_begins_without_a_step(group, device: torch.device) -> None:
    before = group.index.clock.clone()
    offsets = legal_offsets(1)
    opened = group.open_batch(torch.tensor(offsets, device=device), layout(POOLING_SUM, device), offsets[-1])
    assert opened.table_ranges.tolist() == expected(offsets, offsets[-1])[1]
    assert opened.scratch is None and torch.equal(group.index.clock, before)


def test_the_clock_follows_the_system_and_never_repeats(backend: str, device: torch.device) -> None:
    group = make_group(backend, [32, 32, 32], strategy=SCORE_TIMESTAMP)
    given = torch.tensor(legal_offsets(0), device=device)
    times = []
    for _ in range(3):
        step, lag = group.next_step()
        group.open_batch(given, layout(POOLING_SUM, device), int(given[-1]), lag)
        step.finish()
        times.append(int(group.index.clock[NOW]))
        assert group.index.score_values.tolist() == [times[-1]] * 3
    assert times[0] < times[1] < times[2] and times[0] > 1_600_000_000 * 10**9


@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_NONE])
@pytest.mark.parametrize("with_step", [False, True])
def test_c04_illegal_offsets_are_clamped_and_counted(
    backend: str, device: torch.device, pooling: int, with_step: bool
) -> None:
    if backend == "cpu":
        pytest.skip("cpu: illegal offsets raise before a lookup begins")
    group = make_group(backend, [32, 32, 32], strategy=SCORE_LFU)
    counted = [0, 0, 0]
    for seed in range(300 if backend == "cuda" else 25):
        offsets, num_ids = spoilt_offsets(seed)
        given = torch.tensor(offsets, device=device)
        if with_step:
            step, lag = group.next_step()
            opened = group.open_batch(given, layout(pooling, device), num_ids, lag)
            step.finish()
        else:
            opened = group.open_batch(given, layout(pooling, device), num_ids)
        safe, bounds, wrong = expected(offsets, num_ids)
        counted = [a + b for a, b in zip(counted, wrong, strict=True)]
        assert opened.table_ranges.tolist() == bounds
        assert pooling == POOLING_NONE or opened.offsets.tolist() == safe
        assert group.index.tallies[:, CLAMPED].tolist() == counted
    assert min(counted) > 0


@pytest.mark.parametrize("strategy", [SCORE_STEP, SCORE_LFU])
def test_scratch_memory_is_filled_with_the_batch(backend: str, device: torch.device, strategy: int) -> None:
    if backend == "cpu":
        pytest.skip("cpu: needs none")
    group = make_group(backend, [32, 32, 32], strategy=strategy)
    offsets = legal_offsets(5)
    _, lag = group.next_step()
    opened = group.open_batch(torch.tensor(offsets, device=device), layout(POOLING_SUM, device), 5000, lag)
    missing = opened.scratch
    words = missing.scratch.tolist()
    assert missing.num_filled - missing.num_zeros >= missing.num_claims + missing.num_lists + 4
    assert missing.num_claims >= 10_000
    assert set(words[missing.num_zeros : missing.num_filled]) == {-1}
    filled = words[: missing.num_zeros]
    assert len(filled) == (2 * missing.num_claims if strategy == SCORE_LFU else 0) and not any(filled)


def test_c04_illegal_frequencies_are_clamped_and_counted(backend: str, device: torch.device) -> None:
    if backend == "cpu":
        pytest.skip("cpu: illegal frequencies raise before a lookup begins")
    group = make_group(backend, [32, 32], strategy=SCORE_LFU)
    ids = torch.tensor([1, 2, 3, 1, 4, 5], device=device)
    counts = torch.tensor([0, 7, -5, 2, 2**31, 3], device=device)
    group.index.score_values.fill_(1)
    for factor in (1, 2):
        group.begin_step().finish()
        group.find_or_insert(ids, ranges(4, 2).to(device), counts)
        slots = group.scan(0)
        scores = dict(zip(group.index.keys[slots].tolist(), group.index.scores[slots].tolist(), strict=True))
        assert scores == {1: 3 * factor, 2: 7 * factor, 3: factor}
        slots = group.scan(1)
        scores = dict(zip(group.index.keys[slots].tolist(), group.index.scores[slots].tolist(), strict=True))
        assert scores == {4: (2**31 - 1) * factor, 5: 3 * factor}
        assert group.index.tallies[:, CLAMPED].tolist() == [2 * factor, factor]


def test_c04_illegal_frequencies_are_counted_where_admission_alone_reads_them(
    backend: str, device: torch.device
) -> None:
    if backend == "cpu":
        pytest.skip("cpu: illegal frequencies raise before a lookup begins")
    module = module_on(backend, admitting(2**40))
    group = module.tables
    ids = torch.tensor([1, 2, 1, 3], device=device)
    for number in (1, 2):
        group.begin_step().finish()
        frequencies = torch.tensor([0, 5, 2**31, 1], device=device)
        group.find_or_insert(ids, ranges(4).to(device), frequencies, admit_all=False)
        assert lengths_of(module) == {1: 2**31 * number, 2: 5 * number, 3: number}
        assert group.index.tallies[0, CLAMPED] == 2 * number


@pytest.mark.cuda
@pytest.mark.parametrize("pooling", list(DynamicEmbPoolingMode))
def test_c04_a_step_with_illegal_input_reads_nothing_outside(pooling: DynamicEmbPoolingMode) -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    dims = [16] * 3 if pooling is DynamicEmbPoolingMode.NONE else [16, 5, 128]
    options = [
        DynamicEmbTableOptions(dim=dim, max_capacity=256, score_strategy=DynamicEmbScoreStrategy.LFU) for dim in dims
    ]
    features = [t for t, count in enumerate(FEATURES) for _ in range(count)]
    module = BatchedDynamicEmbeddingTablesV2(
        options, ["a", "b", "c"], features, pooling_mode=pooling, optimizer="adam", device="cuda"
    )
    wrong = 0
    for seed in range(60):
        offsets, num_ids = spoilt_offsets(seed)
        wrong += sum(expected(offsets, num_ids)[2])
        generator = torch.Generator("cuda").manual_seed(seed)
        ids = torch.randint(-99, 99, (num_ids,), device="cuda", generator=generator)
        weights = None
        if pooling is not DynamicEmbPoolingMode.NONE and seed % 2:
            weights = torch.rand(num_ids, device="cuda", generator=generator, requires_grad=True)
        counts = torch.randint(-5, 5, (num_ids,), device="cuda", generator=generator)
        wrong += int((counts < 1).sum())
        output = module(ids, torch.tensor(offsets, device="cuda"), weights, frequency_counters=counts)
        output.backward(torch.ones_like(output))
        assert output.isfinite().all()
    module.tables.check_invariants()
    assert sum(table["clamped_inputs"] for table in module.stats().values()) == wrong
