"""Admission under row-wise sharding: an id has one owner, which counts its occurrences on all ranks."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from dynamicemb.optimizer import EmbOptimType
from dynamicemb.sharding.planning.table_sizes import table_memory
from tests.support.admitting import admitting
from tests.support.lookups import make_module, options
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import (
    Case,
    Table,
    build,
    compile_kernels,
    dynamic_modules,
    exported,
    loss_of,
    make_batch,
    make_kjt,
    outputs_of,
)

pytestmark = pytest.mark.distributed

THRESHOLD = 4
STEPS = 4
A = Table("a", ("f0", "f1"), score="LFU", admit=THRESHOLD)
B = Table("b", ("f2",), dist_type="hash_roundrobin", admit=THRESHOLD)
CASES = {
    "ec": Case((A, B), pooled=False),
    "ec-dedup": Case((A, B), pooled=False, dedup=True),
    "ebc": Case((A, B), pooled=True),
    # One of two ranks has no samples in every other step.
    "ec-dedup-empty": Case((A, B), pooled=False, dedup=True, batch_sizes=(0, 6)),
}


def train(rank: int, world_size: int, case: Case) -> list[dict[str, Any]]:
    """Return what the rank's tables hold after each step, and their counters."""
    model = build(case, world_size)
    seen = []
    for step in range(STEPS):
        outputs = outputs_of(case, model(make_kjt(make_batch(case, step, rank), case)))
        loss_of(outputs).backward()
        state: dict[str, Any] = {"rows": exported(model), "scores": {}, "counts": {}, "rejected": {}}
        for module in dynamic_modules(model):
            group = module.tables
            for t, name in enumerate(group.names):
                ids, scores = module.export_scores(name, "cpu")
                state["scores"][name] = dict(zip(ids.tolist(), scores.tolist(), strict=True))
                counter = group.admission.counter
                begin, end = (int(b) * counter.bucket_capacity for b in counter.bucket_offsets[t : t + 2])
                live = counter.digests[begin:end] >= 2
                keys, counts = counter.keys[begin:end][live], counter.scores[begin:end][live]
                state["counts"][name] = dict(zip(keys.tolist(), counts.tolist(), strict=True))
                state["rejected"][name] = module.stats()[name]["non_admitted"]
        seen.append(state)
    return seen


def occurrences(case: Case, world_size: int, step: int) -> dict[str, Counter[int]]:
    """Return how often the ids of each table occur on all ranks in a step."""
    found: dict[str, Counter[int]] = {table.name: Counter() for table in case.tables}
    for rank in range(world_size):
        batch = make_batch(case, step, rank)
        per_feature = batch["lengths"].view(len(batch["keys"]), -1).sum(1).tolist()
        parts = dict(zip(batch["keys"], batch["values"].split(per_feature), strict=True))
        for table in case.tables:
            for feature in table.features:
                found[table.name].update(parts[feature].tolist())
    return found


def merged(results: list[list[dict[str, Any]]], step: int, what: str, table: str) -> dict[int, Any]:
    parts = [result[step][what][table] for result in results]
    union = {key: value for part in parts for key, value in part.items()}
    assert len(union) == sum(map(len, parts)), "an id has two owners"
    return union


@pytest.mark.parametrize("name", CASES)
def test_c12_occurrences_are_counted_over_all_ranks(ranks: RankPool, name: str) -> None:  # noqa: F811
    compile_kernels()
    case, world_size = CASES[name], 2
    results = ranks.run(world_size, train, case)
    totals: dict[str, Counter[int]] = {table.name: Counter() for table in case.tables}
    for step in range(STEPS):
        for table, found in occurrences(case, world_size, step).items():
            totals[table] += found
            admitted = {key for key, number in totals[table].items() if number >= THRESHOLD}
            assert merged(results, step, "rows", table).keys() == admitted
            waiting = {key: number for key, number in totals[table].items() if number < THRESHOLD}
            assert merged(results, step, "counts", table) == waiting
            if table == "a":
                assert merged(results, step, "scores", table) == {key: totals[table][key] for key in admitted}
    for table in totals:
        sizes = [len(merged(results, step, "rows", table)) for step in range(STEPS)]
        assert sizes[0] < sizes[1] < sizes[-1]
    assert all(results[rank][-1]["rejected"][table] > 0 for rank in range(world_size) for table in totals)


def read(rank: int, world_size: int, case: Case) -> list[dict[str, torch.Tensor]]:
    """Return outputs of lookups that train nothing."""
    model = build(case, world_size)
    outputs = []
    for step in range(2):
        with torch.no_grad():
            result = outputs_of(case, model(make_kjt(make_batch(case, step, rank), case)))
        outputs.append({name: value.clone() for name, value in result.items()})
    return outputs


@pytest.mark.parametrize("name", ["ec-dedup", "ebc"])
def test_c12_rejected_ids_read_their_first_values_on_every_rank(ranks: RankPool, name: str) -> None:  # noqa: F811
    compile_kernels()
    case = CASES[name]
    open_to_all = replace(case, tables=tuple(replace(table, admit=0) for table in case.tables))
    for ours, theirs in zip(ranks.run(2, read, case), ranks.run(2, read, open_to_all), strict=True):
        for step, outputs in enumerate(ours):
            assert outputs.keys() == theirs[step].keys()
            for feature, output in outputs.items():
                assert torch.equal(output, theirs[step][feature])
                assert output.numel() == 0 or output.any()


def test_c20_the_planner_counts_the_counter_and_staged_rows() -> None:
    table = admitting(2, counter=1000, embedding_dtype=torch.float32)
    plain = options(embedding_dtype=torch.float32)
    ours, theirs = (table_memory("a", option, EmbOptimType.EXACT_SGD, 100, "cpu", 256) for option in (table, plain))
    counter = make_module([table], device="cpu").memory_usage()["counter"]
    assert ours.index_bytes - theirs.index_bytes == 25 * 1008 <= counter <= 25 * 1008 + 1024
    assert ours.scratch_bytes - theirs.scratch_bytes >= 100 * 16
