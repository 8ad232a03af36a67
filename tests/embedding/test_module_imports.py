"""Rows that are imported with ``insert``: which of repeated ids counts, and what an import leaves alone."""

import torch

from tests.support.lookups import bag_per_id, make_module, options, row_of


def test_of_repeated_imported_ids_the_last_counts() -> None:
    module = make_module([options(capacity=16), options(capacity=16)])
    # Ids 5 and 9 are new; 7 is there before, and is repeated on both sides of them.
    module.insert("b", torch.tensor([7]), torch.full((1, 4), -1.0))
    ids = torch.tensor([7, 5, 7, 9, 5, 7])
    rows = torch.arange(6.0)[:, None].expand(6, 4)
    assert module.insert("b", ids, rows).all()
    values = {key: row_of(module, "b", key)[0].tolist() for key in (5, 7, 9)}
    assert values == {5: [4.0] * 4, 7: [5.0] * 4, 9: [3.0] * 4}
    assert module.stats()["a"]["size"] == 0


def test_an_import_beyond_a_bucket_says_which_ids_failed() -> None:
    module = make_module([options(capacity=16)])
    ids = torch.cat([torch.arange(20), torch.arange(20)])
    rows = torch.arange(40.0)[:, None].expand(40, 4)
    placed = module.insert("a", ids, rows)
    assert placed.tolist() == [True] * 16 + [False] * 4 + [True] * 16 + [False] * 4
    for key in range(16):
        assert row_of(module, "a", key)[0].tolist() == [20.0 + key] * 4
    # The rows of the ids that failed went nowhere.
    module.eval()
    assert bool((module(*bag_per_id(range(16, 20))) == 0).all())
