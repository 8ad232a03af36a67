"""Dumps in the background are those of the moment of their call, whatever happens while they are written."""

import errno
import logging
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import DumpHandle, DynamicEmbDump, DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, KVCounter
from dynamicemb.checkpoint import dump as dump_path
from dynamicemb.checkpoint.tables import tables_of_modules
from dynamicemb.checkpoint.writing import contents
from dynamicemb.checkpoint.writing.contents import Selected, copied, live, num_copied_bytes
from dynamicemb.errors import DynamicEmbError
from dynamicemb.table.index import SEEN
from tests.checkpoint.test_counters import FileCounter
from tests.support.background import SlowDisk, dump, dump_in_background, files_of, load, make, step
from tests.support.checkpoints import records, without_scores
from tests.support.lookups import options
from tests.support.memory_disk import IMAGES, Killed, MemoryDisk, failing_at, killing_at

TIMESTAMP, STEP, _, LFU, KEEP = DynamicEmbScoreStrategy
SECOND = 10**9


def counting(**more: Any) -> Any:
    strategy, counter = FrequencyAdmissionStrategy(2), KVCounter(64, 16)
    return options(admit_strategy=strategy, admission_counter=counter, score_strategy=LFU, **more)


# Tables, arguments of the module, and what is dumped.
CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "two tables": ([options(), options(dim=3, capacity=128)], {}, {}),
    "bf16 that grows": ([options(init_capacity=16, capacity=128)], {"output_dtype": torch.float32}, {}),
    "fp16 without state": ([options(dim=5, score_strategy=STEP)], {}, {"optim": False}),
    "two scores and no state": ([options(score_strategy=(LFU, TIMESTAMP))], {"optimizer": "sgd"}, {}),
    "ids that expire": ([options(ttl=100.0), options()], {}, {}),
    "admission": ([counting(), counting(dim=3)], {"optimizer": "exact_row_wise_adagrad"}, {"counter": True}),
    "never evicts": ([options(capacity=None, init_capacity=32, score_strategy=KEEP)], {}, {}),
}
for _name, _dtype in (("bf16 that grows", torch.bfloat16), ("fp16 without state", torch.float16)):
    for _table in CASES[_name][0]:
        _table.embedding_dtype = _dtype


def disturb(module: Any, disk: MemoryDisk, num_steps: int = 4) -> None:
    """Evict, erase, grow, expire, count and load."""
    before = module.stats()["a"]
    for first in range(1000, 1000 + 20 * num_steps, 20):
        step(module, *range(first, first + 20), *range(first, first + 20), 3, -3)
    assert module.erase("a", torch.tensor([3, -3], device=module.tables.device)) == 2
    module.tables.index.clock[SEEN] += 200 * SECOND
    after = module.stats()["a"]
    assert after["evicted"] > before["evicted"] or after["capacity"] > before["capacity"]
    step(module, 7)
    load(module, disk, "/runs/other")
    step(module, 8, 8)


# Interpreted kernels take seconds for what others do at once.
_EVERYWHERE = [(case, increment) for case in CASES for increment in (False, True)]
_INTERPRETED = [("two tables", True), ("admission", False)]
_RUNS = [
    *(pytest.param("cpu", *run) for run in _EVERYWHERE),
    *(pytest.param("interpret", *run) for run in _INTERPRETED),
    *(pytest.param("cuda", *run, marks=pytest.mark.cuda) for run in _EVERYWHERE),
]


@pytest.mark.parametrize(("backend", "case", "increment"), _RUNS, indirect=["backend"])
def test_c21_files_are_those_of_the_moment_of_the_call(backend: str, case: str, increment: bool) -> None:
    tables, arguments, request = CASES[case]
    module = make(backend, *tables, **arguments)
    disk, slow = MemoryDisk(), SlowDisk()
    step(module, *range(-15, 15))
    step(module, *range(-3, 3))
    if increment:
        dump(module, disk, "/runs/base", **request)
        slow.root = disk.image(True, True).root
        module.erase("a", torch.tensor([-15, 5], device=module.tables.device))
        module.tables.index.clock[SEEN] += 10 * SECOND
        step(module, 1, 1, 50, 60)
        request = {**request, "base": ["/runs/base"]}
    device = module.tables.device
    out = module(torch.tensor([2], device=device), torch.tensor([0] + [1] * len(tables), device=device))
    marks = dict(module.tables.marks)
    dump(module, disk, **request)
    module.tables.marks = marks
    other = make(backend, *tables, **arguments)
    step(other, 5, 5, 6)
    dump(other, disk, "/runs/other", **request | {"base": []})
    handle = dump_in_background(module, slow, **request)
    total = handle.progress()[1]
    out.sum().backward()
    disturb(module, disk, 3 if backend == "interpret" else 4)
    assert not handle.done() and handle.progress() == (0, total) and total > 0
    slow.go.set()
    handle.wait()
    assert handle.done() and handle.progress() == (total, total)
    assert files_of(slow) == files_of(disk)
    assert not slow.files and {path.split("/")[2] for path in slow.all_files()} <= {"dump", "base"}


def test_c26_increments_in_the_background_equal_a_full_dump(backend: str) -> None:
    module, disk, chain = make(backend, options()), MemoryDisk(), []
    for number in range(4):
        step(module, *range(20 * number, 20 * number + 25))
        # It waits for the one before, which it continues.
        chain.append(f"/runs/{number}")
        handle = dump_in_background(module, disk, chain[-1], base=chain[:-1])
        # In the next increment.
        module.erase("a", torch.tensor([20 * number], device=module.tables.device))
        step(module, 20 * number + 1)
    handle.wait()
    dump(module, disk, "/runs/last", base=chain)
    copy = make(backend, options())
    load(copy, disk, *chain, "/runs/last")
    assert without_scores(records(copy, "a")) == without_scores(records(module, "a"))
    assert module.stats()["a"]["evicted"] > 10


def contents_of(module: Any, disk: MemoryDisk) -> dict[int, tuple[bytes, bytes]]:
    copy = make("cpu", options())
    load(copy, disk)
    return without_scores(records(copy, "a"))


def test_c21_an_error_at_any_operation_comes_from_wait_and_leaves_dump_and_marks_of_before() -> None:
    module, first = make("cpu", options()), MemoryDisk()
    step(module, *range(20))
    dump(module, first)
    old = without_scores(records(module, "a"))
    mark = module.tables.marks[0]
    step(module, 1, 2, 3)
    new = without_scores(records(module, "a"))
    request = {"base": ["/runs/dump"]}
    counting = first.image(True, True)
    dump_in_background(module, counting, "/runs/next", **request).wait()
    for number in range(1, counting.count + 1):
        disk = first.image(True, True)
        disk.fail = failing_at(number, errno.EIO)
        module.tables.marks[0] = mark
        handle = dump_in_background(module, disk, "/runs/next", **request)
        with pytest.raises(OSError) as caught:
            handle.wait()
        assert caught.value.errno == errno.EIO and handle.done()
        assert module.tables.marks[0] is mark and not disk.files
        disk.fail = lambda number, name: None
        assert contents_of(module, disk) == old
        dump_in_background(module, disk, "/runs/next", allow_overwrite=True, **request).wait()
        copy = make("cpu", options())
        load(copy, disk, "/runs/dump", "/runs/next")
        assert without_scores(records(copy, "a")) == new
    assert counting.count > 30


@pytest.mark.parametrize("image", IMAGES)
def test_c21_a_dump_in_the_background_that_is_killed_leaves_the_one_before(image: str) -> None:
    module, first = make("cpu", options()), MemoryDisk()
    step(module, *range(20))
    dump(module, first)
    old = without_scores(records(module, "a"))
    step(module, 1, 2, 3, 30)
    new = without_scores(records(module, "a"))
    counting = first.image(True, True)
    dump_in_background(module, counting, allow_overwrite=True).wait()
    found = []
    for number in range(1, counting.count + 1):
        disk = first.image(True, True)
        disk.fail = killing_at(number)
        with pytest.raises(Killed):
            dump_in_background(module, disk, allow_overwrite=True).wait()
        found.append(contents_of(module, disk.image(*IMAGES[image])))
        assert found[-1] in (old, new)
    assert old in found and new in found


def test_c21_a_dump_waits_for_the_one_before_it() -> None:
    module, slow, disk = make("cpu", options()), SlowDisk(), MemoryDisk()
    step(module, 1, 2)
    first = dump_in_background(module, slow)
    step(module, 3)
    for blocking in (True, False):
        slow.go.clear()
        timer = threading.Timer(0.2, slow.go.set)
        timer.start()
        assert first.done() != blocking
        dump(module, disk, f"/runs/{blocking}", blocking=blocking)
        assert first.done()
        timer.join()
    dump(module, disk, "/runs/last")
    assert sorted(disk.entries("/runs") or ()) == ["False", "True", "last"]
    assert len(records(module, "a")) == 3 and len(contents_of(module, slow)) == 2


def test_c27_an_error_that_nobody_waited_for_is_told_by_the_next_dump() -> None:
    module, disk = make("cpu", options()), MemoryDisk()
    step(module, 1, 2)
    disk.fail = failing_at(8, errno.ENOSPC)
    dump_in_background(module, disk, "/runs/lost")
    with pytest.warns(RuntimeWarning, match="'/runs/lost' failed in the background, and nobody waited.*No space"):
        dump(module, disk)
    assert len(contents_of(module, disk)) == 2
    disk.fail = failing_at(disk.count + 8, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        dump_in_background(module, disk, "/runs/heard").wait()
    # Told once.
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        dump(module, disk, allow_overwrite=True)


def test_c21_what_the_disk_refuses_comes_from_wait(tmp_path: Path) -> None:
    module = make("cpu", options())
    step(module, 1, 2)
    (tmp_path / "thesis.tex").touch()
    handle = module.dump(tmp_path, blocking=False)
    assert isinstance(handle, DumpHandle)
    with pytest.raises(FileExistsError, match="not empty"):
        handle.wait()
    handle = module.dump(tmp_path / "base", optim=True, blocking=False)
    handle.wait()
    handle = module.dump(tmp_path / "base", optim=True, blocking=False, base=tmp_path / "base", allow_overwrite=True)
    with pytest.raises(ValueError, match="an increment needs a folder of its own"):
        handle.wait()
    step(module, 3)
    module.dump(tmp_path / "other", optim=True)
    handle = module.dump(tmp_path / "next", optim=True, blocking=False, base=tmp_path / "base")
    with pytest.raises(DynamicEmbError, match="base ends with .*the last dump or load of the table was dump"):
        handle.wait()
    # This can be said at once.
    fresh = make("cpu", options())
    with pytest.raises(DynamicEmbError, match="last dump or load of the table was none.*full dump"):
        fresh.dump(tmp_path / "next", optim=True, blocking=False, base=tmp_path / "base")
    with pytest.warns(UserWarning, match="no dynamic tables"):
        handle = DynamicEmbDump(tmp_path / "nothing", torch.nn.Linear(1, 1), blocking=False)
    handle.wait()
    assert handle.done() and handle.progress() == (0, 0)


def test_c21_wait_gives_up_in_time_and_the_dump_goes_on() -> None:
    module, slow = make("cpu", options()), SlowDisk()
    step(module, *range(10))
    handle = dump_in_background(module, slow)
    with pytest.raises(TimeoutError, match=r"'/runs/dump' was not complete after 0.01 s: 0 of 10 rows"):
        handle.wait(0.01)
    assert not handle.done() and repr(handle) == "DumpHandle('/runs/dump', 0 of 10 rows of this rank, being written)"
    slow.go.set()
    assert handle.wait(60) is None and handle.wait() is None
    assert repr(handle).endswith("10 of 10 rows of this rank, complete)")
    for wrong, kind in (("1", TypeError), (-5, ValueError), (float("nan"), ValueError), (float("inf"), ValueError)):
        with pytest.raises(kind, match="timeout must be"):
            handle.wait(wrong)  # type: ignore[arg-type]
    assert len(contents_of(module, slow)) == 10


@pytest.mark.parametrize("fails", [False, True])
def test_c26_a_load_during_a_dump_says_what_increments_continue(fails: bool) -> None:
    module, slow, disk = make("cpu", options()), SlowDisk(), MemoryDisk()
    step(module, 1, 2)
    dump(module, disk)
    step(module, 3)
    for merge in (False, True):
        slow.go.clear()
        slow.reached.clear()
        slow.fail = (lambda number, name: None) if not fails else failing_at(slow.count + 20, errno.EIO)
        handle = dump_in_background(module, slow, allow_overwrite=True)
        load(module, disk, merge=merge)
        mark = module.tables.marks.get(0)
        assert (mark is None) == merge
        slow.go.set()
        if fails:
            with pytest.raises(OSError):
                handle.wait()
        else:
            handle.wait()
        assert module.tables.marks.get(0) is mark


def test_c20_the_copy_takes_what_was_said_and_goes_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contents, "_COPY_BLOCK_BYTES", 16 * 4 * 12)
    module = make("cpu", options(capacity=256), options(capacity=64, dim=5))
    step(module, *range(40))
    step(module, 1, 2)
    tables = tables_of_modules([module], "")
    for selected in (Selected(True, False), Selected(False, False), Selected(True, False, 2, True)):
        copies = copied(tables, [selected, selected])
        for table, copy in zip(tables, copies, strict=True):
            blocks = list(copy.blocks)
            held = copy.holds._ids.nbytes if selected.increment else 0  # type: ignore[attr-defined]
            arrays = [part for block in blocks for part in (block.keys, block.weights, block.state, *block.scores)]
            assert sum(array.untyped_storage().nbytes() for array in arrays) + held == num_copied_bytes(table, selected)
            assert sum(block.keys.numel() for block in blocks) == copy.num_rows == (2 if selected.increment else 40)
    (copy, _) = copied(tables, [Selected(True, False)] * 2)
    seen = []
    for block in copy.blocks:
        assert [number for number, part in enumerate(seen) if part() is not None] == []
        seen += [weakref.ref(block.weights), weakref.ref(block.state)]
        del block
    assert len(seen) > 4
    wanted = sum(num_copied_bytes(table, Selected(True, False)) for table in tables)
    with caplog.at_level(logging.INFO, logger="dynamicemb"):
        dump_in_background(module, MemoryDisk()).wait()
    assert f"copies {wanted} bytes to host memory" in caplog.text
    marks = dict(module.tables.marks)
    monkeypatch.setattr(dump_path, "available_host_memory", lambda: wanted - 1)
    disk = MemoryDisk()
    with pytest.raises(MemoryError, match=rf"wants {wanted} bytes on .*free are {wanted - 1}; dump with blocking=True"):
        dump_in_background(module, disk)
    assert module.tables.marks == marks and disk.count == 0
    dump(module, disk)
    monkeypatch.setattr(dump_path, "available_host_memory", lambda: wanted)
    dump_in_background(module, disk, allow_overwrite=True).wait()


def test_c20_a_dump_that_failed_holds_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_COPY_BLOCK_BYTES", 16 * 4 * 12)
    held: list[weakref.ref[torch.Tensor]] = []

    def watched(*args: Any) -> list[contents.Contents]:
        copies = copied(*args)
        for copy in copies:
            blocks = list(copy.blocks)
            held.extend(weakref.ref(part) for block in blocks for part in (block.weights, block.state))
            copy.blocks = contents.drained(blocks)
        return copies

    monkeypatch.setattr(dump_path, "copied", watched)
    module, disk = make("cpu", options(capacity=256), options(capacity=256)), MemoryDisk()
    step(module, *range(100))
    disk.fail = failing_at(20, errno.EIO)
    handle = dump_in_background(module, disk)
    with pytest.raises(OSError):
        handle.wait()
    assert len(held) > 20 and [part for part in held if part() is not None] == []


def test_c12_a_counter_of_the_user_is_asked_at_the_call() -> None:
    counter, slow, disk = FileCounter(), SlowDisk(), MemoryDisk()
    module = make("cpu", options(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=counter))
    step(module, 1, 1, -5)
    dump(module, disk, counter=True)
    handle = dump_in_background(module, slow, counter=True)
    step(module, 2, 2, 1)
    assert counter.counts == {(0, -5): 1, (0, 2): 2}
    slow.go.set()
    handle.wait()
    assert files_of(slow) == files_of(disk)
    broken = FileCounter(broken=True)
    module = make("cpu", options(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=broken))
    with pytest.raises(DynamicEmbError, match="FileCounter.dump must write"):
        dump_in_background(module, disk, counter=True)


def test_c21_tables_are_locked_while_they_are_dumped_and_not_while_their_copy_is() -> None:
    module, slow = make("cpu", options()), SlowDisk()
    step(module, 1)

    def is_free() -> bool:
        """Say whether another thread gets the lock."""
        got = []

        def take() -> None:
            got.append(module.tables.turn._lock.acquire(blocking=False))
            if got[0]:
                module.tables.turn._lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return got[0]

    with live(tables_of_modules([module], "")[0], Selected(True, False)):
        assert not is_free()
    handle = dump_in_background(module, slow)
    assert is_free()
    slow.go.set()
    handle.wait()
