"""Integer weights of a batch say how often each occurrence counts, on all ranks, and weigh nothing; contract 10, 12."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from tests.support.ranks import GpuRanks, RankPool, gpu_ranks, ranks  # noqa: F401
from tests.support.sharded_model import (
    Case,
    Table,
    build,
    compile_kernels,
    device_of,
    dynamic_modules,
    exported,
    loss_of,
    outputs_of,
)

pytestmark = pytest.mark.distributed

THRESHOLD = 5
A = Table("a", ("f0", "f1"), score="LFU", admit=THRESHOLD)
B = Table("b", ("f2",), dist_type="hash_roundrobin", score="LFU")
PLAIN = Table("p", ("f3",))
STATIC = Table("s", ("f4",), sharding="row_wise", num_embeddings=40)
STEPS = 4
TABLES = (A, STATIC, PLAIN, B)
CASES = {
    "ec": Case(TABLES, pooled=False),
    "ec-dedup": Case(TABLES, pooled=False, dedup=True),
    "ebc": Case(TABLES, pooled=True),
    "ebc-mean": Case((A, Table("m", ("f4",), sharding="row_wise", num_embeddings=40, pooling="mean")), pooled=True),
    "ec-alone": Case((B,), pooled=False),
    # The order of a batch is not that of the shardings.
    "ec-unordered": Case((STATIC, B), pooled=False),
}
# Who gives counts: all ranks, the last one, the last one in every other step, nobody.
GIVING = ("all", "last", "at times", "none")


def batch_of(case: Case, rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch_size = [3, 2, 0][(rank + step) % 3]
    keys = list(reversed(case.features)) if step % 2 else case.features
    lengths = torch.randint(0, 4, (batch_size * len(keys),), generator=generator)
    ids = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
    counts = torch.randint(1, 4, (ids.numel(),), generator=generator)
    return {"keys": keys, "values": ids, "lengths": lengths, "weights": counts, "stride": batch_size}


def gives(giving: str, rank: int, world_size: int, step: int) -> bool:
    if giving == "all" or giving == "none":
        return giving == "all"
    return rank == world_size - 1 and (giving == "last" or step % 2 == 0)


def train(rank: int, world_size: int, case: Case, giving: str) -> dict[str, Any]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model, plain = build(case, world_size), build(case, world_size)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for step in range(STEPS):
            parts = batch_of(case, rank, step)
            if not gives(giving, rank, world_size, step):
                parts["weights"] = None
            device = device_of(case)
            outputs = outputs_of(case, model(KeyedJaggedTensor(**parts).to(device)))
            without = outputs_of(case, plain(KeyedJaggedTensor(**parts | {"weights": None}).to(device)))
            loss_of(outputs).backward()
            loss_of(without).backward()
            # What is admitted early trains early; the other tables take no notice.
            for name in ("f2", "f3", "f4"):
                if name in outputs:
                    assert torch.equal(outputs[name], without[name]), (name, step)
    scores = {}
    for module in dynamic_modules(model):
        for name in module.table_names:
            ids, values = module.export_scores(name, "cpu")
            scores[name] = dict(zip(ids.tolist(), values.tolist(), strict=True))
    rows = {name: set(of_table) for name, of_table in exported(model).items()}
    said = [str(warning.message) for warning in recorded if "integer weights" in str(warning.message)]
    return {"scores": scores, "rows": rows, "said": said}


def counted(case: Case, world_size: int, giving: str) -> dict[str, Counter[int]]:
    found: dict[str, Counter[int]] = {table.name: Counter() for table in case.tables}
    for step in range(STEPS):
        for rank in range(world_size):
            batch = batch_of(case, rank, step)
            per_key = batch["lengths"].view(len(batch["keys"]), -1).sum(1).tolist()
            counts = batch["weights"] if gives(giving, rank, world_size, step) else torch.ones_like(batch["weights"])
            parts = zip(batch["values"].split(per_key), counts.split(per_key), strict=True)
            of_keys = dict(zip(batch["keys"], parts, strict=True))
            for table in case.tables:
                for feature in table.features:
                    for key, count in zip(*(part.tolist() for part in of_keys[feature]), strict=True):
                        found[table.name][key] += count
    return found


def check(results: list[dict[str, Any]], case: Case, giving: str) -> None:
    world_size = len(results)
    for table, total in counted(case, world_size, giving).items():
        held = [result["scores"].get(table) for result in results]
        if None in held:
            continue
        merged = {key: score for scores in held for key, score in scores.items()}
        assert len(merged) == sum(map(len, held))
        # Every id that is counted often enough is there, with all of its occurrences.
        expected = {key: number for key, number in total.items() if table != "a" or number >= THRESHOLD}
        assert merged.keys() == expected.keys(), table
        assert table == "p" or merged == expected, table
    for rank, result in enumerate(results):
        given = any(gives(giving, rank, world_size, step) for step in range(STEPS))
        assert len(result["said"]) == given and all("taken for how often" in text for text in result["said"])


@pytest.mark.parametrize("giving", GIVING)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_c10_integer_weights_are_counts_over_all_ranks(
    ranks: RankPool,  # noqa: F811
    name: str,
    world_size: int,
    giving: str,
) -> None:
    compile_kernels()
    check(ranks.run(world_size, train, CASES[name], giving), CASES[name], giving)


def refuse(rank: int, world_size: int, pooled: bool) -> list[str]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    case = Case((A, B), pooled=pooled)
    model = build(case, world_size)
    good = {"keys": ["f0", "f1", "f2"], "values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([1, 1, 1])}
    messages = []
    for weights in (
        torch.tensor([1, 0, 2]),
        torch.tensor([1, 2]),
        torch.tensor([1, 2, 2**31]),
        torch.ones(3, 1).long(),
    ):
        batch = KeyedJaggedTensor(**good | ({"weights": weights} if rank == world_size - 1 else {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError) as caught:
                model(batch)
        messages.append(str(caught.value))
        assert not any(exported(model).values())
    return messages


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_c04_wrong_counts_raise_on_all_ranks(ranks: RankPool, world_size: int, pooled: bool) -> None:  # noqa: F811
    *others, own = ranks.run(world_size, refuse, pooled)
    assert [text.partition(";")[0] for text in own] == [
        "features: weights of integers, which count, must be in 1..2147483647, got 0..2",
        "features: 2 weights for 3 ids",
        "features: weights of integers, which count, must be in 1..2147483647, got 1..2147483648",
        "features: weights must have one dimension, got shape (3, 1)",
    ]
    assert all("another rank refuses its batch" in text for messages in others for text in messages)


def take_no_counts(rank: int, world_size: int) -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    batch = {"keys": ["f3"], "values": torch.tensor([1, 2]), "lengths": torch.tensor([1, 1])}
    for pooled in (False, True):
        model = build(Case((PLAIN,), pooled=pooled), world_size)
        # Not even numbers that cannot count.
        for expected in (["no dynamic table of it counts occurrences"], []):
            with warnings.catch_warnings(record=True) as recorded:
                warnings.simplefilter("always")
                model(KeyedJaggedTensor(**batch, weights=torch.tensor([0, 3])))
            said = [str(w.message) for w in recorded if str(w.message).startswith("features: ")]
            assert [text in message for text in expected for message in said] == [True for _ in expected]
    weighted = build(Case((A,), pooled=True, weighted=True), world_size)
    with pytest.raises(
        ValueError if rank != world_size - 1 else TypeError, match="floating pooling weights, got|another"
    ):
        weights = torch.tensor([1, 3]) if rank == world_size - 1 else torch.ones(2)
        weighted(KeyedJaggedTensor(**batch | {"keys": ["f0", "f1"]}, weights=weights))


@pytest.mark.parametrize("world_size", [1, 2])
def test_c27_counts_that_nobody_reads_are_named(ranks: RankPool, world_size: int) -> None:  # noqa: F811
    ranks.run(world_size, take_no_counts)


@pytest.mark.parametrize("giving", GIVING)
def test_c10_integer_weights_are_counts_on_gpus(gpu_ranks: GpuRanks, giving: str) -> None:  # noqa: F811
    for case in CASES.values():
        on_gpus = Case(case.tables, pooled=case.pooled, dedup=case.dedup, device="cuda")
        check(gpu_ranks.run(2, train, on_gpus, giving), on_gpus, giving)
