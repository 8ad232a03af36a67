"""SIGKILL of a rank on the real disk: the dump before, or the new one, loads whole."""

import os
import signal
import warnings
from pathlib import Path

import pytest

from tests.support.checkpoints import Records, records
from tests.support.dying_ranks import make, run
from tests.support.lookups import make_module, options

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Of the operations of a dump so many are between two kills; 1 with --every-operation.
STRIDE = 9


def expected(trial: int, world_size: int) -> Records:
    parts = [records(make(trial, rank, world_size), "a") for rank in range(world_size)]
    return {i: record for part in parts for i, record in part.items()}


def loaded(folder: Path) -> Records:
    from dynamicemb import DynamicEmbScoreStrategy

    module = make_module([options(capacity=256, score_strategy=DynamicEmbScoreStrategy.LFU)], optimizer="adam")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.load(folder / "dumps" / "dump" / "model", optim=True)
    return records(module, "a")


@pytest.mark.parametrize(("world_size", "guilty"), [(1, 0), (2, 0), (2, 1)])
def test_c21_a_rank_killed_before_any_operation_leaves_a_whole_dump(
    tmp_path: Path, pytestconfig: pytest.Config, world_size: int, guilty: int
) -> None:
    (tmp_path / "dumps").mkdir()
    assert run(world_size, tmp_path, 0, guilty, -1) == [0] * world_size
    # Once more, as an overwriting dump has more operations.
    assert run(world_size, tmp_path, 1, guilty, -1) == [0] * world_size
    before, trial = expected(1, world_size), 1
    assert loaded(tmp_path) == before
    total = int((tmp_path / f"count {guilty}").read_text())
    stride = 1 if pytestconfig.getoption("--every-operation") else STRIDE
    outcomes = []
    for number in range(1, total + 1, stride):
        trial += 1
        codes = run(world_size, tmp_path, trial, guilty, number)
        assert codes[guilty] == -signal.SIGKILL, (number, codes)
        new, found = expected(trial, world_size), loaded(tmp_path)
        assert found in (before, new), number
        outcomes.append(found == new)
        before = found
    # The new one from some operation on.
    assert outcomes == sorted(outcomes) and not outcomes[0]
    trial += 1
    assert run(world_size, tmp_path, trial, guilty, -1) == [0] * world_size
    assert loaded(tmp_path) == expected(trial, world_size)
    assert os.listdir(tmp_path / "dumps") == ["dump"]
    print(f"{len(outcomes)} kills of {total} operations, {sum(outcomes)} behind the exchange")
