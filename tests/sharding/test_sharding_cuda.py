"""TorchRec on GPUs: ranks train the same model as one process, and what holds on CPUs holds there.

Each test runs with ranks that share one GPU over gloo, and with ranks that have a GPU each over NCCL.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dynamicemb.optimizer import EmbOptimType
from dynamicemb.sharding.bag_mean import Average, divide, divisors
from dynamicemb.sharding.checks.lengths import ends_on_cpu, ends_on_device
from dynamicemb.sharding.exchange.bucketize import bucketize
from dynamicemb.sharding.exchange.dedup import Deduplication
from tests.sharding import (
    test_alone,
    test_batches,
    test_sharding,
    test_sharding_edges,
    test_sharding_module,
    test_train_pipeline,
)
from tests.support.ranks import GpuRanks, gpu_ranks, skip_without_gpus  # noqa: F401
from tests.support.sharded_model import (
    Case,
    Model,
    Table,
    build,
    device_of,
    dynamic_modules,
    embedding_configs,
    make_batch,
    make_kjt,
)

pytestmark = [pytest.mark.cuda, pytest.mark.distributed]

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3])


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    skip_without_gpus(1)


def on_gpu(case: Case, **changes: Any) -> Case:
    return replace(case, device="cuda", **changes)


CASES = {
    **{name: on_gpu(case) for name, case in test_sharding.CASES.items()},
    # FBGEMM's dense sequence lookup works on GPUs.
    "ec-dense": on_gpu(Case((test_sharding.A, test_sharding.STATIC_DP), pooled=False)),
}
KINDS = pytest.mark.parametrize(
    "case", [on_gpu(test_sharding_module.EC), on_gpu(test_sharding_module.EBC)], ids=["ec", "ebc"]
)


@WORLD_SIZES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_c02_c10_c17_gpus_equal_one_process(gpu_ranks: GpuRanks, case: Case, world_size: int) -> None:  # noqa: F811
    test_sharding.check(gpu_ranks, world_size, case)


@pytest.mark.parametrize("name", ["ec", "ec-mixed-dedup", "ebc-mean", "ebc-weighted", "ebc-mixed"])
@pytest.mark.parametrize("sizes", [(4, 0, 3), (0, 2), (0,)], ids=["uneven", "half-empty", "all-empty"])
def test_c03_empty_ranks_never_hang(gpu_ranks: GpuRanks, name: str, sizes: tuple[int, ...]) -> None:  # noqa: F811
    test_sharding.check(gpu_ranks, 2, replace(CASES[name], batch_sizes=sizes))


@pytest.mark.parametrize("name", ["ec-dedup", "ebc"])
def test_c03_empty_features(gpu_ranks: GpuRanks, name: str) -> None:  # noqa: F811
    test_sharding.check(gpu_ranks, 2, replace(CASES[name], empty_features=("f0", "f1", "f2", "f3")))


# Jobs of the gloo tests that check everything themselves, and their arguments.
EDGES = test_sharding_edges.CASES
JOBS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "uint64-ec-dedup": (test_sharding_edges.look_up_unsigned, (on_gpu(EDGES["ec-dedup"]),)),
    "uint64-ebc": (test_sharding_edges.look_up_unsigned, (on_gpu(EDGES["ebc"]),)),
    "state-dict-ec": (test_sharding_module.save_and_load, (on_gpu(test_sharding_module.EC),)),
    "state-dict-ebc": (test_sharding_module.save_and_load, (on_gpu(test_sharding_module.EBC),)),
    "evaluation-ec": (test_sharding_module.evaluate, (on_gpu(test_sharding_module.EC, batch_sizes=(9,)),)),
    "evaluation-ebc": (test_sharding_module.evaluate, (on_gpu(test_sharding_module.EBC, batch_sizes=(9,)),)),
    "resharding": (test_sharding_module.reshard, (on_gpu(test_sharding_module.EBC),)),
    "idle-weights": (test_sharding_module.ignore_weights, ("cuda",)),
    "dtypes": (test_batches.mix_dtypes, ("cuda",)),
    "keys-ec": (test_batches.change_keys, ("cuda", False)),
    "keys-ebc": (test_batches.change_keys, ("cuda", True)),
    "dropped-outputs": (test_batches.drop_outputs, ("cuda",)),
    "weights-gradients": (test_batches.want_gradients, ("cuda",)),
}


@WORLD_SIZES
@pytest.mark.parametrize(("job", "arguments"), JOBS.values(), ids=JOBS.keys())
def test_what_holds_on_cpus_holds_on_gpus(
    gpu_ranks: GpuRanks,  # noqa: F811
    world_size: int,
    job: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    gpu_ranks.run(world_size, job, *arguments)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("pooled", [True, False], ids=["ebc", "ec"])
def test_c04_contradictions_raise_on_all_gpus(gpu_ranks: GpuRanks, world_size: int, pooled: bool) -> None:  # noqa: F811
    kinds = [*test_batches.MALFORMED, *test_batches.CONTRADICTORY]
    test_batches.check_refusals(gpu_ranks.run(world_size, test_batches.refuse_all, "cuda", pooled, kinds), kinds)


@KINDS
def test_schedulers_reach_the_tables(gpu_ranks: GpuRanks, case: Case) -> None:  # noqa: F811
    test_sharding_module.check_rates(gpu_ranks.run(1, test_sharding_module.schedule, case))


@KINDS
def test_c05_the_seed_of_rank_0_decides(gpu_ranks: GpuRanks, case: Case) -> None:  # noqa: F811
    test_sharding_module.check_seeds(gpu_ranks, replace(case, batch_sizes=(9,)))


@pytest.mark.parametrize("name", ["ec", "ec-dedup"])
def test_c03_a_rank_may_be_empty_in_a_variable_batch(gpu_ranks: GpuRanks, name: str) -> None:  # noqa: F811
    results = gpu_ranks.run(2, test_sharding_edges.vary_stride, on_gpu(EDGES[name]))
    assert results == [[(4, 4), (4, 4)], [(0, 4), (0, 4)]]


@WORLD_SIZES
def test_c10_c14_a_pipeline_changes_nothing(gpu_ranks: GpuRanks, world_size: int) -> None:  # noqa: F811
    test_train_pipeline.check(gpu_ranks, world_size, "cuda")


@pytest.mark.parametrize("name", test_sharding_edges.BROKEN_CASES)
# Lengths are values, at which nobody looks on a GPU.
@pytest.mark.parametrize("fault", sorted(set(test_sharding_edges.FAULTS) - {"lengths"}))
def test_c04_a_bad_batch_on_one_rank_raises_on_all(gpu_ranks: GpuRanks, name: str, fault: str) -> None:  # noqa: F811
    test_sharding_edges.check_refusal(gpu_ranks, on_gpu(test_sharding_edges.BROKEN_CASES[name]), fault)


def test_c04_a_bad_batch_in_a_pipeline_raises_on_all(gpu_ranks: GpuRanks) -> None:  # noqa: F811
    test_train_pipeline.check_refusal(gpu_ranks, "cuda")


def break_the_batch(rank: int, world_size: int, case: Case) -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model = build(case, world_size)
    batch = KeyedJaggedTensor(["f0", "f1"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="features: ids are on cpu, the tables on cuda:0"):
        model(batch)
    assert all(not stats["size"] for tables in dynamic_modules(model) for stats in tables.stats().values())
    model(batch.to(device_of(case)))


@pytest.mark.parametrize("name", ["ec", "ebc"])
def test_c04_a_bad_batch_of_one_rank_is_refused(gpu_ranks: GpuRanks, name: str) -> None:  # noqa: F811
    gpu_ranks.run(1, break_the_batch, on_gpu(EDGES[name]))


def train_all_on_adam(rank: int, world_size: int, case: Case) -> None:
    # On the CPU static tables lack this optimizer, and sharding refuses it.
    model = build(case, world_size, optimizer=EmbOptimType.ADAM)
    first = test_sharding_module.forward(case, model, 0, rank)
    sum((value**2).sum() for value in first.values()).backward()
    second = test_sharding_module.forward(case, model, 0, rank)
    for name in ("g0", "f0", "f2"):
        used = first[name] != 0
        assert bool(used.any()) and bool((first[name] != second[name])[used].all()), name


@KINDS
def test_static_tables_beside_dynamic_ones_may_use_adam(gpu_ranks: GpuRanks, case: Case) -> None:  # noqa: F811
    gpu_ranks.run(1, train_all_on_adam, case)


def measure_memory(rank: int, world_size: int) -> tuple[int, int, int, int]:
    """Return planned and allocated bytes of a table, and planned and used bytes of the scratch of a step."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.modules.embedding_modules import EmbeddingCollection

    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingCollectionSharder

    batch_size = 2**17
    case = on_gpu(Case((Table("a", ("f0",), num_embeddings=2**20),), pooled=False))
    configs = embedding_configs(case)
    model = Model(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    sharders = [DynamicEmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM, "seed": 1})]
    constraints = {"a": DynamicEmbParameterConstraints(use_dynamicemb=True)}
    planner = DynamicEmbeddingShardingPlanner(configs, batch_size=batch_size, constraints=constraints)
    plan = planner.collective_plan(model, sharders)
    before = torch.cuda.memory_allocated()
    sharded = DistributedModelParallel(model, device=device_of(case), plan=plan, sharders=sharders)
    allocated = torch.cuda.memory_allocated() - before
    (tables,) = dynamic_modules(sharded)
    used = max(scratch_of_a_step(tables, batch_size) for _ in range(3))
    memory = planner.memory["a"]
    assert memory.hbm_bytes == memory.total_bytes
    return memory.total_bytes - memory.scratch_bytes, allocated, memory.scratch_bytes, used


def scratch_of_a_step(tables: Any, num_ids: int) -> int:
    """Return the peak of a training step on new ids, without its output and gradient."""
    ids = torch.randint(-(2**62), 2**62, (num_ids,), device="cuda")
    offsets = torch.arange(num_ids + 1, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = tables(ids, offsets)
    output.backward(torch.ones_like(output))
    return torch.cuda.max_memory_allocated() - before - 2 * output.numel() * output.itemsize


def test_c20_planned_memory_is_what_a_gpu_allocates(gpu_ranks: GpuRanks) -> None:  # noqa: F811
    ((planned, allocated, planned_scratch, used_scratch),) = gpu_ranks.run(1, measure_memory)
    # Counters, and the allocator's rounding to 2 MiB for each large array.
    assert planned <= allocated < planned + 2**24
    assert planned_scratch / 2 < used_scratch <= planned_scratch


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ids_per_table", [[0], [63], [100, 0, 2000], [5, 1, 1, 0, 63]])
def test_distinct_ids_are_found_as_on_the_cpu(ids_per_table: list[int], dtype: torch.dtype) -> None:
    for num_values in (1, 10, 10**9):
        test_sharding.check_unique(ids_per_table, num_values, dtype, "cuda")


def count_waits(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return a result and how often the host waited for the GPU; constants have been made by an earlier call."""
    function(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as caught:
            # So that there always is one.
            torch.ones(1, device="cuda").item()
            result = function(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return result, sum("synchronizing CUDA operation" in str(one.message) for one in caught) - 1


def test_input_dist_waits_for_the_gpu_once_at_most() -> None:
    from torchrec.sparse.jagged_tensor import KeyedTensor

    case = on_gpu(Case((test_sharding.A, test_sharding.B), pooled=False, batch_sizes=(64,)))
    kjt = make_kjt(make_batch(case, 0, 0), case)
    (unique, reverse), waits = count_waits(Deduplication([2, 1], True, device_of(case)), kjt)
    assert waits == 1
    on_cpu, reverse_on_cpu = Deduplication([2, 1], True, torch.device("cpu"))(kjt.to(torch.device("cpu")))
    for name in ("values", "lengths", "weights"):
        assert torch.equal(getattr(unique, name)().cpu(), getattr(on_cpu, name)()), name
    assert torch.equal(reverse.cpu(), reverse_on_cpu)
    assert unique.length_per_key() == on_cpu.length_per_key()

    owners = kjt.values() % 3
    on_gpu_, waits = count_waits(bucketize, owners, kjt.lengths(), 3)
    assert waits == 0
    for got, expected in zip(on_gpu_, bucketize(owners.cpu(), kjt.lengths().cpu(), 3)):
        assert torch.equal(got.cpu(), expected)

    averages = [Average("f1", "f1", False), Average("f2", "f2", False)]
    sizes, waits = count_waits(divisors, kjt, averages)
    assert waits == 0
    assert torch.equal(sizes.cpu(), divisors(kjt.to(torch.device("cpu")), averages))
    pooled = KeyedTensor(["f2", "f0"], [3, 2], torch.ones(64, 5, device="cuda"), key_dim=1)
    mean, waits = count_waits(divide, pooled, ["f2"], sizes[:, 1:])
    assert waits == 0
    assert torch.equal(mean.values()[:, :3].cpu(), (1 / sizes[:, 1:]).expand(-1, 3).cpu())
    assert bool((mean.values()[:, 3:] == 1).all())


def wait_once(rank: int, world_size: int, case: Case) -> int:
    model = build(case, world_size).eval()
    parts = make_batch(case, 0, rank)
    batch = {name: part.cuda() if isinstance(part, torch.Tensor) else part for name, part in parts.items()}

    def look_up() -> list[torch.Tensor]:
        with torch.no_grad():
            # A batch of its own each time: a tensor remembers sums that it has been asked for.
            result = model(make_kjt(batch, case))
            return [result.values()] if case.pooled else [jagged.values() for jagged in result.values()]

    outputs, waits = count_waits(look_up)
    assert all(bool(output.isfinite().all()) for output in outputs)
    return waits


@pytest.mark.parametrize("pooled", [True, False])
def test_a_rank_alone_waits_for_the_gpu_once(gpu_ranks: GpuRanks, pooled: bool) -> None:  # noqa: F811
    assert gpu_ranks.run(1, wait_once, on_gpu(Case((test_sharding.A, test_sharding.B), pooled=pooled))) == [1]


@pytest.mark.parametrize("kind", test_alone.LENGTHS)
def test_lengths_are_compared_on_the_gpu_as_on_the_cpu(kind: str) -> None:
    numbers, batch_size, is_right = test_alone.LENGTHS[kind]
    lengths, num_ids = torch.tensor(numbers, dtype=torch.int64), test_alone.NUM_IDS.get(kind, 0)
    if not is_right:
        with pytest.raises(ValueError, match="features: lengths must be non-negative"):
            ends_on_device(lengths.cuda(), None, num_ids, batch_size)
        return
    ends, starts = ends_on_device(lengths.cuda(), None, num_ids, batch_size)
    on_cpu, starts_on_cpu = ends_on_cpu(lengths, num_ids, batch_size)
    assert torch.equal(ends.cpu(), on_cpu) and starts == starts_on_cpu
