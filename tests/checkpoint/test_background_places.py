"""A load of the place that a dump in the background is being written to, and paths that mean something else later."""

import errno
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from dynamicemb.checkpoint.disk.io import FileSystem
from dynamicemb.checkpoint.dump import DumpRequest, dump_tables
from dynamicemb.checkpoint.load import LoadRequest, load_tables
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.tables import tables_of_model, tables_of_modules
from tests.checkpoint.test_background_ranks import SlowRealDisk
from tests.support.background import SlowDisk, dump, dump_in_background, load, make, step
from tests.support.checkpoints import records
from tests.support.lookups import options
from tests.support.memory_disk import failing_at


def held_after(go: threading.Event, work: Any) -> set[int]:
    """Start a load, which must wait for `go`; return the ids that it brought."""
    copy, done = make("cpu", options()), threading.Event()

    def run() -> None:
        work(copy)
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert not done.wait(0.3), "the load did not wait"
    go.set()
    thread.join(60)
    assert done.is_set()
    return set(records(copy, "a"))


@pytest.mark.parametrize("chained", [False, True])
def test_c21_a_load_of_a_dump_that_is_being_written_waits_for_it(chained: bool) -> None:
    module, slow = make("cpu", options()), SlowDisk()
    step(module, 1, 2)
    slow.go.set()
    dump(module, slow, "/runs/base")
    step(module, 3)
    slow.go.clear()
    slow.reached.clear()
    base = ("/runs/base",) if chained else ()
    place = "/runs/first" if chained else "/runs/base"
    handle = dump_in_background(module, slow, place, base=base, allow_overwrite=True)
    paths = ("/runs/base", "/runs/first") if chained else ("/runs/other/../base/",)
    assert held_after(slow.go, lambda copy: load(copy, slow, *paths)) == {1, 2, 3}
    handle.wait()


def test_c21_a_load_of_a_collection_of_a_dump_that_is_being_written_waits_for_it(tmp_path: Path) -> None:
    module, slow = make("cpu", options()), SlowRealDisk()
    step(module, 1, 2)
    (tmp_path / "link").symlink_to(tmp_path)
    request = DumpRequest(str(tmp_path / "link" / "dump"), True, blocking=False)
    handle = dump_tables(request, tables_of_model(module, None), Ranks(), slow)
    assert handle is not None and slow.reached.wait(60)

    def work(copy: Any) -> None:
        load_tables(LoadRequest((str(tmp_path / "dump" / "model"),)), tables_of_modules([copy], ""), Ranks(), slow)

    assert held_after(slow.go, work) == {1, 2}
    handle.wait()


def test_c21_a_load_of_other_places_does_not_wait() -> None:
    module, slow = make("cpu", options()), SlowDisk()
    step(module, 1, 2)
    slow.go.set()
    dump(module, slow, "/runs/base")
    slow.go.clear()
    slow.reached.clear()
    handle = dump_in_background(module, slow, "/runs/later")
    copy = make("cpu", options())
    load(copy, slow, "/runs/base")
    assert set(records(copy, "a")) == {1, 2} and not handle.done()
    slow.go.set()
    handle.wait()


def test_c27_a_load_raises_the_error_of_the_dump_that_it_wanted_once() -> None:
    module, slow, copy = make("cpu", options()), SlowDisk(), make("cpu", options())
    step(module, 1, 2)
    slow.go.set()
    dump(module, slow)
    step(module, 3)
    for heard in (False, True):
        slow.fail = failing_at(slow.count + 8, errno.ENOSPC)
        handle = dump_in_background(module, slow, allow_overwrite=True)
        with pytest.raises(OSError, match="No space"):
            handle.wait() if heard else load(copy, slow)
        load(copy, slow)
        assert set(records(copy, "a")) == {1, 2}
        with pytest.raises(OSError, match="No space"):
            handle.wait()


def test_c21_a_dump_goes_where_its_path_led_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make("cpu", options())
    step(module, 1, 2)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    module.dump("base", optim=True)
    step(module, 3)

    class Moving(FileSystem):
        def real_path(self, path: str) -> str:
            # Between the call and the first thing that the thread does.
            if threading.current_thread() is not threading.main_thread():
                os.chdir(tmp_path / "there")
            return super().real_path(path)

    request = DumpRequest("first", True, base=("base",), blocking=False)
    handle = dump_tables(request, tables_of_modules([module], ""), Ranks(), Moving())
    assert handle is not None
    handle.wait()
    assert sorted(os.listdir(tmp_path / "here")) == ["base", "first"] and not os.listdir(tmp_path / "there")


def test_c21_threads_that_dump_to_one_place_follow_each_other(tmp_path: Path) -> None:
    few, many = make("cpu", options()), make("cpu", options())
    step(few, 1, 2)
    step(many, *range(10))
    few.dump(tmp_path / "dump")
    failures: list[BaseException] = []

    def run(module: Any, blocking: bool) -> None:
        try:
            handle = module.dump(tmp_path / "dump", allow_overwrite=True, blocking=blocking)
            if handle is not None:
                handle.wait()
        except BaseException as error:
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(15):
            calls = [(few, True), (many, True), (many, False)]
            threads = [threading.Thread(target=run, args=call) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not failures
            copy = make("cpu", options())
            copy.load(tmp_path / "dump")
            assert set(records(copy, "a")) in ({1, 2}, set(range(10)))
            assert os.listdir(tmp_path) == ["dump"]


_FORKING = """
import os, sys
from tests.support.background import SlowDisk, dump_in_background, make, step
from tests.support.lookups import options

module, slow = make("cpu", options()), SlowDisk()
step(module, 1, 2)
handle = dump_in_background(module, slow)
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
slow.go.set()
handle.wait()
print("over")
"""


@pytest.mark.slow
def test_c21_a_forked_child_does_not_wait_for_a_dump_that_it_does_not_write() -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", _FORKING], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "over", done.stderr
