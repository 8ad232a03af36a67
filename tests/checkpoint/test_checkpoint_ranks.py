"""Dumps of several ranks: any number of ranks and any routing loads any other's, and ranks fail together."""

import errno
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoints import Records, records, shift_between, without_scores
from tests.support.ranks import RankError, RankPool, ranks  # noqa: F401
from tests.support.sharded_model import Case, Table, build, dynamic_modules, loss_of, make_batch, make_kjt, outputs_of

pytestmark = pytest.mark.distributed


def case_for(dist_type: str, pooled: bool = True, score: str = "TIMESTAMP", device: str = "cpu") -> Case:
    tables = (
        Table("users", ("u",), dim=4, dist_type=dist_type, score=score, num_embeddings=300),
        Table("things", ("i", "j"), dim=4 if not pooled else 6, dist_type=dist_type, score=score, num_embeddings=300),
        Table("static", ("s",), num_embeddings=20, sharding="data_parallel"),
    )
    return Case(tables if pooled else tables[:2], pooled=pooled, batch_sizes=(5, 3), device=device)


def make(case: Case, world_size: int, **arguments: Any) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(case, world_size, **{"optimizer": EmbOptimType.ADAM, **arguments})


def steps(model: Any, case: Case, rank: int, numbers: range) -> list[bytes]:
    """Train; return the bits of the losses."""
    losses = []
    for step in numbers:
        result = outputs_of(case, model(make_kjt(make_batch(case, step, rank), case)))
        model.zero_grad()
        loss = loss_of(result)
        loss.backward()
        losses.append(loss.detach().cpu().numpy().tobytes())
    return losses


def held(model: Any) -> dict[str, Records]:
    return {name: records(tables, name) for tables in dynamic_modules(model) for name in tables.table_names}


def train_and_dump(rank: int, world_size: int, case: Case, path: str) -> dict[str, Records]:
    from dynamicemb import DynamicEmbDump

    model = make(case, world_size)
    steps(model, case, rank, range(4))
    DynamicEmbDump(path, model, optim=True)
    return held(model)


def load_and_dump(rank: int, world_size: int, case: Case, path: str, onward: str | None) -> dict[str, Records]:
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad
    from tests.support.placements import owner_of

    model = make(case, world_size, seed=99)
    steps(model, case, rank, range(7, 8))
    report = DynamicEmbLoad(path, model, optim=True)
    for tables in dynamic_modules(model):
        tables.tables.check_invariants()
    found = held(model)
    for table in case.tables:
        if table.sharding is None:
            assert report["model.collection"][table.name].num_lost == 0
            ids = torch.tensor(list(found[table.name]), dtype=torch.int64)
            assert bool((owner_of(ids, world_size, table.dist_type, table.num_embeddings) == rank).all())
    if onward is not None:
        DynamicEmbDump(onward, model, optim=True)
    return found


def joined(parts: list[dict[str, Records]]) -> dict[str, Records]:
    """Return what all ranks hold; no id is on two of them."""
    result: dict[str, Records] = {}
    for name in parts[0]:
        result[name] = {i: record for part in parts for i, record in part[name].items()}
        assert len(result[name]) == sum(len(part[name]) for part in parts)
    return result


def check_hop(before: dict[str, Records], after: dict[str, Records], score: str) -> None:
    """Check that a dump and a load have changed nothing but the moments from which times count."""
    for name in before:
        assert without_scores(after[name]) == without_scores(before[name])
        shift = shift_between(before[name], after[name])
        assert shift == 0 or score == "TIMESTAMP"


CHAINS = {
    "1-2-3-1": ([1, 2, 3, 1], ["roundrobin", "continuous", "hash_roundrobin", "roundrobin"]),
    "2-5-1": ([2, 5, 1], ["hash_roundrobin", "roundrobin", "continuous"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("score", ["TIMESTAMP", "LFU"])
@pytest.mark.parametrize("chain", CHAINS)
def test_c23_chains_of_other_world_sizes_and_routings_lose_nothing(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    chain: str,
    score: str,
) -> None:
    sizes, routings = CHAINS[chain]
    # Sequences with LFU, bags with times.
    pooled = score == "TIMESTAMP"
    first = case_for(routings[0], pooled, score)
    before = joined(ranks.run(sizes[0], train_and_dump, first, str(tmp_path / "0")))
    assert all(-(2**63) in table and 2**63 - 1 in table for table in before.values())
    for hop in range(1, len(sizes)):
        case = case_for(routings[hop], pooled, score)
        onward = str(tmp_path / str(hop))
        after = joined(ranks.run(sizes[hop], load_and_dump, case, str(tmp_path / str(hop - 1)), onward))
        check_hop(before, after, score)
        before = after


def train_on(rank: int, world_size: int, case: Case, path: str) -> None:
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad, state_dict_without_rows

    model = make(case, world_size)
    steps(model, case, rank, range(3))
    DynamicEmbDump(path, model, optim=True)
    resumed = make(case, world_size, seed=1234, learning_rate=0.5)
    steps(resumed, case, rank, range(50, 52))
    DynamicEmbLoad(path, resumed, optim=True)
    # The static table is TorchRec's business.
    with state_dict_without_rows():
        resumed.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    further = range(3, 23)
    assert steps(resumed, case, rank, further) == steps(model, case, rank, further)
    for name, found in held(model).items():
        assert without_scores(found) == without_scores(held(resumed)[name])
        if case.tables[0].score != "TIMESTAMP":
            assert found == held(resumed)[name]


def schedule(rank: int, world_size: int, path: str) -> None:
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad

    case = case_for("roundrobin")
    DynamicEmbDump(path, make(case, world_size, learning_rate=0.05), optim=True)
    model = make(case, world_size, learning_rate=0.001)
    DynamicEmbLoad(path, model)
    for optim, rate in ((False, 0.001), (True, 0.05)):
        DynamicEmbLoad(path, model, optim=optim)
        rates = {group["lr"] for group in model.fused_optimizer.param_groups if not group["params"]}
        assert rates == {rate} == {tables.optimizer.learning_rate for tables in dynamic_modules(model)}
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.001
    # Which leaves alone what has been set.
    DynamicEmbLoad(path, model)
    model.fused_optimizer.step()
    assert {tables.optimizer.learning_rate for tables in dynamic_modules(model)} == {0.001}


def test_c23_schedulers_see_the_learning_rate_of_a_dump(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(1, schedule, str(tmp_path / "dump"))


@pytest.mark.slow
@pytest.mark.parametrize("score", ["TIMESTAMP", "STEP", "LFU"])
def test_c23_training_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path, score: str) -> None:  # noqa: F811
    ranks.run(2, train_on, case_for("roundrobin", score=score), str(tmp_path / "dump"))


def caught(work: Any, disk: Any) -> str:
    try:
        work(disk)
    except OSError as error:
        assert error.errno == errno.EIO
        return str(error)
    return "no error"


def fails_everywhere(work: Any, total: int, guilty: bool) -> None:
    """Let each of so many operations fail in turn on the guilty rank."""
    from tests.support.failing_disk import FailingDisk

    for number in range(1, total + 1):
        disk = FailingDisk(number if guilty else -1, errno.EIO)
        messages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, caught(work, disk))
        assert len(set(messages)) == 1 and messages[0] != "no error", (number, messages)


def fail_on_rank(rank: int, world_size: int, path: str, guilty: int) -> int:
    """Let every disk operation of a rank fail in turn; all ranks must raise the same, and go on."""
    from dynamicemb.checkpoint.disk.io import FileSystem
    from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
    from dynamicemb.checkpoint.load import LoadRequest, load_tables
    from dynamicemb.checkpoint.ranks import Ranks
    from dynamicemb.checkpoint.tables import tables_of_model
    from tests.support.failing_disk import FailingDisk

    case = case_for("roundrobin")
    model = make(case, world_size)
    steps(model, case, rank, range(2))
    tables = tables_of_model(model, None)
    together = Ranks()

    def dump(disk: FileSystem) -> None:
        dump_tables(DumpRequest(path, optim=True, allow_overwrite=True), tables, together, disk)

    def load(disk: FileSystem) -> None:
        load_tables(LoadRequest((path,), optim=True), tables, together, disk)

    def operations(work: Any) -> int:
        disk = FailingDisk(-1, errno.EIO)
        work(disk)
        counts: list[Any] = [None] * world_size
        dist.all_gather_object(counts, disk.count)
        return int(counts[guilty])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dump(FailingDisk(-1, errno.EIO))
        before = held(model)
        num_dump = operations(dump)
        fails_everywhere(dump, num_dump, rank == guilty)
        dump(FailingDisk(-1, errno.EIO))
        num_load = operations(load)
        fails_everywhere(load, num_load, rank == guilty)
        load(FailingDisk(-1, errno.EIO))
    assert {n: without_scores(r) for n, r in held(model).items()} == {n: without_scores(r) for n, r in before.items()}
    return num_dump + num_load


@pytest.mark.parametrize("guilty", [0, 1])
def test_c21_a_failure_on_one_rank_raises_on_all_and_the_group_is_usable_after_it(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    guilty: int,
) -> None:
    assert min(ranks.run(2, fail_on_rank, str(tmp_path / "dump"), guilty)) > 30


def misuse(rank: int, world_size: int, path: str) -> list[str]:
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad
    from dynamicemb.errors import DynamicEmbError

    case = case_for("roundrobin")
    model = make(case, world_size)
    steps(model, case, rank, range(1))
    messages = []

    def expect(kind: type[Exception], work: Any) -> None:
        try:
            work()
        except kind as error:
            messages.append(str(error))
        else:
            raise AssertionError("no error")

    names = {"model.collection": ["users"]} if rank == 0 else None
    expect(DynamicEmbError, lambda: DynamicEmbDump(path, model, names))
    expect(DynamicEmbError, lambda: DynamicEmbDump(path, model, optim=rank == 0))
    expect(ValueError, lambda: DynamicEmbDump(path, model, {"model.other": ["users"]} if rank == 1 else None))
    expect(FileNotFoundError, lambda: DynamicEmbLoad(path, model))
    # Wrong on one rank alone: the other one must not wait for it.
    wrong: Any = None if rank == 1 else path
    expect(TypeError, lambda: DynamicEmbDump(wrong, model))
    expect(TypeError, lambda: DynamicEmbLoad(wrong, model))
    tables = dynamic_modules(model)[0]
    expect(TypeError, lambda: tables.dump(wrong))
    expect(TypeError, lambda: tables.load(wrong))
    expect(TypeError, lambda: DynamicEmbDump(path, model, base=[wrong] if rank == 1 else None))
    switch: Any = "adam" if rank == 1 else True
    expect(TypeError, lambda: DynamicEmbDump(path, model, optim=switch))
    expect(TypeError, lambda: DynamicEmbLoad(path, model, merge=switch))
    assert not os.path.exists(path)
    # Ids on a rank where no lookup finds them.
    dynamic_modules(model)[0].insert("users", torch.tensor([1 - rank]), torch.ones(1, 4))
    expect(DynamicEmbError, lambda: DynamicEmbDump(path, model))
    assert not os.path.exists(path)
    return messages


def test_c21_ranks_that_disagree_or_hold_ids_of_others_raise_on_all(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    first, second = ranks.run(2, misuse, str(tmp_path / "dump"))
    assert first == second
    wanted = ["the ranks disagree about the tables", "the ranks disagree about the options", "no collection"]
    wanted += ["there is no dump", *["path must be a string or a path"] * 5]
    wanted += [f"{name} must be True or False, got 'adam'" for name in ("optim", "merge")]
    for part, message in zip([*wanted, "holds ids on rank 0 that"], first, strict=True):
        assert part in message


def sub_group(rank: int, world_size: int, path: str) -> bool:
    """The first two of three ranks have a model; the third takes no part."""
    from dynamicemb import DynamicEmbDump
    from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
    from tests.support.lookups import bag_per_id, make_module, options

    group = dist.new_group([0, 1])
    if rank == 2:
        return True
    module = make_module([options()])
    module(*bag_per_id(range(rank, 20, 2))).sum().backward()
    DynamicEmbDump(path, module, pg=group)
    copy = make_module([options()])
    assert isinstance(copy, BatchedDynamicEmbeddingTablesV2)
    report = copy.load(os.path.join(path, "model"), pg=group)
    assert report["a"].num_rows == 20
    return records(copy, "a").keys() == set(range(rank, 20, 2))


def other_ranks(rank: int, world_size: int, path: str) -> None:
    """A part of the ranks over which a model is sharded, and more than those."""
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad
    from dynamicemb.checkpoint.ranks import Ranks
    from dynamicemb.checkpoint.tables import tables_of_model

    case = case_for("roundrobin")
    alone = dist.new_group([0])
    model = make(case, world_size)
    steps(model, case, rank, range(1))
    before = held(model)
    DynamicEmbDump(path, model)
    if rank == 0:
        for work in (DynamicEmbDump, DynamicEmbLoad):
            with pytest.raises(ValueError, match=r"are spread over the ranks \[0, 1\], the process group has \[0\]"):
                work(path, model, pg=alone)
        small = make(case, 1, pg=alone)
        steps(small, case, 0, range(1))
        with pytest.raises(ValueError, match=r"are spread over the ranks \[0\], the process group has \[0, 1\]"):
            # Without the other rank, which an error of rank 0 must not wait for.
            tables_of_model(small, None, Ranks())
        DynamicEmbDump(f"{path} of one", small, pg=alone)
        found = held(small)
        DynamicEmbLoad(f"{path} of one", small, pg=alone)
        assert {n: set(r) for n, r in held(small).items()} == {n: set(r) for n, r in found.items()} != {}
    assert held(model) == before


def test_c21_ranks_that_are_not_those_of_the_tables_are_refused(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(2, other_ranks, str(tmp_path / "dump"))


def test_c21_a_part_of_the_ranks_dumps_without_the_others(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    assert ranks.run(3, sub_group, str(tmp_path / "dump")) == [True] * 3
    files = {path.name for path in (tmp_path / "dump" / "model").glob("*emb_keys*")}
    assert files == {"a_emb_keys.rank_0.world_size_2", "a_emb_keys.rank_1.world_size_2"}


def die_in_dump(rank: int, world_size: int, path: str, guilty: int, number: int) -> int:
    """Dump; the guilty rank is killed before one of its operations. Returns how many it had."""
    from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
    from dynamicemb.checkpoint.ranks import Ranks
    from dynamicemb.checkpoint.tables import tables_of_model
    from tests.support.failing_disk import FailingDisk

    class DeadlyDisk(FailingDisk):
        def _count(self, name: str) -> None:
            self.count += 1
            if rank == guilty and self.count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    case = case_for("roundrobin")
    model = make(case, world_size)
    steps(model, case, rank, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disk = DeadlyDisk(-1, 0)
        request = DumpRequest(path, optim=True, allow_overwrite=True)
        dump_tables(request, tables_of_model(model, None), Ranks(), disk)
    return disk.count


@pytest.mark.slow
def test_c21_a_rank_killed_during_a_dump_leaves_the_one_before(tmp_path: Path) -> None:
    guilty = 1
    path = str(tmp_path / "dump")
    case = case_for("roundrobin")
    pool = RankPool()
    try:
        before = joined(pool.run(2, train_and_dump, case, path))
        total = pool.run(2, die_in_dump, str(tmp_path / "other"), guilty, -1)[guilty]
        # In the middle of its files.
        begin = time.monotonic()
        with pytest.raises(RankError, match="process died"):
            pool.run(2, die_in_dump, path, guilty, total // 2)
        assert time.monotonic() - begin < 30
        after = joined(pool.run(2, load_and_dump, case, path, None))
        assert {n: without_scores(r) for n, r in after.items()} == {n: without_scores(r) for n, r in before.items()}
        pool.run(2, die_in_dump, path, guilty, -1)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["dump", "other"]
    finally:
        pool.close()


def count_exchanges(rank: int, world_size: int, path: str) -> tuple[int, int]:
    """Return how often the ranks exchange something in a dump, and in a load."""
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad

    model = make(case_for("roundrobin"), world_size)
    exchange, number = dist.all_gather_object, 0

    def counted(*args: Any, **more: Any) -> None:
        nonlocal number
        number += 1
        exchange(*args, **more)

    dist.all_gather_object = counted
    try:
        DynamicEmbDump(path, model, optim=True)
        of_dump, number = number, 0
        DynamicEmbLoad(path, model, optim=True)
        return of_dump, number
    finally:
        dist.all_gather_object = exchange


def test_a_load_exchanges_six_times(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    """Each exchange waits for the slowest rank: find the tables, agree, look, verify, fill, adopt."""
    found = ranks.run(2, count_exchanges, str(tmp_path / "dump"))
    assert {of_load for _, of_load in found} == {6}
