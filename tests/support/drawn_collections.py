"""Draw collections and batches, train them sharded, and train TorchRec's unsharded collection on the same rows.

A `Draw` is complete: it prints as the expression that makes it again, so that a failure can be pasted into a test. Its
rows and ids follow from its seed. Both sides start with the same rows: shards of static tables are overwritten, dynamic
tables get them by `insert`.
"""

import random
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.sharded_model import (
    LEARNING_RATE,
    Case,
    Table,
    build,
    device_of,
    dynamic_modules,
    embedding_configs,
    exported,
    loss_of,
)

# What a draw may have beyond the ordinary; a draw without an aspect never has it.
ASPECTS = frozenset(
    {
        # A static row-wise table of bags with MEAN pooling: TorchRec divides its sums where all outputs come together.
        "row-wise mean",
        # The same, one of the features that it reads being a dynamic table's too.
        "row-wise mean shares with dynamic",
        # Ranks whose ids and lengths have other dtypes than those of the others.
        "dtypes differ between ranks",
        # Keys in another order, other extra keys, in the second batch.
        "keys change",
        # Pooling weights that are trained themselves.
        "gradient of weights",
    }
)
ROW_WISE = ("row_wise", "table_row_wise")
STATIC_BAGS = ("table_wise", "row_wise", "column_wise", "table_column_wise", "table_row_wise", "data_parallel")
# FBGEMM's dense lookup of sequences is broken on CPUs, without dynamic tables too.
STATIC_SEQUENCES = ("table_wise", "row_wise", "column_wise")
DTYPES = {"int32": torch.int32, "int64": torch.int64}
# fp32 sums in another order than the float64 reference.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


@dataclass(frozen=True)
class Part:
    """What one rank brings to one step.

    Attributes:
        keys: features of the batch, in its order; those that start with "x" are read by no table.
        batch_size: number of samples.
        longest: most ids in a bag; 0: no ids at all.
        ids, lengths: dtypes.
        offsets: whether the batch is made of offsets instead of lengths.
    """

    keys: tuple[str, ...]
    batch_size: int = 3
    longest: int = 4
    ids: str = "int64"
    lengths: str = "int64"
    offsets: bool = False


@dataclass(frozen=True)
class Draw:
    """A collection and its batches.

    Attributes:
        seed: of first rows and ids.
        tables: dynamic ones and static ones.
        pooled: bags or sequences.
        steps: by step and rank.
        weighted: bags have pooling weights; "trained": these want a gradient.
        dedup: sequences are sent without repeated ids.
        device: "cpu" or "cuda", of tables and batches.
    """

    seed: int
    tables: tuple[Table, ...]
    pooled: bool
    steps: tuple[tuple[Part, ...], ...]
    weighted: bool | str = False
    dedup: bool = False
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.steps[0])

    @property
    def case(self) -> Case:
        """The collection alone."""
        return Case(self.tables, self.pooled, bool(self.weighted), self.dedup, device=self.device)

    def readers(self, feature: str) -> list[Table]:
        """Return the tables that read a feature."""
        return [table for table in self.tables if feature in table.features]


# Drawing


def draw(seed: int, world_size: int, aspects: frozenset[str] = ASPECTS, device: str = "cpu") -> Draw:
    """Draw a collection and two batches for each rank."""
    choose = random.Random(seed)
    pooled = choose.random() < 0.6
    weighted: bool | str = pooled and choose.random() < 0.4
    if weighted and "gradient of weights" in aspects:
        weighted = choose.choice((True, "trained"))
    tables = _without(_draw_tables(choose, pooled, device), bool(weighted), aspects)
    even = any(table.sharding == "table_row_wise" for table in tables)
    if even and weighted == "trained":
        # Refused: such a table gives weights no gradient.
        weighted = True
    features = sorted({feature for table in tables for feature in table.features})
    first = _draw_parts(choose, features, world_size, even, aspects)
    second = _draw_parts(choose, features, world_size, even, aspects)
    if "keys change" not in aspects:
        second = tuple(replace(part, keys=before.keys) for part, before in zip(second, first, strict=True))
    dedup = not pooled and choose.random() < 0.5
    return Draw(seed, tables, pooled, (first, second), weighted, dedup, device)


def _draw_tables(choose: random.Random, pooled: bool, device: str) -> tuple[Table, ...]:
    kinds = STATIC_BAGS if pooled else STATIC_SEQUENCES
    if device == "cuda":
        kinds = STATIC_BAGS if pooled else (*STATIC_SEQUENCES, "data_parallel")
    number, same_dim = choose.randint(1, 5), choose.choice((4, 8))
    # One table at least is dynamic.
    dynamic = choose.randrange(number)
    tables = []
    for t in range(number):
        sharding = choose.choice(kinds) if t != dynamic and choose.random() < 0.5 else None
        # FBGEMM wants multiples of 4.
        dim = choose.choice((4, 8, 16) if sharding else (1, 3, 4, 8)) if pooled else same_dim
        table = Table(
            f"t{t}",
            # Few, so that tables share them.
            tuple(choose.sample([f"f{i}" for i in range(5)], choose.choice((1, 1, 2)))),
            dim=8 if pooled and sharding in ("column_wise", "table_column_wise") else dim,
            pooling=choose.choice(("sum", "mean")) if pooled else "sum",
            # FBGEMM wants a row of a row-wise table on each rank.
            num_embeddings=choose.randint(5, 40),
            sharding=sharding,
        )
        if sharding is None:
            dist_type = choose.choice(("roundrobin", "hash_roundrobin", "continuous"))
            table = replace(table, dist_type=dist_type, score=choose.choice(("TIMESTAMP", "LFU")))
        tables.append(table)
    return tuple(tables)


def _without(tables: tuple[Table, ...], weighted: bool, aspects: frozenset[str]) -> tuple[Table, ...]:
    """Return the tables, with SUM instead of MEAN where that has an aspect that must not be drawn."""
    of_dynamic = {feature for table in tables if table.sharding is None for feature in table.features}
    changed = []
    for table in tables:
        # No two of torch, FBGEMM and TorchRec's row-wise tables agree what a weighted mean and its gradient are.
        excluded = weighted and table.sharding is not None
        if table.sharding in ROW_WISE:
            excluded |= "row-wise mean" not in aspects
            excluded |= bool(of_dynamic & {*table.features}) and "row-wise mean shares with dynamic" not in aspects
        changed.append(replace(table, pooling="sum") if excluded else table)
    return tuple(changed)


def _draw_parts(
    choose: random.Random, features: list[str], world_size: int, even: bool, aspects: frozenset[str]
) -> tuple[Part, ...]:
    parts = []
    for _ in range(world_size):
        keys = features + choose.choice(([], [], ["x0"], ["x0", "x1"]))
        choose.shuffle(keys)
        part = Part(
            keys=tuple(keys),
            batch_size=choose.choice((0, 1, 2, 3, 5)),
            longest=choose.choice((0, 1, 4, 4)),
            ids=choose.choice(("int32", "int64")),
            lengths=choose.choice(("int32", "int64")),
            offsets=choose.random() < 0.3,
        )
        if parts and "dtypes differ between ranks" not in aspects:
            part = replace(part, ids=parts[0].ids, lengths=parts[0].lengths)
        if parts and even:
            # Gloo's reduce-scatter, which TorchRec calls there, wants as many samples of all.
            part = replace(part, batch_size=parts[0].batch_size)
        parts.append(part)
    return tuple(parts)


def simpler(draw: Draw) -> Iterator[Draw]:
    """Yield draws that have a little less."""
    for t in range(len(draw.tables)):
        tables = draw.tables[:t] + draw.tables[t + 1 :]
        if any(table.sharding is None for table in tables):
            yield replace(draw, tables=tables)
        table = draw.tables[t]
        for fewer in (table.features[1:], table.features[:1]) if len(table.features) > 1 else ():
            yield replace(draw, tables=(*draw.tables[:t], replace(table, features=fewer), *draw.tables[t + 1 :]))
    if draw.world_size > 1:
        yield replace(draw, steps=tuple(parts[:-1] for parts in draw.steps))
        yield replace(draw, steps=tuple(parts[1:] for parts in draw.steps))
    if len(draw.steps) > 1:
        yield replace(draw, steps=draw.steps[:1])
    for changes in ({"weighted": False}, {"dedup": False}):
        if replace(draw, **changes) != draw:
            yield replace(draw, **changes)
    read = {feature for table in draw.tables for feature in table.features}
    for keys in (lambda part: tuple(k for k in part.keys if k in read), lambda part: tuple(sorted(part.keys))):
        changed = tuple(tuple(replace(part, keys=keys(part)) for part in parts) for parts in draw.steps)
        if changed != draw.steps:
            yield replace(draw, steps=changed)
    for plain in ({"ids": "int64"}, {"lengths": "int64"}, {"offsets": False}, {"batch_size": 3}, {"longest": 4}):
        changed = tuple(tuple(replace(part, **plain) for part in parts) for parts in draw.steps)
        if changed != draw.steps:
            yield replace(draw, steps=changed)


def simplest(
    fails: Callable[[Draw], Exception | None], one: Draw, error: Exception, limit_s: float
) -> tuple[Draw, Exception]:
    """Return a draw that fails with the same type of error, as simple as could be found in a while, and its error."""
    until, found = time.monotonic() + limit_s, True
    while found:
        found = False
        for other in simpler(one):
            if time.monotonic() > until:
                break
            its = fails(other)
            if type(its) is type(error):
                one, error, found = other, its, True
                break
    return one, error


# What both sides see


def first_rows(draw: Draw, table: Table) -> torch.Tensor:
    """Return ``[num_embeddings, dim]``, all different."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{draw.seed} {table.name}".encode()))
    return torch.rand(table.num_embeddings, table.dim, generator=generator) * 2 - 1


def contents(draw: Draw, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return i64 lengths ``[K * B]``, i64 ids ``[N]`` and pooling weights ``[N]`` or None."""
    part = draw.steps[step][rank]
    lengths, ids = [], []
    for key in part.keys:
        # By name: a key's ids are the same wherever it stands.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{draw.seed} {step} {rank} {key}".encode()))
        sizes = torch.randint(0, part.longest + 1, (part.batch_size,), generator=generator)
        readers = draw.readers(key)
        largest = min((table.num_embeddings for table in readers), default=2**31)
        ids.append(torch.randint(0, largest, (int(sizes.sum()),), generator=generator))
        lengths.append(sizes)
    values = torch.cat(ids)
    generator = torch.Generator().manual_seed(draw.seed + 7 * step + rank)
    weights = torch.rand(values.numel(), generator=generator) + 0.5 if draw.weighted else None
    return torch.cat(lengths), values, weights


def batch_of(draw: Draw, step: int, rank: int, weights: torch.Tensor | None) -> Any:
    """Return a rank's batch on its device."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    part, device = draw.steps[step][rank], device_of(draw.case)
    lengths, values, _ = contents(draw, step, rank)
    dtype = DTYPES[part.lengths]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    form = {"offsets": offsets.to(dtype)} if part.offsets else {"lengths": lengths.to(dtype)}
    return KeyedJaggedTensor(
        keys=list(part.keys),
        values=values.to(DTYPES[part.ids]).to(device),
        weights=weights,
        stride=part.batch_size,
        **{name: value.to(device) for name, value in form.items()},
    )


def unsharded(draw: Draw, pooling: str | None = None) -> Any:
    """Return TorchRec's collection on the CPU, with the first rows; `pooling` is that of all tables if given."""
    from torchrec.modules.embedding_configs import PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    configs = embedding_configs(draw.case)
    for config in configs if pooling else []:
        config.pooling = PoolingType(pooling)
    if draw.pooled:
        collection = EmbeddingBagCollection(tables=configs, is_weighted=bool(draw.weighted))
    else:
        collection = EmbeddingCollection(tables=configs)
    with torch.no_grad():
        for table in draw.tables:
            weights_of(draw, collection)[table.name].weight.copy_(first_rows(draw, table))
    return collection


def weights_of(draw: Draw, collection: Any) -> Any:
    """Return the tables of an unsharded collection by name."""
    return collection.embedding_bags if draw.pooled else collection.embeddings


# The ranks' side


def train_all(rank: int, world_size: int, draws: list[Draw]) -> list[dict[str, Any]]:
    """Train one draw after the other."""
    return [train(rank, one) for one in draws]


def train(rank: int, draw: Draw) -> dict[str, Any]:
    """Train on a rank; return what `check` compares."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, module="dynamicemb")
        model = build(draw.case, draw.world_size)
    _give_first_rows(rank, draw, model)
    outputs, gradients = [], []
    for step in range(len(draw.steps)):
        _, _, weights = contents(draw, step, rank)
        if weights is not None:
            weights = weights.to(device_of(draw.case)).requires_grad_(draw.weighted == "trained")
        result = model(batch_of(draw, step, rank, weights))
        named = dict(result.to_dict().items()) if draw.pooled else {name: jt.values() for name, jt in result.items()}
        outputs.append({name: value.detach().clone().cpu() for name, value in named.items()})
        model.zero_grad()
        loss_of(named).backward()
        gradients.append(None if weights is None or weights.grad is None else weights.grad.cpu())
        with torch.no_grad():
            for parameter in model.parameters():
                # Data-parallel tables are ordinary parameters; the fused ones have been updated.
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    failed = {name: stats["failed"] for tables in dynamic_modules(model) for name, stats in tables.stats().items()}
    return {
        "outputs": outputs,
        "gradients": gradients,
        "dynamic": exported(model),
        "static": {
            name: [(offsets, shard.cpu()) for offsets, shard in shards]
            for name, shards in _static_shards(draw, model).items()
        },
        "failed": sum(failed.values()),
    }


def _give_first_rows(rank: int, draw: Draw, model: Any) -> None:
    from tests.support.placements import owner_of

    device, by_name = device_of(draw.case), {table.name: table for table in draw.tables}
    for name, shards in _static_shards(draw, model).items():
        rows = first_rows(draw, by_name[name])
        for (row, column), shard in shards:
            shard.copy_(rows[row : row + shard.shape[0], column : column + shard.shape[1]])
    for tables in dynamic_modules(model):
        for name in tables.table_names:
            table = by_name[name]
            ids = torch.arange(table.num_embeddings)
            own = ids[owner_of(ids, draw.world_size, table.dist_type, table.num_embeddings) == rank]
            assert bool(tables.insert(name, own.to(device), first_rows(draw, table)[own].to(device)).all())


def _static_shards(draw: Draw, model: Any) -> dict[str, list[tuple[list[int], torch.Tensor]]]:
    """Return offsets of this rank's shards and the shards themselves, by static table."""
    static = {table.name for table in draw.tables if table.sharding}
    shards = {}
    for key, value in model.state_dict().items():
        name = key.split(".")[-2]
        if name in static:
            if hasattr(value, "local_shards"):
                shards[name] = [(s.metadata.shard_offsets, s.tensor.detach()) for s in value.local_shards()]
            else:
                shards[name] = [([0, 0], value.detach())]
    return shards


# The unsharded side


def train_unsharded(draw: Draw) -> tuple[list[list[dict[str, torch.Tensor]]], list[list[Any]], dict[str, torch.Tensor]]:
    """Return outputs by step and rank, gradients of weights by step and rank, and the last rows by table."""
    # torch knows no weighted means.
    collection = unsharded(draw, "SUM" if draw.weighted else None).double()
    parameters = {table.name: weights_of(draw, collection)[table.name].weight for table in draw.tables}
    outputs, gradients = [], []
    for step in range(len(draw.steps)):
        outputs.append([])
        gradients.append([])
        sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for rank in range(draw.world_size):
            _, _, weights = contents(draw, step, rank)
            weights = None if weights is None else weights.double().requires_grad_()
            named = _look_up(draw, collection, step, rank, weights)
            outputs[-1].append({name: value.detach() for name, value in named.items()})
            wanted = [*parameters.values(), *([] if weights is None else [weights])]
            loss = loss_of(named)
            found = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
            gradients[-1].append(found[-1] if weights is not None else None)
            for name, gradient in zip(parameters, found):
                sums[name] += 0 if gradient is None else gradient
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= LEARNING_RATE * sums[name] / draw.world_size
    return outputs, gradients, {name: parameter.detach() for name, parameter in parameters.items()}


def _look_up(
    draw: Draw, collection: Any, step: int, rank: int, weights: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    plain = replace(draw.steps[step][rank], ids="int64", lengths="int64")
    steps = [list(parts) for parts in draw.steps]
    steps[step][rank] = plain
    batch = batch_of(replace(draw, device="cpu", steps=tuple(map(tuple, steps))), step, rank, weights)
    tables = {
        name: (table, feature)
        for table in draw.tables
        for feature in table.features
        for name in [f"{feature}@{table.name}" if len(draw.readers(feature)) > 1 else feature]
    }
    if plain.batch_size == 0:
        return {name: torch.zeros(0, table.dim) for name, (table, _) in tables.items()}
    result = collection(batch)
    if not draw.pooled:
        return {name: jagged.values() for name, jagged in result.items()}
    named = dict(result.to_dict())
    if draw.weighted:
        lengths = batch.lengths().view(len(plain.keys), plain.batch_size)
        for name, (table, feature) in tables.items():
            if table.pooling == "mean":
                named[name] = named[name] / lengths[plain.keys.index(feature)].clamp(min=1)[:, None]
    return named


# Comparing


def check(draw: Draw, results: list[dict[str, Any]]) -> None:
    """Compare what the ranks returned for a draw with the unsharded collection; raises an AssertionError."""
    outputs, gradients, rows = train_unsharded(draw)
    for step in range(len(draw.steps)):
        for rank, result in enumerate(results):
            got, wanted = result["outputs"][step], outputs[step][rank]
            assert got.keys() == wanted.keys(), (step, rank, sorted(got), sorted(wanted))
            for name, value in wanted.items():
                _compare(got[name], value, f"output {name!r} of step {step} on rank {rank}")
            if draw.weighted == "trained":
                _compare_gradients(draw, step, rank, result["gradients"][step], gradients[step][rank])
    for table in draw.tables:
        got = _assembled(table, results)
        _compare(got, rows[table.name], f"rows of table {table.name!r}")
    assert not sum(result["failed"] for result in results)


def _compare(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), **TOLERANCE, msg=lambda text: f"{what}: {text}")


def _compare_gradients(draw: Draw, step: int, rank: int, got: Any, wanted: torch.Tensor) -> None:
    """Compare gradients of weights, whatever kind of table reads them."""
    part = draw.steps[step][rank]
    lengths, _, _ = contents(draw, step, rank)
    counts = lengths.view(len(part.keys), part.batch_size).sum(1).tolist()
    for key, own in zip(part.keys, torch.split(torch.arange(sum(counts)), counts), strict=True):
        readers = draw.readers(key)
        if own.numel() and readers:
            what = f"gradient of the weights of {key!r} in step {step} on rank {rank}"
            assert got is not None, f"{what}: None"
            _compare(got[own], wanted[own], what)


def _assembled(table: Table, results: list[dict[str, Any]]) -> torch.Tensor:
    """Return the rows of a table of all ranks, NaN where none has them."""
    rows = torch.full((table.num_embeddings, table.dim), torch.nan)
    for result in results:
        if table.sharding is None:
            for i, row in result["dynamic"][table.name].items():
                assert 0 <= i < table.num_embeddings, f"table {table.name!r} has the id {i} of another feature"
                rows[i] = row
        else:
            for (row, column), shard in result["static"].get(table.name, []):
                rows[row : row + shard.shape[0], column : column + shard.shape[1]] = shard
    return rows
