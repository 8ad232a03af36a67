"""A model with dynamic and static tables, trained by ranks under DistributedModelParallel and by plain torch.

Both see the same batches. The reference holds one dense parameter per table, whose rows are the ids that occur.
"""

import functools
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dynamicemb.sharding.checks.lengths import ends_on_cpu
from dynamicemb.sharding.exchange.bucketize import bucketize
from tests.support.ranks import local_world_size

SEED = 20250
LEARNING_RATE = 0.1
STEPS = 3
STATIC_VALUE = 0.5
EXTREME_IDS = [-(2**63), -(2**63) + 1, -4, -1, 0, 1, 2**31, 2**62 + 3, 2**63 - 1]


@dataclass(frozen=True)
class Table:
    """One table of a case; `sharding` None makes it dynamic."""

    name: str
    features: tuple[str, ...]
    dim: int = 4
    pooling: str = "sum"
    dist_type: str = "roundrobin"
    num_embeddings: int = 1000
    score: str = "TIMESTAMP"
    sharding: str | None = None
    check: str = "IGNORE"
    # Occurrences that admit an id; 0 admits all.
    admit: int = 0


@dataclass(frozen=True)
class Case:
    """A model and its batches."""

    tables: tuple[Table, ...]
    pooled: bool
    weighted: bool = False
    dedup: bool = False
    # Samples of a rank are batch_sizes[(rank + step) % len].
    batch_sizes: tuple[int, ...] = (5,)
    empty_features: tuple[str, ...] = ()
    id_dtype: torch.dtype = torch.int64
    # "cpu" or "cuda": where the ranks' tables and batches are.
    device: str = "cpu"

    @property
    def features(self) -> list[str]:
        """All features, in an order that TorchRec must permute."""
        return sorted({feature for table in self.tables for feature in table.features}, reverse=True)


def make_batch(case: Case, step: int, rank: int) -> dict[str, Any]:
    """Return keys, lengths, values and weights of a rank's batch."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch_size = case.batch_sizes[(rank + step) % len(case.batch_sizes)]
    static = {f for table in case.tables if table.sharding for f in table.features}
    narrow = case.id_dtype == torch.int32
    lengths, values = [], []
    for feature in case.features:
        sizes = torch.randint(0, 5, (batch_size,), generator=generator)
        if feature in case.empty_features:
            sizes.zero_()
        count = int(sizes.sum())
        ids = torch.randint(0, 12, (count,), generator=generator)
        if feature not in static:
            pool = torch.tensor(EXTREME_IDS + list(range(-6, 7)))
            if narrow:
                pool = pool[(pool >= -(2**31)) & (pool < 2**31)]
            ids = pool[torch.randint(0, len(pool), (count,), generator=generator)]
        lengths.append(sizes)
        values.append(ids)
    all_values = torch.cat(values)
    weights = torch.rand(all_values.numel(), generator=generator) + 0.5
    return {
        "keys": case.features,
        "lengths": torch.cat(lengths),
        "values": all_values.to(case.id_dtype),
        "weights": weights if case.weighted else None,
    }


def loss_of(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss whose gradient differs between all elements."""
    total = torch.zeros(())
    for name in sorted(outputs):
        out = outputs[name]
        target = torch.linspace(-1, 1, out.shape[1]).to(out.device)
        total = total.to(out.device) + ((out - target) ** 2).sum()
    return total / 10


@functools.cache
def compile_kernels() -> None:
    """Fill numba's cache once, in this process; else every rank would compile the same kernels at the same time."""
    from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
    from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode, DynamicEmbTableOptions

    ids, offsets = torch.tensor([1, 2, 1]), torch.tensor([0, 2, 3])
    for mode in (DynamicEmbPoolingMode.NONE, DynamicEmbPoolingMode.SUM):
        for weights in (None, torch.ones(3)) if mode is DynamicEmbPoolingMode.SUM else (None,):
            module = BatchedDynamicEmbeddingTablesV2(
                [DynamicEmbTableOptions(dim=4, max_capacity=128)], ["t"], pooling_mode=mode, device="cpu"
            )
            module(ids, offsets, weights).sum().backward()
            module.eval()(ids, offsets, weights)
            module.export_keys_values("t", "cpu")
    bucketize(torch.tensor([1, 0, 1]), torch.tensor([2, 1]), 2)
    ends_on_cpu(offsets.diff(), 3, 1)


# The ranks' side


class Model(nn.Module):
    """A collection below the root, as in a real model."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: Any) -> Any:
        return self.collection(features)


def embedding_configs(case: Case) -> list[Any]:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType

    def fill(weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return weight.fill_(STATIC_VALUE)

    configs = []
    for table in case.tables:
        common: dict[str, Any] = {
            "name": table.name,
            "num_embeddings": table.num_embeddings,
            "embedding_dim": table.dim,
            "feature_names": list(table.features),
        }
        if table.sharding:
            common["init_fn"] = fill
        if case.pooled:
            configs.append(EmbeddingBagConfig(pooling=PoolingType(table.pooling.upper()), **common))
        else:
            configs.append(EmbeddingConfig(**common))
    return configs


def table_options(table: Table) -> Any:
    from dynamicemb.admission import FrequencyAdmissionStrategy, KVCounter
    from dynamicemb.dynamicemb_config import DynamicEmbCheckMode, DynamicEmbScoreStrategy, DynamicEmbTableOptions

    admission = {}
    if table.admit:
        admission = {"admit_strategy": FrequencyAdmissionStrategy(table.admit), "admission_counter": KVCounter(256, 16)}
    return DynamicEmbTableOptions(
        score_strategy=DynamicEmbScoreStrategy[table.score],
        dist_type=table.dist_type,
        safe_check_mode=DynamicEmbCheckMode[table.check],
        **admission,
    )


def build(
    case: Case,
    world_size: int,
    pg: Any = None,
    codecs: Any = None,
    missing_as_empty: bool = False,
    **sharder_arguments: Any,
) -> Any:
    """Return the model under DistributedModelParallel, over the ranks of a process group, None for all.

    `codecs` are the sharders' registry of codecs, `missing_as_empty` is their ``missing_features_as_empty``.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

    configs = embedding_configs(case)
    meta = torch.device("meta")
    if case.pooled:
        collection = EmbeddingBagCollection(tables=configs, is_weighted=case.weighted, device=meta)
    else:
        collection = EmbeddingCollection(tables=configs, device=meta)
    constraints = {
        # Columns are spread by four.
        table.name: ParameterConstraints(sharding_types=[table.sharding], min_partition=4)
        if table.sharding
        else DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=table_options(table))
        for table in case.tables
    }
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE, "seed": SEED}
    fused_params.update(sharder_arguments)
    fused_params = {name: value for name, value in fused_params.items() if value is not None}

    class BagSharder(DynamicEmbeddingBagCollectionSharder):
        """Knows a type more that TorchRec lists for GPUs only, although gloo can do it."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(dict.fromkeys([*super().sharding_types(compute_device_type), "table_row_wise"]))

    sharders = [
        DynamicEmbeddingCollectionSharder(
            dict(fused_params), codecs, case.dedup, missing_features_as_empty=missing_as_empty
        ),
        BagSharder(dict(fused_params), codecs, missing_features_as_empty=missing_as_empty),
    ]
    model = Model(collection)
    topology = Topology(world_size, case.device, local_world_size=local_world_size())
    planner = DynamicEmbeddingShardingPlanner(configs, topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, pg)
    env = None if pg is None else ShardingEnv.from_process_group(pg)
    return DistributedModelParallel(model, env=env, device=device_of(case), plan=plan, sharders=sharders)


def device_of(case: Case) -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device(case.device)


def make_kjt(batch: dict[str, Any], case: Case) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    kjt = KeyedJaggedTensor(
        keys=batch["keys"],
        values=batch["values"],
        lengths=batch["lengths"],
        weights=batch["weights"],
        stride=batch["lengths"].numel() // len(batch["keys"]),
    )
    return kjt.to(device_of(case))


def outputs_of(case: Case, result: Any) -> dict[str, torch.Tensor]:
    """Return ``[B, D]`` or ``[N, D]`` per feature."""
    if case.pooled:
        return result.to_dict()
    return {name: jagged.values() for name, jagged in result.items()}


def dynamic_modules(model: Any) -> list[Any]:
    return [
        tables
        for module in model.modules()
        if hasattr(module, "dynamic_embedding_modules")
        for tables in module.dynamic_embedding_modules
    ]


def exported(model: Any) -> dict[str, dict[int, torch.Tensor]]:
    """Return the rows of this rank, by table and id."""
    rows = {}
    for tables in dynamic_modules(model):
        for name in tables.table_names:
            ids, values = tables.export_keys_values(name, torch.device("cpu"))
            rows[name] = dict(zip(ids.tolist(), values))
    return rows


def train(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """Train on a rank; return its outputs by step, its rows and its scores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, module="dynamicemb")
        model = build(case, world_size)
    outputs = []
    for step in range(STEPS):
        result = outputs_of(case, model(make_kjt(make_batch(case, step, rank), case)))
        outputs.append({name: value.detach().clone().cpu() for name, value in result.items()})
        model.zero_grad()
        loss_of(result).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                # Data-parallel tables are ordinary parameters; the fused ones have been updated.
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    scores = {}
    for tables in dynamic_modules(model):
        for t, name in enumerate(tables.table_names):
            slots = tables.tables.scan(t)
            index = tables.tables.index
            scores[name] = dict(zip(index.keys[slots].tolist(), index.scores[slots].tolist()))
    return {"outputs": outputs, "rows": exported(model), "scores": scores}


# The reference


class Reference:
    """Dense parameters and index arithmetic; one process, the global batch."""

    def __init__(self, case: Case, world_size: int, initial: dict[str, dict[int, torch.Tensor]]) -> None:
        self.case, self.world_size = case, world_size
        self.ids = {name: {i: row for row, i in enumerate(rows)} for name, rows in initial.items()}
        self.weights = {
            name: nn.Parameter(torch.stack(list(rows.values())).double()) for name, rows in initial.items() if rows
        }
        self.counts: dict[str, dict[int, int]] = {name: {} for name in initial}

    def outputs(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return ``[B, D]`` or ``[N, D]`` per output name."""
        keys = batch["keys"]
        batch_size = batch["lengths"].numel() // len(keys)
        lengths = batch["lengths"].view(len(keys), batch_size)
        values = torch.split(batch["values"], lengths.sum(1).tolist())
        weights = None
        if batch["weights"] is not None:
            weights = torch.split(batch["weights"].double(), lengths.sum(1).tolist())
        results = {}
        for table in self.case.tables:
            for feature in table.features:
                shared = sum(feature in other.features for other in self.case.tables) > 1
                f = keys.index(feature)
                rows = self._rows(table, values[f].tolist())
                if self.case.pooled:
                    rows = pool(rows, lengths[f], None if weights is None else weights[f], table.pooling)
                results[f"{feature}@{table.name}" if shared else feature] = rows
        return results

    def _rows(self, table: Table, ids: list[int]) -> torch.Tensor:
        if not ids:
            return torch.zeros(0, table.dim, dtype=torch.float64)
        for i in ids:
            self.counts[table.name][i] = self.counts[table.name].get(i, 0) + 1
        return self.weights[table.name][torch.tensor([self.ids[table.name][i] for i in ids])]

    def step(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Train one step; return the outputs of every rank."""
        outputs = [self.outputs(make_batch(self.case, step, rank)) for rank in range(self.world_size)]
        loss = sum(loss_of(out) for out in outputs) / self.world_size
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            parameters = list(self.weights.values())
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients):
                    if gradient is not None:
                        parameter -= LEARNING_RATE * gradient
        return outputs


def pool(rows: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """Return ``[B, D]``; MEAN divides by the number of ids, also of a weighted bag."""
    if weights is not None:
        rows = rows * weights[:, None]
    bags = torch.split(rows, lengths.tolist())
    sums = torch.stack([bag.sum(0) for bag in bags]) if bags else rows.new_zeros(0, rows.shape[1])
    return sums / lengths.clamp(min=1)[:, None] if pooling == "mean" else sums


def initial_rows(case: Case, world_size: int) -> dict[str, dict[int, torch.Tensor]]:
    """Return the first value of every id that occurs: of dynamic tables as one module of one process makes it."""
    from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
    from dynamicemb.dynamicemb_config import complete_initializer_args

    ids: dict[str, set[int]] = {table.name: set() for table in case.tables}
    for step in range(STEPS):
        for rank in range(world_size):
            batch = make_batch(case, step, rank)
            sizes = batch["lengths"].view(len(batch["keys"]), -1).sum(1).tolist()
            for feature, values in zip(batch["keys"], torch.split(batch["values"], sizes)):
                for table in case.tables:
                    if feature in table.features:
                        ids[table.name].update(values.tolist())
    rows: dict[str, dict[int, torch.Tensor]] = {}
    for table, config in zip(case.tables, embedding_configs(case)):
        wanted = torch.tensor(sorted(ids[table.name]), dtype=torch.int64)
        values = torch.full((wanted.numel(), table.dim), STATIC_VALUE)
        if table.sharding is None:
            options = table_options(table)
            options = replace(
                options,
                dim=table.dim,
                max_capacity=1024,
                initializer_args=complete_initializer_args(options.initializer_args, embedding_config=config),
            )
            module = BatchedDynamicEmbeddingTablesV2([options], [table.name], seed=SEED, device="cpu")
            values = module(wanted, torch.arange(wanted.numel() + 1)).detach()
        rows[table.name] = dict(zip(wanted.tolist(), values))
    return rows
