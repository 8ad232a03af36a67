"""Gradients of several backward passes, trained at once, against a plain sum by row."""

import itertools

import pytest
import torch

from dynamicemb.optimizer import OptimizerKind, OptimizerSpec
from dynamicemb.table.index import CLOCK_SIZE, UPDATES
from dynamicemb.table.layout import POOLING_MEAN, POOLING_SUM
from dynamicemb.table.stepping.gradients import Gradients
from dynamicemb.table.stepping.lookup import Lookup
from tests.support.row_cases import weights_of
from tests.support.tables import kernels_of
from tests.table.test_triton_rows import copy_store, make_lookup, make_store

DIM, RATE = 16, 0.1


def located(lookup: Lookup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(places, scales)`` of a lookup's occurrences, found bag by bag."""
    layout, places, scales = lookup.layout, [], []
    for bag, (begin, end) in enumerate(itertools.pairwise(lookup.offsets.tolist())):
        feature, sample = divmod(bag, layout.batch_size)
        places += [sample * layout.width + int(layout.column_offsets[feature])] * (end - begin)
        scales += [1 / max(1, end - begin) if layout.pooling == POOLING_MEAN else 1.0] * (end - begin)
    return torch.tensor(places), torch.tensor(scales) * lookup.per_sample_weights


def joined(lookups: list[Lookup], grads: list[torch.Tensor]) -> Gradients:
    """Return the gradients of two lookups of two tables; the occurrences of a table stand together."""
    first, second = lookups
    parts = [located(lookup) for lookup in lookups]
    bounds, shift = [lookup.table_ranges.tolist() for lookup in lookups], first.rows.numel()
    order = [
        begins + i
        for t in range(2)
        for begins, ranges in zip((0, shift), bounds, strict=True)
        for i in range(ranges[t], ranges[t + 1])
    ]
    return Gradients(
        torch.cat([first.ids, second.ids])[order],
        torch.cat([first.rows, second.rows])[order],
        first.table_ranges + second.table_ranges,
        torch.cat([grad.flatten() for grad in grads]),
        None,
        torch.cat([parts[0][0], parts[1][0] + grads[0].numel()])[order],
        torch.cat([parts[0][1], parts[1][1]])[order],
    )


@pytest.mark.parametrize("pooling", [POOLING_SUM, POOLING_MEAN])
def test_gradients_of_two_backwards_are_trained_at_once(
    backend: str, device: torch.device, pooling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    store = make_store([DIM, DIM], torch.float32, [0, 0])
    lookups = [
        make_lookup(store, [1, 2], batch_size, pooling, distinct=20, weighted=True, missing=0.1)
        for batch_size in (6, 4)
    ]
    grads = [torch.randn(lookup.layout.batch_size, lookup.layout.width) for lookup in lookups]
    sums: dict[int, torch.Tensor] = {}
    for lookup, grad in zip(lookups, grads, strict=True):
        places, scales = located(lookup)
        for place, scale, row in zip(places, scales, lookup.rows.tolist(), strict=True):
            if row >= 0:
                sums[row] = sums.get(row, torch.zeros(DIM)) + scale * grad.flatten()[place : place + DIM]
    wanted = [weights_of(store, t).clone() for t in range(2)]
    for row, gradient in sums.items():
        t = int(row >= store.first_rows[1])
        wanted[t][row - store.first_rows[t]] -= RATE * gradient

    own, gradients = copy_store(store, device), joined(lookups, grads)
    here = Gradients(*(value if value is None else value.to(device) for value in gradients))
    clock = torch.zeros(CLOCK_SIZE, dtype=torch.int64, device=device)
    spec = OptimizerSpec(kind=OptimizerKind.SGD, stochastic_rounding=False)
    kernels_of(backend).update(own, spec, here, clock, torch.full((1,), RATE, device=device))
    # One application of the optimizer, not two.
    assert int(clock[UPDATES]) == 1
    mine = store.__class__.attach([chunk.cpu() for chunk in own.chunks], own.formats, own.dtype, own.chunk_shift)
    for t in range(2):
        torch.testing.assert_close(weights_of(mine, t), wanted[t], rtol=1e-5, atol=1e-5)
    assert len(sums) > 20
