"""The state machine of ``machine.py`` with tables that admit by count or by chance, against the dict oracle."""

from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis.stateful import invariant

from dynamicemb import FrequencyAdmissionStrategy, KVCounter, ProbabilityAdmissionStrategy
from dynamicemb.table.cpu.philox import philox4x32_reference
from dynamicemb.table.initializers import table_key
from tests.conftest import reason_to_skip
from tests.support.machine import TableMachine, explore
from tests.support.oracle import Judge, ReferenceCounter

pytestmark = pytest.mark.usefixtures("tensors_on_device")
EXAMPLES = {"cpu": (16, 40), "interpret": (4, 6), "cuda": (20, 40)}


class CountingMachine(TableMachine):
    """Admits an id with its second occurrence; the counters are too small for all."""

    rejecting_examples = 0
    forgetting_examples = 0
    threshold = 2

    def admission_options(self) -> dict[str, Any]:
        return {
            "admit_strategy": FrequencyAdmissionStrategy(self.threshold),
            "admission_counter": KVCounter(16, bucket_capacity=16),
        }

    def judge(self, table: int) -> Judge | None:
        counter = ReferenceCounter(1, 16)
        self.counters = {**getattr(self, "counters", {}), table: counter}
        return lambda amounts, step: counter.judge(amounts, self.threshold)

    @invariant()
    def counters_are_equal(self) -> None:
        group = self.module.tables
        counter = group.admission.counter
        stats = self.module.stats()
        for t, expected in self.counters.items():
            begin, end = (int(b) * 16 for b in counter.bucket_offsets[t : t + 2])
            live = counter.digests[begin:end] >= 2
            keys, counts = counter.keys[begin:end][live].tolist(), counter.scores[begin:end][live].tolist()
            assert dict(zip(keys, counts, strict=True)) == expected.counted()
            mine = stats["ab"[t]]
            assert mine["counter_size"] == len(keys)
            assert mine["counter_evicted"] == expected.counts["evicted"]
            assert mine["counter_failed"] == expected.counts["failed"]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "oracles"):
            kind = type(self)
            kind.rejecting_examples += any(oracle.counts["non_admitted"] for oracle in self.oracles)
            counters = getattr(self, "counters", {}).values()
            kind.forgetting_examples += any(counter.counts["evicted"] for counter in counters)


class ThirdTimeMachine(CountingMachine):
    """Admits an id with its third occurrence."""

    threshold = 3


class ChanceMachine(TableMachine):
    """Admits an id with probability 1/2."""

    rejecting_examples = 0

    def admission_options(self) -> dict[str, Any]:
        return {"admit_strategy": ProbabilityAdmissionStrategy(0.5)}

    def judge(self, table: int) -> Judge | None:
        key = table_key(3, "ab"[table])

        def admitted(amounts: dict[int, int], step: int) -> dict[int, int]:
            return {i: number for i, number in amounts.items() if drawn(key, i, step) < 2**31}

        return admitted

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "oracles"):
            type(self).rejecting_examples += any(oracle.counts["non_admitted"] for oracle in self.oracles)


def drawn(key: int, i: int, step: int) -> int:
    """Return the word that decides, by the text of ``docs/random.md``."""
    words = (key & 0xFFFFFFFF, key >> 32)
    return philox4x32_reference(words, (i & 0xFFFFFFFF, i >> 32 & 0xFFFFFFFF, 0xFFFFFFFF, step))[0]


def run(backend: str, kind: type[TableMachine]) -> None:
    if reason := reason_to_skip(backend):
        pytest.skip(f"{backend}: {reason}")
    small = {"capacities": (16, 16), "bag_size": 3, "batch_size": 1, "most_warm_up": 2}
    sizes = small if backend == "interpret" else {}
    machine = type("Machine", (kind,), {"backend": backend, "examples": 0, **sizes})
    examples, steps = EXAMPLES[backend]
    explore(machine, examples, steps)
    assert machine.rejecting_examples >= 0.5 * examples
    if backend != "interpret":
        assert machine.evicting_examples > 0
        assert getattr(machine, "forgetting_examples", 1) > 0


KINDS = [CountingMachine, ThirdTimeMachine, ChanceMachine]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["cpu", "interpret"])
def test_c12_state_machine_with_admission_equals_the_oracle(
    backend: str, device: torch.device, kind: type[TableMachine]
) -> None:
    run(backend, kind)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["cuda"])
def test_c12_state_machine_with_admission_equals_the_oracle_on_a_gpu(
    backend: str, device: torch.device, kind: type[TableMachine]
) -> None:
    run(backend, kind)
