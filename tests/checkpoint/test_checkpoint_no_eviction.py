"""Dumps of tables that never evict: the order in which ids were inserted comes back."""

from pathlib import Path
from typing import Any

from dynamicemb import DynamicEmbScoreStrategy
from dynamicemb.table.index import NOW, SEEN
from tests.support.checkpoints import load_quietly, records, shift_between, without_scores
from tests.support.lookups import bag_per_id, make_module, options
from tests.support.tables import device_of, use_backend

KEEP = DynamicEmbScoreStrategy.NO_EVICTION
# Later than any clock, so that time passes only where a test says so.
LATE = 4 * 10**18


def keeping(backend: str, **more: Any) -> Any:
    module = make_module(
        [options(capacity=None, init_capacity=32, score_strategy=KEEP, **more)],
        optimizer="adam",
        device=device_of(backend),
    )
    use_backend(module.tables, backend)
    return module


def step(module: Any, ids: Any) -> list[float]:
    ids, offsets = bag_per_id(ids)
    out = module(ids.to(module.tables.device), offsets.to(module.tables.device))
    out.pow(2).sum().backward()
    return out.detach().cpu().flatten().tolist()


def test_c10_a_table_that_never_evicts_comes_back_in_the_order_of_insertion(backend: str, tmp_path: Path) -> None:
    module = keeping(backend)
    for first in (40, -20, 0):
        step(module, [*range(first, first + 20), *range(40, 45)])
    module.dump(tmp_path / "d", optim=True)
    before = records(module, "a")
    order = [before[i][2] for i in (40, -20, 0)]
    assert order == sorted(set(order)) and before[59][2] == before[40][2]
    # A table whose clock is behind the dump's, by an hour: what comes next is later all the same.
    copy = keeping(backend)
    report = copy.load(tmp_path / "d", optim=True)["a"]
    assert (report.num_rows, report.num_lost) == (60, 0)
    after = records(copy, "a")
    assert without_scores(before) == without_scores(after)
    assert shift_between(before, after) > 0
    for ids in ([100], [-20, 101]):
        assert step(copy, ids) == step(module, ids)
    scores = {i: score for i, (_, _, score) in records(copy, "a").items()}
    assert max(score for i, score in scores.items() if i < 100) < scores[100] < scores[101]
    assert scores[-20] == after[-20][2]
    copy.tables.check_invariants()


def test_c10_insertion_times_of_a_clock_that_is_ahead_are_moved_to_the_present(tmp_path: Path) -> None:
    module, copy = keeping("cpu"), keeping("cpu")
    module.tables.index.clock[[NOW, SEEN]] = LATE
    chain = [tmp_path / "base", tmp_path / "next"]
    step(module, [1, 2])
    module.dump(chain[0], optim=True)
    step(module, [3, 1])
    module.dump(chain[1], optim=True, base=chain[:1])
    for path in (chain[0], chain):
        copy.load(path, optim=True)
        scores = [score for _, _, score in records(copy, "a").values()]
        assert max(scores)[0] < LATE // 2
    assert shift_between(records(module, "a"), records(copy, "a")) < 0
    step(copy, [4])
    assert records(copy, "a")[4][2] > records(copy, "a")[3][2] > records(copy, "a")[1][2]
    # Times on the disk are those of the chain, wherever it is continued.
    chain.append(tmp_path / "third")
    copy.dump(chain[2], optim=True, base=chain[:2])
    again = keeping("cpu")
    again.load(chain, optim=True)
    assert without_scores(records(again, "a")) == without_scores(records(copy, "a"))
    shift_between(records(copy, "a"), records(again, "a"))
    # A dump without a manifest has an order and no clock.
    (chain[0] / "manifest.json").unlink()
    load_quietly(again, chain[0], optim=True)
    order = records(again, "a")
    assert order[1][2] == order[2][2] <= (again.tables.now(),)


def test_c10_a_table_that_never_evicts_takes_a_dump_of_any_size(tmp_path: Path) -> None:
    module = keeping("cpu")
    for first in range(0, 3000, 500):
        step(module, range(first, first + 500))
    module.dump(tmp_path / "d", optim=True)
    copy = keeping("cpu")
    report = copy.load(tmp_path / "d", optim=True)["a"]
    assert (report.num_rows, report.num_lost) == (3000, 0)
    assert without_scores(records(copy, "a")) == without_scores(records(module, "a"))
    half = keeping("cpu")
    step(half, range(-1000, 10))
    report = half.load(tmp_path / "d", optim=True, merge=True)["a"]
    assert report.num_lost == 0 and records(half, "a").keys() == set(range(-1000, 3000))
    half.tables.check_invariants()
