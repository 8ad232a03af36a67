"""The example of the documentation of `score_function`, word for word, through a table."""

import importlib.util
import inspect
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy as Score
from dynamicemb import DynamicEmbTableOptions
from dynamicemb.table.index import NOW, SEEN
from tests.support.lookups import batch, contents, make_module, options

HOUR = 3600 * 10**9


def example() -> str:
    """Return the code that the docstring of the options shows, after its sentence about counts that halve."""
    documented = inspect.getdoc(DynamicEmbTableOptions)
    assert documented is not None
    (found,) = re.findall(r"halve with each hour since the last\n* *touch::\n\n((?: +[^\n]*\n)+)", documented)
    return textwrap.dedent(found)


@pytest.fixture
def documented(tmp_path: Path) -> Any:
    """The documented function, from a file as that of a user."""
    path = tmp_path / "scoring.py"
    path.write_text("import math\n\n\n" + example())
    spec = importlib.util.spec_from_file_location("scoring", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.decayed


def test_c10_the_documented_function_halves_counts_each_hour(documented: Any) -> None:
    assert example().startswith("def decayed(scores, cur_timestamp):\n")
    assert documented((5 * HOUR, 8), 5 * HOUR) == 3.0
    # Eight occurrences three hours ago count as much as one now.
    assert documented((5 * HOUR, 8), 8 * HOUR) == documented((8 * HOUR, 1), 8 * HOUR) == 0.0
    assert math.isclose(documented((0, 3), HOUR), math.log2(1.5))


@pytest.mark.usefixtures("tensors_on_device")
def test_c10_a_table_evicts_by_the_documented_function(backend: str, device: torch.device, documented: Any) -> None:
    strategy = (Score.TIMESTAMP, Score.LFU)
    table = options(capacity=16, score_strategy=strategy, score_function=documented)
    module = make_module([table], device=device)
    clock = module.tables.index.clock
    # Touched long ago and often: ids 0 to 7, 2^(id + 1) times. Three hours later: ids 10 to 17, three times each.
    module(*batch([key for key in range(8) for _ in range(2 ** (key + 1))]))
    clock[[NOW, SEEN]] += 3 * HOUR
    module(*batch([key for key in range(10, 18) for _ in range(3)]))
    assert contents(module)["a"].keys() == {*range(8), *range(10, 18)}
    # By now ids 0 to 3 count as 1/4, 1/2, 1 and 2, the later ones as 3, id 4 as 4. The frequency alone says otherwise:
    # id 1 has occurred more often than those.
    for number, (new, victim) in enumerate(((100, 0), (101, 1), (102, 2), (103, 3))):
        module(*batch([new] * 8))
        there = contents(module)["a"].keys()
        assert {*range(number + 1, 8), *range(10, 18)} < there
        assert victim not in there and new in there
    module(*batch([104] * 8))
    assert set(range(4, 8)) < contents(module)["a"].keys()
    assert len(contents(module)["a"].keys() & set(range(10, 18))) == 7


def decays(scores, cur_timestamp):
    return math.log(max(scores[1], 1)) + (cur_timestamp - scores[0]) * 1e-9 * math.log(0.9)


@pytest.mark.usefixtures("tensors_on_device")
def test_c10_a_frequency_that_decays_by_a_tenth_each_second_ranks(backend: str, device: torch.device) -> None:
    table = options(capacity=16, score_strategy=(Score.TIMESTAMP, Score.LFU), score_function=decays)
    module = make_module([table], device=device)
    clock = module.tables.index.clock
    # Ids 0 to 15 occur 1, 2, 3, ... times, a second after each other, so id k ranks log(k + 1) + (15 - k) log(0.9).
    for key in range(16):
        module(*batch([key] * (key + 1)))
        clock[[NOW, SEEN]] += 10**9
    ranks = {key: math.log(key + 1) + (15 - key) * math.log(0.9) for key in range(16)}
    by_rank = sorted(ranks, key=lambda key: ranks[key])
    assert by_rank == list(range(16))
    # A hundred seconds later id 0 is touched once more. By frequencies alone it would be among the first two to go.
    clock[[NOW, SEEN]] += 100 * 10**9
    module(*batch([0]))
    module(*batch([50, 51]))
    # Id 0 has the frequency 2 and the present time. Ids 1 and 2 are the oldest of those that are left.
    assert contents(module)["a"].keys() == {0, *range(3, 16), 50, 51}
