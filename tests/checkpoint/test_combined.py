"""Dumps of tables with several options at once (contract 28)."""

import tempfile
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynamicemb import DynamicEmbCheckMode, DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, KVCounter
from dynamicemb.table.index import NOW, SEEN
from tests.support.admitting import lengths_of
from tests.support.checkpoints import records, shift_between, without_scores
from tests.support.lookups import bag_per_id, make_module, options

TIMESTAMP, STEP, CUSTOMIZED, LFU, KEEP = DynamicEmbScoreStrategy
ERROR = DynamicEmbCheckMode.ERROR
# Later than any clock, so that time passes only where a test says so.
LATE = 4 * 10**18


def step(module: Any, ids: Any) -> list[float]:
    ids, offsets = bag_per_id(ids)
    out = module(ids.to(module.tables.device), offsets.to(module.tables.device))
    out.pow(2).sum().backward()
    return out.detach().cpu().flatten().tolist()


COMBINED = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from([TIMESTAMP, STEP, LFU, (TIMESTAMP, LFU), (LFU, TIMESTAMP), KEEP]),
        "ttl": st.booleans(),
        "threshold": st.sampled_from([0, 2, 3]),
        "grows": st.booleans(),
        "mode": st.sampled_from([DynamicEmbCheckMode.IGNORE, ERROR]),
        "protect_steps": st.sampled_from([0, 2]),
    }
)


def table_of(case: dict[str, Any], grows: bool) -> Any:
    strategy = case["strategy"]
    # At half its load a bucket of 64 is never full by chance, so that a table that grows holds what another one does.
    more: dict[str, Any] = {"safe_check_mode": case["mode"], "protect_steps": case["protect_steps"]}
    more["bucket_capacity"] = 64
    if case["ttl"] and (strategy is TIMESTAMP or isinstance(strategy, tuple)):
        more["ttl"] = 100e-9
    if case["threshold"]:
        more["admit_strategy"] = FrequencyAdmissionStrategy(case["threshold"])
        more["admission_counter"] = KVCounter(256, 16)
    if strategy is KEEP:
        return options(capacity=None, init_capacity=64, score_strategy=strategy, **more)
    if grows:
        more |= {"init_capacity": 64, "max_load_factor": 0.5}
    return options(capacity=256, score_strategy=strategy, **more)


def make(case: dict[str, Any], grows: bool) -> Any:
    module = make_module([table_of(case, grows)], optimizer="adam")
    module.tables.index.clock[[NOW, SEEN]] = LATE
    return module


@settings(max_examples=20, deadline=None)
@example(
    case={
        "strategy": (LFU, TIMESTAMP), "ttl": True, "threshold": 2, "grows": True, "mode": ERROR, "protect_steps": 2,
    },
    seed=1,
    chained=True,
)  # fmt: skip
@given(case=COMBINED, seed=st.integers(0, 2**16), chained=st.booleans())
def test_c28_a_dump_comes_back_with_all_options_at_once(case: dict[str, Any], seed: int, chained: bool) -> None:
    generator = torch.Generator().manual_seed(seed)

    def batches(number: int) -> list[list[int]]:
        return [(torch.randn(24, generator=generator) * 30).long().tolist() for _ in range(number)]

    module = make(case, case["grows"])
    with tempfile.TemporaryDirectory() as folder:
        chain: list[str] = []
        for number in range(3):
            for ids in batches(3):
                step(module, ids)
                module.tables.index.clock[SEEN] += 30
            if chained or number == 2:
                chain.append(f"{folder}/{number}")
                module.dump(chain[-1], optim=True, counter=case["threshold"] > 0, base=chain[:-1] or None)
        before = records(module, "a")
        # A copy with other buckets: the table that may grow loads into one that does not, and the reverse.
        copy = make(case, not case["grows"])
        step(copy, batches(1)[0])
        report = copy.load(chain, optim=True, counter=case["threshold"] > 0)["a"]
    assert (report.num_lost, report.num_expired, report.num_counts_lost) == (0, 0, 0)
    copy.tables.check_invariants()
    after = records(copy, "a")
    assert without_scores(before) == without_scores(after)
    for column in range(len(next(iter(before.values()))[2]) if before else 0):
        shift_between(before, after, column)
    if case["threshold"]:
        assert lengths_of(copy) == lengths_of(module)
    # Both go on alike: the same ids are admitted, expire and are evicted, with the same rows.
    for ids in batches(3):
        assert step(copy, ids) == step(module, ids)
        for each in (copy, module):
            each.tables.index.clock[SEEN] += 40
    assert without_scores(records(module, "a")) == without_scores(records(copy, "a"))
    copy.tables.check_invariants()
