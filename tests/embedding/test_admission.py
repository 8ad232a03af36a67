"""Admission: which new ids get a row, what the others read, and what is counted."""

import copy
import pickle
from typing import Any

import pytest
import torch

from dynamicemb import (
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    InsertFailedError,
)
from dynamicemb.table.cpu.philox import philox4x32_reference
from dynamicemb.table.growing.plan import InsertPlan
from dynamicemb.table.initializers import table_key
from dynamicemb.table.stepping.staging import Stage
from dynamicemb.table.triton.rows import row_shape
from tests.support.admitting import admitting, by_chance, device, first_values, holds, lengths_of, module_on  # noqa: F401
from tests.support.lookups import (
    MEAN,
    NONE,
    SEED,
    SUM,
    bag_per_id,
    batch,
    constant,
    contents,
    make_module,
    score_of,
    snapshot,
)
from tests.support.tables import use_backend

pytestmark = pytest.mark.usefixtures("tensors_on_device")
LFU = DynamicEmbScoreStrategy.LFU


# By count


def test_c12_an_id_is_admitted_in_the_step_in_which_its_count_reaches_the_threshold(backend: str) -> None:
    module = module_on(backend, admitting(3))
    for ids, inside, counted in (
        ([7, 7, 5], [False, False], {7: 2, 5: 1}),
        ([7, 5], [True, False], {5: 2}),
        ([5, 9, 9, 9, 9], [True, True], {}),
    ):
        module(*bag_per_id(ids)).sum().backward()
        assert holds(module, [7, 5]) == inside
        assert lengths_of(module) == counted
    assert holds(module, [9]) == [True]
    stats = module.stats()["a"]
    assert (stats["non_admitted"], stats["inserted"], stats["failed"], stats["misses"]) == (4, 3, 0, 10)


@pytest.mark.parametrize("threshold", [0, 1])
def test_c12_a_threshold_of_one_admits_everything(backend: str, threshold: int) -> None:
    module = module_on(backend, admitting(threshold))
    module(*bag_per_id([1, 2, 2]))
    assert holds(module, [1, 2]) == [True, True] and lengths_of(module) == {}
    assert module.stats()["a"]["non_admitted"] == 0


def test_c12_frequencies_count_as_occurrences(backend: str) -> None:
    module = module_on(backend, admitting(10))
    module(*bag_per_id([1, 2, 1]), frequency_counters=torch.tensor([4, 9, 5]))
    assert lengths_of(module) == {1: 9, 2: 9}
    module(*bag_per_id([1, 3]), frequency_counters=torch.tensor([1, 10]))
    assert holds(module, [1, 2, 3]) == [True, False, True]


def test_c12_tables_count_apart(backend: str) -> None:
    module = module_on(backend, admitting(2), admitting(2, dim=3))
    module(*batch([1, 2, 2], [1, 3, 3]))
    assert (holds(module, [1, 2, 3], "a"), holds(module, [1, 2, 3], "b")) == (
        [False, True, False],
        [False, False, True],
    )
    assert (lengths_of(module, 0), lengths_of(module, 1)) == ({1: 1}, {1: 1})


def test_c12_an_lfu_score_starts_with_all_occurrences_so_far(backend: str) -> None:
    module = module_on(backend, admitting(3, score_strategy=LFU), admitting(3))
    module(*batch([7, 7], [7]))
    module(*batch([7, 7, 8, 8, 8], []))
    assert score_of(module, "a", 7) == 4 and score_of(module, "a", 8) == 3
    module(*batch([7], []))
    assert score_of(module, "a", 7) == 5


@pytest.mark.parametrize("key", [-1, 0, -(2**63), 2**63 - 1])
def test_c01_every_id_can_be_counted(backend: str, key: int) -> None:
    module = module_on(backend, admitting(2))
    module(*bag_per_id([key]))
    assert lengths_of(module) == {key: 1}
    module(*bag_per_id([key]))
    assert lengths_of(module) == {} and holds(module, [key]) == [True]


def test_c12_a_full_counter_forgets_its_lowest_counts(backend: str) -> None:
    module = module_on(backend, admitting(9, counter=16))
    module(*bag_per_id([*range(16), *range(4, 16)]))
    module(*bag_per_id([100, 101, 4]))
    counts = lengths_of(module)
    assert len(counts) == 16 and counts[100] == counts[101] == 1 and counts[4] == 3
    assert sum(i in counts for i in range(4)) == 2 and all(counts[i] == 2 for i in range(5, 16))
    assert module.stats()["a"]["counter_evicted"] == 2
    # A lookup never makes the counter forget its own ids; the first sixteen find a place.
    module(*bag_per_id(range(200, 220)))
    assert sorted(lengths_of(module)) == list(range(200, 216))
    stats = module.stats()["a"]
    assert (stats["counter_size"], stats["counter_evicted"], stats["counter_failed"]) == (16, 18, 4)
    module.tables.check_invariants()


def test_c12_a_counter_keeps_the_ids_of_the_present_lookup(backend: str) -> None:
    module = module_on(backend, admitting(9, counter=16))
    module(*bag_per_id([*range(16), *[i for i in range(8, 16) for _ in range(4)]]))
    module(*bag_per_id([*range(100, 108), *range(8)]))
    # The lowest counts belong to this lookup, so those that count 5 must go.
    assert lengths_of(module) == {**dict.fromkeys(range(8), 2), **dict.fromkeys(range(100, 108), 1)}


def test_c12_an_admitted_id_that_finds_no_slot_counts_anew(backend: str) -> None:
    module = module_on(backend, admitting(2, capacity=16))
    waiting = module(*bag_per_id([i for i in range(16) for _ in range(2)]))
    module(*bag_per_id([50]))
    out = module(*bag_per_id([50]))
    # Its bucket is full of ids of the lookup that waits for its backward.
    assert not out.any() and holds(module, [50]) == [False] and lengths_of(module) == {}
    stats = module.stats()["a"]
    assert (stats["failed"], stats["non_admitted"]) == (1, 1)
    waiting.sum().backward()


def test_c08_an_evicted_id_must_be_admitted_again(backend: str) -> None:
    module = module_on(backend, admitting(2, capacity=16))
    module(*bag_per_id([1, 1])).sum().backward()
    module(*bag_per_id([i for i in range(2, 18) for _ in range(2)])).sum().backward()
    assert holds(module, [1]) == [False]
    module(*bag_per_id([1]))
    assert holds(module, [1]) == [False] and lengths_of(module) == {1: 1}


def test_c12_an_import_needs_no_admission(backend: str) -> None:
    module = module_on(backend, admitting(5))
    module(*bag_per_id([1, 2]))
    assert module.insert("a", torch.tensor([1, 3]), torch.ones(2, 4)).all()
    assert holds(module, [1, 2, 3]) == [True, False, True]
    assert lengths_of(module) == {2: 1}


def test_c11_evaluation_does_not_count(backend: str) -> None:
    module = module_on(backend, admitting(2, eval_initializer_args=constant(0.5)))
    module(*bag_per_id([1]))
    before = [*snapshot(module), *(t.clone() for t in module.tables.admission.counter.tensors())]
    assert (module.eval()(*bag_per_id([1, 2])) == 0.5).all()
    after = [*snapshot(module), *module.tables.admission.counter.tensors()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_c12_lookups_without_gradient_count(backend: str) -> None:
    module = module_on(backend, admitting(2))
    with torch.no_grad():
        for _ in range(2):
            out = module(*bag_per_id([4]))
            torch.testing.assert_close(out, first_values([4], 4), rtol=0, atol=0)
    assert holds(module, [4]) == [True] and module.tables.steps.num_outstanding == 0


# What rejected ids read


@pytest.mark.parametrize("pooling", [NONE, SUM, MEAN])
def test_c12_a_rejected_id_reads_the_first_value_of_its_row_and_is_not_trained(backend: str, pooling: Any) -> None:
    module = module_on(backend, admitting(3), admitting(3), pooling_mode=pooling)
    ids, offsets = batch([5, -9], [5])
    expected = torch.cat([first_values([5, -9], 4, "a"), first_values([5], 4, "b")])
    if pooling is SUM:
        expected = torch.cat([expected[:2].sum(0), expected[2]])[None]
    if pooling is MEAN:
        expected = torch.cat([expected[:2].sum(0) / 2, expected[2]])[None]
    for _ in range(2):
        out = module(ids, offsets)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)
        out.sum().backward()
    assert module.stats()["a"]["size"] == 0
    # Admitted, it starts where it was, and is trained from there.
    torch.testing.assert_close(module(ids, offsets), expected, rtol=1e-6, atol=0)
    module(ids, offsets).sum().backward()
    assert not torch.allclose(module(ids, offsets), expected)
    assert module.stats()["a"]["dropped_gradients"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c12_rejected_ids_of_tables_of_several_widths(backend: str, dtype: torch.dtype) -> None:
    # Wide rows before narrow ones: staged rows that ignored where those of the table before end would share memory.
    dims = {"a": 17, "b": 3, "c": 8}
    tables = [admitting(2, dim=d, embedding_dtype=dtype) for d in dims.values()]
    module = module_on(backend, *tables, optimizer="adam", stochastic_rounding=False)
    module(*batch([1], [1, 1], [2]))
    keys = [3, 1, 4, 1]
    parts = dict(zip("abc", (keys, keys[:2], keys[2:]), strict=True))
    out = module(*batch(*parts.values()))
    sums = [first_values(part, dims[name], name).to(dtype).float().sum(0) for name, part in parts.items()]
    torch.testing.assert_close(out[0], torch.cat(sums), rtol=1e-6, atol=1e-6)
    assert [holds(module, [1, 3, 4], name) for name in "abc"] == [
        [True, False, False],
        [True, False, False],
        [False, False, False],
    ]


def test_c12_the_strategy_says_what_rejected_ids_read(backend: str) -> None:
    module = module_on(backend, admitting(2, values=constant(0.25)))
    assert (module(*bag_per_id([1, 2])) == 0.25).all()
    out = module(*bag_per_id([1, 3]))
    torch.testing.assert_close(out[:1], first_values([1], 4), rtol=0, atol=0)
    assert (out[1:] == 0.25).all()
    # A function of the id, of the table's stream.
    narrow = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM, lower=2.0, upper=3.0)
    module = module_on(backend, admitting(2, values=narrow))
    torch.testing.assert_close(module(*bag_per_id([8])), first_values([8], 4, args=narrow), rtol=0, atol=0)


def test_c12_pooling_weights_of_rejected_ids_get_their_gradient(backend: str) -> None:
    module = module_on(backend, admitting(2))
    module(*batch([1, 1]))
    for ids in ([1, 7, 8], [8]):
        weights = torch.tensor([0.5, 2.0, -1.0])[: len(ids)].requires_grad_()
        out = module(*batch(ids), weights)
        values = torch.tensor([1.0, 2.0, 3.0, 4.0])
        before = first_values(ids, 4)
        torch.testing.assert_close(out[0], (before * weights.detach()[:, None]).sum(0))
        (out * values).sum().backward()
        torch.testing.assert_close(weights.grad, before @ values)
        assert holds(module, [7]) == [False]
    assert holds(module, [8]) == [True]


def test_c13_rejected_and_admitted_occurrences_of_one_batch_are_told_apart(backend: str) -> None:
    module = module_on(backend, admitting(2), pooling_mode=NONE)
    ids = [1, 2, 1, 3, 2, 4]
    out = module(*bag_per_id(ids))
    torch.testing.assert_close(out, first_values(ids, 4), rtol=0, atol=0)
    out.sum().backward()
    trained = module(*bag_per_id(ids))
    moved = torch.tensor([2.0, 2.0, 2.0, 0.0, 2.0, 0.0])[:, None]
    torch.testing.assert_close(trained, first_values(ids, 4) - moved)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "exact_row_wise_adagrad"])
def test_c20_staged_rows_do_not_touch_those_of_the_tables(backend: str, optimizer: str) -> None:
    module = module_on(backend, admitting(2), admitting(2, dim=5), optimizer=optimizer)
    module(*batch([1, 1], [2, 2])).sum().backward()
    before = [chunk.clone() for chunk in module.tables.store.chunks]
    bases = module.tables.store.chunk_bases.clone()
    module(*batch(range(10, 20), range(10, 30))).sum().backward()
    assert all(torch.equal(*pair) for pair in zip(before, module.tables.store.chunks, strict=True))
    assert torch.equal(bases, module.tables.store.chunk_bases)


def test_c03_an_empty_batch_admits_nobody(backend: str) -> None:
    module = module_on(backend, admitting(2))
    assert module(*batch([], [])).shape == (2, 4)
    assert module.stats()["a"]["non_admitted"] == 0


def test_c19_a_growing_table_admits(backend: str) -> None:
    module = module_on(backend, admitting(2, capacity=128, init_capacity=16))
    for first in range(0, 40, 10):
        ids = list(range(first, first + 10))
        module(*bag_per_id(ids)).sum().backward()
        module(*bag_per_id(ids)).sum().backward()
    assert all(holds(module, list(range(40)))) and module.tables.capacities[0] > 40
    module.tables.check_invariants()


def test_c14_a_growth_between_forward_and_backward_keeps_the_gradients_of_pooling_weights(backend: str) -> None:
    module = module_on(backend, admitting(2, capacity=128, init_capacity=16))
    weights = torch.tensor([1.0, 1.0]).requires_grad_()
    out = module(*batch([7, 8]), weights)
    for _ in range(2):
        module(*bag_per_id(range(100, 160))).sum().backward()
    assert module.tables.capacities[0] > 16
    out.sum().backward()
    torch.testing.assert_close(weights.grad, first_values([7, 8], 4).sum(1))


# By chance


def drawn(key: int, step: int, table: str = "a", seed: int = SEED) -> int:
    """Return the word that decides, by the text of ``docs/random.md``."""
    k = table_key(seed, table)
    counter = (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF, 0xFFFFFFFF, step)
    return philox4x32_reference((k & 0xFFFFFFFF, k >> 32), counter)[0]


def test_c12_chance_is_a_function_of_seed_table_id_and_step(backend: str) -> None:
    num = 200 if backend != "interpret" else 40
    ids = [*range(-4, num), 2**62 + 1, -(2**63)]
    module = module_on(backend, by_chance(0.3), by_chance(0.3))
    resident: dict[str, set[int]] = {"a": set(), "b": set()}
    for step in (1, 2):
        module(*batch([*ids, ids[0]], ids)).sum().backward()
        for table, known in resident.items():
            known |= {i for i in ids if drawn(i, step, table) < round(0.3 * 2**32)}
            assert {i for i, inside in zip(ids, holds(module, ids, table), strict=True) if inside} == known
    assert resident["a"] != resident["b"]


def test_c12_the_draws_of_the_documentation() -> None:
    """``docs/random.md`` has these words."""
    words = {(0, 1): 0xF8391355, (0, 2): 0xA28D30BC, (-1, 1): 0xF3F236F2, (12345678901234567, 7): 0x87562E38}
    assert {(i, step): drawn(i, step, "user", 0) for i, step in words} == words


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_c12_as_many_ids_are_admitted_as_the_probability_says(probability: float) -> None:
    module = make_module([by_chance(probability) for _ in range(8)], device="cpu")
    module(*batch(*[range(250)] * 8))
    admitted = sum(table["inserted"] for table in module.stats().values())
    # Five standard deviations of 2,000 draws.
    assert abs(admitted - 2000 * probability) < 5 * (2000 * probability * (1 - probability)) ** 0.5


def test_c12_probability_one_admits_everything(backend: str) -> None:
    module = module_on(backend, by_chance(1.0))
    module(*bag_per_id(range(30)))
    assert all(holds(module, list(range(30)))) and module.stats()["a"]["non_admitted"] == 0
    assert "counter_size" not in module.stats()["a"]


# Without the host


@pytest.mark.cuda
@pytest.mark.parametrize("table", [admitting(2, capacity=4096), by_chance(0.5)])
def test_c12_a_captured_step_admits(table: DynamicEmbTableOptions) -> None:
    twins = [make_module([table], device="cuda", pooling_mode=SUM) for _ in range(2)]
    ids, offsets = (tensor.cuda() for tensor in bag_per_id(range(64)))
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        twins[0](ids, offsets).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = twins[0](ids, offsets)
        out.sum().backward()
    for first in (1000, 1000, 0, 2000):
        ids.copy_(torch.arange(first, first + 64))
        graph.replay()
    twins[1](*(tensor.cuda() for tensor in bag_per_id(range(64)))).sum().backward()
    # A capture begins a step on the host, not on the device.
    for first in (1000, 1000, 0, 2000):
        expected = twins[1](*(tensor.cuda() for tensor in bag_per_id(range(first, first + 64))))
        expected.sum().backward()
    torch.testing.assert_close(out, expected)
    assert contents_of(twins[0]) == contents_of(twins[1])
    assert twins[0].stats()["a"]["non_admitted"] == twins[1].stats()["a"]["non_admitted"] > 0


def contents_of(module: Any) -> set[int]:
    return set(module.export_keys_values("a", "cpu")[0].tolist())


@pytest.mark.cuda
def test_c12_admission_never_waits_for_the_gpu() -> None:
    module = make_module([admitting(2, capacity=4096), admitting(2, dim=8, capacity=4096)], device="cuda")
    inputs = [tuple(t.cuda() for t in batch(range(i, i + 50), range(i + 9))) for i in range(8)]
    for tensors in inputs[:2]:
        module(*tensors).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tensors in inputs[2:]:
            module(*tensors).sum().backward()
            module.stats(wait=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("table", [admitting(2, score_strategy=LFU), by_chance(0.4, score_strategy=LFU)])
def test_c16_devices_agree_on_who_is_admitted(backend: str, table: DynamicEmbTableOptions) -> None:
    if backend == "cpu":
        pytest.skip("cpu: the side that the others are compared with")
    twins = [module_on(side, table, copy.copy(table)) for side in ("cpu", backend)]
    generator = torch.Generator(device="cpu").manual_seed(0)
    for _ in range(4):
        keys = torch.randint(0, 40, (30,), generator=generator, device="cpu").tolist()
        outs = [module(*(t.to(module.tables.device) for t in batch(keys[:20], keys[20:]))) for module in twins]
        torch.testing.assert_close(outs[0].cpu(), outs[1].cpu())
        for out in outs:
            out.sum().backward()
    one, other = (module.tables for module in twins)
    assert torch.equal(one.index.tallies, other.index.tallies.cpu())
    for name in ("keys", "digests", "scores", "rows", "tags"):
        assert torch.equal(getattr(one.index, name), getattr(other.index, name).cpu()), name
        if one.admission.counter is not None:
            counters = [getattr(group.admission.counter, name).cpu() for group in (one, other)]
            assert torch.equal(*counters), name


# Check mode ERROR


def test_c06_error_counts_only_ids_that_will_be_admitted(backend: str) -> None:
    table = admitting(3, capacity=16, safe_check_mode=DynamicEmbCheckMode.ERROR)
    module = module_on(backend, table, table)
    # One occurrence of 30 new ids: nobody gets a slot.
    ids, offsets = batch(range(30), range(5))
    assert module.plan_inserts(ids, offsets) == [InsertPlan(0, 0, 0), InsertPlan(1, 0, 0)]
    twice = torch.full_like(ids, 2)
    # Once before and twice now.
    module(ids, offsets).sum().backward()
    before = [t.clone() for t in module.tables.admission.counter.tensors()]
    assert module.plan_inserts(ids, offsets, twice) == [InsertPlan(0, 14, 30), InsertPlan(1, 0, 5)]
    assert module.plan_inserts(*batch([*range(18), *range(18), 50], [1])) == [InsertPlan(0, 2, 18), InsertPlan(1, 0, 0)]
    with pytest.raises(InsertFailedError, match="'a': 14 of 30"):
        module(ids, offsets, frequency_counters=twice)
    after = module.tables.admission.counter.tensors()
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    module(*batch([*range(16), *range(16), 50], [1]))
    assert module.stats()["a"]["size"] == 16


def test_c06_error_takes_ids_of_other_strategies_for_admitted() -> None:
    module = make_module([by_chance(0.1, safe_check_mode=DynamicEmbCheckMode.ERROR)], device="cpu")
    assert module.plan_inserts(*bag_per_id(range(40))) == [InsertPlan(0, 0, 40)]


# Copies, reports


def test_c12_copies_go_on_counting(backend: str) -> None:
    # A copy finds the kernels of its device, not those of a test.
    module = module_on("cpu" if backend == "interpret" else backend, admitting(3), admitting(3))
    module(*batch([1, 1], [2]))
    expected = module.stats()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        use_backend(twin.tables, backend)
        assert twin.stats() == twin.stats(wait=False) == expected
        twin(*batch([1], [2, 2]))
        assert holds(twin, [1], "a") == holds(twin, [2], "b") == [True]
        assert lengths_of(twin, 1) == {}
    assert lengths_of(module, 0) == {1: 2} and holds(module, [1]) == [False]


def test_c20_the_counter_is_in_the_memory_usage(backend: str) -> None:
    module = module_on(backend, admitting(2, counter=1600), admitting(2, counter=100))
    usage = module.memory_usage()
    tensors = module.tables.admission.counter.tensors()
    assert usage["counter"] == sum(t.untyped_storage().nbytes() for t in tensors)
    assert 25 * 1712 <= usage["counter"] <= 25 * 1712 + 1024
    assert "counter" not in module_on(backend, by_chance(0.5)).memory_usage()


def test_c12_tags_of_a_counter_are_rebased(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamicemb.table.stepping.tracker.REBASE_AT", 3)
    module = module_on(backend, admitting(9, counter=16))
    for ids in ([], [], range(16)):
        module(*bag_per_id(ids or [0])).sum().backward()
    # The next step has a smaller number than the last one; the ids of that are not those of this one.
    module(*bag_per_id(range(20, 36)))
    assert int(module.tables.index.clock[0]) == 2
    assert sorted(lengths_of(module)) == list(range(20, 36))
    assert module.stats()["a"]["counter_failed"] == 0


def test_contents_are_reproducible() -> None:
    def run() -> Any:
        module = make_module([admitting(2, score_strategy=LFU)], device="cpu")
        for first in (0, 5, 3):
            module(*bag_per_id(range(first, first + 9))).sum().backward()
        return contents(module)

    assert run() == run()


def test_kernels_know_the_rows_of_a_lookup_as_those_of_the_tables() -> None:
    group = module_on("cpu", admitting(2)).tables
    view = Stage.allocate(group.store, 40).store
    assert view is not group.store
    assert row_shape(view) is row_shape(view) is row_shape(group.store)
