"""``safe_check_mode``: failed inserts are foreseen (ERROR), warned about (WARNING) or only counted (IGNORE)."""

import copy
import linecache
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.dynamicemb_config import DynamicEmbCheckMode
from dynamicemb.embedding.checks import InsertChecks
from dynamicemb.embedding.inputs import check_batch
from dynamicemb.errors import DynamicEmbError, InsertFailedError
from dynamicemb.table.growing.plan import InsertPlan, _bucket_of, plan_inserts
from dynamicemb.table.index import FAILED
from dynamicemb.table.layout import locate
from tests.support.lookups import (
    EXTREME,
    NONE,
    SUM,
    assert_unchanged,
    bag_per_id,
    batch,
    make_module,
    messages,
    options,
    snapshot,
)
from tests.support.tables import device_of, make_group, ranges, use_backend

ERROR, WARNING, IGNORE = DynamicEmbCheckMode


def checked_module(backend: str, *modes: DynamicEmbCheckMode, **arguments):
    """Make a module of tables of one bucket of 16 slots each, with these modes."""
    tables = [options(capacity=16, safe_check_mode=mode) for mode in modes]
    module = make_module(tables, device=device_of(backend), **arguments)
    use_backend(module.tables, backend)
    return module


class Model(torch.nn.Module):
    """What users have around a table: a module of theirs in modules of torch."""

    def __init__(self, tables: torch.nn.Module) -> None:
        super().__init__()
        self.tables = torch.nn.Sequential(tables)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.tables[0](ids, offsets)


def test_c06_a_warning_names_the_line_of_the_user() -> None:
    model = Model(checked_module("cpu", WARNING))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(*bag_per_id(range(40)))
        checked_module("cpu", WARNING, enforce_hbm=True)
    lines = [linecache.getline(one.filename, one.lineno).strip() for one in caught]
    construction = "return BatchedDynamicEmbeddingTablesV2(tables, **arguments)"
    assert lines == ["return self.tables[0](ids, offsets)", construction]


# The plan


@pytest.mark.parametrize("num_buckets", [1, 3, 8])
def test_the_plan_puts_ids_into_the_buckets_of_the_layout(num_buckets: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.tensor(EXTREME), torch.randint(-(2**63), 2**63 - 1, (2000,), generator=generator)])
    index = make_group("cpu", [32, 16 * num_buckets]).index
    expected, _, _ = locate(ids.numpy(), num_buckets, 1)
    assert np.array_equal(_bucket_of(index, ids, torch.ones_like(ids)).numpy(), 2 + expected)


def missing_ids(group, ids: list[list[int]]) -> list[set[int]]:
    found = [group.contains(t, torch.tensor(part, dtype=torch.int64)).tolist() for t, part in enumerate(ids)]
    return [{i for i, there in zip(*pair, strict=True) if not there} for pair in zip(ids, found, strict=True)]


@pytest.mark.parametrize("protect_steps", [0, 1])
@pytest.mark.usefixtures("tensors_on_device")
def test_c06_a_plan_counts_exactly_the_ids_that_then_fail(backend: str, protect_steps: int) -> None:
    group = make_group(backend, [32, 16], protect_steps=protect_steps)
    rng = np.random.default_rng(5 + protect_steps)
    outstanding, num_failed, num_evicted = [], 0, 0
    for number in range(8 if backend == "interpret" else 14):
        ids = [rng.integers(-30, 30, size).tolist() for size in rng.integers(0, 26, 2)]
        flat, table_ranges = torch.tensor(ids[0] + ids[1], dtype=torch.int64), ranges(*map(len, ids))
        new = missing_ids(group, ids)
        before = [tensor.clone() for tensor in group.index.tensors()]
        plans = group.plan_inserts(flat, table_ranges, [0, 1])
        assert all(torch.equal(*pair) for pair in zip(before, group.index.tensors(), strict=True))
        outstanding.append(group.begin_step())
        rows = group.find_or_insert(flat, table_ranges)[0].tolist()
        parts = rows[: len(ids[0])], rows[len(ids[0]) :]
        failed = [{i for i, row in zip(*pair, strict=True) if row < 0} for pair in zip(ids, parts, strict=True)]
        assert plans == [InsertPlan(t, len(failed[t]), len(new[t])) for t in (0, 1)]
        num_failed += sum(map(len, failed))
        num_evicted = group.stats()["t0"]["evicted"]
        if number % 3 != 1:
            outstanding.pop(0).finish()
        if number % 4 == 2:
            # Erased slots stay protected as long as the step that touched them.
            group.erase(0, flat[: len(ids[0])][:6])
    assert num_failed > 10 and num_evicted > 10


def test_a_plan_leaves_tables_out_that_nobody_asked_for() -> None:
    group = make_group("cpu", [16, 16])
    ids, table_ranges = torch.arange(60), ranges(20, 40)
    assert group.plan_inserts(ids, table_ranges, [1]) == [InsertPlan(1, 24, 40)]
    assert group.plan_inserts(ids, table_ranges, []) == []
    assert group.plan_inserts(ids[:0], ranges(0, 0), [0, 1]) == [InsertPlan(0, 0, 0), InsertPlan(1, 0, 0)]


def test_the_tag_of_an_empty_slot_means_nothing_to_a_plan() -> None:
    group = make_group("cpu", [16])
    group.index.tags.fill_(99)
    assert group.plan_inserts(torch.arange(17), ranges(17), [0]) == [InsertPlan(0, 1, 17)]
    with_erased = [InsertPlan(0, 3, 17)]
    group.index.digests[:2] = 1
    assert group.plan_inserts(torch.arange(17), ranges(17), [0]) == with_erased


def test_a_plan_of_many_buckets_is_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group("cpu", [16 * 40])
    rows = torch.full((900,), -1, dtype=torch.int32)
    arguments = (group.index, torch.arange(900), ranges(900), rows, 0, [0])
    whole = plan_inserts(*arguments)
    monkeypatch.setattr("dynamicemb.table.growing.plan.SLOTS_AT_A_TIME", 48)
    assert plan_inserts(*arguments) == whole and 260 <= whole[0].failed < 400


# ERROR


@pytest.mark.parametrize("pooling", [SUM, NONE])
@pytest.mark.usefixtures("tensors_on_device")
def test_c06_error_raises_the_numbers_and_leaves_the_table_unchanged(backend: str, pooling) -> None:
    module = checked_module(backend, ERROR, pooling_mode=pooling)
    module(*bag_per_id([1, 2, 3])).sum().backward()
    before, steps = snapshot(module), module.tables.steps.current
    with pytest.raises(InsertFailedError, match="'a': 2 of 16 new ids") as caught:
        # 16 new ids and the two that are there: 13 slots are free, and that of id 3 may be taken.
        module(*bag_per_id([1, 2, *range(10, 26), 25]))
    assert (caught.value.table, caught.value.failed, caught.value.total) == ("a", 2, 16)
    assert_unchanged(module, before)
    assert module.tables.steps.current == steps
    output = module(*bag_per_id(range(10, 26)))
    assert bool(output.any(1).all())
    assert module.stats()["a"] | {"hits": 0} == module.stats()["a"] | {"hits": 0, "failed": 0, "evicted": 3}


@pytest.mark.usefixtures("tensors_on_device")
def test_c06_error_counts_ids_of_outstanding_steps_as_protected(backend: str) -> None:
    module = checked_module(backend, ERROR)
    waiting = module(*bag_per_id(range(10)))
    with pytest.raises(InsertFailedError, match="1 of 7 new ids"):
        module(*bag_per_id(range(20, 27)))
    waiting.sum().backward()
    module(*bag_per_id(range(20, 27)))
    assert module.stats()["a"]["evicted"] == 1


def test_c06_every_table_has_its_own_mode() -> None:
    module = checked_module("cpu", IGNORE, ERROR, WARNING)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        waiting = module(*batch(range(20), range(16), range(18)))
        stats = module.stats()
        assert [stats[name]["failed"] for name in "abc"] == [4, 0, 2]
        assert len(recorded) == 1 and "table 'c': 2 occurrences" in str(recorded[0].message)
        before = snapshot(module)
        with pytest.raises(InsertFailedError, match="table 'b': 1 of 1 new"):
            module(*batch([], [99], []))
    assert waiting.requires_grad
    for old, new in zip(before, snapshot(module), strict=True):
        assert torch.equal(old, new)


def test_c06_error_also_guards_imports() -> None:
    module = checked_module("cpu", IGNORE, ERROR)
    before = snapshot(module)
    with pytest.raises(InsertFailedError, match="'b': 4 of 20"):
        module.insert("b", torch.arange(20), torch.zeros(20, 4))
    assert_unchanged(module, before)
    assert module.insert("b", torch.arange(16), torch.zeros(16, 4)).all()
    assert not module.insert("a", torch.arange(20), torch.zeros(20, 4)).all()


def test_c06_error_does_not_concern_evaluation() -> None:
    module = checked_module("cpu", ERROR).eval()
    assert not module(*bag_per_id(range(99))).any()
    assert module.plan_inserts(*bag_per_id(range(99))) == []


def test_c04_a_batch_may_be_planned_without_a_lookup() -> None:
    module = checked_module("cpu", ERROR, IGNORE)
    assert module.plan_inserts(*batch(range(20), range(30))) == [InsertPlan(0, 4, 20)]
    assert module.stats()["a"]["misses"] == 0
    with pytest.raises(ValueError, match="must not decrease"):
        module.plan_inserts(torch.arange(4), torch.tensor([0, 3, 2]))


@pytest.mark.cuda
@pytest.mark.parametrize("training", [True, False])
def test_c04_error_raises_on_wrong_values_of_cuda_inputs(training: bool) -> None:
    table = options(safe_check_mode=ERROR, score_strategy=DynamicEmbScoreStrategy.LFU)
    module = make_module([table], device="cuda").train(training)
    ids, offsets = (tensor.cuda() for tensor in bag_per_id(range(4)))
    module(ids, offsets)
    before = snapshot(module)
    wrong = [([0, 3, 2, 3, 4], "must not decrease"), ([1, 1, 2, 3, 4], "start at 0"), ([0, 1, 2, 3, 5], "end at")]
    for values, message in wrong:
        with pytest.raises(ValueError, match=message):
            module(ids, torch.tensor(values).cuda())
    for count in (0, 2**31):
        with pytest.raises(ValueError, match=r"frequency_counters must be in 1\.\."):
            module(ids, offsets, frequency_counters=torch.tensor([1, 1, 1, count]).cuda())
    assert all(torch.equal(*pair) for pair in zip(before, snapshot(module), strict=True))
    assert module.stats()["a"]["clamped_inputs"] == 0


@pytest.mark.parametrize(("mode", "waits"), [(ERROR, True), (WARNING, False), (IGNORE, False)])
def test_c04_only_error_waits_to_see_values(monkeypatch: pytest.MonkeyPatch, mode, waits: bool) -> None:
    seen = []

    def check(*arguments, wait: bool, **more):
        seen.append(wait)
        return check_batch(*arguments, wait=wait, **more)

    monkeypatch.setattr("dynamicemb.embedding.module.check_batch", check)
    module = checked_module("cpu", IGNORE, mode)
    module(*batch([1], [2]))
    # A sharded lookup asks all ranks instead.
    module.insert_checks.left_to_ranks = True
    module(*batch([1], [2]))
    module.plan_inserts(*batch([1], [2]))
    assert seen == [waits, False, True]


def capturing_checks(monkeypatch: pytest.MonkeyPatch, *modes: DynamicEmbCheckMode) -> InsertChecks:
    """Return the checks of tables on a GPU that is capturing a graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group = SimpleNamespace(device=torch.device("cuda"), names=["a", "b"])
    return InsertChecks(group, modes)


def test_c06_error_refuses_graph_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DynamicEmbError, match="of table b waits .* capture with WARNING or IGNORE"):
        capturing_checks(monkeypatch, IGNORE, ERROR).refuse_capture()
    capturing_checks(monkeypatch, IGNORE, WARNING).refuse_capture()


def test_c27_warning_says_that_replays_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = capturing_checks(monkeypatch, WARNING, IGNORE)
    with pytest.warns(UserWarning, match="of table a: no warning comes while a CUDA graph is replayed"):
        checks.after_insert()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.after_insert()


@pytest.mark.cuda
def test_c06_error_inside_a_capture_raises_and_leaves_the_module_usable() -> None:
    module = checked_module("cuda", ERROR)
    ids, offsets = (tensor.cuda() for tensor in bag_per_id(range(4)))
    module(ids, offsets)
    with pytest.raises(DynamicEmbError, match="capture with WARNING"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(ids, offsets)
    module(ids, offsets)
    assert module.stats()["a"]["hits"] == 4


# WARNING


@pytest.mark.usefixtures("tensors_on_device")
def test_c06_warning_warns_with_the_numbers_one_step_later_at_most(backend: str) -> None:
    module = checked_module(backend, WARNING)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        module(*bag_per_id([*range(18), 17])).sum().backward()
        if backend == "cuda":
            torch.cuda.synchronize()
        module(*bag_per_id([0])).sum().backward()
    assert len(recorded) == 1
    text = str(recorded[0].message)
    assert "table 'a': 3 occurrences of new ids" in text and "3 since construction" in text and "max_capacity" in text


def test_c06_warning_warns_once_for_each_failure() -> None:
    module = checked_module("cpu", WARNING)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for ids in (range(17), range(3), range(18)):
            module(*bag_per_id(ids)).sum().backward()
        twin = copy.deepcopy(module)
        twin(*bag_per_id([1])).sum().backward()
        twin(*bag_per_id(range(20))).sum().backward()
        assert not module.insert("a", torch.arange(100, 117), torch.zeros(17, 4)).all()
    counts = [text.split(";")[0] for text in messages(recorded)]
    numbers = [[int(word) for word in text.replace(",", "").split() if word.isdigit()] for text in counts]
    assert numbers == [[1, 1], [2, 3], [4, 7], [1, 4]]


def test_c06_a_warning_made_an_error_leaves_no_step_outstanding() -> None:
    module = checked_module("cpu", WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="1 occurrences"):
            module(*bag_per_id(range(17)))
        assert module.tables.steps.num_outstanding == 0
        module(*bag_per_id(range(16)))


@pytest.mark.cuda
def test_c06_warning_never_waits_for_the_gpu() -> None:
    module = checked_module("cuda", WARNING)
    inputs = [tuple(tensor.cuda() for tensor in bag_per_id(range(first, first + 20))) for first in range(0, 200, 20)]
    for tensors in inputs[:2]:
        module(*tensors).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            for tensors in inputs[2:]:
                module(*tensors).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert any("table 'a'" in text for text in messages(recorded))


# Construction


def test_c06_ignore_only_counts() -> None:
    module = checked_module("cpu", IGNORE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(*bag_per_id(range(20)))
        module(*bag_per_id(range(20)))
    assert int(module.tables.index.tallies[0, FAILED]) == 8


@pytest.mark.parametrize("mode", [0, "ERROR", None, True])
def test_c27_a_wrong_mode_is_refused_at_construction(mode) -> None:
    with pytest.raises(TypeError, match="safe_check_mode must be a DynamicEmbCheckMode"):
        DynamicEmbTableOptions(safe_check_mode=mode)
    table = options()
    table.safe_check_mode = mode
    with pytest.raises(TypeError, match="safe_check_mode"):
        make_module([table])


@pytest.mark.filterwarnings("error")
def test_c27_imports_of_a_table_that_is_only_read_are_checked_too() -> None:
    ids, rows = torch.arange(17), torch.zeros(17, 4)
    module = make_module([options(capacity=16, training=False, safe_check_mode=ERROR)])
    with pytest.raises(InsertFailedError, match="1 of 17 new ids"):
        module.insert("a", ids, rows)
    module = make_module([options(capacity=16, training=False, safe_check_mode=WARNING)])
    with pytest.warns(UserWarning, match="1 occurrences of new ids found no slot"):
        module.insert("a", ids, rows)
