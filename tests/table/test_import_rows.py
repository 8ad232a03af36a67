"""Rows imported with given scores: on every backend the same ids stay, with their scores, state and rows."""

import pytest
import torch

from dynamicemb.table.group import TableGroup
from dynamicemb.table.importing.rows import RowImport, clear
from dynamicemb.table.layout import fmix64, locate
from dynamicemb.table.scores import SCORE_COMPOUND, SCORE_LFU, SCORE_TIMESTAMP
from tests.support.tables import kernels_of, make_group, ranges


def held(group: TableGroup, table: int) -> dict[int, tuple[list[float], tuple[int, ...]]]:
    slots = group.scan(table)
    weights, _ = group.read(table, group.index.rows[slots])
    scores = torch.stack(group.scores(table, slots), 1)
    return {
        i: (row, tuple(score))
        for i, row, score in zip(group.index.keys[slots].tolist(), weights.tolist(), scores.tolist(), strict=True)
    }


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    """Return a row that depends on id and column."""
    mixed = torch.from_numpy(fmix64(ids.cpu().numpy()).view("int64")).to(ids.device)
    return ((mixed[:, None] >> torch.arange(4, device=ids.device)) % 1000).float()


@pytest.mark.parametrize("strategy", [SCORE_LFU, SCORE_TIMESTAMP, SCORE_COMPOUND])
def test_c23_the_strongest_ids_of_each_bucket_stay_whatever_their_order(
    backend: str, tensors_on_device: None, strategy: int
) -> None:
    ids = torch.cat([torch.arange(-45, 45), torch.tensor([-(2**63), 2**63 - 1])])
    scores = torch.arange(ids.numel()) * 37 % 11
    stamps = torch.arange(ids.numel()) + 1000
    columns = [stamps, scores] if strategy == SCORE_COMPOUND else [scores]
    results = []
    for order in (torch.arange(ids.numel()), torch.arange(ids.numel()).flip(0)):
        group = make_group(backend, [16, 48], strategy=strategy)
        with RowImport(group, 1, False, ids.numel(), 0.0) as importer:
            for part in torch.split(order, 20):
                importer.add(ids[part], rows_of(ids[part]), None, [column[part] for column in columns])
        group.check_invariants()
        assert importer.num_lost == ids.numel() - 48 and importer.num_repeated == 0
        assert group.size(0) == 0 and group.stats()["t1"]["size"] == 48
        assert group.stats()["t1"]["hits"] == group.stats()["t1"]["misses"] == 0
        results.append(held(group, 1))
    assert results[0] == results[1]
    buckets = locate(ids.cpu().numpy(), 3, 1)[0]
    hashes = fmix64(ids.cpu().numpy())
    for bucket in range(3):
        ranked = [(int(scores[i]), int(hashes[i]), int(ids[i])) for i in range(ids.numel()) if buckets[i] == bucket]
        kept = {i for *_, i in sorted(ranked, reverse=True)[:16]}
        assert kept == {i for *_, i in ranked} & results[0].keys()
    for place, key in enumerate(ids.tolist()):
        if key in results[0]:
            row, score = results[0][key]
            assert row == rows_of(ids[place : place + 1])[0].tolist()
            assert score == tuple(int(column[place]) for column in columns)


@pytest.mark.parametrize("strategy", [SCORE_LFU, SCORE_COMPOUND])
def test_c07_a_count_that_was_imported_never_wraps(backend: str, tensors_on_device: None, strategy: int) -> None:
    group = make_group(backend, [16], strategy=strategy)
    ids = torch.arange(3)
    counts = torch.tensor([2**63 - 1, 2**62 + 1, 2**62 - 5])
    with RowImport(group, 0, False, 3, 0.0) as importer:
        importer.add(ids, rows_of(ids), None, [ids + 9, counts][-1 if strategy == SCORE_LFU else 0 :])
    step = group.begin_step()
    group.find_or_insert(ids, ranges(3), torch.tensor([2**31 - 1, 1, 5]))
    step.finish()
    found = {i: score[-1] for i, (_, score) in held(group, 0).items()}
    assert found == {0: 2**62 + 2**31 - 1, 1: 2**62 + 1, 2: 2**62}


def test_c23_an_import_uses_only_kernels_that_the_backend_has(backend: str, tensors_on_device: None) -> None:
    group = make_group(backend, [32], strategy=SCORE_LFU)
    # As they are: tests make those of Triton work in batch order.
    group.kernels = kernels_of(backend)
    ids = torch.arange(-9, 9)
    with RowImport(group, 0, False, ids.numel(), 0.0) as importer:
        importer.add(ids, rows_of(ids), None, [ids + 20])
    assert held(group, 0) == {i: (row, (i + 20,)) for i, row in zip(ids.tolist(), rows_of(ids).tolist(), strict=True)}
    assert {name for name, kernel in vars(kernels_of(backend)).items() if not callable(kernel)} == set()


def test_c08_replaced_ids_are_gone_and_kept_ones_stay(backend: str, tensors_on_device: None) -> None:
    group = make_group(backend, [32], strategy=SCORE_LFU)
    step = group.begin_step()
    group.find_or_insert(torch.tensor([1, 1, 2]), ranges(3))
    step.finish()
    epoch = group.epoch
    ids = torch.tensor([2, 3, 3])
    rows, scores = torch.arange(12.0).view(3, 4), torch.tensor([5, 6, 7])
    with RowImport(group, 0, True, 3, 0.0) as importer:
        importer.add(ids, rows, None, [scores])
    assert {i: score for i, (_, score) in held(group, 0).items()} == {1: (2,), 2: (5,), 3: (7,)}
    assert held(group, 0)[3][0] == [8.0, 9.0, 10.0, 11.0] and importer.num_repeated == 2
    assert group.epoch > epoch
    with RowImport(group, 0, False, 1, 0.0) as importer:
        importer.add(ids[:1], rows[:1], None, [scores[:1]])
    assert held(group, 0).keys() == {2}
    clear(group, 0)
    assert held(group, 0) == {} and group.stats()["t0"]["size"] == 0
    group.check_invariants()
    # The table works on.
    step = group.begin_step()
    found, _ = group.find_or_insert(torch.arange(20), ranges(20))
    step.finish()
    assert bool((found >= 0).all())
    group.check_invariants()


def test_c23_an_id_that_is_there_competes_with_the_score_that_comes(backend: str, tensors_on_device: None) -> None:
    group = make_group(backend, [16], strategy=SCORE_LFU)
    ids = torch.arange(16)
    with RowImport(group, 0, False, 16, 0.0) as importer:
        importer.add(ids, rows_of(ids), None, [torch.where(ids == 0, 1, ids + 10)])
    # Id 0 is the weakest, and in the same batch as the newcomers: it comes with the highest score.
    more = torch.tensor([100, 0, 101])
    with RowImport(group, 0, True, 3, 0.0) as importer:
        importer.add(more, rows_of(more) + 1, None, [torch.tensor([50, 99, 51])])
    assert importer.num_lost == 2 and importer.num_repeated == 1
    found = held(group, 0)
    assert found.keys() == {0, 100, 101, *range(3, 16)}
    for key, score in ((100, 50), (0, 99), (101, 51)):
        assert found[key] == ((rows_of(torch.tensor([key])) + 1)[0].tolist(), (score,))
    group.check_invariants()


def test_c14_an_import_that_cannot_begin_leaves_no_step(
    backend: str, tensors_on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(backend, [32])

    def fail(importer: RowImport) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RowImport, "_look", fail)
        with pytest.raises(MemoryError) as caught, RowImport(group, 0, False, 1, 0.0):
            pass
    # The error, which holds the import, lives on.
    with RowImport(group, 0, False, 1, 0.0):
        pass
    assert caught.value is not None


def test_c14_an_import_ends_the_steps_before_it(backend: str, tensors_on_device: None) -> None:
    group = make_group(backend, [32, 32])
    step = group.begin_step()
    with RowImport(group, 1, True, 1, 0.0):
        pass
    assert (group.steps.num_awaited(0), group.steps.num_awaited(1)) == (1, 0)
    assert group.steps.replaced_since(step.number) == (1,) and not step.finished
    with RowImport(group, 0, False, 1, 0.0):
        pass
    assert step.finished and group.steps.oldest() == group.steps.current
    assert group.turn._lock.acquire(blocking=False)
    group.turn._lock.release()


def test_c07_imported_ids_may_be_evicted_at_once(backend: str, tensors_on_device: None) -> None:
    group = make_group(backend, [16], strategy=SCORE_LFU, protect_steps=5)
    ids = torch.arange(16)
    with RowImport(group, 0, False, 16, 0.0) as importer:
        importer.add(ids, rows_of(ids), None, [ids + 1])
    step = group.begin_step()
    rows, _ = group.find_or_insert(torch.tensor([100]), ranges(1))
    step.finish()
    assert bool((rows >= 0).all())
    assert held(group, 0).keys() == {100, *range(1, 16)}
