"""One collection under DistributedModelParallel, for tests of what its configs, constraints and arguments do."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

COMPLETED = ("dim", "embedding_dtype", "initializer_args")
# What messages of this package about such a model say.
OURS = ("dynamic table", "optimizer", "has no effect")
STATIC = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])


def constraint(**options: Any) -> DynamicEmbParameterConstraints:
    """Return the constraint of a dynamic table."""
    return DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions(**options))


@dataclasses.dataclass
class Built:
    """A sharded collection, and what was warned of on the way."""

    model: DistributedModelParallel
    warnings: list[str]

    @property
    def collection(self) -> Any:
        """The sharded collection."""
        return self.model.module[0]

    @property
    def modules(self) -> list[BatchedDynamicEmbeddingTablesV2]:
        """The dynamic tables of this rank."""
        modules: list[BatchedDynamicEmbeddingTablesV2] = self.collection.dynamic_embedding_modules
        return modules

    def forward(self, ids: Mapping[str, torch.Tensor], per_bag: int = 1) -> torch.Tensor:
        """Look up so many ids a bag; return ``[N, D]`` of all features for sequences, ``[B, total_D]`` for bags."""
        count = max(values.numel() for values in ids.values()) // per_bag
        lengths = [torch.tensor([per_bag] * (v.numel() // per_bag) + [0] * (count - v.numel())) for v in ids.values()]
        kjt = KeyedJaggedTensor(keys=list(ids), values=torch.cat(list(ids.values())), lengths=torch.cat(lengths))
        output = self.model(kjt)
        if hasattr(output, "keys") and not isinstance(output, dict):
            return output.values()
        return torch.cat([jagged.values() for jagged in output.values()])

    def exported(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return the rows of this rank, by table and id."""
        rows = {}
        for module in self.modules:
            for name in module.table_names:
                ids, values = module.export_keys_values(name, torch.device("cpu"))
                rows[name] = dict(zip(ids.tolist(), values, strict=True))
        return rows


def shard(
    configs: list[Any],
    constraints: dict[str, Any],
    fused_params: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] | None = None,
    by_hand: bool = False,
    change: Callable[[Any], None] | None = None,
) -> Built:
    """Shard a collection over all ranks; tables without a constraint are static.

    Args:
        configs: all EmbeddingConfig, or all EmbeddingBagConfig.
        constraints: of the dynamic tables.
        fused_params: of the sharder.
        prepare: called with the unsharded collection.
        by_hand: take from the plan entries what a planner completes, as one might who writes a plan.
        change: called with each plan entry of a dynamic table before the model is sharded.
    """
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    meta = torch.device("meta")
    bags = isinstance(configs[0], EmbeddingBagConfig)
    collection: Any = EmbeddingBagCollection(configs, device=meta) if bags else EmbeddingCollection(configs, meta)
    if prepare is not None:
        prepare(collection)
    model = nn.Sequential(collection)
    sharders = [
        DynamicEmbeddingBagCollectionSharder(fused_params=fused_params),
        DynamicEmbeddingCollectionSharder(fused_params=fused_params),
    ]
    all_constraints = {config.name: constraints.get(config.name, STATIC) for config in configs}
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        planner = DynamicEmbeddingShardingPlanner(
            configs,
            topology=Topology(torch.distributed.get_world_size(), "cpu"),
            constraints=all_constraints,
        )
        plan = planner.collective_plan(model, sharders)
        for name in constraints:
            entry = plan.plan["0"][name]
            if by_hand:
                left_open = {name: getattr(DynamicEmbTableOptions(), name) for name in COMPLETED}
                entry.dynamicemb_options = dataclasses.replace(entry.dynamicemb_options, **left_open)
            if change is not None:
                change(entry)
        sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    ours = [str(w.message) for w in recorded if any(word in str(w.message) for word in OURS)]
    return Built(sharded, ours)
