"""Batches as users send them: malformed, of other dtypes, with other keys; what raises, raises on all ranks."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import Case, Table, build, dynamic_modules, exported, make_batch, make_kjt, outputs_of

pytestmark = pytest.mark.distributed

A, B = Table("a", ("f0",)), Table("b", ("f1",), dist_type="hash_roundrobin")
STATIC = Table("s", ("f2",), sharding="row_wise", num_embeddings=12)


def case_of(pooled: bool, device: str, *tables: Table, **more: Any) -> Case:
    return Case(tables or (A, STATIC, B), pooled=pooled, device=device, **more)


def kjt(device: str = "cpu", **parts: Any) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(**parts).to(torch.device(device))


def good(device: str, step: int = 0) -> Any:
    ids = torch.tensor([1, 2, 3, 4, 5, 6]) + 2 * step
    return kjt(device, keys=["f0", "f1", "f2"], values=ids, lengths=torch.tensor([2, 1, 1, 1, 0, 1]))


KEYS = ["f0", "f1", "f2"]
IDS, LENGTHS = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([2, 1, 1, 1, 0, 1])
# What contradicts itself or has a wrong type, and how its own rank names it.
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "too few lengths": ({"lengths": LENGTHS[:5]}, "ValueError: features: 5 lengths for 3 features"),
    "another stride": ({"stride": 5}, "ValueError: features: stride=5, but 6 lengths for 3 features are 2 samples"),
    "ids of two dimensions": ({"values": IDS[:, None]}, "ValueError: features: ids must have one dimension"),
    "float ids": ({"values": IDS.float()}, "TypeError: features: ids must be int64, int32 or uint64"),
    "short lengths": ({"lengths": LENGTHS.short()}, "TypeError: features: lengths must be int64 or int32"),
    "a key twice": ({"keys": ["f0", "f1", "f0"]}, "ValueError: features: keys ['f0'] occur twice"),
    "idle inverse indices": (
        {"inverse_indices": (["f0", "f1", "f2"], torch.zeros(3, 2, dtype=torch.int64))},
        "ValueError: features: inverse_indices need stride_per_key_per_rank",
    ),
    "neither": ({"lengths": None}, "ValueError: features: the batch has neither lengths nor offsets"),
}
# Numbers that the host of a GPU learns only while it sends.
CONTRADICTORY: dict[str, tuple[dict[str, Any], str]] = {
    "negative lengths": ({"lengths": torch.tensor([2, 1, 1, 1, -1, 2])}, "lengths must be non-negative and sum to"),
    "too long": ({"lengths": torch.tensor([2, 1, 1, 1, 1, 1])}, "lengths must be non-negative and sum to"),
    "beyond all bounds": ({"lengths": torch.tensor([2**62, 2**62, 2**62, 2**62, 0, 6])}, "lengths must be non-neg"),
    "late offsets": ({"lengths": None, "offsets": torch.tensor([1, 3, 4, 5, 6, 6, 7])}, "must start at 0|sum to the"),
    "other offsets": ({"offsets": torch.tensor([0, 1, 3, 4, 5, 5, 6])}, "running sum"),
}
# What a KeyedJaggedTensor of the CPU remembers and its lengths contradict.
REMEMBERED: dict[str, tuple[dict[str, Any], str]] = {
    "length_per_key": ({"length_per_key": [3, 1, 2]}, r"length_per_key=\[3, 1, 2\], but by its lengths \[3, 2, 1\]"),
    "offset_per_key": ({"offset_per_key": [0, 1, 2, 6]}, r"offset_per_key=\[0, 1, 2, 6\]"),
}


def refuse_all(rank: int, world_size: int, device: str, pooled: bool, kinds: list[str]) -> list[str]:
    """Send one malformed batch after the other from the last rank, good ones between; return what this rank read."""
    model = build(case_of(pooled, device), world_size)
    messages = []
    faults = MALFORMED | CONTRADICTORY | REMEMBERED
    for step, kind in enumerate(kinds):
        parts = {"keys": KEYS, "values": IDS, "lengths": LENGTHS} | faults[kind][0]
        is_bad = rank == world_size - 1
        before = {name: set(rows) for name, rows in exported(model).items()}
        try:
            model(kjt(device, **parts) if is_bad else good(device))
            messages.append("nothing raised")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        assert {name: set(rows) for name, rows in exported(model).items()} == before
        outputs = outputs_of(model_case := case_of(pooled, device), model(good(device, step)))
        assert all(bool(value.isfinite().all()) for value in outputs.values()), model_case
    return messages


@pytest.mark.parametrize("pooled", [True, False], ids=["ebc", "ec"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_c04_parts_that_contradict_each_other_raise_on_all_ranks(
    ranks: RankPool,  # noqa: F811
    world_size: int,
    pooled: bool,
) -> None:
    kinds = [*MALFORMED, *CONTRADICTORY, *REMEMBERED]
    check_refusals(ranks.run(world_size, refuse_all, "cpu", pooled, kinds), kinds)


def check_refusals(of_ranks: list[list[str]], kinds: list[str]) -> None:
    import re

    *others, own = of_ranks
    faults = MALFORMED | CONTRADICTORY | REMEMBERED
    for kind, message in zip(kinds, own, strict=True):
        text = faults[kind][1]
        assert message.startswith(text) if kind in MALFORMED else re.search(text, message), (kind, message)
        assert message.startswith(("ValueError: features: ", "TypeError: features: "))
    for messages in others:
        assert set(messages) == {"ValueError: features: another rank refuses its batch; its own error says why"}


def fail_on_the_way(rank: int, world_size: int, device: str) -> list[str]:
    """Raise at several places between the check of a batch and its exchange, on the last rank only."""
    from torchrec.distributed.sharding import rw_sharding

    from dynamicemb.sharding.exchange import input_dist, send_batch

    messages = []
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (send_batch, "pad_empty_batch", send_batch.pad_empty_batch),
        (input_dist, "bucketize", input_dist.bucketize),
        # Of the static table, whose exchange comes first.
        (rw_sharding, "bucketize_kjt_before_all2all", rw_sharding.bucketize_kjt_before_all2all),
    ]
    for pooled in (True, False):
        model = build(case_of(pooled, device, STATIC, A, B), world_size)
        for owner, name, inner in places:
            calls = []

            def failing(*args: Any, inner: Any = inner, calls: list[int] = calls, **kwargs: Any) -> Any:
                calls.append(1)
                if len(calls) == 1:
                    raise MemoryError("no memory for this batch")
                return inner(*args, **kwargs)

            if rank == world_size - 1:
                setattr(owner, name, failing)
            try:
                model(good(device))
                messages.append("nothing raised")
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
            finally:
                setattr(owner, name, inner)
            outputs_of(case_of(pooled, device), model(good(device)))
    return messages


def test_c04_whatever_raises_before_the_exchange_raises_on_all_ranks(ranks: RankPool) -> None:  # noqa: F811
    first, second = ranks.run(2, fail_on_the_way, "cpu")
    assert set(first) == {"ValueError: features: another rank refuses its batch; its own error says why"}
    assert set(second) == {"MemoryError: no memory for this batch"}


def mix_dtypes(rank: int, world_size: int, device: str) -> None:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

    narrow = rank == world_size - 1
    lengths = LENGTHS.int() if narrow else LENGTHS
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(lengths.dtype)
    for pooled in (True, False):
        expected = outputs_of(case_of(pooled, device), build(case_of(pooled, device), world_size)(good(device)))
        for parts in (
            {"values": IDS, "lengths": lengths},
            {"values": IDS, "offsets": offsets},
            {"values": IDS.int() if narrow else IDS, "lengths": lengths},
            {"values": IDS, "lengths": lengths, "weights": torch.ones(6) if narrow else None},
        ):
            model = build(case_of(pooled, device), world_size)
            outputs = outputs_of(case_of(pooled, device), model(kjt(device, keys=KEYS, **parts)))
            assert all(torch.equal(value, outputs[name]) for name, value in expected.items())
        # What TorchRec makes for a rank that has nothing.
        nothing = JaggedTensor.empty(values_dtype=torch.int64, device=torch.device(device))
        full = JaggedTensor(values=IDS[:3].to(device), lengths=torch.tensor([2, 1], device=device))
        batch = KeyedJaggedTensor.from_jt_dict(dict.fromkeys(KEYS, nothing if narrow else full))
        outputs_of(case_of(pooled, device), build(case_of(pooled, device), world_size)(batch))
    weighted = case_of(True, device, weighted=True)
    model = build(weighted, world_size)
    for dtype in (torch.float64, torch.float16, torch.float32):
        weights = torch.ones(6, dtype=dtype if narrow else torch.float32)
        model(kjt(device, keys=KEYS, values=IDS, lengths=LENGTHS, weights=weights)).values()


def test_c01_c03_ranks_may_send_parts_of_different_dtypes(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, mix_dtypes, "cpu")


def change_keys(rank: int, world_size: int, device: str, pooled: bool) -> None:
    case = case_of(pooled, device)
    batches = [make_batch(case, step, rank) for step in range(4)]
    expected, model = build(case, world_size), build(case, world_size)
    for step, batch in enumerate(batches):
        per_key = len(batch["lengths"]) // len(batch["keys"])
        parts = batch["values"].split(batch["lengths"].view(-1, per_key).sum(1).tolist())
        of_key = {
            key: (ids, lengths)
            for key, ids, lengths in zip(batch["keys"], parts, batch["lengths"].split(per_key), strict=True)
        }
        # Other keys in each step, not the same ones on all ranks.
        of_key["x"] = (torch.tensor([-7]), torch.tensor([1] + [0] * (per_key - 1)))
        keys = [list(batch["keys"]), ["x", *batch["keys"]], [*reversed(batch["keys"]), "x"], sorted(of_key)][
            (step + rank) % 4
        ]
        changed = kjt(
            device,
            keys=keys,
            values=torch.cat([of_key[key][0] for key in keys]),
            lengths=torch.cat([of_key[key][1] for key in keys]),
        )
        outputs = outputs_of(case, model(changed))
        wanted = outputs_of(case, expected(make_kjt(batch, case)))
        assert all(torch.equal(value, outputs[name]) for name, value in wanted.items())
        for result in (outputs, wanted):
            sum(value.sum() for value in result.values()).backward()
    rows, wanted_rows = exported(model), exported(expected)
    assert {name: set(held) for name, held in rows.items()} == {name: set(held) for name, held in wanted_rows.items()}
    assert all(torch.equal(row, wanted_rows[name][key]) for name, held in rows.items() for key, row in held.items())


@pytest.mark.parametrize("pooled", [True, False], ids=["ebc", "ec"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_c04_features_are_read_by_name(ranks: RankPool, world_size: int, pooled: bool) -> None:  # noqa: F811
    ranks.run(world_size, change_keys, "cpu", pooled)


def leave_features_out(rank: int, world_size: int) -> None:
    for pooled in (True, False):
        case = case_of(pooled, "cpu")
        model = build(case, world_size, missing_as_empty=True)
        outputs = outputs_of(case, model(kjt(keys=["f1"], values=IDS[:2], lengths=torch.tensor([2, 0]))))
        assert sorted(outputs) == KEYS
        # A bag without ids is zero, a sequence without ids is empty.
        assert not outputs["f0"].any() and not outputs["f2"].any() and bool(outputs["f1"].any())
        assert {name: set(rows) for name, rows in exported(model).items() if name == "a"} == {"a": set()}


def test_c04_missing_features_are_read_as_empty_where_that_is_wanted(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(2, leave_features_out)


def ignore_idle_weights(rank: int, world_size: int) -> None:
    import warnings

    for pooled in (True, False):
        model = build(case_of(pooled, "cpu"), world_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(kjt(keys=KEYS, values=IDS, lengths=LENGTHS, weights=torch.ones(6)))
        said = [one for one in caught if "the collection is not weighted" in str(one.message)]
        assert len(said) == 1, [str(one.message) for one in caught]


def test_c27_weights_that_nobody_reads_are_named_once(ranks: RankPool) -> None:  # noqa: F811
    ranks.run(1, ignore_idle_weights)


def drop_outputs(rank: int, world_size: int, device: str) -> None:
    """Forward in training mode and drop what comes, without Python's garbage collector."""
    for pooled in (True, False):
        case = case_of(pooled, device)
        model = build(case, world_size)
        steps = [module.tables.steps for module in dynamic_modules(model)]
        gc.collect()
        gc.disable()
        try:
            for step in range(4):
                outputs = outputs_of(case, model(good(device, step)))
                assert {tracker.num_outstanding for tracker in steps} == {1}
                del outputs
                assert {tracker.num_outstanding for tracker in steps} == {0}
            # A backward still finds its way.
            sum(value.sum() for value in outputs_of(case, model(good(device))).values()).backward()
        finally:
            gc.enable()
        assert {tracker.num_outstanding for tracker in steps} == {0}


@pytest.mark.parametrize("world_size", [1, 2])
def test_c14_a_step_is_over_when_its_outputs_are_dropped(ranks: RankPool, world_size: int) -> None:  # noqa: F811
    ranks.run(world_size, drop_outputs, "cpu")


def want_gradients(rank: int, world_size: int, device: str) -> None:
    """Weights want their gradient on all ranks, on one, or on none, with batches of one size and of several."""
    tables = (A, B, Table("s", ("f2",), sharding="table_wise", num_embeddings=12))
    case = case_of(True, device, *tables, weighted=True)
    model = build(case, world_size)
    for wanting in (set(range(world_size)), {0}, set(), {world_size - 1}):
        for batch_size in (1, 1 + rank):
            lengths = torch.full((3 * batch_size,), 2)
            ids = torch.arange(6 * batch_size) % 12
            weights = torch.linspace(0.5, 2, 6 * batch_size, device=device).requires_grad_(rank in wanting)
            outputs = outputs_of(case, model(kjt(device, keys=KEYS, values=ids, lengths=lengths, weights=weights)))
            # What each occurrence reads by itself.
            alone = kjt(
                device,
                keys=KEYS,
                values=ids,
                lengths=torch.ones_like(ids),
                weights=torch.ones(len(ids)),
            )
            rows = outputs_of(case, model.eval()(alone))
            expected = torch.cat([rows[key].detach().sum(1) for key in KEYS])
            model.train()
            sum(value.sum() for value in outputs.values()).backward()
            if rank in wanting:
                torch.testing.assert_close(weights.grad, expected, rtol=1e-5, atol=1e-5)
            else:
                assert weights.grad is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_c13_pooling_weights_get_their_gradient(ranks: RankPool, world_size: int) -> None:  # noqa: F811
    ranks.run(world_size, want_gradients, "cpu")


def test_c04_only_dynamic_tables_ask_what_a_gpu_finds_out_about_lengths() -> None:
    from dynamicemb.sharding.checks.features import Wanted, read_features

    parts = {"keys": ["f0"], "values": IDS, "lengths": torch.tensor([9, -3])}
    for asked in (True, False):
        wanted = Wanted(["f0"], False, False, False, asked, torch.device("meta"))
        batch, contradicts = read_features(kjt("meta", **parts), wanted)
        assert (contradicts is not None) is asked
        assert batch.lengths().shape == (2,)
