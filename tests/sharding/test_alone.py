"""A rank alone exchanges nothing: the short way of a batch gives what TorchRec's way gives, bit for bit."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchrec.modules.utils import construct_jagged_tensors
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dynamicemb.sharding import torchrec_compat
from dynamicemb.sharding.checks.features import Wanted
from dynamicemb.sharding.checks.lengths import ends_on_cpu, ends_on_device
from dynamicemb.sharding.exchange.alone import ReadyBags, ReadySequences, ReadySplits
from dynamicemb.sharding.torchrec_compat import jagged_tensors, keyed_jagged_tensor
from tests.sharding.test_sharding import CASES, MEAN, A, B
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import (
    Case,
    Table,
    build,
    dynamic_modules,
    exported,
    loss_of,
    make_batch,
    make_kjt,
    outputs_of,
)

pytestmark = pytest.mark.distributed

ADMITTING = Table("a", ("f0", "f1"), admit=3)
RAISING = Table("a", ("f0", "f1"), check="ERROR")
MORE_CASES = {
    **CASES,
    "ec-one": Case((A,), pooled=False),
    "ebc-one": Case((A,), pooled=True),
    "ec-lfu-dedup": Case((B, ADMITTING), pooled=False, dedup=True),
    "ebc-admission": Case((B, ADMITTING), pooled=True),
    "ec-error": Case((RAISING, B), pooled=False),
    "ebc-empty": Case((A, MEAN), pooled=True, batch_sizes=(0, 3, 0)),
    "ec-empty": Case((A, B), pooled=False, batch_sizes=(0, 3, 0)),
}
SHORT = [name for name in MORE_CASES if "mixed" not in name]


def collection_of(model: Any) -> Any:
    return model.module.collection


def train_on_a_way(case: Case, short: bool, giving: str) -> tuple[list[Any], dict[str, Any], list[dict[str, Any]]]:
    """Train a few steps, evaluate one; return outputs and gradients of weights, rows, and counters of the tables."""
    model = build(case, 1)
    if not short:
        collection_of(model)._is_alone = False
    told: list[Any] = []
    for step in range(4):
        batch = make_batch(case, step, 0)
        if giving == "counts":
            batch["weights"] = torch.arange(batch["values"].numel()) % 5 + 1
        if "order" in giving and step:
            # Features in the order of the tables: nothing to permute.
            keys = collection_of(model)._names
            parts = dict(zip(batch["keys"], split(batch, batch["values"]), strict=True))
            sizes = dict(zip(batch["keys"], batch["lengths"].view(len(batch["keys"]), -1), strict=True))
            batch |= {"keys": keys, "values": torch.cat([parts[key] for key in keys])}
            batch["lengths"] = torch.cat([sizes[key] for key in keys])
        if "gradients" in giving:
            batch["weights"].requires_grad_()
        result = model(make_kjt(batch, case))
        assert type(result).__name__.startswith("Ready") is (short and not case.dedup), type(result)
        outputs = outputs_of(case, result)
        told += [
            (name, value.detach().clone(), None if case.pooled else result[name].lengths().clone())
            for name, value in outputs.items()
        ]
        loss_of(outputs).backward()
        if "gradients" in giving:
            told.append(("weights", batch["weights"].grad, None))
    model.eval()
    with torch.no_grad():
        told += [(name, value, None) for name, value in outputs_of(case, model(make_kjt(batch, case))).items()]
    stats = [tables.stats() for tables in dynamic_modules(model)]
    return told, exported(model), stats


def split(batch: dict[str, Any], values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values.split(batch["lengths"].view(len(batch["keys"]), -1).sum(1).tolist())


def compare_ways(rank: int, world_size: int, case: Case, giving: str) -> None:
    short, expected = train_on_a_way(case, True, giving), train_on_a_way(case, False, giving)
    assert len(short[0]) == len(expected[0])
    for (name, value, lengths), (wanted_name, wanted, wanted_lengths) in zip(short[0], expected[0], strict=True):
        assert name == wanted_name and value.shape == wanted.shape and torch.equal(value, wanted), name
        assert lengths is None or torch.equal(lengths, wanted_lengths), name
    assert short[1].keys() == expected[1].keys()
    for name, rows in expected[1].items():
        assert short[1][name].keys() == rows.keys(), name
        assert all(torch.equal(short[1][name][key], row) for key, row in rows.items()), name
    assert short[2] == expected[2]


@pytest.mark.parametrize("name", SHORT)
def test_the_short_way_gives_what_torchrecs_way_gives(ranks: RankPool, name: str) -> None:  # noqa: F811
    ranks.run(1, compare_ways, MORE_CASES[name], "ids")


@pytest.mark.parametrize(
    ("name", "giving"),
    [
        ("ec-one", "counts"),
        ("ec-lfu-dedup", "counts"),
        ("ebc-admission", "counts"),
        ("ebc-weighted", "gradients"),
        ("ebc-weighted-mean", "gradients"),
        ("ebc-weighted", "gradients in order"),
        ("ebc-weighted-mean", "gradients in order"),
        ("ec", "order"),
        ("ec-one", "order"),
        ("ebc-one", "order"),
    ],
)
def test_the_short_way_with_counts_gradients_and_orders(ranks: RankPool, name: str, giving: str) -> None:  # noqa: F811
    ranks.run(1, compare_ways, MORE_CASES[name], giving)


class CountedOps(TorchDispatchMode):
    """Lists the torch ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Constant(torch.autograd.Function):
    """Values that want a gradient, and do nothing with it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *shape: int) -> torch.Tensor:
        with _disable_current_modes():
            return torch.zeros(shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        return None, None, None


class ConstantLookup:
    """Stands for the tables of a module, and calls no torch op that is counted."""

    def __init__(self, module: Any) -> None:
        self.pooled = module.pooling_mode.name != "NONE"
        self.dim, self.num_features = module.max_D, module.total_D // module.max_D
        self.anchor = torch.zeros(1, requires_grad=True)

    def __call__(self, ids: torch.Tensor, offsets: torch.Tensor, *_: Any, **__: Any) -> Any:
        if self.pooled:
            shape = ((offsets.numel() - 1) // self.num_features, self.num_features * self.dim)
        else:
            shape = (ids.numel(), self.dim)
        return Constant.apply(self.anchor, *shape)


def count_ops(rank: int, world_size: int, pooled: bool, train: bool) -> list[str]:
    case = Case((Table("a", ("f1", "f0")), Table("b", ("f2", "f3"))), pooled=pooled)
    model = build(case, world_size)
    model.train(train)
    for module in dynamic_modules(model):
        object.__setattr__(module, "forward", ConstantLookup(module))
    for step in range(3):
        batch = make_batch(case, step, rank)
        features = make_kjt(batch | {"keys": ["f1", "f0", "f2", "f3"]}, case)
        counted = CountedOps()
        with counted, torch.set_grad_enabled(train):
            result = model(features)
            values = [result.values()] if pooled else [jagged.values() for jagged in result.values()]
        gradients = [torch.ones_like(value) for value in values]
        if train:
            with counted:
                torch.autograd.backward(values, gradients)
    return counted.names


@pytest.mark.parametrize(
    ("pooled", "train", "most"), [(True, True, 2), (True, False, 2), (False, True, 6), (False, False, 5)]
)
def test_a_step_of_a_rank_alone_calls_few_torch_ops(
    ranks: RankPool,  # noqa: F811
    pooled: bool,
    train: bool,
    most: int,
) -> None:
    ((*names,),) = ranks.run(1, count_ops, pooled, train)
    assert len(names) <= most, "\n".join(names)


LENGTHS = {
    "usual": ([2, 0, 1, 4, 0, 0], 2, True),
    "one bag": ([3], 1, True),
    "no ids": ([0, 0], 2, True),
    "no bags": ([], 0, True),
    "negative": ([2, -1, 1], 1, False),
    "too few": ([1, 1], 1, False),
    "too many": ([3, 9], 1, False),
    "beyond all bounds": ([2**62, 2**62, 2**62, 2**62, 0, 6], 2, False),
}
NUM_IDS = {"usual": 7, "one bag": 3, "too few": 3, "too many": 5, "beyond all bounds": 6, "negative": 2}


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("offset_dtype", [None, torch.int32, torch.int64])
def test_c04_lengths_are_compared_with_ids(kind: str, offset_dtype: torch.dtype | None) -> None:
    numbers, batch_size, is_right = LENGTHS[kind]
    lengths, num_ids = torch.tensor(numbers, dtype=torch.int64), NUM_IDS.get(kind, 0)
    offsets = None if offset_dtype is None else torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(offset_dtype)
    if not is_right:
        with pytest.raises(ValueError, match="features: lengths must be non-negative and sum to"):
            ends_on_cpu(lengths, num_ids, batch_size)
        with pytest.raises(ValueError, match="features: lengths must be non-negative and sum to"):
            ends_on_device(lengths, offsets, num_ids, batch_size)
        return
    expected = [0, *itertools.accumulate(numbers)]
    for ends, starts in (
        ends_on_cpu(lengths, num_ids, batch_size),
        ends_on_device(lengths, offsets, num_ids, batch_size),
    ):
        assert ends.dtype == torch.int64 and ends.tolist() == expected
        assert starts == expected[:: batch_size or 1]


def test_c04_lengths_that_are_not_contiguous_are_read_as_they_are() -> None:
    every_other = torch.tensor([1, 9, 2, 9])[::2]
    assert ends_on_cpu(every_other, 3, 1)[1] == [0, 1, 3]


def test_c04_ids_without_bags_are_refused() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="sum to the 3 ids"):
        ends_on_cpu(nothing, 3, 0)
    with pytest.raises(ValueError, match="sum to the number of ids"):
        ends_on_device(nothing, None, 3, 0)


@pytest.mark.parametrize("offsets", [[1, 2, 3], [0, 1, 3], [0, 3, 3]])
def test_c04_offsets_that_are_no_running_sums_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets, if there are any, must start at 0 and be their running sum"):
        ends_on_device(torch.tensor([2, 1]), torch.tensor(offsets), 3, 1)


def test_lengths_on_a_device_take_few_torch_ops() -> None:
    with CountedOps() as counted:
        ends_on_device(torch.arange(6), None, 15, 3)
    # Besides the running sums, which the lookup needs anyway, and the copy to the host.
    assert len([name for name in counted.names if "aten.arange" not in name]) <= 6, counted.names


def test_c04_keys_are_checked_whenever_they_change() -> None:
    wanted = Wanted(["x", "y"], False, False, False, False, torch.device("cpu"))
    keys = ["x", "y"]
    for _ in range(2):
        assert wanted.missing(keys) == []
    keys[1] = "z"
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\['y'\] are not in the batch"):
            wanted.missing(keys)
    with pytest.raises(ValueError, match=r"keys \['x'\] occur twice"):
        wanted.missing(["x", "y", "x"])
    lenient = replace(wanted, missing_as_empty=True)
    assert [lenient.missing(keys) for keys in (["x"], ["x"], ["y"], ["x", "y"])] == [["y"], ["y"], ["x"], []]


def test_tensors_made_of_parts_are_those_of_the_constructors() -> None:
    ids, lengths, ends = torch.tensor([5, 6, 7]), torch.tensor([2, 1]), torch.tensor([0, 2, 3])
    weights = torch.ones(3)
    for given in (ids, weights, None):
        made = keyed_jagged_tensor(["x", "y"], ids, given, lengths, ends, 1, [0, 2, 3])
        built = KeyedJaggedTensor(
            ["x", "y"],
            ids,
            weights=given,
            lengths=lengths,
            offsets=ends,
            stride=1,
            length_per_key=[2, 1],
            offset_per_key=[0, 2, 3],
        )
        assert type(made) is KeyedJaggedTensor and same_fields(made, built)
    made_ones = jagged_tensors(["x", "y"], [ids, weights], [weights, ids], [lengths, ends])
    built_ones = {"x": JaggedTensor(ids, weights, lengths), "y": JaggedTensor(weights, ids, ends)}
    assert list(made_ones) == list(built_ones)
    assert all(same_fields(made_ones[name], built_ones[name]) for name in built_ones)
    assert jagged_tensors(["x"], [ids], None, [lengths])["x"].weights_or_none() is None


def same_fields(one: Any, other: Any) -> bool:
    mine, theirs = vars(one), vars(other)
    return mine.keys() == theirs.keys() and all(
        value is theirs[name] or (isinstance(value, list) and value == theirs[name]) for name, value in mine.items()
    )


@pytest.mark.parametrize("field", ["_values", "_more"])
def test_tensors_of_an_unknown_release_are_made_by_their_constructor(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    class Other(JaggedTensor):
        def __init__(self, *args: Any, **parts: Any) -> None:
            super().__init__(*args, **parts)
            setattr(self, field, torch.tensor([-1]))

    monkeypatch.setattr(torchrec_compat, "JaggedTensor", Other)
    made = jagged_tensors(["x"], [torch.tensor([1.0])], None, [torch.tensor([1])])["x"]
    assert getattr(made, field).tolist() == [-1]


def test_what_is_ready_goes_through_the_callbacks() -> None:
    ready = ReadyBags(torch.arange(6.0).view(2, 3), ["x", "y"], [1, 2])
    ready.callbacks.append(lambda pooled: {"x": pooled["x"] + 1, "y": pooled["y"]})
    ready.callbacks.append(lambda parts: {**parts, "z": parts["x"] * 2})
    result = ready.wait()
    assert result["x"].tolist() == [[1.0], [4.0]] and result["z"].tolist() == [[2.0], [8.0]]
    # A lazy result waits by itself.
    assert ready["y"].wait().tolist() == [[1.0, 2.0], [4.0, 5.0]]
    batch = KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]), stride=1)
    splits = ReadySplits(batch, None)
    assert splits.wait().wait()[0] is batch
    assert [awaitable.wait().wait() for awaitable in splits.awaitables] == [batch]


def watch(rank: int, world_size: int, pooled: bool) -> None:
    """TorchRec's trackers, its early release of memory and its stashing work: the way is TorchRec's then."""
    from dynamicemb.sharding.exchange import send_batch

    case = Case((A,), pooled=pooled)
    model = build(case, world_size)
    collection, features = collection_of(model), make_kjt(make_batch(case, 0, 0), case)
    assert type(model(features)).__name__.startswith("Ready")
    seen: list[tuple[Any, ...]] = []
    collection.post_lookup_tracker_fn = lambda *args: seen.append(args)
    collection.post_odist_tracker_fn = lambda: seen.append(())
    expected = model(features)
    ((batch, looked_up, *_), odist) = seen
    assert odist == () and batch.keys() == ["f0", "f1"]
    assert looked_up.dim() == (2 if pooled else 1)
    collection.post_odist_tracker_fn = None
    model(features)
    collection.post_lookup_tracker_fn, collection.post_odist_tracker_fn = None, lambda: seen.append(())
    model(features)
    assert len(seen) == 4 and seen[-1] == ()
    collection.post_odist_tracker_fn = None
    inner, send_batch.stashes_memory = send_batch.stashes_memory, lambda: True
    try:
        assert not type(model(features)).__name__.startswith("Ready")
    finally:
        send_batch.stashes_memory = inner
    lookup = collection._lookups[0]
    lookup.optim_state_tracker_fn = lambda *args: seen.append(args)
    result = model(features)
    assert len(seen) == 5 and type(result).__name__.startswith("Ready")
    for name, value in outputs_of(case, expected).items():
        assert torch.equal(value, outputs_of(case, result)[name])
    if not hasattr(collection, "_free_features_storage_early"):
        # An older release.
        return
    collection._free_features_storage_early = True
    context = collection.create_context()
    collection.input_dist(context, features)
    # The batch comes in another order than the tables have.
    assert features.keys() == ["f1", "f0"] and len(context.early_releasable_inputs) == 1


@pytest.mark.parametrize("pooled", [True, False])
def test_who_watches_a_rank_alone_sees_what_torchrec_shows(ranks: RankPool, pooled: bool) -> None:  # noqa: F811
    ranks.run(1, watch, pooled)


def read_context(rank: int, world_size: int, pooled: bool) -> None:
    case = Case((A, MEAN if pooled else B), pooled=pooled)
    model = build(case, world_size)
    collection, features = collection_of(model), make_kjt(make_batch(case, 0, 0), case)
    context = collection.create_context()
    (batch,) = collection.input_dist(context, features).wait().wait()
    (of_sharding,) = context.sharding_contexts
    assert of_sharding.batch_size_per_rank == [5] and not context.is_padded
    assert batch.keys() == collection._names and batch.stride() == 5
    assert batch.offsets().tolist() == [0, *itertools.accumulate(batch.lengths().tolist())]
    if pooled:
        assert of_sharding.batch_size_per_feature_pre_a2a == [5] * 3 and context.divisors is not None
    else:
        assert of_sharding.features_before_input_dist is batch
    # Called apart, as some modules around a collection do, and then at once.
    apart = collection.output_dist(context, collection.compute(context, [batch]))
    at_once = collection.compute_and_output_dist(context, [batch])
    for name, value in outputs_of(case, at_once).items():
        assert torch.equal(value, outputs_of(case, apart)[name])


@pytest.mark.parametrize("pooled", [True, False])
def test_the_context_of_a_rank_alone_has_what_others_read(ranks: RankPool, pooled: bool) -> None:  # noqa: F811
    ranks.run(1, read_context, pooled)


def leave_out_and_count(rank: int, world_size: int) -> None:
    """A feature that a batch lacks, and counts of a batch in the order of the tables."""
    case = Case((Table("b", ("f0", "f1"), score="LFU"),), pooled=False)
    model = build(case, world_size, missing_as_empty=True)
    counts, ids, lengths = torch.tensor([7, 1, 2]), torch.tensor([5, 6, 5]), torch.tensor([2, 1])
    batch = KeyedJaggedTensor(["f0"], ids, weights=counts, lengths=lengths)
    for _ in range(2):
        outputs = model(batch)
        assert outputs["f0"].lengths().tolist() == [2, 1] and outputs["f1"].lengths().tolist() == [0, 0]
        assert torch.equal(outputs["f0"].values()[0], outputs["f0"].values()[2])
    (tables,) = dynamic_modules(model)
    slots = tables.tables.scan(0)
    index = tables.tables.index
    assert dict(zip(index.keys[slots].tolist(), index.scores[slots].tolist(), strict=True)) == {5: 18, 6: 2}
    pooled = build(replace(case, pooled=True), world_size, missing_as_empty=True)(batch).to_dict()
    assert pooled["f0"].shape == (2, 4) and pooled["f0"].any(1).all()
    assert pooled["f1"].tolist() == [[0.0] * 4] * 2


def test_c10_counts_and_missing_features_of_a_rank_alone(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(1, leave_out_and_count)


def test_sequences_come_with_their_ids_where_that_is_wanted() -> None:
    rows = torch.arange(6.0).view(3, 2)
    batch = keyed_jagged_tensor(
        ["x", "y"], torch.tensor([7, 8, 9]), None, torch.tensor([1, 0, 0, 2]), None, 2, [0, 1, 3]
    )
    for with_ids in (False, True):
        ready = ReadySequences(rows, batch, ["x", "y"], with_ids).wait()
        built = construct_jagged_tensors(rows, batch, ["x", "y"], need_indices=with_ids)
        assert list(ready) == list(built) == ["x", "y"]
        for name, jagged in ready.items():
            ids = built[name].weights_or_none()
            assert torch.equal(jagged.values(), built[name].values())
            assert torch.equal(jagged.lengths(), built[name].lengths())
            assert jagged.weights_or_none() is None if ids is None else torch.equal(jagged.weights(), ids)


def look_up_with_ids(rank: int, world_size: int) -> None:
    case = Case((A,), pooled=False)
    model = build(case, world_size)
    collection_of(model)._need_indices = True
    batch = make_batch(case, 0, rank)
    ids = dict(zip(batch["keys"], split(batch, batch["values"]), strict=True))
    for name, jagged in model(make_kjt(batch, case)).items():
        assert torch.equal(jagged.weights(), ids[name])


def test_a_collection_that_wants_ids_returns_them(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(1, look_up_with_ids)


def profile(rank: int, world_size: int, pooled: bool) -> set[str]:
    case = Case((A,), pooled=pooled)
    model = build(case, world_size)
    features = make_kjt(make_batch(case, 0, rank), case)
    with torch.profiler.profile() as profile:
        assert type(model(features)).__name__.startswith("Ready")
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("pooled", [True, False])
def test_profiles_show_the_lookup_of_a_rank_alone(ranks: RankPool, pooled: bool) -> None:  # noqa: F811
    (names,) = ranks.run(1, profile, pooled)
    assert "[lookup]_[collection]_[dynamic_row_wise]" in names, names
