"""NO_EVICTION: tables that grow until memory ends; contract 10 and 19."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbCheckMode, DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode
from dynamicemb.errors import DynamicEmbError, InsertFailedError
from dynamicemb.table.growing import growth as growth_module
from dynamicemb.table.growing import relocation
from dynamicemb.table.growing.crowding import roomy_factor, safe_load
from dynamicemb.table.growing.plan import taken_slots
from dynamicemb.table.index import OLDEST, STEP, Index
from dynamicemb.table.layout import locate
from dynamicemb.table.rows import MAX_ROWS, RowFormat, RowStore, _chunk_shift
from dynamicemb.table.scores import SCORE_NO_EVICTION
from tests.conftest import reason_to_skip
from tests.support.oracle import ReferenceTable
from tests.support.tables import UNIFORM, device_of, use_backend

KEEP = DynamicEmbScoreStrategy.NO_EVICTION
DIM = 4


def make(backend: str, *init_capacities: int, bucket: int = 16, load: float = 1.0, **common):
    """Make tables without a limit and, named "other", one of 32 rows that counts."""
    options = [
        DynamicEmbTableOptions(
            dim=DIM,
            init_capacity=init,
            bucket_capacity=bucket,
            initializer_args=UNIFORM,
            score_strategy=KEEP,
            max_load_factor=load,
            **common,
        )
        for init in init_capacities
    ]
    lfu = DynamicEmbScoreStrategy.LFU
    other = {"max_capacity": 2 * bucket, "bucket_capacity": bucket, "initializer_args": UNIFORM, "score_strategy": lfu}
    options.append(DynamicEmbTableOptions(dim=DIM, **other, **common))
    names = [f"t{t}" for t in range(len(init_capacities))]
    module = BatchedDynamicEmbeddingTablesV2(
        options, [*names, "other"], pooling_mode=DynamicEmbPoolingMode.NONE, device=device_of(backend), seed=3
    )
    use_backend(module.tables, backend)
    return module


def lookup(module: BatchedDynamicEmbeddingTablesV2, *parts) -> torch.Tensor:
    device = module.tables.device
    ids = torch.tensor([int(i) for part in parts for i in part], dtype=torch.int64, device=device)
    offsets = torch.tensor([0, *(len(part) for part in parts)], device=device).cumsum(0)
    return module(ids, offsets)


def scores(module: BatchedDynamicEmbeddingTablesV2, table: str = "t0") -> dict[int, int]:
    ids, values = module.export_scores(table, "cpu")
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def rows(module: BatchedDynamicEmbeddingTablesV2, table: str = "t0") -> dict[int, bytes]:
    ids, values = module.export_keys_values(table, "cpu")
    return {key: row.numpy().tobytes() for key, row in zip(ids.tolist(), values, strict=True)}


def ids_of_bucket(bucket: int, num_buckets: int, count: int, first: int = 0) -> list[int]:
    """Return ids from ``first`` on that one bucket of a table would get."""
    ids = np.arange(first, first + 40 * count * num_buckets)
    return ids[locate(ids, num_buckets, 1)[0] == bucket][:count].tolist()


def binomial_tail(trials: int, share: float, most: int) -> float:
    """Return the chance of more than ``most`` of ``trials``, summed term by term."""
    total = 0.0
    for k in range(most + 1, min(trials, most + 400) + 1):
        choose = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        total += math.exp(choose + k * math.log(share) + (trials - k) * math.log1p(-share))
    return total


@pytest.mark.parametrize("bucket", [16, 48, 128, 1024])
def test_a_full_bucket_is_out_of_the_question_below_the_safe_load(bucket: int) -> None:
    for num_buckets in (2, 2**10, 2**24):
        ids = int(safe_load(bucket) * bucket * num_buckets)
        if ids > bucket:
            assert binomial_tail(ids, 1 / num_buckets, bucket) * 2**24 < 1e-12
    # And it is not much lower than it must be.
    ids = int(safe_load(bucket) * 1.05 * bucket * 2**24)
    assert binomial_tail(ids, 2.0**-24, bucket) * 2**24 > 1e-12


@pytest.mark.parametrize("tables", [1, 10, 1000])
@pytest.mark.parametrize("first", [16, 1040, 2**20])
def test_row_ids_last_until_a_group_is_nearly_full(tables: int, first: int) -> None:
    shift = _chunk_shift([first] * tables, [None] * tables)
    rng = np.random.default_rng(tables)
    entries, capacities = tables * -(-first >> shift), [first] * tables
    while True:
        t = int(rng.integers(tables)) if rng.random() < 0.5 else int(np.argmin(capacities))
        more = entries + -(-capacities[t] >> shift)
        if more << shift > MAX_ROWS:
            break
        entries, capacities[t] = more, 2 * capacities[t]
    # Whoever was refused would have brought the group close to its limit.
    assert sum(capacities) + capacities[t] > MAX_ROWS * 31 / 32


def test_a_store_says_when_its_row_ids_end() -> None:
    store = RowStore([64, 16], [RowFormat(4, 0)] * 2, torch.float32, torch.device("cpu"), [None, None])
    assert store.chunk_shift == 6 and store.next_row == 128
    assert store.can_add(0, MAX_ROWS - 128 - 63) and not store.can_add(0, MAX_ROWS - 127)


def test_c10_no_id_is_evicted_and_scores_stay(backend: str) -> None:
    module = make(backend, 32, 16)
    rng = np.random.default_rng(5)
    steps, most, universe = (6, 14, 60) if backend == "interpret" else (40, 50, 600)
    known: list[dict[int, int]] = [{}, {}]
    saved: list[dict[int, bytes]] = [{}, {}]
    for _ in range(steps):
        parts = [rng.integers(-universe, universe, rng.integers(0, most)) for _ in range(2)]
        with torch.no_grad():
            lookup(module, *parts, [1, 2])
        module.tables.check_invariants()
        for t, part in enumerate(parts):
            now = scores(module, f"t{t}")
            new = set(part.tolist()) - set(known[t])
            assert set(now) == set(known[t]) | new
            assert {key: now[key] for key in known[t]} == known[t]
            # One time for all ids of a step, later than that of every step before.
            assert len({now[key] for key in new}) <= 1
            assert not new or not known[t] or min(now[key] for key in new) > max(known[t].values())
            known[t] = now
            values = rows(module, f"t{t}")
            assert {key: values[key] for key in saved[t]} == saved[t]
            saved[t] = values
    stats = module.stats()
    assert all(stats[f"t{t}"]["evicted"] == stats[f"t{t}"]["failed"] == 0 for t in range(2))
    # Buckets of 16 are full long before the table is: without a look at them ids would have been lost.
    assert backend == "interpret" or stats["t0"]["load"] < 0.6
    assert module.tables.capacities[2] == 32


def test_c10_it_grows_when_a_bucket_would_overflow_and_not_before(backend: str) -> None:
    module = make(backend, 64)
    bucket = ids_of_bucket(1, 4, 40)
    with torch.no_grad():
        lookup(module, bucket[:16], [])
        assert module.tables.capacities[0] == 64
        # Ids that are there take no room, nor do repeated ones.
        lookup(module, [*bucket[:16], *bucket[:3]], [])
        assert module.tables.capacities[0] == 64
        lookup(module, bucket[16:17] * 3, [])
    assert module.tables.capacities[0] == 128
    assert set(scores(module)) == set(bucket[:17])


@pytest.mark.filterwarnings("ignore:max_capacity=")
@pytest.mark.parametrize(("init", "first"), [(None, 32), (64, 64), (16, 16)])
def test_c10_a_limit_is_where_a_table_begins_unless_another_number_says_so(init: int | None, first: int) -> None:
    table = {"dim": DIM, "max_capacity": 32, "init_capacity": init, "bucket_capacity": 16, "score_strategy": KEEP}
    module = BatchedDynamicEmbeddingTablesV2([DynamicEmbTableOptions(**table)], ["t0"], device="cpu")
    assert module.tables.capacities == [first]
    with torch.no_grad():
        for step in range(4):
            lookup(module, range(50 * step, 50 * step + 50))
    assert module.tables.capacities[0] > 200
    assert len(scores(module)) == 200 and module.stats()["t0"]["evicted"] == module.stats()["t0"]["failed"] == 0


def test_c10_one_batch_may_need_several_doublings(backend: str) -> None:
    module = make(backend, 32)
    # Bucket 0 of two and of four, in halves buckets 0 and 4 of eight.
    ids = ids_of_bucket(0, 8, 10) + ids_of_bucket(4, 8, 10)
    with torch.no_grad():
        lookup(module, ids, [])
    assert module.tables.capacities[0] == 128
    assert set(scores(module)) == set(ids)


def test_c10_ids_that_collide_on_purpose_do_not_grow_a_table(backend: str) -> None:
    module = make(backend, 32)
    # Together at any size up to 256 buckets; by then 1 slot in 200 would be in use.
    ids = ids_of_bucket(3, 256, 20)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="'t0': so many ids share a bucket"):
            lookup(module, ids[:18], [])
        assert module.tables.capacities[0] == 32 and module.stats()["t0"]["failed"] == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lookup(module, ids[18:], [])
    assert module.stats()["t0"]["evicted"] == 2
    module.tables.check_invariants()


def test_c10_collisions_below_the_safe_load_are_noticed_afterwards(backend: str) -> None:
    if backend == "interpret":
        pytest.skip("interpret: no kernel is involved, and 129 ids take long")
    module = make(backend, 1024, bucket=128)
    ids = ids_of_bucket(3, 8, 129)
    with torch.no_grad():
        lookup(module, ids, [])
        if backend == "cuda":
            torch.cuda.synchronize()
        with pytest.warns(UserWarning, match="'t0': so many ids share a bucket"):
            lookup(module, [], [])


def test_c19_slots_of_erased_ids_that_a_step_protects_are_no_room(backend: str) -> None:
    module = make(backend, 16)
    waiting = lookup(module, range(16), [])
    device = module.tables.device
    assert module.erase("t0", torch.arange(8, device=device)) == 8
    with torch.no_grad():
        lookup(module, range(100, 104), [])
    assert module.tables.capacities[0] > 16 and module.stats()["t0"]["failed"] == 0
    assert set(scores(module)) == {*range(8, 16), *range(100, 104)}
    waiting.sum().backward()
    assert module.stats()["t0"]["dropped_gradients"] == 8
    # Once the step is over they are room.
    freed = make(backend, 16)
    lookup(freed, range(16), []).sum().backward()
    freed.erase("t0", torch.arange(8, device=device))
    with torch.no_grad():
        lookup(freed, [100], [])
        lookup(freed, range(101, 104), [])
    assert freed.tables.capacities[0] == 16


def test_c19_slots_of_erased_ids_count_below_the_safe_load(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "interpret":
        pytest.skip("interpret: no kernel is involved, and 160 ids take long")
    module = make(backend, 128, bucket=128)
    device = module.tables.device
    waiting = []
    for begin in range(0, 160, 40):
        waiting.append(lookup(module, range(begin, begin + 40), []))
        assert module.erase("t0", torch.arange(begin, begin + 40, device=device)) == 40
    # 40 ids at most at any time, but the slots of all 160 are taken until backward.
    assert module.stats()["t0"]["failed"] == 0 and module.tables.capacities[0] == 256
    del waiting
    monkeypatch.setattr(growth_module.Growth, "ask", None)
    for begin in range(200, 600, 40):
        lookup(module, range(begin, begin + 40), []).sum().backward()
        module.erase("t0", torch.arange(begin, begin + 40, device=device))
        if backend == "cuda":
            torch.cuda.synchronize()
    # Nobody looked again: the slots of ids whose steps are over do not count.
    assert module.tables.capacities[0] == 256


def test_c19_the_host_asks_only_above_the_safe_load(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The safe load of buckets of 64 is 0.25: 32 ids.
    module = make(backend, 128, bucket=64)
    asked = []
    ask = growth_module.Growth.ask
    monkeypatch.setattr(growth_module.Growth, "ask", lambda *args: (asked.append(1), ask(*args))[1])
    device = module.tables.device
    module.insert("t0", torch.arange(20, device=device), torch.zeros(20, DIM, device=device))
    for _ in range(2):
        lookup(module, range(9), [])
        if backend == "cuda":
            torch.cuda.synchronize()
    assert not asked
    lookup(module, range(1000, 1020), [])
    assert asked and module.tables.capacities[0] == 128
    assert module.stats()["t0"]["size"] == 40


@pytest.mark.parametrize("error", [MemoryError("3 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")])
def test_c10_when_memory_ends_it_warns_once_and_evicts_the_oldest(
    backend: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(backend, 32)
    oracle = ReferenceTable(2, 16, SCORE_NO_EVICTION, lambda key: (np.zeros(0), np.zeros(0)))
    rng = np.random.default_rng(2)

    def no_memory(*args: object, **kwargs: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr("dynamicemb.table.rows.allocate", no_memory)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for step in range(1, 7 if backend == "interpret" else 40):
            part = rng.integers(0, 64, 12).tolist()
            lookup(module, part, [])
            value = int(module.tables.index.score_values[0])
            oracle.lookup(part, None, value, step, step)
            assert scores(module) == {key: entry.score for key, entry in oracle.entries().items()}
    assert [str(w.message).startswith("table 't0' cannot grow beyond 32 rows (") for w in caught] == [True]
    assert "smaller embedding_dtype" in str(caught[0].message) and "max_capacity" not in str(caught[0].message)
    assert module.stats()["t0"]["evicted"] == oracle.counts["evicted"] > 0
    module.tables.check_invariants()


def test_an_error_that_is_not_about_memory_is_raised(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(backend, 16)

    def broken(*args: object) -> torch.Tensor:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(module.tables.kernels, "relocate", broken)
    with pytest.raises(RuntimeError, match="illegal instruction"):
        lookup(module, range(30), [])


def test_c19_where_memory_allows_half_the_growth_it_is_taken(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(backend, 32, load=0.5)
    grow = growth_module.grow

    def scarce(index, store, kernels, table, factor):
        if factor > 2:
            raise MemoryError("scarce")
        grow(index, store, kernels, table, factor)

    monkeypatch.setattr(growth_module, "grow", scarce)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"cannot grow beyond 64 rows \(scarce\)"):
            lookup(module, range(40), [])
        assert module.tables.capacities[0] == 64
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lookup(module, range(40, 90), [])
    assert module.tables.capacities[0] == 64


def test_c19_the_end_of_slots_is_the_end_of_growth(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(backend, 32)
    monkeypatch.setattr(relocation, "MAX_GROUP_SLOTS", 64 + 31)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"beyond 32 rows \(the tables of one module have at most 95"):
        lookup(module, range(40), [])
    assert module.tables.capacities[0] == 32 and module.stats()["t0"]["failed"] == 8


def test_c19_a_host_without_memory_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make("cpu", 32)
    monkeypatch.setattr("dynamicemb.host_memory.available_host_memory", lambda: 4000)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"beyond 32 rows \(\d+ bytes are needed and 4000 available"):
        lookup(module, range(40), [])
    assert module.tables.capacities[0] == 32


def test_a_copy_goes_on_without_evicting() -> None:
    module = make("cpu", 32)
    with torch.no_grad():
        lookup(module, range(50), [])
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert scores(twin) == scores(module)
            lookup(twin, range(50, 200), [])
            assert set(scores(twin)) == set(range(200)) and twin.stats()["t0"]["evicted"] == 0
            twin.tables.check_invariants()


def test_c28_check_mode_error_makes_room_first(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(backend, 32, safe_check_mode=DynamicEmbCheckMode.ERROR)
    with torch.no_grad():
        lookup(module, range(60), [])
        assert set(scores(module)) == set(range(60))
        monkeypatch.setattr("dynamicemb.table.rows.allocate", lambda *args: torch.empty(2**55, dtype=torch.uint8))
        before = scores(module)
        with pytest.warns(UserWarning, match="cannot grow"), pytest.raises(InsertFailedError, match="t0"):
            lookup(module, range(1000, 1300), [])
        assert scores(module) == before


def test_c10_thresholds_and_imports(backend: str) -> None:
    module = make(backend, 32)
    device = module.tables.device
    with torch.no_grad():
        lookup(module, [1, 2], [])
        threshold = module.get_score()["t0"]
        assert all(1_600_000_000 * 10**9 < score < threshold for score in scores(module).values())
        lookup(module, [1, 3], [])
    assert {key for key, score in scores(module).items() if score >= threshold} == {3}
    group = module.tables
    assert group.index.keys[group.scan(0, threshold)].tolist() == [3]
    before = scores(module)
    assert module.insert("t0", torch.tensor([1, 4], device=device), torch.ones(2, DIM, device=device)).all()
    after = scores(module)
    assert {key: after[key] for key in before} == before and after[4] > threshold


def test_c04_options_that_contradict_it_are_refused() -> None:
    with pytest.raises(ValueError, match="init_capacity of table 'a' is not set"):
        BatchedDynamicEmbeddingTablesV2([DynamicEmbTableOptions(dim=4, score_strategy=KEEP)], ["a"], device="cpu")


@pytest.mark.cuda
def test_a_graph_of_a_table_without_a_limit_is_refused() -> None:
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    module = make("cuda", 1024)
    ids, offsets = torch.arange(4, device="cuda"), torch.tensor([0, 4, 4], device="cuda")
    module(ids, offsets)
    torch.cuda.synchronize()
    with pytest.raises(DynamicEmbError, match="NO_EVICTION"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(ids, offsets)


def test_roomy_factor_of_its_example() -> None:
    cpu = torch.device("cpu")
    index = Index.create([2], 16, [0], [SCORE_NO_EVICTION], cpu)
    store = RowStore([32], [RowFormat(4, 0)], torch.float32, cpu)
    del store
    low, high = ids_of_bucket(0, 4, 10), ids_of_bucket(2, 4, 7)
    held = torch.tensor(low[:6] + high[:6])
    index.keys[:12], index.digests[:12] = held, 2
    index.clock[STEP] = index.clock[OLDEST] = 1
    taken = taken_slots(index, 0, None)
    new = torch.tensor(low[6:] + high[6:])
    assert roomy_factor(index, 0, new[:4], taken, 1, 8) == 1
    assert roomy_factor(index, 0, new, taken, 1, 8) == 2
    assert roomy_factor(index, 0, new, taken, 4, 8) == 4
    assert roomy_factor(index, 0, new, taken, 1, 1) is None
