"""Dumps in the background of several ranks, and of processes that end."""

import errno
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dynamicemb.checkpoint.disk.io import FileSystem
from tests.support.checkpoints import records, trained, without_scores
from tests.support.failing_disk import FailingDisk
from tests.support.ranks import RankPool, ranks  # noqa: F401

pytestmark = pytest.mark.distributed


class SlowRealDisk(FileSystem):
    """The real disk, which stands still before its first write until `go` is set."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def write(self, file: int, data: memoryview) -> None:
        self.reached.set()
        assert self.go.wait(300), "nobody let the disk go on"
        super().write(file, data)


def start(model: Any, path: str, disk: FileSystem, **request: Any) -> Any:
    from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
    from dynamicemb.checkpoint.ranks import Ranks
    from dynamicemb.checkpoint.tables import tables_of_model

    request = {"optim": True, "blocking": False, **request}
    return dump_tables(DumpRequest(path, **request), tables_of_model(model, None), Ranks(), disk)


def train_meanwhile(rank: int, world_size: int, path: str, device: str = "cpu") -> int:
    """Dump in the background, then train with collectives of its own; returns the steps that ran meanwhile."""
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad
    from tests.checkpoint.test_checkpoint_ranks import case_for, held, make, steps
    from tests.support.sharded_model import dynamic_modules

    case = case_for("roundrobin", score="LFU", device=device)
    model = make(case, world_size)
    steps(model, case, rank, range(3))
    before = held(model)
    DynamicEmbDump(f"{path}/now", model, optim=True)
    slow = SlowRealDisk()
    handle = start(model, f"{path}/later", slow)
    assert slow.reached.wait(60)
    steps(model, case, rank, range(3, 8))
    assert not handle.done() and held(model) != before
    slow.go.set()
    # The last steps and the collectives of the dump go on side by side.
    steps(model, case, rank, range(8, 12))
    handle.wait()
    DynamicEmbDump(f"{path}/next", model, optim=True, base=f"{path}/later", blocking=False).wait()
    after = held(model)
    DynamicEmbLoad(f"{path}/later", model, optim=True)
    assert held(model) == before
    DynamicEmbLoad([f"{path}/later", f"{path}/next"], model, optim=True)
    assert held(model) == after
    for tables in dynamic_modules(model):
        tables.tables.check_invariants()
    return 5


def test_c21_ranks_train_while_their_dump_is_written(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    assert ranks.run(2, train_meanwhile, str(tmp_path)) == [5, 5]
    check_files(tmp_path)


def check_files(tmp_path: Path) -> None:
    """Check that the dump in the background has the files of the one before it."""
    now, later = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.rank_*")}
        for folder in (tmp_path / "now", tmp_path / "later")
    )
    assert now == later and len(now) == 16 and any(now.values())


def fail_meanwhile(rank: int, world_size: int, path: str, guilty: int, device: str = "cpu") -> list[tuple[str, str]]:
    """Let operations of one rank fail; returns the error of each and of the next dump, which must succeed."""
    from tests.checkpoint.test_checkpoint_ranks import case_for, make, steps

    case = case_for("roundrobin", device=device)
    model = make(case, world_size)
    steps(model, case, rank, range(2))
    counting = FailingDisk(-1, errno.EIO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start(model, path, counting).wait()
        counts: list[Any] = [None] * world_size
        dist.all_gather_object(counts, counting.count)
        messages = []
        for number in range(2, counts[guilty], 7):
            disk = FailingDisk(number if rank == guilty else -1, errno.EIO)
            handle = start(model, path, disk, allow_overwrite=True)
            steps(model, case, rank, range(1))
            try:
                handle.wait()
            except OSError as error:
                messages.append(str(error))
        start(model, path, FailingDisk(-1, errno.EIO), allow_overwrite=True).wait()
    assert len(messages) == len(range(2, counts[guilty], 7))
    return messages


@pytest.mark.parametrize("guilty", [0, 1])
def test_c21_a_failure_on_one_rank_comes_from_wait_on_all(ranks: RankPool, tmp_path: Path, guilty: int) -> None:  # noqa: F811
    check_failures(ranks.run(2, fail_meanwhile, str(tmp_path / "dump"), guilty))


def check_failures(messages: list[Any]) -> None:
    """Check that both ranks had the error of the disk."""
    first, second = messages
    assert first == second and len(first) > 3 and all("Errno 5" in message for message in first)


def dump_in_groups(rank: int, world_size: int, path: str) -> bool:
    """Dump on all ranks, of which some have more groups than others, and on some of them."""
    from dynamicemb import DynamicEmbDump
    from dynamicemb.checkpoint.ranks_apart import _APART
    from tests.support.lookups import bag_per_id, make_module, options

    pair = dist.new_group([0, 1], use_local_synchronization=True)
    module = make_module([options()])
    module(*bag_per_id(range(rank, 30, 3))).sum().backward()
    connections = []
    for number in range(2):
        DynamicEmbDump(f"{path}/all{number}", module, blocking=False).wait()
        connections.append(_APART[dist.group.WORLD])
    assert connections[0] is connections[1]
    copy = make_module([options()])
    assert copy.load(f"{path}/all1/model")["a"].num_rows == 30
    dist.barrier()
    if rank < 2:
        module = make_module([options()])
        module(*bag_per_id(range(rank, 30, 2))).sum().backward()
        handle = DynamicEmbDump(f"{path}/pair", module, pg=pair, blocking=False)
        handle.wait()
        assert _APART[pair] is not connections[0]
        assert make_module([options()]).load(f"{path}/pair/model", pg=pair)["a"].num_rows == 30
    return True


def test_c21_ranks_of_any_group_dump_in_the_background(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    assert ranks.run(3, dump_in_groups, str(tmp_path)) == [True] * 3


def leave_meanwhile(rank: int, world_size: int, path: str) -> bool:
    """Destroy the process group while a dump is being written."""
    from tests.support.lookups import bag_per_id, make_module, options

    module = make_module([options()])
    module(*bag_per_id(range(rank, 20, 2))).sum().backward()
    slow = SlowRealDisk()
    handle = start(module, path, slow)
    assert slow.reached.wait(60)
    dist.destroy_process_group()
    slow.go.set()
    handle.wait()
    assert Path(path, "manifest.json").exists()
    copy = make_module([options()])
    copy.load(Path(path, "model"))
    return records(copy, "a").keys() == set(range(20))


@pytest.mark.slow
def test_c21_a_dump_outlives_the_process_group(tmp_path: Path) -> None:
    pool = RankPool()
    try:
        # Each rank alone reads what both have written.
        assert all(pool.run(2, leave_meanwhile, str(tmp_path / "dump")))
    finally:
        pool.close()


def turn_warnings_into_errors(rank: int, world_size: int, path: str) -> list[str]:
    """Let rank 0 hear of an error that rank 1 has not heard of, and load counts into tables without a counter."""
    from dynamicemb import FrequencyAdmissionStrategy, KVCounter
    from tests.support.lookups import bag_per_id, make_module, options

    module = make_module([options()])
    module(*bag_per_id(range(rank, 20, 2))).sum().backward()
    state = module.state_dict()
    counting = make_module([options(admit_strategy=FrequencyAdmissionStrategy(2), admission_counter=KVCounter(64, 16))])
    Path(path).mkdir(exist_ok=True)
    Path(path, "thesis.tex").touch()
    messages = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = module.dump(path, blocking=False)
        if rank == 0:
            with pytest.raises(FileExistsError):
                handle.wait()
        for work in (lambda: module.dump(path), lambda: counting.load_state_dict(state)):
            try:
                work()
            except Warning as warning:
                messages.append(str(warning))
    # The group can be used after it.
    module.dump(f"{path}/folder/dump")
    return messages


def test_c21_a_warning_that_is_an_error_is_one_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    for unheard, counts in ranks.run(2, turn_warnings_into_errors, str(tmp_path / "dump")):
        assert "failed in the background, and nobody waited for it" in unheard
        assert "has no admission counts" in counts


class NoThreads(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def lack_a_thread(rank: int, world_size: int, path: str) -> str:
    """Dump in the background where rank 1 can start no thread, then again where it can; returns the first error."""
    from tests.support.lookups import bag_per_id, make_module, options

    model = make_module([options()])
    model(*bag_per_id(range(rank, 20, 2))).sum().backward()
    usual, message = threading.Thread, ""
    threading.Thread = NoThreads if rank == 1 else usual
    try:
        start(model, path, FileSystem())
    except RuntimeError as error:
        message = str(error)
    finally:
        threading.Thread = usual
    assert not model.tables.marks and not Path(path).exists()
    for thread in threading.enumerate():
        if thread.name == "dynamicemb dump":
            thread.join(60)
            assert not thread.is_alive()
    start(model, path, FileSystem()).wait(60)
    return message


def test_c21_a_rank_without_a_thread_raises_on_all(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    assert ranks.run(2, lack_a_thread, str(tmp_path / "dump")) == ["can't start new thread"] * 2


_CHILD = """
import os, signal, sys, threading
from dynamicemb.checkpoint.disk.io import FileSystem
from tests.support.checkpoints import trained
from tests.checkpoint.test_background_ranks import start

class Disk(FileSystem):
    def write(self, file, data):
        # Not before the main thread has come to its end, and the interpreter to its own.
        threading.main_thread().join()
        if sys.argv[2] == "fails":
            raise OSError(28, "No space left on device")
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(file, data)

start(trained(num_steps=2, seed=2, num_tables=1), sys.argv[1], Disk(), allow_overwrite=True)
print("the end of the main thread")
"""


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["succeeds", "fails", "killed"])
def test_c21_a_process_ends_with_a_whole_dump_or_the_one_before(tmp_path: Path, fate: str) -> None:
    place = tmp_path / "dump"
    old, new = trained(num_steps=1, seed=1, num_tables=1), trained(num_steps=2, seed=2, num_tables=1)
    start(old, str(place), FileSystem()).wait()
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", _CHILD, str(place), fate]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if fate == "killed" else 0), done.stderr
    assert fate == "killed" or "the end of the main thread" in done.stdout
    copy = trained(num_steps=1, seed=3, num_tables=1)
    copy.load(place / "model", optim=True)
    expected = new if fate == "succeeds" else old
    assert without_scores(records(copy, "a")) == without_scores(records(expected, "a"))
    told = f"the dump to {str(place)!r} failed in the background, and nobody waited for it: OSError(28" in done.stderr
    assert told == (fate == "fails"), done.stderr


def find_store(rank: int, world_size: int) -> str:
    from dynamicemb.checkpoint.ranks_apart import default_store

    store = default_store()
    store.set(f"found {rank}", "yes")
    return store.get(f"found {1 - rank}").decode()


def test_this_torch_has_the_store_that_connections_are_made_over(ranks: RankPool) -> None:  # noqa: F811
    """``_get_default_store`` is private; torch 2.11 to 2.14 have it."""
    assert ranks.run(2, find_store) == ["yes", "yes"]
