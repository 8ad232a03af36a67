"""Tables that grow; contract 19."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbCheckMode, DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.capacity import MAX_BUCKET_CAPACITY, growing_bucket_layout
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode
from dynamicemb.errors import DynamicEmbError, InsertFailedError
from dynamicemb.table.growing import growth as growth_module
from dynamicemb.table.growing import relocation
from dynamicemb.table.index import INDEX_BYTES_PER_SLOT
from dynamicemb.table.layout import locate
from tests.conftest import reason_to_skip
from tests.support.lookups import EXTREME
from tests.support.tables import UNIFORM, device_of, use_backend

NAMES = ["a", "b"]
DIM = 4


def make(backend: str, capacities=((16, 256), (32, 32)), **arguments) -> BatchedDynamicEmbeddingTablesV2:
    bucket = arguments.pop("bucket_capacity", 16)
    load_factor = arguments.pop("max_load_factor", 0.5)
    common = {
        "score_strategy": arguments.pop("score_strategy", DynamicEmbScoreStrategy.STEP),
        "safe_check_mode": arguments.pop("safe_check_mode", DynamicEmbCheckMode.IGNORE),
        "score_function": arguments.pop("score_function", None),
    }
    options = [
        DynamicEmbTableOptions(
            dim=DIM,
            init_capacity=init,
            max_capacity=most,
            bucket_capacity=bucket,
            initializer_args=UNIFORM,
            **common,
            **({"max_load_factor": load_factor} if init < most else {}),
        )
        for init, most in capacities
    ]
    arguments = {"optimizer": "exact_adagrad", "learning_rate": 0.5, "eps": 1e-3, "seed": 3, **arguments}
    module = BatchedDynamicEmbeddingTablesV2(
        options, NAMES[: len(options)], pooling_mode=DynamicEmbPoolingMode.NONE, device=device_of(backend), **arguments
    )
    use_backend(module.tables, backend)
    return module


def lookup(module: BatchedDynamicEmbeddingTablesV2, *parts) -> torch.Tensor:
    device = module.tables.device
    ids = torch.tensor([i for part in parts for i in part], dtype=torch.int64, device=device)
    offsets = torch.tensor([0, *(len(part) for part in parts)], device=device).cumsum(0)
    return module(ids, offsets)


def contents(module: BatchedDynamicEmbeddingTablesV2, table: int = 0) -> dict[int, tuple[int, bytes]]:
    group = module.tables
    slots = group.scan(table)
    rows = torch.cat(group.read(table, group.index.rows[slots]), 1).cpu().numpy()
    keys, scores = group.index.keys[slots].tolist(), group.index.scores[slots].tolist()
    return {key: (score, row.tobytes()) for key, score, row in zip(keys, scores, rows, strict=True)}


@pytest.mark.parametrize(
    ("init", "most", "expected"),
    [
        (1280, 12800, (13, 104, 128)),
        (128, 128, (1, 1, 128)),
        (1, 1024, (1, 8, 128)),
        (129, 1024, (2, 8, 128)),
        (512, 1000, (4, 8, 128)),
        (700, 1000, (8, 8, 128)),
        (1, 1100, (2, 16, 128)),
    ],
)
def test_a_table_doubles_to_its_most(init: int, most: int, expected: tuple[int, int, int]) -> None:
    assert growing_bucket_layout(init, most, 128) == expected
    first, last, bucket = expected
    assert init <= first * bucket and last * bucket >= most and (last // first).bit_count() == 1
    # What a planner rounded is not rounded again.
    assert growing_bucket_layout(first * bucket, last * bucket, 128) == expected


def test_a_single_bucket_does_not_grow() -> None:
    assert growing_bucket_layout(16, 200, MAX_BUCKET_CAPACITY) == (1, 1, 208)


def test_c19_growth_loses_no_id_score_or_state(backend: str) -> None:
    module = make(backend, score_strategy=DynamicEmbScoreStrategy.LFU)
    group = module.tables
    ids = [*EXTREME, *range(2, 100 - len(EXTREME))]
    known: dict[int, tuple[int, bytes]] = {}
    capacities = [group.capacities[0]]
    step = 19 if backend == "interpret" else 7
    for begin in range(0, len(ids), step):
        lookup(module, ids[begin : begin + step], [5, 6]).sum().backward()
        group.check_invariants()
        now = contents(module)
        for key, entry in known.items():
            assert now[key] == entry
        known = now
        capacities.append(group.capacities[0])
        assert len(now) <= 0.5 * capacities[-1]
    assert sorted(known) == sorted(set(ids))
    grown = [c for c, after in zip(capacities, capacities[1:]) if c != after]
    assert grown == ([16, 64, 128] if backend == "interpret" else [16, 32, 64, 128])
    stats = module.stats()["a"]
    assert stats["capacity"] == 256 and stats["evicted"] == stats["failed"] == 0
    # The other table's ids moved with their part of the arrays.
    assert sorted(contents(module, 1)) == [5, 6]


def test_c19_a_batch_that_is_larger_than_the_table_fits_at_once(backend: str) -> None:
    module = make(backend, ((16, 1024), (32, 32)), max_load_factor=0.75)
    ids = list(range(-60, 60)) * (1 if backend == "interpret" else 3)
    output = lookup(module, ids, [])
    assert module.tables.capacities[0] == 256
    assert len(contents(module)) == 120 and module.stats()["a"]["evicted"] == 0
    assert output.abs().sum(1).min() > 0
    module.tables.check_invariants()


def test_c19_the_last_slot_works_after_growth(backend: str) -> None:
    module = make(backend, ((16, 64),), max_load_factor=1.0)
    group = module.tables
    with torch.no_grad():
        for begin in range(0, 120 if backend == "interpret" else 400, 8):
            lookup(module, range(begin, begin + 8))
    assert group.capacities[0] == 64
    assert int((group.index.digests >= 2).sum()) == 64
    group.check_invariants()
    assert module.stats()["a"]["evicted"] > 0


def test_c19_a_step_in_flight_trains_its_rows_after_growth(backend: str) -> None:
    grown, fixed = make(backend), make(backend, ((256, 256), (32, 32)))
    outputs = []
    for module in (grown, fixed):
        waiting = lookup(module, [1, 2, 3, 1], [7])
        with torch.no_grad():
            lookup(module, range(10, 40), [])
        waiting.backward(torch.ones_like(waiting))
        with torch.no_grad():
            outputs.append(lookup(module, [1, 2, 3], [7]).cpu())
    assert grown.tables.capacities[0] > 16
    assert torch.equal(outputs[0], outputs[1])
    assert grown.stats()["a"]["dropped_gradients"] == 0


def test_c07_ids_of_an_outstanding_step_stay_protected_through_growth(backend: str) -> None:
    module = make(backend, ((16, 32),), max_load_factor=1.0)
    group = module.tables
    waiting = lookup(module, range(10))
    three = torch.tensor([3], device=group.device)
    row = int(group.find(three, torch.tensor([0, 1], device=group.device)))
    assert module.erase("a", three) == 1
    with torch.no_grad():
        for begin in range(100, 148 if backend == "interpret" else 260, 8):
            lookup(module, range(begin, begin + 8))
    assert group.capacities[0] == 32
    assert set(range(10)) - {3} <= set(contents(module))
    # Nor does anybody get the row of the erased one.
    assert row not in group.index.rows[group.scan(0)].tolist()
    group.check_invariants()
    waiting.backward(torch.ones_like(waiting))
    assert module.stats()["a"]["dropped_gradients"] == 1


def test_an_import_grows_the_table_too(backend: str) -> None:
    module = make(backend)
    device = module.tables.device
    ids = torch.arange(100, device=device)
    rows = torch.arange(400, dtype=torch.float32, device=device).view(100, DIM)
    assert module.insert("a", ids, rows).all()
    assert module.tables.capacities == [256, 32]
    exported, values = module.export_keys_values("a", "cpu")
    assert torch.equal(values[exported.argsort()], rows.cpu())


def test_a_table_that_may_not_grow_further_evicts(backend: str) -> None:
    module = make(backend, ((16, 32), (32, 32)))
    with torch.no_grad():
        lookup(module, range(1000, 1040), [])
    assert module.tables.capacities == [32, 32]
    for begin in range(0, 24 if backend == "interpret" else 80, 8):
        lookup(module, range(begin, begin + 8), []).sum().backward()
    stats = module.stats()["a"]
    assert stats["capacity"] == 32 and stats["evicted"] > 0
    module.tables.check_invariants()


def test_c19_without_memory_a_table_evicts_and_warns_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(backend)
    before = contents(module)

    asked = []

    def no_memory(*args: object, **kwargs: object) -> torch.Tensor:
        asked.append(args)
        raise MemoryError("Unable to allocate 3 GiB")

    # The rows are asked for last.
    monkeypatch.setattr("dynamicemb.table.rows.allocate", no_memory)
    with pytest.warns(
        UserWarning, match=r"table 'a' cannot grow beyond 16 rows \(Unable to allocate 3 GiB\).*max_capacity"
    ):
        lookup(module, range(12), [])
    assert before == {} and module.tables.capacities == [16, 32]
    module.tables.check_invariants()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for begin in range(12, 60, 8):
            lookup(module, range(begin, begin + 8), []).sum().backward()
    monkeypatch.undo()
    assert len(asked) == 1
    assert module.stats()["a"]["evicted"] > 0 and len(contents(module)) == 16
    module.tables.check_invariants()


def test_c19_memory_that_ends_in_the_middle_leaves_nothing_behind(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(backend)
    lookup(module, [1, 2, 3], []).sum().backward()
    group, before = module.tables, contents(module)
    num_bytes = module.memory_usage()

    def no_memory(*args: object) -> torch.Tensor:
        raise MemoryError("Unable to allocate 3 GiB")

    # Index and rows have been allocated by then.
    monkeypatch.setattr(group.kernels, "relocate", no_memory)
    with pytest.warns(UserWarning, match="cannot grow beyond 16 rows"):
        lookup(module, range(10, 20), [])
    assert group.capacities == [16, 32] and module.memory_usage() == num_bytes
    group.check_invariants()
    assert {key: contents(module)[key] for key in before} == before


def test_a_copy_goes_on_growing(backend: str) -> None:
    if backend == "interpret":
        pytest.skip("interpret: kernels of a test are not copied")
    module = make(backend)
    lookup(module, range(20), []).sum().backward()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert contents(twin) == contents(module)
        lookup(twin, range(20, 100), []).sum().backward()
        assert twin.tables.capacities[0] == 256 and len(contents(twin)) == 100
        twin.tables.check_invariants()
    assert module.tables.capacities[0] == 64


def test_repeated_ids_do_not_grow_a_table(backend: str) -> None:
    module = make(backend)
    for _ in range(3):
        lookup(module, [1, 2, 3, 4, 5, 6] * 10, [])
    assert module.tables.capacities[0] == 16


def test_evaluation_does_not_grow_a_table(backend: str) -> None:
    module = make(backend)
    module.eval()
    lookup(module, range(40), [])
    assert module.tables.capacities[0] == 16


def test_the_host_asks_the_device_only_near_a_threshold(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(backend, ((64, 4096), (32, 32)))
    asked = []
    ask = growth_module.Growth.ask
    monkeypatch.setattr(growth_module.Growth, "ask", lambda *args: (asked.append(1), ask(*args))[1])
    for _ in range(5):
        lookup(module, [1, 2], [])
        if backend == "cuda":
            torch.cuda.synchronize()
    assert not asked
    lookup(module, range(40), [])
    assert asked and module.tables.capacities[0] == 128


def test_max_load_factor_without_growth_warns() -> None:
    with pytest.warns(UserWarning, match="max_load_factor.*init_capacity below max_capacity"):
        options = DynamicEmbTableOptions(dim=4, max_capacity=128, max_load_factor=0.75)
        BatchedDynamicEmbeddingTablesV2([options], ["a"], device="cpu")


def test_c28_a_plan_of_check_mode_error_counts_on_growth(backend: str) -> None:
    module = make(backend, ((16, 256), (32, 32)), safe_check_mode=DynamicEmbCheckMode.ERROR)
    lookup(module, range(100), []).sum().backward()
    assert module.tables.capacities[0] == 256 and module.stats()["a"]["failed"] == 0
    before = contents(module)
    with pytest.raises(InsertFailedError):
        lookup(module, range(1000, 1600), [])
    assert contents(module) == before
    device = module.tables.device
    ids = torch.arange(2000, 2100, device=device)
    small = make(backend, ((16, 256), (32, 32)), safe_check_mode=DynamicEmbCheckMode.ERROR)
    assert small.insert("a", ids, torch.zeros(100, DIM, device=device)).all()


def test_c28_check_mode_error_grows_rather_than_fails(backend: str) -> None:
    # 12 ids of one bucket of two, the others of both: 20 are fewer than the load factor allows.
    ids = np.arange(2000)
    buckets = locate(ids, 4, 1)[0]
    batch = [*ids[buckets == 0][:9].tolist(), *ids[buckets == 2][:9].tolist()]
    for mode, capacity, failed in ((DynamicEmbCheckMode.ERROR, 64, 0), (DynamicEmbCheckMode.IGNORE, 32, 2)):
        module = make(backend, ((32, 256),), max_load_factor=0.9, safe_check_mode=mode)
        lookup(module, batch).sum().backward()
        assert module.tables.capacities[0] == capacity and module.stats()["a"]["failed"] == failed
        # What may be evicted is no reason to grow.
        lookup(module, ids[buckets == 0][20:29].tolist()).sum().backward()
        assert module.tables.capacities[0] == capacity
    stubborn = make(backend, ((32, 256),), max_load_factor=0.9, safe_check_mode=DynamicEmbCheckMode.ERROR)
    same = ids[locate(ids, 16, 1)[0] == 0][:17].tolist()
    with pytest.raises(InsertFailedError):
        lookup(stubborn, same)
    assert stubborn.tables.capacities[0] == 32


def older_first(scores, now):
    return (scores[0] - now) * 1e-9 + math.log(scores[1])


@pytest.mark.parametrize("function", [None, older_first])
def test_c28_compound_scores_survive_growth(backend: str, function) -> None:
    strategy = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)
    module = make(backend, ((16, 64), (32, 32)), score_strategy=strategy, score_function=function)
    lookup(module, [1, 1, 1, 2], [])
    before = dict(zip(*(x.tolist() for x in module.export_scores("a", "cpu")), strict=True))
    with torch.no_grad():
        lookup(module, range(10, 40), [])
    assert module.tables.capacities[0] == 64
    after = dict(zip(*(x.tolist() for x in module.export_scores("a", "cpu")), strict=True))
    assert len(after) == 32 and after[1] == before[1] and after[2] == before[2]
    assert after[1][1] == 3 and after[10][0] > after[1][0] > 1_600_000_000 * 10**9
    with torch.no_grad():
        for begin in range(100, 180, 8):
            lookup(module, range(begin, begin + 8), [])
    assert module.stats()["a"]["evicted"] > 0
    module.tables.check_invariants()


@pytest.mark.cuda
def test_a_graph_of_a_table_that_may_grow_is_refused() -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    module = make("cuda")
    ids, offsets = torch.arange(4, device="cuda"), torch.tensor([0, 4, 4], device="cuda")
    module(ids, offsets)
    torch.cuda.synchronize()
    with pytest.raises(DynamicEmbError, match="init_capacity = max_capacity"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(ids, offsets)


@pytest.mark.cuda
def test_c20_growth_takes_no_more_than_is_planned_for() -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    slots = 1 << 20
    module = make("cuda", ((slots, 2 * slots),), bucket_capacity=128, optimizer="sgd")
    group = module.tables
    with torch.no_grad():
        lookup(module, range(slots // 2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    relocation.grow(group.index, group.store, group.kernels, 0, 2)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    # What the planner counts for this table: as much as its index at last, and the positions of entries.
    assert 0 < extra <= (INDEX_BYTES_PER_SLOT + relocation.GROWTH_BYTES_PER_SLOT) * 2 * slots


def test_random_growth_equals_a_table_that_was_large_at_once(backend: str) -> None:
    rng = np.random.default_rng(1)
    # Interpreted, each slot of a table that grows takes milliseconds.
    last, universe, steps, most = (192, 25, 4, 16) if backend == "interpret" else (768, 90, 30, 60)
    grown = make(backend, ((48, last), (48, last // 2)), max_load_factor=0.4, bucket_capacity=48)
    fixed = make("cpu", ((last, last), (last // 2, last // 2)), bucket_capacity=48)
    for _ in range(steps):
        parts = [
            rng.integers(-universe, universe, rng.integers(most // 2, most)).tolist(),
            rng.integers(0, 40, rng.integers(0, 12)).tolist(),
        ]
        outputs = [lookup(module, *parts) for module in (grown, fixed)]
        assert torch.allclose(outputs[0].cpu(), outputs[1], rtol=1e-4, atol=1e-4)
        grad = torch.from_numpy(rng.standard_normal(outputs[1].shape).astype(np.float32))
        for output in outputs:
            output.backward(grad.to(output.device))
        grown.tables.check_invariants()
    for t in range(2):
        ours, theirs = contents(grown, t), contents(fixed, t)
        assert {key: score for key, (score, _) in ours.items()} == {key: score for key, (score, _) in theirs.items()}
        if backend == "cpu":
            assert ours == theirs
    assert grown.tables.capacities[0] > 48
