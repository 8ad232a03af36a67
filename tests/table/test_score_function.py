"""User score functions: what is translated, what is refused, and who is evicted by them; contract 10."""

import functools
import math
import pickle
import runpy
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dynamicemb import DynamicEmbScoreStrategy as Score
from dynamicemb import DynamicEmbTableOptions
from dynamicemb.errors import UnsupportedOptionError
from dynamicemb.score_function import translate
from dynamicemb.table.cpu.score_function import ranks_of
from dynamicemb.table.index import EVICTED, NOW, SEEN
from dynamicemb.table.scores import SCORE_COMPOUND
from dynamicemb.table.triton.score_function import compile_score as compile_for_gpu
from dynamicemb.table.triton.score_function import ranks
from tests.support.lookups import batch, contents, make_module, options
from tests.support.oracle import ReferenceTable, mixed
from tests.support.tables import make_group, ranges
from tests.support.twins import Twins

# The interpreter computes with NumPy, which says so when a result is not finite.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
TIME_FIRST = (Score.TIMESTAMP, Score.LFU)
COUNT_FIRST = (Score.LFU, Score.TIMESTAMP)
DECAY = 0.9
TOO_LARGE = 10**400
CONFIG = {"decay": 0.9}


def decayed(scores, cur_timestamp):
    """Rank by frequency, decayed by a tenth each second."""
    return math.log(max(scores[1], 1)) + (cur_timestamp - scores[0]) * 1e-9 * math.log(0.9)


def by_cases(scores, now):
    time, count = scores
    age = (now - time) / 1e9
    age *= 2
    return count * DECAY**age if 1 < count <= 6 and not (age < 0.25 or count == 4) else -math.inf


def rounded(s, t):
    x = math.floor(-s[1] / 3) + math.ceil(s[1] / 3) - abs(min(s[1], 2.5, DECAY * 7))
    return math.pow(x, 3) + math.sqrt(s[1]) ** 2 + float(math.fabs(-s[1]))


def transcendental(s, t):
    n = +s[1]
    return math.erf(n) + math.sin(n) + math.cos(n) + math.log2(n + 1) + math.exp(-n) + math.log(n + 2, 3) + math.pi


def branches(s, t):
    first = 1 if s[1] > 3 else 0.1
    return first + (2.5 if s[1] != 5 or False else s[1] / 7) - (1e-9 if s[0] >= t else 0)


def constant(scores, now):
    return 2 * 3 - 1 / 4


FUNCTIONS = [decayed, by_cases, rounded, transcendental, branches, constant]


def value_of(bits: int) -> float:
    """Return the float64 whose rank on the CPU is given."""
    bits = bits if bits >= 0 else -(2**63) - bits
    return float(np.array(bits, np.int64).view(np.float64))


def rank(source: str, stamp: int, count: int, now: int) -> int:
    """Return the rank of one slot on the CPU."""
    return int(ranks_of(source, np.array([stamp]), np.array([count]), now)[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_c10_a_translated_function_has_the_values_of_the_function(function) -> None:
    source = translate(function, TIME_FIRST)
    now = 10**18
    for count, age in product(range(9), (0, 1, 2 * 10**8, 10**9, 10**11)):
        expected = function((float(now - age), float(count)), float(now))
        got = value_of(rank(source, now - age, count, now))
        assert got == pytest.approx(expected, rel=1e-13, abs=1e-13), (count, age)


@triton.jit
def _ranks_kernel(stamps_ptr, counts_ptr, now_ptr, out_ptr, FUNCTION: tl.constexpr):
    i = tl.arange(0, 64)
    values = ranks(tl.load(stamps_ptr + i), tl.load(counts_ptr + i), tl.load(now_ptr), FUNCTION)
    tl.store(out_ptr + i, values)


@pytest.mark.usefixtures("tensors_on_device")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_c16_triton_ranks_as_the_cpu_does(backend: str, device: torch.device, function) -> None:
    if backend == "cpu":
        pytest.skip("cpu: is what Triton is compared with")
    source = translate(function, TIME_FIRST)
    generator = torch.Generator().manual_seed(0)
    now = 10**18
    stamps = now - torch.randint(0, 10**10, (64,), generator=generator, device="cpu")
    counts = torch.randint(1, 12, (64,), generator=generator, device="cpu")
    out = torch.zeros(64, dtype=torch.int64)
    args = (stamps.to(device), counts.to(device), torch.tensor(now), out)
    _ranks_kernel[(1,)](*args, FUNCTION=compile_for_gpu(source), enable_fp_fusion=False)
    for stamp, count, bits in zip(stamps.tolist(), counts.tolist(), out.tolist(), strict=True):
        flipped = bits ^ -(2**63)
        expected = value_of(rank(source, stamp, count, now))
        ours = value_of(flipped if flipped >= 0 else flipped + 1)
        assert ours == pytest.approx(expected, rel=1e-13, abs=1e-13)


# The line of each function that must be named, and words of the message.
def _loop(s, t):
    for _ in range(3):  # named
        pass
    return 1.0


def _if(s, t):
    if s[1] > 3:  # named
        return 1.0
    return 2.0


def _calls(s, t):
    x = s[1]
    return value_of(x)  # named


def _lookup(s, t):
    return s[0] * CONFIG["decay"]  # named


def _third(s, t):
    return s[2]  # named


def _bare(s, t):
    return max(s)  # named


def _unsupported_math(s, t):
    return math.gamma(s[1])  # named


def _power(s, t):
    return s[0] ** s[1]  # named


def _condition(s, t):
    return (s[1] > 3) * 2.0  # named


def _truth(s, t):
    return 1.0 if s[1] else 2.0  # named


def _no_return(s, t):
    s = s[1]  # named


def _returns_nothing(s, t):
    return  # named


def _remainder(s, t):
    return s[1] % 7  # named


def _zero(s, t):
    return s[1] + 1 / 0  # named


def _unknown(s, t):
    return s[1] * undefined_name  # noqa: F821  # named


def _arguments(s, t, more):  # named
    return s[1]


def _default(s, t=3):  # named
    return s[1]


def _shadowed(s, t):
    s = s[1] * 2
    a, b = s  # named
    return a + b


def _too_large(s, t):
    return s[1] * TOO_LARGE  # named


def _nested(s, t):
    def inner():  # named
        return 1

    return s[1]


REFUSED = {
    _loop: "for statements", _if: "if statements", _calls: "value_of.. cannot be inlined", _lookup: "only s can be",
    _third: "must be 0 or 1", _bare: "must be indexed", _unsupported_math: "math.gamma.. cannot be inlined",
    _power: "positive constant base", _condition: "a condition is no number", _truth: "made of comparisons",
    _no_return: "must end with", _returns_nothing: "must end with", _remainder: "cannot be compiled",
    _zero: "has no value", _unknown: "undefined_name is not a number", _arguments: "must take",
    _shadowed: "cannot be compiled", _too_large: "has no value", _default: "no defaults", _nested: "cannot be compiled",
}  # fmt: skip


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_c27_what_cannot_be_compiled_is_refused_with_its_line(function) -> None:
    with pytest.raises(ValueError, match=REFUSED[function]) as held:
        DynamicEmbTableOptions(score_strategy=TIME_FIRST, score_function=function)
    message = str(held.value)
    assert "# named" in message and function.__name__ in message
    number = int(message.split(f"{__file__}:")[1].split(")")[0])
    with open(__file__) as source:
        assert source.readlines()[number - 1].strip() in message


def test_c27_no_function_no_source_and_one_score_are_refused() -> None:
    def refuse(error: type, match: str, function: object, strategy: object = TIME_FIRST) -> None:
        with pytest.raises(error, match=match):
            DynamicEmbTableOptions(score_strategy=strategy, score_function=function)

    refuse(ValueError, "lambda", lambda s, t: s[1])
    refuse(TypeError, "plain Python function", 3)
    refuse(TypeError, "plain Python function", math.log)
    namespace: dict = {}
    exec("def f(s, t):\n    return s[1]\n", namespace)
    refuse(ValueError, "not in a file", namespace["f"])
    for strategy in (Score.TIMESTAMP, Score.STEP, Score.CUSTOMIZED, Score.LFU):
        refuse(ValueError, "score_function ranks two scores", decayed, strategy)


def test_c10_a_nested_function_may_have_lines_at_the_margin(tmp_path: Path) -> None:
    file = tmp_path / "margin.py"
    # No formatter leaves such lines.
    file.write_text(
        "def factory():\n"
        "    def inner(scores, now):\n"
        '        """Of two lines,\n'
        'the second at the margin."""\n'
        "# A comment too.\n"
        "        return scores[1] * 2\n"
        "    return inner\n"
        "def too_large(scores, now):\n"
        f"    return scores[1] + {10**400}\n"
        "def refused():\n"
        "    def inner(scores, now):\n"
        "# At the margin.\n"
        "        return scores[1] % 7\n"
        "    return inner\n"
    )
    functions = runpy.run_path(str(file))
    source = translate(functions["factory"](), TIME_FIRST)
    assert value_of(rank(source, 0, 5, 0)) == 10
    with pytest.raises(ValueError, match=r"margin.py:9\): it has no value"):
        translate(functions["too_large"], TIME_FIRST)
    with pytest.raises(ValueError, match=r"margin.py:13\): .*'return scores\[1\] % 7'"):
        translate(functions["refused"](), TIME_FIRST)


def test_c27_a_wrapper_is_not_taken_for_what_it_wraps() -> None:
    def negated(scores, now):
        return -scores[1]

    source = translate(negated, TIME_FIRST)
    assert translate(functools.wraps(decayed)(negated), TIME_FIRST) == source

    @functools.wraps(decayed)
    def decorated(scores, now):
        return -scores[1]

    with pytest.raises(ValueError, match="without decorators: 'def decorated"):
        translate(decorated, TIME_FIRST)


def test_c28_tables_of_one_module_need_one_function_and_one_order() -> None:
    def build(*tables: tuple) -> None:
        make_module([options(score_strategy=s, score_function=f) for s, f in tables])

    build((TIME_FIRST, decayed), (TIME_FIRST, decayed))
    for other in ((TIME_FIRST, None), (TIME_FIRST, constant), (COUNT_FIRST, decayed), (Score.STEP, None)):
        for tables in (((TIME_FIRST, decayed), other), (other, (TIME_FIRST, decayed))):
            with pytest.raises((ValueError, UnsupportedOptionError), match="differ in .*score_"):
                build(*tables)


def test_c10_numbers_of_the_scopes_around_are_those_of_the_construction() -> None:
    factor = 2

    def scaled(scores, now):
        return scores[1] * factor

    source = translate(scaled, TIME_FIRST)
    factor = 3
    assert value_of(rank(source, 0, 5, 0)) == 10
    assert translate(scaled, TIME_FIRST) != source
    assert value_of(rank(translate(scaled, COUNT_FIRST), 5, 0, 0)) == 15


@pytest.mark.usefixtures("tensors_on_device")
def test_c10_random_batches_evict_as_the_oracle_ranks(backend: str) -> None:
    """Ids that are touched seldom and late outlive often and early ones, and the other way round."""

    def ranked(scores, now):
        return math.log(max(scores[1], 1)) - (now - scores[0]) * 1e-9

    rng = np.random.default_rng(5)
    empty = np.zeros(0, np.float32)
    function = translate(ranked, COUNT_FIRST[::-1])
    group = make_group(backend, [48, 16], strategy=SCORE_COMPOUND, score_function=function)
    oracles = [
        ReferenceTable(n, 16, SCORE_COMPOUND, lambda key: (empty, empty), lambda *x: ranked(x[:2], x[2]))
        for n in (3, 1)
    ]
    num_evicted = by_function = 0
    for _ in range(60 if backend == "cpu" else 8):
        # A step in which half a second has passed.
        group.index.clock[[NOW, SEEN]] += int(rng.integers(1, 10**9))
        sizes = [int(rng.integers(10, 40)), int(rng.integers(5, 20))]
        ids = [rng.integers(0, 70, n) ** 2 // 70 for n in sizes]
        step = group.begin_step()
        _, events = group.find_or_insert(torch.tensor(np.concatenate(ids)), ranges(*sizes))
        result = events.result()
        now, evicted = int(group.index.clock[NOW]), []
        for oracle, keys in zip(oracles, ids, strict=True):
            resident = oracle.entries()
            out = oracle.lookup(keys.tolist(), None, 0, step.number, step.number, now)[1]
            evicted += out
            least = min((entry.score for entry in resident.values()), default=0)
            by_function += sum(entry.score > least for _, entry in out)
        assert result.evicted_ids.tolist() == [key for key, _ in evicted]
        assert result.evicted_scores.tolist() == [entry.score for _, entry in evicted]
        assert result.evicted_stamps.tolist() == [entry.stamp for _, entry in evicted]
        num_evicted += len(evicted)
        step.finish()
        group.check_invariants()
    # Not what the frequency alone would have evicted.
    assert num_evicted > 20 and by_function > 2


@pytest.mark.usefixtures("tensors_on_device")
@pytest.mark.parametrize("tile", [16, 1024])
def test_c16_buckets_of_any_size_evict_by_the_function(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, tile: int
) -> None:
    if backend == "cpu":
        pytest.skip("cpu: is what Triton is compared with")

    def around_zero(scores, now):
        return (scores[1] - 1.5) * math.exp((scores[0] - now) * 1e-9)

    monkeypatch.setattr(sys.modules["dynamicemb.table.triton.insert"], "_TILE", tile)
    twins = Twins(device, [48], 48, SCORE_COMPOUND)
    for side in (twins.cpu, twins.gpu):
        side.index.score_function = translate(around_zero, TIME_FIRST)
    ids = torch.arange(20, device="cpu") * 7919
    for step in range(4):
        twins.advance()
        mine = torch.cat([ids + 10**6 * step, ids[:14] + 10**6 * step, ids[:3]])
        for side, more in ((twins.cpu, {}), (twins.gpu, {"deterministic": True})):
            side.lookup(mine, torch.tensor([0, 37], device="cpu"), None, **more)
        twins.assert_equal()
    assert twins.cpu.index.tallies[0, EVICTED] >= 30


@pytest.mark.usefixtures("tensors_on_device")
def test_c10_not_a_number_is_evicted_first_and_zeros_tie(backend: str) -> None:
    def odd(scores, now):
        # NaN of either sign for 2 and 5 occurrences, -0.0 for 3, 0.0 for 4, else -1.
        infinite = math.inf if scores[1] > 1 else 1.0
        nan = infinite - infinite
        number = -0.0 if scores[1] == 3 else 0.0 if scores[1] == 4 else -1.0
        return nan if scores[1] == 2 else -nan if scores[1] == 5 else number

    group = make_group(backend, [16], strategy=SCORE_COMPOUND, score_function=translate(odd, TIME_FIRST))
    nan, zeros = [5, 6, 7, 8], [1, 2, 3, 4]
    counts = dict.fromkeys(range(9, 17), 1) | {1: 3, 2: 4, 3: 3, 4: 4, 5: 2, 6: 5, 7: 2, 8: 5}
    ids = [key for key, count in counts.items() for _ in range(count)]
    step = group.begin_step()
    group.find_or_insert(torch.tensor(ids), ranges(len(ids)))
    step.finish()
    step = group.begin_step()
    new = torch.arange(100, 116)
    _, events = group.find_or_insert(new, ranges(16))
    others = [key for key in counts if key not in (*nan, *zeros)]
    expected = [key for part in (nan, others, zeros) for key in sorted(part, key=mixed)]
    assert events.result().evicted_ids.tolist() == expected


def test_c10_a_module_takes_its_function_along_to_another_process() -> None:
    module = make_module([options(capacity=16, score_strategy=COUNT_FIRST, score_function=decayed_counts)])
    copy = pickle.loads(pickle.dumps(module))
    for one in (module, copy):
        one(*batch([key for key in range(16) for _ in range(1 + key % 5)]))
        one(*batch([100, 101]))
    assert set(contents(module)["a"]) == set(contents(copy)["a"])
    gone = set(range(16)) - set(contents(module)["a"])
    assert gone == set(sorted((4, 9, 14), key=mixed)[:2])


def decayed_counts(scores, now):
    """Rank the most frequent lowest."""
    return -scores[0]
