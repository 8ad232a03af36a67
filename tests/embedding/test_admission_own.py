"""Admission by the user's own strategies and counters, and what is refused."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamicemb import (
    AdmissionStrategy,
    Counter,
    DynamicEmbError,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
)
from dynamicemb.dynamicemb_config import MAX_BUCKET_CAPACITY
from dynamicemb.embedding.admission import refuse_capture
from dynamicemb.table.admission import ADMIT_BY_CALL
from dynamicemb.table.importing.rows import RowImport
from tests.support.admitting import admitting, by_chance, device, first_values, holds, lengths_of, module_on  # noqa: F401
from tests.support.lookups import bag_per_id, batch, constant, make_module, options, score_of

pytestmark = pytest.mark.usefixtures("tensors_on_device")
LFU = DynamicEmbScoreStrategy.LFU


class Even(AdmissionStrategy):
    """Admits even ids that occurred twice; rejected ids read 9."""

    def __init__(self, fills: bool = True) -> None:
        self.fills = fills
        self.seen: list[tuple[list[int], list[int]]] = []

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        self.seen.append((keys.tolist(), frequencies.tolist()))
        return (keys % 2 == 0) & (frequencies >= 2)

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        if self.fills:
            buffer[indices] = 9.0
        return self.fills


@dataclass
class Unhashable(Even):
    """What a dataclass is that may be compared and is not frozen."""

    threshold: int = 2


class DictCounter(Counter):
    """Counts in a dict."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}

    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        out = []
        for key, table, frequency in zip(keys.tolist(), table_ids.tolist(), frequencies.tolist(), strict=True):
            self.counts[table, key] = self.counts.get((table, key), 0) + frequency
            out.append(self.counts[table, key])
        return torch.tensor(out, dtype=torch.int64, device=keys.device)

    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        for key, table in zip(keys.tolist(), table_ids.tolist(), strict=True):
            self.counts.pop((table, key), None)

    def memory_usage(self, mem_type: Any = None) -> int:
        return 0

    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        raise NotImplementedError

    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("counter", ["none", "KVCounter", "own"])
def test_c12_a_strategy_of_the_user(backend: str, counter: str) -> None:
    strategy = Even()
    counters = {"none": None, "KVCounter": KVCounter(64, 16), "own": DictCounter()}
    tables = [
        options(dim, admit_strategy=strategy, admission_counter=counters[counter], score_strategy=LFU) for dim in (4, 3)
    ]
    module = module_on(backend, *tables)
    out = module(*batch([2, 3, 3, 2, 4], [4]))
    assert strategy.seen == [([2, 3, 4], [2, 2, 1]), ([4], [1])]
    torch.testing.assert_close(out[0, :4], 2 * first_values([2], 4)[0] + 27)
    assert (out[0, 4:] == 9).all()
    out.sum().backward()
    module(*batch([4, 3], [6, 6]))
    remembers = counter != "none"
    assert strategy.seen[2:] == [([4, 3], [2, 3] if remembers else [1, 1]), ([6], [2])]
    assert holds(module, [2, 3, 4]) == [True, False, remembers]
    assert holds(module, [4, 6], "b") == [False, True]
    if remembers:
        assert score_of(module, "a", 4) == 2
    if counter == "KVCounter":
        assert (lengths_of(module, 0), lengths_of(module, 1)) == ({3: 3}, {4: 1})
    if counter == "own":
        assert counters["own"].counts == {(0, 3): 3, (1, 4): 1}
    assert module.stats()["a"]["non_admitted"] == (4 if remembers else 5)
    module.tables.check_invariants()


def test_c12_a_strategy_that_fills_nothing_leaves_it_to_the_table(backend: str) -> None:
    module = module_on(backend, options(admit_strategy=Even(fills=False)))
    torch.testing.assert_close(module(*bag_per_id([3, 2])), first_values([3, 2], 4), rtol=0, atol=0)


def test_c12_a_class_derived_from_ours_decides_itself(backend: str) -> None:
    class Stricter(FrequencyAdmissionStrategy):
        def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
            return super().admit(keys, frequencies) & (keys > 0)

    module = module_on(backend, admitting(0, strategy=Stricter(2)))
    assert module.tables.admission.kind == ADMIT_BY_CALL
    module(*bag_per_id([1, 1, -1, -1]))
    assert holds(module, [1, -1]) == [True, False]


class Never(FrequencyAdmissionStrategy):
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies < 0


class NeverByChance(ProbabilityAdmissionStrategy):
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies < 0


@pytest.mark.parametrize("strategy", [Never(2, constant(0.5)), NeverByChance(0.5, constant(0.5))])
@pytest.mark.parametrize("counter", [None, KVCounter(9, 16)])
def test_c12_initializer_args_of_a_derived_class_are_read(backend: str, strategy: Any, counter: Any) -> None:
    module = module_on(backend, options(admit_strategy=strategy, admission_counter=counter))
    assert (module(*bag_per_id([1, 2])) == 0.5).all() and holds(module, [1, 2]) == [False, False]


def test_c28_a_chance_that_is_derived_and_does_not_decide_is_refused() -> None:
    class Loud(ProbabilityAdmissionStrategy):
        def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
            buffer[indices] = 9.0
            return True

    with pytest.raises(ValueError, match="Loud must decide by itself.*override admit"):
        options(admit_strategy=Loud(0.5))


def test_c12_the_frequency_strategy_asks_a_counter_of_the_user(backend: str) -> None:
    counter = DictCounter()
    strategy = FrequencyAdmissionStrategy(2, constant(0.5))
    module = module_on(backend, options(admit_strategy=strategy, admission_counter=counter))
    assert (module(*bag_per_id([1])) == 0.5).all()
    module(*bag_per_id([1, 2]))
    assert holds(module, [1, 2]) == [True, False] and counter.counts == {(0, 2): 1}


def test_c12_counts_beyond_the_largest_frequency_are_exact(backend: str) -> None:
    most = 2**31 - 1
    table = options(admit_strategy=Even(), admission_counter=KVCounter(64, 16), score_strategy=LFU)
    module = module_on(backend, table)
    ids, offsets = bag_per_id([1, 1, 3, 1])
    module(ids, offsets, frequency_counters=torch.tensor([most, most, 2, most]))
    assert lengths_of(module) == {1: 3 * most, 3: 2}
    module(ids, offsets, frequency_counters=torch.tensor([most, 1, 2, 1]))
    assert lengths_of(module) == {1: 4 * most + 2, 3: 4}
    ids, offsets = bag_per_id([2, 2])
    module(ids, offsets, frequency_counters=torch.tensor([most, most]))
    assert score_of(module, "a", 2) == 2 * most and module.stats()["a"]["clamped_inputs"] == 0


def test_c12_an_id_that_was_imported_starts_counting_anew(backend: str) -> None:
    own = DictCounter()
    for counter in (own, KVCounter(64, 16)):
        table = options(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=counter)
        module = module_on(backend, table)
        module(*bag_per_id([5, 5, 6]))
        module.insert("a", torch.tensor([5, 5, 8]), torch.zeros(3, 4))
        assert own.counts == {(0, 6): 1}
        module.erase("a", torch.tensor([5, 8]))
        # Not the third occurrence since it lost its row.
        module(*bag_per_id([5]))
        assert holds(module, [5, 6, 8]) == [False] * 3
        module(*bag_per_id([5, 5, 6]))
        assert holds(module, [5, 6, 8]) == [True, False, False]
        own.counts = {(0, 6): 1}


@pytest.mark.parametrize("keep", [False, True])
def test_c12_an_id_that_was_loaded_is_not_counted_by_a_counter_of_the_user(backend: str, keep: bool) -> None:
    own = DictCounter()
    module = module_on(backend, options(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=own))
    module(*bag_per_id([5, 5, 6]))
    with RowImport(module.tables, 0, keep, 2, 0.0) as rows:
        rows.add(torch.tensor([5, 8]), torch.zeros(2, 4), None, [torch.tensor([10**18, 10**18])])
    assert holds(module, [5, 6, 8]) == [True, False, True] and own.counts == {(0, 6): 1}


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ([True], TypeError, r"Wrong.admit must return a tensor of torch.bool, got \[True\]"),
        (torch.ones(2, dtype=torch.int64, device="cpu"), TypeError, "got a torch.int64 tensor"),
        (torch.ones(3, dtype=torch.bool, device="cpu"), ValueError, r"must return shape \(2,\)"),
    ],
)
def test_c04_a_wrong_answer_of_the_user_is_refused(result: Any, error: type[Exception], message: str) -> None:
    class Wrong(Even):
        def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> Any:
            return result

    module = make_module([options(admit_strategy=Wrong())], device="cpu")
    with pytest.raises(error, match=message):
        module(*bag_per_id([1, 2]))
    assert module.tables.steps.num_outstanding == 0 and module.stats()["a"]["size"] == 0


@pytest.mark.parametrize("result", [None, 1])
def test_c04_a_fill_that_does_not_say_whether_it_filled_is_refused(backend: str, result: Any) -> None:
    class Forgetful(Even):
        def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> Any:
            buffer[indices] = 9.0
            return result

    module = module_on(backend, options(admit_strategy=Forgetful()))
    with pytest.raises(TypeError, match="Forgetful.initialize_non_admitted_embeddings must return True or False, got"):
        module(*bag_per_id([1, 2]))
    assert module.tables.steps.num_outstanding == 0


def test_c20_a_fill_that_fails_leaves_the_counts_right(backend: str) -> None:
    class Failing(Even):
        def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
            raise KeyError("the user's")

    module = module_on(backend, options(capacity=16, admit_strategy=Failing()))
    module(*bag_per_id([2, 2]))
    with pytest.raises(KeyError):
        module(*bag_per_id([1, *range(4, 40, 2), *range(4, 40, 2)]))
    counts = module.stats()["a"]
    assert counts["size"] == counts["inserted"] - counts["evicted"]
    assert counts["hits"] + counts["misses"] == 39 and module.tables.steps.num_outstanding == 0
    module.tables.check_invariants()


def test_c12_the_users_own_code_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    own = make_module([options(admit_strategy=Even())], device="cpu").tables.admission
    ours = make_module([admitting(2)], device="cpu").tables.admission
    gpu = torch.device("cuda")
    with pytest.raises(DynamicEmbError, match="use FrequencyAdmissionStrategy with a KVCounter"):
        refuse_capture(SimpleNamespace(admission=own, device=gpu))
    refuse_capture(SimpleNamespace(admission=ours, device=gpu))
    refuse_capture(SimpleNamespace(admission=None, device=gpu))


# Construction


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FrequencyAdmissionStrategy(-1), ValueError, "threshold must be in 0"),
        (lambda: FrequencyAdmissionStrategy(2**63), ValueError, "threshold must be in 0"),
        (lambda: FrequencyAdmissionStrategy(1.5), TypeError, "threshold must be an int"),
        (lambda: FrequencyAdmissionStrategy(True), TypeError, "threshold must be an int"),
        (lambda: FrequencyAdmissionStrategy(1, 0.5), TypeError, "initializer_args must be"),
        (lambda: ProbabilityAdmissionStrategy(0), ValueError, r"probability must be in \(0, 1\], got 0"),
        (lambda: ProbabilityAdmissionStrategy(1.01), ValueError, "probability must be in"),
        (lambda: ProbabilityAdmissionStrategy(float("nan")), ValueError, "probability must be in"),
        (lambda: ProbabilityAdmissionStrategy("1"), TypeError, "probability must be a number"),
        (lambda: KVCounter(0), ValueError, "capacity of a KVCounter must be >= 1"),
        (lambda: KVCounter(1.0), TypeError, "capacity of a KVCounter must be an int"),
        (lambda: KVCounter(10, 17), ValueError, "multiple of 16"),
        (lambda: KVCounter(10, key_type=torch.int32), ValueError, "int64 or uint64"),
        (lambda: options(admit_strategy=FrequencyAdmissionStrategy(2)), ValueError, "needs an admission_counter"),
        (
            lambda: options(admit_strategy=ProbabilityAdmissionStrategy(0.5), admission_counter=KVCounter(9)),
            ValueError,
            "no effect on ProbabilityAdmissionStrategy",
        ),
        (lambda: options(admit_strategy=Even(), admission_counter=5), TypeError, "must be a KVCounter or a Counter"),
        (
            lambda: options(admit_strategy=Unhashable()),
            TypeError,
            "Unhashable cannot be hashed, and tables are grouped",
        ),
        (lambda: options(admit_strategy=Even), TypeError, "admit_strategy must be an AdmissionStrategy"),
        (lambda: make_module([admitting(2), admitting(3)]), ValueError, "differ in admit_strategy"),
        (lambda: make_module([admitting(2), options()]), ValueError, "differ in admit_strategy"),
        (
            lambda: make_module([options(admit_strategy=EVEN), options(admit_strategy=EVEN, admission_counter=NINE)]),
            ValueError,
            "need counters of one kind",
        ),
        (
            lambda: make_module([options(admit_strategy=EVEN, admission_counter=KVCounter(9, b)) for b in (16, 32)]),
            ValueError,
            r"buckets of \[16, 32\] ids",
        ),
        (
            lambda: make_module([admitting(2, 2**30), admitting(2, 2**30)]),
            ValueError,
            "admission_counter: the counters of .'a', 'b'. have 2147483648 places together, more than 2147483647",
        ),
    ],
)
def test_c27_what_makes_no_sense_is_refused_at_construction(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


EVEN, NINE = Even(), KVCounter(9, 16)


def test_c27_admission_of_a_table_that_is_only_read_warns() -> None:
    with pytest.warns(UserWarning, match="admit_strategy=.*no effect: only training lookups ask it, and"):
        make_module([admitting(2, training=False)])


def test_c27_frequencies_without_effect_are_refused() -> None:
    module = make_module([by_chance(0.5)], device="cpu")
    with pytest.raises(ValueError, match="only score_strategy LFU and admission count"):
        module(*bag_per_id([1]), frequency_counters=torch.tensor([2]))


def test_counters_are_rounded_up_to_whole_buckets() -> None:
    assert KVCounter(1).layout() == (1, 128) and KVCounter(33, 16).layout() == (3, 16)
    assert KVCounter(1024).layout() == (12, 128) and KVCounter(10**6).layout() == (7813, 128)
    assert KVCounter(33, MAX_BUCKET_CAPACITY).layout() == (1, 48)


def test_the_names_of_the_reference_implementation() -> None:
    import dynamicemb
    from dynamicemb import embedding_admission

    assert embedding_admission.KVCounter is dynamicemb.KVCounter is KVCounter
    assert KVCounter(capacity=5, bucket_capacity=32, key_type=torch.uint64).bucket_capacity == 32
    strategy = FrequencyAdmissionStrategy(threshold=2, initializer_args=None)
    assert strategy == FrequencyAdmissionStrategy(2) and hash(strategy) == hash(FrequencyAdmissionStrategy(2))
    assert strategy.admit(torch.tensor([1, 2]), torch.tensor([1, 2])).tolist() == [False, True]
    assert DynamicEmbTableOptions(admit_strategy=strategy, admission_counter=KVCounter(9)).admit_strategy is strategy
