"""Lookups of the module: ids, bags, first values, eviction, evaluation (lines 1 to 9 and 11 of the contract)."""

from importlib import import_module

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbScoreStrategy
from dynamicemb.table.cpu.initialize import initial_values
from dynamicemb.table.layout import fmix64
from dynamicemb.types import DynamicEmbInitializerMode as Mode
from tests.support.lookups import (
    EXTREME,
    MEAN,
    NONE,
    SUM,
    assert_unchanged,
    bag_per_id,
    batch,
    constant,
    contents,
    key_of,
    make_module,
    options,
    poison,
    row_of,
    snapshot,
)


def first_values(module, table: int, ids: list[int]) -> torch.Tensor:
    keys = torch.tensor(ids, dtype=torch.int64)
    return initial_values(module.tables.initializers, table, keys, module.dims[table])


def bucket_mates(count: int, num_buckets: int, start: int = 0) -> list[int]:
    """Return ids of bucket 0."""
    ids = np.arange(start, start + 40 * count * num_buckets)
    return ids[(fmix64(ids) >> np.uint64(20)) % np.uint64(num_buckets) == 0][:count].tolist()


# Ids


@pytest.mark.parametrize("pooling", [SUM, NONE])
def test_c01_extreme_ids_are_looked_up_trained_evaluated_and_erased(pooling) -> None:
    module = make_module([options(capacity=128)], pooling_mode=pooling)
    before = first_values(module, 0, EXTREME)
    output = module(*bag_per_id(EXTREME))
    assert torch.equal(output, before)
    grad = torch.arange(1.0, 1 + output.numel()).view_as(output)
    output.backward(grad)
    module.eval()
    assert torch.equal(module(*bag_per_id(EXTREME)), before - grad)
    assert module.contains("a", torch.tensor(EXTREME)).all()
    assert module.erase("a", torch.tensor(EXTREME)) == len(EXTREME)
    assert not module(*bag_per_id(EXTREME)).any()


def test_c01_int32_and_uint64_name_the_same_ids_as_int64() -> None:
    ids = [-(2**31), -1, 0, 1, 2**31 - 1]
    rows = {}
    for dtype in (torch.int64, torch.int32, torch.uint64):
        module = make_module()
        given = torch.tensor(ids).to(dtype)
        rows[dtype] = module(given, bag_per_id(ids)[1].to(torch.int32 if dtype == torch.int32 else torch.int64))
        assert sorted(contents(module)["a"]) == sorted(ids)
        assert module.contains("a", given).all() and module.erase("a", given) == len(ids)
    assert torch.equal(rows[torch.int64], rows[torch.int32]) and torch.equal(rows[torch.int64], rows[torch.uint64])
    module = make_module()
    module(torch.tensor([2**64 - 1, 2**63], dtype=torch.uint64), torch.tensor([0, 1, 2]))
    assert sorted(contents(module)["a"]) == [-(2**63), -1]


def test_c01_ids_may_be_strided_expanded_or_a_view() -> None:
    module = make_module()
    table = torch.arange(40).view(8, 5)
    for ids in (table[:, 2], table.flatten()[7:15], torch.tensor([3]).expand(8), table.flatten().to(torch.uint64)[::5]):
        offsets = torch.stack([torch.arange(9), torch.full((9,), -7)], 1)[:, 0]
        values = module(ids, offsets).detach()
        assert torch.equal(values, first_values(module, 0, ids.tolist()))


# Bags


@pytest.mark.parametrize("pooling", [SUM, MEAN])
def test_c02_repeated_ids_in_and_across_bags_and_features(pooling) -> None:
    module = make_module([options(3), options(2)], feature_table_map=[0, 0, 1], pooling_mode=pooling)
    bags = [[5, 5, 9], [5], [], [9, 5], [5, 5], [5]]
    output = module(*batch(*bags))
    rows = [dict(zip([5, 9], first_values(module, t, [5, 9]), strict=True)) for t in range(2)]
    for k, bag in enumerate(bags):
        feature, sample = divmod(k, 2)
        columns = [slice(0, 3), slice(3, 6), slice(6, 8)][feature]
        expected = sum((rows[int(feature == 2)][i] for i in bag), torch.zeros([3, 3, 2][feature]))
        if pooling is MEAN and bag:
            expected = expected / len(bag)
        torch.testing.assert_close(output[sample, columns], expected, rtol=1e-6, atol=1e-6)
    assert module.stats()["a"]["size"] == 2 and module.stats()["b"]["size"] == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
@pytest.mark.parametrize("bags", [[], [[]] * 6, [[], [], [1, 2], [], [3], []], [[4]] * 6], ids=str)
def test_c03_empty_batches_bags_and_features(bags, pooling, training: bool) -> None:
    dims = [3, 3] if pooling is NONE else [3, 2]
    module = make_module([options(d) for d in dims], feature_table_map=[0, 0, 1], pooling_mode=pooling)
    module.train(training)
    ids, offsets = batch(*bags)
    output = module(ids, offsets)
    assert output.shape == ((ids.numel(), 3) if pooling is NONE else (len(bags) // 3, sum(dims) + 3))
    if training:
        output.sum().backward()
        assert module.tables.steps.num_outstanding == 0
    if pooling is not NONE:
        for k, bag in enumerate(bags):
            sample, feature = k % 2, k // 2
            if not bag:
                assert not output[sample, [slice(0, 3), slice(3, 6), slice(6, 8)][feature]].any()


@pytest.mark.parametrize("factor", [0, 1 / 64, 1, 2])
def test_c03_up_to_twice_the_capacity_of_ids_in_one_batch(factor: float) -> None:
    module = make_module([options(capacity=64), options(capacity=64)], pooling_mode=NONE)
    count = int(64 * factor)
    ids, offsets = batch(list(range(count)), list(range(count)))
    poison(module)
    output = module(ids, offsets)
    stats = module.stats()
    failed = ~module.contains("a", torch.arange(count))
    assert stats["a"]["size"] + failed.sum() == count and stats["a"]["failed"] == failed.sum()
    assert factor <= 1 or failed.sum() >= 64
    expected = torch.where(failed[:, None], 0, first_values(module, 0, list(range(count))))
    assert torch.equal(output[:count], expected)
    output.sum().backward()
    module.tables.check_invariants()
    assert stats["a"]["evicted"] == 0


@pytest.mark.parametrize("dims", [[1, 3, 64, 257], [2048, 2047]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_c13_dims_and_dtypes_mix(dims, dtype, output_dtype) -> None:
    module = make_module(
        [options(d, embedding_dtype=dtype) for d in dims], output_dtype=output_dtype, stochastic_rounding=False
    )
    poison(module)
    output = module(*batch(*([-1], [8]) * len(dims)))
    expected = torch.cat([first_values(module, t, [-1, 8]) for t in range(len(dims))], 1).to(dtype)
    assert output.dtype is output_dtype and torch.equal(output, expected.to(output_dtype))
    output.backward(torch.full_like(output, 0.25))
    module.eval()
    after = (expected.float() - 0.25).to(dtype)
    assert torch.equal(module(*batch(*([-1], [8]) * len(dims))), after.to(output_dtype))


# First values

INITIALIZERS = [
    DynamicEmbInitializerArgs(mode=Mode.UNIFORM, lower=-2.0, upper=-1.0),
    DynamicEmbInitializerArgs(mode=Mode.NORMAL, mean=10.0, std_dev=0.5),
    DynamicEmbInitializerArgs(mode=Mode.TRUNCATED_NORMAL, mean=0.0, std_dev=1.0, lower=3.0, upper=4.0),
    constant(0.1),
    DynamicEmbInitializerArgs(mode=Mode.DEBUG),
]


def philox(counter: list[int], key: int) -> list[int]:
    """Philox4x32-10 of docs/random.md, in plain integers."""
    mask = 2**32 - 1
    c, k = list(counter), [key & mask, key >> 32]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_c05_uniform_values_are_those_of_the_specification() -> None:
    module = make_module([options(6, initializer_args=INITIALIZERS[0]), options(6, initializer_args=INITIALIZERS[0])])
    output = module(*batch([-3], [-3]))
    for t, name in enumerate("ab"):
        for column in range(6):
            counter = [-3 & (2**32 - 1), (-3 >> 32) & (2**32 - 1), column // 4, 0]
            word = philox(counter, key_of(name))[column % 4]
            expected = np.float32(-2) + np.float32(1) * (np.float32(word >> 8) * np.float32(2**-24))
            assert output[0, 6 * t + column].item() == expected


def test_c05_every_table_has_its_own_initializer_and_name() -> None:
    module = make_module([options(64, initializer_args=args) for args in INITIALIZERS])
    uniform, normal, truncated, fixed, debug = module(*bag_per_id([123456] * 5)).detach().chunk(5, 1)
    assert uniform.min() >= -2 and uniform.max() <= -1 and uniform.unique().numel() > 50
    assert 9.5 < normal.mean() < 10.5 and 0.3 < normal.std() < 0.7
    assert truncated.min() >= 3 and truncated.max() <= 4
    assert torch.equal(fixed, torch.full_like(fixed, 0.1)) and torch.equal(debug, torch.full_like(debug, 23456))
    same = make_module([options(8), options(8)])(*bag_per_id([1, 1]))
    assert not torch.equal(same[0, :8], same[0, 8:])


def test_c05_first_values_do_not_depend_on_order_batch_capacity_or_history() -> None:
    ids = list(range(-20, 20))
    reference = dict(zip(ids, make_module([options(5, 1024)])(*bag_per_id(ids)), strict=True))
    module = make_module([options(5, 256)], feature_table_map=[0, 0])
    module(*batch(ids[::-1][:7], [], [3, 3], [-20]))
    module.erase("a", torch.tensor([3]))
    for key in ids[::3] + ids[1::3]:
        row = module(*batch([key], []))[0, :5]
        assert torch.equal(row, reference[key])
    assert not torch.equal(make_module([options(5)], seed=8)(*bag_per_id([1]))[0], reference[1])


def test_c05_default_seed_is_torch_initial_seed() -> None:
    state = torch.get_rng_state()
    try:
        torch.manual_seed(-5)
        torch.rand(3)
        default = make_module(seed=None)(*bag_per_id([4]))
        assert torch.equal(default, make_module(seed=torch.initial_seed())(*bag_per_id([4])))
        assert torch.equal(default, make_module(seed=-5)(*bag_per_id([4])))
    finally:
        torch.set_rng_state(state)


# Eviction


def test_c07_a_batch_keeps_its_own_ids_and_those_of_an_outstanding_step() -> None:
    module = make_module([options(capacity=16)], pooling_mode=NONE)
    waiting = module(*bag_per_id(range(10)))
    output = module(*bag_per_id(range(8, 30)))
    assert module.contains("a", torch.arange(16)).all() and module.stats()["a"]["evicted"] == 0
    assert not output[8:].any() and module.stats()["a"]["failed"] == 14
    before = [row_of(module, "a", i)[0] for i in range(10)]
    waiting.sum().backward()
    assert all(torch.equal(row_of(module, "a", i)[0], row - 1) for i, row in enumerate(before))
    output.sum().backward()
    module(*bag_per_id(range(100, 116)))
    assert module.stats()["a"]["evicted"] == 16


@pytest.mark.parametrize("protect_steps", [0, 1, 3])
def test_c07_protect_steps_keeps_the_ids_of_finished_steps(protect_steps: int) -> None:
    module = make_module([options(capacity=16, protect_steps=protect_steps)])
    module(*bag_per_id(range(16))).sum().backward()
    for step in range(1, 5):
        module(*bag_per_id([1000 + step])).sum().backward()
        assert module.stats()["a"]["evicted"] == max(0, step - protect_steps)


def test_c08_evicted_and_erased_ids_return_fresh() -> None:
    module = make_module(
        [options(capacity=16, score_strategy=DynamicEmbScoreStrategy.LFU)], optimizer="adam", learning_rate=0.1
    )
    first = module(*bag_per_id([1, 2]))
    fresh = first.detach().clone()
    first.sum().backward()
    for _ in range(3):
        module(*bag_per_id([2] * 9)).sum().backward()
    assert module.erase("a", torch.tensor([2])) == 1
    module(*bag_per_id(range(100, 115))).sum().backward()
    module(*bag_per_id(range(200, 216))).sum().backward()
    assert not module.contains("a", torch.tensor([1, 2])).any()
    assert torch.equal(module(*bag_per_id([1, 2])), fresh)
    for key in (1, 2):
        assert not row_of(module, "a", key)[1].any()
        assert contents(module)["a"][key][0] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "exact_row_wise_adagrad"])
def test_c09_poisoned_memory_is_never_seen(optimizer: str, dtype: torch.dtype) -> None:
    tables = [options(d, 16, embedding_dtype=dtype) for d in (5, 3)]
    module = make_module(tables, feature_table_map=[0, 1, 1], optimizer=optimizer)
    poison(module)
    for step in range(6):
        weights = torch.ones(3 * 40, requires_grad=True)
        ids = torch.arange(3 * 40) % 40 + 40 * step
        output = module(ids, torch.tensor([0, 40, 40, 80, 80, 120, 120]), weights)
        output.sum().backward()
        assert output.isfinite().all() and weights.grad.isfinite().all()
        assert not output[1].any()
    assert module.stats()["a"]["failed"] > 0 and module.stats()["b"]["evicted"] > 0
    for name in "ab":
        ids, values = module.export_keys_values(name, "cpu", batch_size=3)
        assert ids.numel() == 16 and values.isfinite().all()
        assert all(row_of(module, name, i)[1].isfinite().all() for i in ids.tolist())


def test_c09_nothing_is_resident_after_initialising_rows_failed(monkeypatch) -> None:
    module = make_module([options(capacity=16)])
    module(*bag_per_id(range(12))).sum().backward()
    poison(module)

    def fail(*arguments) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(import_module("dynamicemb.table.cpu.find_or_insert"), "initialize", fail)
    with pytest.raises(MemoryError) as held:
        module(*bag_per_id([3, 50, 51, 52, 53, 54, 55]))
    monkeypatch.undo()
    assert held.value is not None and module.tables.steps.num_outstanding == 0
    assert not module.contains("a", torch.arange(50, 56)).any()
    assert torch.equal(module(*bag_per_id([50, 51])), first_values(module, 0, [50, 51]))
    module.tables.check_invariants()


# Evaluation


@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
def test_c11_evaluation_changes_nothing_and_missing_ids_read_the_tables_constant(pooling) -> None:
    tables = [options(eval_initializer_args=constant(v)) for v in (0.5, -2.0)]
    module = make_module(tables, pooling_mode=pooling)
    module(*batch([1, 2, 3], [], [1], [2])).sum().backward()
    before = snapshot(module)
    module.eval()
    ids, offsets = batch([1, 99], [], [98, 98], [97])
    output = module(ids, offsets)
    row = row_of(module, "a", 1)[0]
    if pooling is NONE:
        assert torch.equal(output, torch.stack([row, *(torch.full((4,), v) for v in (0.5, -2.0, -2.0, -2.0))]))
    else:
        mean = 2 if pooling is MEAN else 1
        assert torch.equal(output[0, :4], (row + 0.5) / mean) and not output[1, :4].any()
        assert torch.equal(output[:, 4:], torch.tensor([[-4.0 / mean], [-2.0]]).expand(2, 4))
    for _ in range(3):
        module(torch.arange(100), torch.tensor([0, 25, 50, 75, 100]))
    module.stats(), module.memory_usage(), module.contains("a", ids), module.export_keys_values("a", "cpu")
    assert_unchanged(module, before)
    module.train()
    assert torch.equal(module(*batch([99], []))[0, :4], first_values(module, 0, [99])[0]) or pooling is NONE
