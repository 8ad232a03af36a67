"""The index kernels in Triton against their numba twins: every byte in batch order, else ids and scores."""

import sys
import time
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from dynamicemb.table import cpu
from dynamicemb.table import triton as triton_kernels
from dynamicemb.table.admission import Newcomers
from dynamicemb.table.growing.relocation import rebuild
from dynamicemb.table.index import EVICTED, FAILED, INSERTED, NOW, NUM_TALLIES, OLDEST, SEEN, STEP, Index
from dynamicemb.table.layout import locate
from dynamicemb.table.scores import (
    COUNT_ALL,
    SCORE_COMPOUND,
    SCORE_CUSTOMIZED,
    SCORE_LFU,
    SCORE_NO_EVICTION,
    SCORE_STEP,
    SCORE_TIMESTAMP,
)
from dynamicemb.table.triton.judged import SLOTS
from dynamicemb.table.triton.missing import MAX_IDS, Missing
from tests.conftest import reason_to_skip
from tests.support.twins import EXTREME, TENSORS, Twins, draw, strategies_of


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest) -> str:
    """Run with Triton's kernels, interpreted or compiled."""
    if reason := reason_to_skip(request.param):
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture
def on_gpu(backend: str) -> bool:
    return backend == "cuda"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty returns with a pattern that is no row, slot, count or link."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        out = empty(*args, **kwargs)
        if out.numel():
            out.view(torch.uint8).fill_(0x5B)
        return out

    monkeypatch.setattr(torch, "empty", poisoned_empty)


CASES = [
    # strategy, tables, bucket capacity, buckets of each table
    (SCORE_TIMESTAMP, 2, 16, 3),
    (SCORE_STEP, 1, 48, 2),
    (SCORE_CUSTOMIZED, 3, 16, 2),
    (SCORE_LFU, 2, 32, 2),
    (SCORE_COMPOUND, 2, 32, 2),
    ((SCORE_STEP, SCORE_TIMESTAMP), 2, 16, 2),
    ((SCORE_LFU, SCORE_CUSTOMIZED, SCORE_TIMESTAMP), 3, 16, 2),
    ((SCORE_COMPOUND, SCORE_STEP, SCORE_NO_EVICTION), 3, 32, 1),
]
EVERY = (SCORE_COMPOUND, *range(SCORE_COMPOUND))
CUDA_CASES = [
    (s, t, *shape)
    for s in (*range(SCORE_COMPOUND + 1), EVERY)
    for t in (1, 10, 100)
    for shape in ((16, 5), (48, 3), (128, 2))
]
CUDA_CASES += [
    (s, 2, *shape) for s in (*range(SCORE_COMPOUND + 1), EVERY) for shape in ((112, 7), (512, 1), (1024, 2), (4096, 1))
]


def sizes_of(rng: np.random.Generator, tables: int, slots: int, on_gpu: bool) -> list[int]:
    most = slots * 2 if on_gpu else 20
    return [0 if rng.random() < 0.2 else int(rng.integers(0, most)) for _ in range(tables)]


@pytest.mark.parametrize("case", [pytest.param(c, id=str(c)) for c in CASES])
def test_c16_in_batch_order_every_byte_is_the_cpus(backend: str, on_gpu: bool, case: tuple) -> None:
    run_in_order(backend, case, 60 if on_gpu else 4)


@pytest.mark.cuda
@pytest.mark.parametrize("case", [pytest.param(c, id=str(c)) for c in CUDA_CASES])
def test_c16_in_batch_order_every_byte_is_the_cpus_on_many_shapes(case: tuple) -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    run_in_order("cuda", case, 12)


@pytest.mark.parametrize("strategy", [SCORE_TIMESTAMP, SCORE_LFU, SCORE_COMPOUND])
@pytest.mark.parametrize("tile", [16, 1024])
def test_c16_full_buckets_equal_the_cpus_whole_or_by_tiles(
    backend: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch, strategy: int, tile: int
) -> None:
    """Buckets of more than a thousand slots are looked at tile by tile, smaller ones as a whole."""
    monkeypatch.setattr(sys.modules["dynamicemb.table.triton.insert"], "_TILE", tile)
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [48], 48, strategy)
    for step in range(6):
        twins.advance()
        # Scores tie within a step, or all of them for LFU.
        ids = torch.arange(20 * step, 20 * step + 20) * 7919
        for side, options in ((twins.cpu, {}), (twins.gpu, {"deterministic": True})):
            side.lookup(ids, torch.tensor([0, 20]), None, **options)
            if step % 2:
                side.call("erase", ids[:4], torch.tensor([0, 4]))
        twins.assert_equal()
    assert twins.cpu.index.tallies[0, EVICTED] >= 40


def run_in_order(backend: str, case: tuple, steps: int) -> None:
    strategy, tables, bucket_capacity, buckets = case
    on_gpu = backend == "cuda"
    rng = np.random.default_rng([*np.atleast_1d(strategy), *case[1:]])
    slots = bucket_capacity * buckets
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [slots] * tables, bucket_capacity, strategy)
    for step in range(steps):
        twins.advance(lag=int(rng.integers(0, 3)))
        customized = torch.tensor(strategies_of(strategy, tables)) == SCORE_CUSTOMIZED
        twins.set_scores(customized, torch.from_numpy(rng.integers(1, 9, tables)))
        ids, table_ranges = draw(rng, sizes_of(rng, tables, slots, on_gpu), 4 * slots if on_gpu else slots + 20)
        frequencies = torch.from_numpy(rng.integers(1, 5, ids.numel())) if step % 2 else None
        expected = twins.cpu.lookup(ids, table_ranges, frequencies)
        actual = twins.gpu.lookup(ids, table_ranges, frequencies, deterministic=True)
        assert torch.equal(actual[0], expected[0])
        for name, ours, theirs in zip(expected[1]._fields, actual[1], expected[1], strict=True):
            assert torch.equal(ours, theirs), name
        if step % 3 == 2:
            gone, gone_ranges = draw(rng, sizes_of(rng, tables, slots, on_gpu), slots)
            assert torch.equal(twins.gpu.call("erase", gone, gone_ranges), twins.cpu.call("erase", gone, gone_ranges))
        if step % 6 == 5 or steps - step == 1:
            for side in (twins.cpu, twins.gpu):
                rebuild(side.index, side.kernels, step % tables)
        twins.assert_equal()
    twins.gpu.check()
    counters = twins.cpu.index.tallies.sum(0)
    assert counters[EVICTED] > 0 or not on_gpu
    assert counters[FAILED] > 0 or not on_gpu


@pytest.fixture
def kernels_of_insert(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> list[str]:
    """Pretend that there are so many ranks; return which kernels of an insert have run."""
    module, called = sys.modules["dynamicemb.table.triton.find_or_insert"], []
    one = sys.modules["dynamicemb.table.triton.insert_missing"]
    monkeypatch.setattr(one.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(one.dist, "get_world_size", lambda: num_ranks)

    def noting(name: str, kernel):
        def run(*args):
            done = kernel(*args)
            called.append(name if done is not False else f"no {name}")
            return done

        return run

    for name in ("insert_missing", "elect", "insert", "initialize_leaders", "settle"):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    return called


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("strategy", [SCORE_TIMESTAMP, SCORE_LFU, SCORE_COMPOUND])
def test_c07_any_order_leaves_the_same_ids_and_scores(
    backend: str, on_gpu: bool, strategy: int, num_ranks: int, kernels_of_insert: list[str]
) -> None:
    """One kernel does it on a rank alone. Beside other ranks it could wait for ever: four do it."""
    rng = np.random.default_rng(strategy)
    tables, bucket_capacity, buckets = (10, 128, 40) if on_gpu else (2, 32, 2)
    slots = bucket_capacity * buckets
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [slots] * tables, bucket_capacity, strategy)
    failed = 0
    for step in range(120 if on_gpu else 5):
        twins.advance(lag=step % 2)
        ids, table_ranges = draw(rng, sizes_of(rng, tables, slots // 3, on_gpu), 3 * slots if on_gpu else slots + 20)
        frequencies = torch.from_numpy(rng.integers(1, 5, ids.numel())) if step % 2 else None
        expected, result = twins.cpu.lookup(ids, table_ranges, frequencies)
        kernels_of_insert.clear()
        rows, ours = twins.gpu.lookup(ids, table_ranges, frequencies, deterministic=False)
        four = ["no insert_missing", "elect", "insert", "initialize_leaders", "settle"]
        assert kernels_of_insert == (["insert_missing"] if num_ranks == 1 else four)
        # Where some ids must fail, which ones do is open, and so is how often they occur.
        now_failed = int(twins.cpu.index.tallies[:, FAILED].sum())
        same = [c for c in range(NUM_TALLIES) if c != FAILED or now_failed == failed]
        assert torch.equal(twins.gpu.index.tallies.cpu()[:, same], twins.cpu.index.tallies[:, same])
        assert [x.numel() for x in ours] == [x.numel() for x in result]
        if now_failed == failed:
            assert bool(((rows < 0) == (expected < 0)).all())
            assert sorted(zip(*(x.tolist() for x in ours[2:]))) == sorted(zip(*(x.tolist() for x in result[2:])))
            assert all(twins.gpu.resident(t) == twins.cpu.resident(t) for t in range(tables))
            assert torch.equal(twins.gpu.call("find", ids, table_ranges, False), rows)
            tables_of = torch.searchsorted(table_ranges, ours.new, right=True)
            pairs = set(zip(tables_of.tolist(), ids[ours.new].tolist()))
            assert len(pairs) == ours.new.numel()
        twins.gpu.check()
        failed = now_failed
        twins.copy_to_gpu()
    assert twins.cpu.index.tallies[:, EVICTED].sum() > 0 or not on_gpu


def test_c07_more_new_ids_than_a_bucket_holds_fail_in_any_order(backend: str, on_gpu: bool) -> None:
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [16], 16, SCORE_STEP)
    twins.advance()
    ids = torch.arange(20).repeat(2)
    rows, result = twins.gpu.lookup(ids, torch.tensor([0, 40]), None, deterministic=False)
    assert result.new.numel() == 16 and int((rows < 0).sum()) == 8
    assert torch.equal(rows[:20], rows[20:])
    assert sorted(rows[:20][rows[:20] >= 0].tolist()) == list(range(16))
    assert twins.gpu.index.tallies[0, [INSERTED, FAILED]].tolist() == [16, 8]
    twins.gpu.check()


def test_c10_a_hot_new_id_counts_every_occurrence(backend: str, on_gpu: bool) -> None:
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [32, 32], 16, SCORE_LFU)
    twins.advance()
    n = 200_000 if on_gpu else 70
    ids = torch.full((2 * n,), -1)
    rows, result = twins.gpu.lookup(ids, torch.tensor([0, n, 2 * n]), None, deterministic=False)
    assert rows[:n].unique().numel() == rows[n:].unique().numel() == 1 and result.new.numel() == 2
    assert twins.gpu.resident(0) == twins.gpu.resident(1) == {-1: n}


def test_many_buckets_share_the_lists_of_a_small_batch(backend: str, on_gpu: bool) -> None:
    """Two ids give four lists for 64 buckets."""
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [1024], 16, SCORE_STEP)
    keys = np.arange(4000)
    bucket, _, _ = locate(keys, 64, 1)
    for step in range(20 if on_gpu else 3):
        twins.advance()
        # Buckets 5 and 9 are on the same list of four.
        ids = torch.from_numpy(np.concatenate([keys[bucket == 5][step : step + 1], keys[bucket == 9][step : step + 1]]))
        for side, options in ((twins.cpu, {}), (twins.gpu, {"deterministic": step % 2 == 0})):
            rows, _ = side.lookup(ids, torch.tensor([0, 2]), None, **options)
            assert bool((rows >= 0).all())
        if step % 2:
            assert twins.gpu.resident(0) == twins.cpu.resident(0)
            twins.copy_to_gpu()
        twins.assert_equal()


@pytest.mark.parametrize(("stage", "deterministic"), [("insert", True), ("insert_missing", False)])
def test_a_call_cut_short_leaves_nothing_in_the_next_ones_way(
    backend: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch, stage: str, deterministic: bool
) -> None:
    module = sys.modules["dynamicemb.table.triton.find_or_insert"]
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [64], 16, SCORE_STEP)
    twins.advance()
    ids, table_ranges = torch.arange(12), torch.tensor([0, 12])

    def fail(*args):
        raise RuntimeError("cut short")

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, fail)
        with pytest.raises(RuntimeError, match="cut short"):
            twins.gpu.lookup(ids, table_ranges, None, deterministic=deterministic)
    twins.copy_to_gpu()
    for side, options in ((twins.cpu, {}), (twins.gpu, {"deterministic": True})):
        side.lookup(ids, table_ranges, None, **options)
    twins.assert_equal()


def test_a_lookup_whose_scratch_memory_kernels_cannot_number_is_refused() -> None:
    keys = torch.zeros(1, dtype=torch.int64, device="meta")
    numbers = {"num_slots": 2**31 - 1, "bucket_capacity": 16, "counting": COUNT_ALL, "has_stamps": True}
    index = cast(Index, SimpleNamespace(keys=keys, prepared={}, **numbers))
    assert (SLOTS.value + 1) * MAX_IDS < 2**31
    missing = Missing.allocate(index, MAX_IDS, ordered=False)
    assert missing.num_filled < 2**31 and missing.scratch.numel() == missing.end
    with pytest.raises(ValueError, match=f"a lookup of {MAX_IDS + 1} ids is too large, the most are {MAX_IDS}"):
        Missing.allocate(index, MAX_IDS + 1)


def test_c03_no_ids_at_all(backend: str, on_gpu: bool) -> None:
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [16, 16], 16, SCORE_STEP)
    twins.advance()
    none, table_ranges = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for deterministic in (False, True):
        rows, result = twins.gpu.lookup(none, table_ranges, None, deterministic=deterministic)
        assert rows.numel() == 0 and [x.numel() for x in result] == [0] * 5
    assert twins.gpu.call("find", none, table_ranges, True).numel() == 0
    assert twins.gpu.call("erase", none, table_ranges).numel() == 0
    assert twins.gpu.call("scan", 1).numel() == 0


def test_find_without_touch_changes_nothing(backend: str, on_gpu: bool) -> None:
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [64], 32, SCORE_LFU)
    twins.advance()
    ids = torch.from_numpy(np.concatenate([EXTREME, np.arange(5)]))
    rows, _ = twins.gpu.lookup(ids, torch.tensor([0, ids.numel()]), None)
    before = [getattr(twins.gpu.index, name).clone() for name in TENSORS]
    asked = torch.cat([ids, torch.arange(100, 105)])
    found = twins.gpu.call("find", asked, torch.tensor([0, asked.numel()]), False)
    assert torch.equal(found, torch.cat([rows, torch.full((5,), -1, dtype=torch.int32)]))
    assert all(torch.equal(getattr(twins.gpu.index, n), b) for n, b in zip(TENSORS, before, strict=True))


def test_scan_lists_what_has_at_least_a_score(backend: str, on_gpu: bool) -> None:
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [32, 64], 16, SCORE_STEP)
    for step in range(3):
        twins.advance()
        ids = torch.arange(step * 4, step * 4 + 8)
        for side, options in ((twins.cpu, {}), (twins.gpu, {"deterministic": True})):
            side.lookup(ids, torch.tensor([0, 3, 8]), None, **options)
    for table in range(2):
        for least in range(5):
            expected = twins.cpu.call("scan", table, least)
            assert torch.equal(twins.gpu.call("scan", table, least), expected)


def test_c10_a_step_advances_the_clock_on_unix_time(backend: str, on_gpu: bool) -> None:
    for tables, strategy in (
        (1, SCORE_TIMESTAMP),
        (2, SCORE_NO_EVICTION),
        (3, SCORE_STEP),
        (10, SCORE_LFU),
        (10, EVERY),
    ):
        twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [16] * tables, 16, strategy)
        last = 0
        for step in range(1, 300 if on_gpu else 4):
            twins.gpu.kernels.advance(twins.gpu.index, 2)
            clock = twins.gpu.index.clock.tolist()
            assert (clock[STEP], clock[OLDEST]) == (step, max(1, step - 2))
            assert clock[NOW] > last and abs(clock[NOW] - time.time_ns()) < 60e9
            last = clock[NOW]
            left = {SCORE_TIMESTAMP: last, SCORE_NO_EVICTION: last, SCORE_STEP: step}
            assert twins.gpu.index.score_values.tolist() == [left.get(s, 0) for s in strategies_of(strategy, tables)]
            # No training forward.
            twins.gpu.kernels.advance(twins.gpu.index, 2, False)
            left[SCORE_TIMESTAMP] = left[SCORE_NO_EVICTION] = last = int(twins.gpu.index.clock[NOW])
            twins.gpu.index.clock[STEP] -= 1
            assert twins.gpu.index.score_values.tolist() == [left.get(s, 0) for s in strategies_of(strategy, tables)]


def test_rebase_lowers_tags_and_the_step(backend: str, on_gpu: bool) -> None:
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [16], 16, SCORE_STEP)
    for side in (twins.cpu, twins.gpu):
        side.index.clock[STEP] = 12
        side.index.tags.copy_(torch.arange(16, dtype=torch.int32))
        side.call("rebase", 9)
    twins.assert_equal()
    assert twins.gpu.index.tags.tolist() == [0] * 10 + [1, 2, 3, 4, 5, 6]


@pytest.mark.cuda
def test_a_step_can_be_captured_in_a_cuda_graph() -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    device = torch.device("cuda")
    twins = Twins(device, [256, 256], 16, SCORE_STEP)
    rng = np.random.default_rng(0)
    batches = [draw(rng, [150, 100], 900)[0] for _ in range(8)]
    table_ranges = torch.tensor([0, 150, 250], device=device)
    ids = batches[0].to(device)
    side = twins.gpu

    def step() -> torch.Tensor:
        side.kernels.advance(side.index, 0)
        scratch = Missing.allocate(side.index, ids.numel(), ordered=True).filled()
        return side.kernels.find_or_insert(
            side.index, side.store, Newcomers(side.initializers, side.state_values), ids, table_ranges, None, scratch
        )[0]

    step()
    fresh = Index.create([16, 16], 16, side.store.first_rows, [SCORE_STEP] * 2, device)
    for name in TENSORS:
        getattr(side.index, name).copy_(getattr(fresh, name))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = step()
    for batch in batches:
        ids.copy_(batch)
        graph.replay()
        twins.cpu.kernels.advance(twins.cpu.index, 0)
        expected, _ = twins.cpu.lookup(batch, table_ranges.cpu(), None)
        assert torch.equal(rows.cpu(), expected)
        twins.gpu.index.clock[[NOW, SEEN]] = twins.cpu.index.clock[[NOW, SEEN]].to(twins.gpu.index.clock.device)
        twins.assert_equal()


def test_c10_a_rebuild_moves_scores_and_stamps_with_their_ids(backend: str, on_gpu: bool) -> None:
    twins = Twins(torch.device("cuda" if on_gpu else "cpu"), [48], 48, SCORE_COMPOUND)
    ids = torch.arange(48).repeat_interleave(torch.arange(48) % 3 + 1)
    for part in ids.split(24):
        twins.advance()
        for side, options in ((twins.cpu, {}), (twins.gpu, {"deterministic": True})):
            side.lookup(part, torch.tensor([0, part.numel()]), None, **options)
    twins.advance()
    for side in (twins.cpu, twins.gpu):
        side.call("erase", torch.arange(0, 48, 2), torch.tensor([0, 24]))
        old = slots_of_ids(side)
        rebuild(side.index, side.kernels, 0)
        new = slots_of_ids(side)
        assert old.keys() == new.keys() == set(range(1, 48, 2))
        assert sum(old[key][0] != new[key][0] for key in old) > 5
        assert {key: entry[1:] for key, entry in old.items()} == {key: entry[1:] for key, entry in new.items()}
    twins.assert_equal()


@pytest.mark.parametrize("factor", [1, 2])
def test_relocation_into_full_buckets_equals_the_cpus(backend: str, device: torch.device, factor: int) -> None:
    # Two full buckets of 48, less the slots that go. Most probes start in the last group, and wrap.
    ids = np.arange(4000)
    bucket, group, digest = locate(ids, 2, 3)
    parts = [(bucket == b) & ((group == 2) == last) for b in range(2) for last in (True, False)]
    chosen = np.concatenate([ids[part][:24] for part in parts])
    keys, digests = torch.from_numpy(chosen), torch.from_numpy(digest[chosen])
    kept = torch.arange(96) % 5 != 3
    expected = torch.zeros(factor * 96, dtype=torch.uint8)
    slots = cpu.relocate(keys, digests, kept, expected, 48)
    actual = torch.zeros(factor * 96, dtype=torch.uint8, device=device)
    on_device = [tensor.to(device) for tensor in (keys, digests, kept)]
    assert torch.equal(triton_kernels.relocate(*on_device, actual, 48).cpu(), slots)
    assert torch.equal(actual.cpu(), expected)
    starts = torch.from_numpy(group[chosen])[kept] * 16
    assert factor == 2 or bool((slots[kept] % 48 < starts).any())


def slots_of_ids(side) -> dict[int, tuple[int, int, int]]:
    """Return slot, score and stamp of every resident id."""
    slots = side.call("scan", 0).to(side.device)
    columns = [slots, side.index.scores[slots], side.index.stamps[slots]]
    return dict(zip(side.index.keys[slots].tolist(), zip(*(c.tolist() for c in columns)), strict=True))
