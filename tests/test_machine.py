"""The state machine of ``machine.py`` on every backend."""

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machine import TableMachine

pytestmark = pytest.mark.usefixtures("tensors_on_device")
EXAMPLES = {"cpu": (300, 50), "interpret": (20, 10), "cuda": (300, 50)}


def test_state_machine_equals_the_oracle(backend: str) -> None:
    sizes = {} if backend == "cpu" else {"capacities": (16, 16), "bag_size": 2, "batch_size": 1, "most_warm_up": 1}
    machine = type("Machine", (TableMachine,), {"backend": backend, "examples": 0, "evicting_examples": 0, **sizes})
    examples, steps = EXAMPLES[backend]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.examples >= examples
    if backend == "cpu":
        assert machine.evicting_examples >= 0.9 * machine.examples
        assert machine.failing_examples > 0
