"""Dumps, loads and state_dict over GPUs: what holds for gloo ranks holds there, and between the two."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint import test_background_ranks as background
from tests.checkpoint import test_checkpoint_ranks as dumps
from tests.checkpoint import test_state_dict_ranks as states
from tests.support.placements import owner_of
from tests.support.ranks import ON_ONE_GPU, ON_OWN_GPUS, GpuRanks, RankPool, gpu_ranks, ranks, skip_without_gpus  # noqa: F401
from tests.support.state_dict_model import Kind

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.distributed,
    # DCP's own, and TorchRec's.
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]

ROUTINGS = ["roundrobin", "continuous", "hash_roundrobin"]
# Where each hop of a chain runs, and on how many ranks.
CHAINS = {
    "on GPUs": [("cuda", 1), ("cuda", 2), ("cuda", 1)],
    "GPUs and CPUs": [("cuda", 2), ("cpu", 3), ("cuda", 2), ("cpu", 1), ("cuda", 1)],
    "three ranks": [("cuda", 3), ("cuda", 2), ("cuda", 3)],
}


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    skip_without_gpus(1)


@pytest.fixture
def run(gpu_ranks: GpuRanks, ranks: RankPool) -> Callable[..., list[Any]]:  # noqa: F811
    """Run a job on ranks of a kind of device."""

    def on(device: str, world_size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        return (gpu_ranks if device == "cuda" else ranks).run(world_size, job, *arguments)

    return on


def exactly(rank: int, world_size: int, job: Callable[..., Any], *arguments: Any) -> Any:
    """Do a job whose losses must be equal in every bit."""
    torch.use_deterministic_algorithms(True)
    try:
        return job(rank, world_size, *arguments)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("score", ["TIMESTAMP", "LFU"])
@pytest.mark.parametrize("chain", CHAINS)
def test_c23_chains_of_other_devices_and_world_sizes_lose_nothing(
    run: Callable[..., list[Any]], tmp_path: Path, chain: str, score: str
) -> None:
    hops = CHAINS[chain]

    def case(hop: int) -> Any:
        # Sequences with LFU, bags with times.
        return dumps.case_for(ROUTINGS[hop % 3], score == "TIMESTAMP", score, hops[hop][0])

    before = dumps.joined(run(*hops[0], dumps.train_and_dump, case(0), str(tmp_path / "0")))
    assert all(-(2**63) in table and 2**63 - 1 in table for table in before.values())
    for hop in range(1, len(hops)):
        paths = str(tmp_path / str(hop - 1)), str(tmp_path / str(hop))
        after = dumps.joined(run(*hops[hop], dumps.load_and_dump, case(hop), *paths))
        dumps.check_hop(before, after, score)
        before = after


@pytest.mark.parametrize("score", ["TIMESTAMP", "STEP", "LFU"])
def test_c23_training_goes_on_as_if_it_had_not_stopped(
    run: Callable[..., list[Any]], tmp_path: Path, score: str
) -> None:
    case = dumps.case_for("roundrobin", score=score, device="cuda")
    run("cuda", 2, exactly, dumps.train_on, case, str(tmp_path / "dump"))


def test_c21_gpus_train_while_their_dump_is_written(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert run("cuda", 2, background.train_meanwhile, str(tmp_path), "cuda") == [5, 5]
    background.check_files(tmp_path)


def test_c21_a_failure_on_one_rank_comes_from_wait_on_all(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    background.check_failures(run("cuda", 2, background.fail_meanwhile, str(tmp_path / "dump"), 1, "cuda"))


@pytest.mark.parametrize("score", ["LFU", "TIMESTAMP"])
def test_c29_training_goes_on(run: Callable[..., list[Any]], tmp_path: Path, score: str) -> None:
    kind = Kind(score=score, device="cuda", admit=3)
    run("cuda", 2, exactly, states.resume, kind, str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("first", "second"),
    [(("cuda", 2), ("cuda", 1)), (("cuda", 1), ("cuda", 2)), (("cuda", 2), ("cpu", 3)), (("cpu", 3), ("cuda", 2))],
    ids=lambda place: f"{place[1]} {place[0]}",
)
def test_c29_any_device_and_world_size_loads_any_other(
    run: Callable[..., list[Any]], tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    kind = Kind("continuous", admit=2, device=first[0])
    before = run(*first, states.train_and_save, kind, str(tmp_path / "c"))
    kind = replace(kind, dist_type="roundrobin", seed=5, device=second[0])
    states.check_same(before, run(*second, states.load_and_tell, kind, str(tmp_path / "c")), kind)


def rows_of_all(rank: int, world_size: int, backend: str) -> dict[str, list[int]]:
    """Gather rows over a group; returns the ids, which must be those that all ranks hold."""
    from dynamicemb.incremental_dump import incremental_dump

    case = dumps.case_for("roundrobin", device="cuda")
    model = dumps.make(case, world_size)
    dumps.steps(model, case, rank, range(2))
    rows, _ = incremental_dump(model, 0, pg=dist.new_group([0, 1], backend=backend))
    own = {name: set(records) for name, records in dumps.held(model).items()}
    found = {name: ids for name, (ids, _) in rows["model.collection"].items()}
    for name, ids in found.items():
        assert own[name] == {int(i) for i in ids if owner_of(ids[ids == i], 2, "roundrobin", 300) == rank}
    return {name: ids.tolist() for name, ids in found.items()}


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo", "nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_c26_rows_are_gathered_over_any_group(backend: str) -> None:
    on_gpus = GpuRanks(ON_OWN_GPUS if "nccl" in backend else ON_ONE_GPU)
    first, second = on_gpus.run(2, rows_of_all, backend)
    assert first == second and set(first) == {"users", "things"} and all(map(len, first.values()))
