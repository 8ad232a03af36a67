"""The state machine of ``machine.py`` on every backend."""

import pytest
import torch

pytest.importorskip("hypothesis")

from tests.conftest import reason_to_skip
from tests.support.machine import TableMachine, explore

pytestmark = pytest.mark.usefixtures("tensors_on_device")
EXAMPLES = {"cpu": (300, 50), "interpret": (8, 10), "cuda": (38, 50)}
# A GPU waits for the host at every look into a table: eight processes share the 300 examples.
CUDA_PARTS = 8


def run(backend: str, part: int = 0) -> None:
    if reason := reason_to_skip(backend):
        pytest.skip(f"{backend}: {reason}")
    small = {"capacities": (16, 16), "bag_size": 2, "batch_size": 1, "most_warm_up": 1}
    # Of few examples the share that evicts varies more: those of a part all begin with full tables.
    sizes = {"interpret": small, "cuda": {"least_warm_up": 4}}.get(backend, {})
    machine = type("Machine", (TableMachine,), {"backend": backend, "examples": 0, "evicting_examples": 0, **sizes})
    examples, steps = EXAMPLES[backend]
    explore(machine, examples, steps, part)
    if backend != "interpret":
        assert machine.evicting_examples >= 0.9 * machine.examples
        assert machine.failing_examples > 0


@pytest.mark.parametrize("backend", ["cpu", "interpret"])
def test_state_machine_equals_the_oracle(backend: str, device: torch.device) -> None:
    run(backend)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["cuda"])
@pytest.mark.parametrize("part", range(CUDA_PARTS))
def test_state_machine_equals_the_oracle_on_a_gpu(backend: str, device: torch.device, part: int) -> None:
    run(backend, part)
