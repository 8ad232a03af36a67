"""Who looks up under TorchRec: our sharded collection, static tables, and a constant in the place of tables."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.engines import LEARNING_RATE
from benchmarks.sharded.batches import filling
from benchmarks.sharded.cases import ShardedCase
from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode, DynamicEmbTableOptions
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

# All rows begin alike, so that engines can be compared by what they return.
FIRST_VALUE = 0.01
OURS = "dynamicemb"
STATIC = ("static, table-wise", "static, row-wise")
CONSTANT = "a constant lookup"
# Rows of tables that nothing reads.
_FEW_ROWS = 256


@dataclass
class Model:
    """One competitor.

    Attributes:
        model: a collection under ``DistributedModelParallel``.
        case: what it runs.
        gradients: of the outputs, made at the first training step.
    """

    model: DistributedModelParallel
    case: ShardedCase
    gradients: list[torch.Tensor] | None = None

    def forward(self, batch: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Return the pooled values ``[B, total_D]``, or the rows ``[N_f, D]`` of every feature."""
        output = self.model(batch)
        return [output.values()] if self.case.pooled else [jagged.values() for jagged in output.values()]

    def step(self, batch: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Run a step and return the outputs; the gradients are those of a weighted sum, the same in every step."""
        if not self.case.train:
            with torch.no_grad():
                return self.forward(batch)
        outputs = self.forward(batch)
        if self.gradients is None:
            random = torch.Generator(outputs[0].device).manual_seed(3)
            self.gradients = [torch.randn(o.shape, generator=random, device=o.device) for o in outputs]
        torch.autograd.backward(outputs, self.gradients)
        return outputs

    @property
    def tables(self) -> list[Any]:
        """Our tables of this rank."""
        tables: list[Any] = self.model.module.dynamic_embedding_modules
        return tables


def static(case: ShardedCase, device: torch.device, row_wise_plan: bool) -> Model:
    """Shard static tables, fused, by TorchRec's own sharders: row-wise, or whole tables that go round the ranks."""
    sharders = {True: EmbeddingBagCollectionSharder, False: EmbeddingCollectionSharder}
    sharder = sharders[case.pooled](fused_params=_fused_params(case))
    collection, configs = _collection(case, case.rows)
    world = dist.get_world_size()
    each = {
        config.name: row_wise(compute_kernel="fused")
        if row_wise_plan
        else table_wise(rank=number % world, compute_kernel="fused")
        for number, config in enumerate(configs)
    }
    plan = construct_module_sharding_plan(collection, each, sharder, world, world, device.type)
    return _sharded(case, collection, device, ShardingPlan({"": plan}), sharder)


def ours(case: ShardedCase, device: torch.device) -> Model:
    """Shard our tables, and insert every id."""
    model = _dynamic(case, device, case.rows)
    model.model.train()
    with torch.no_grad():
        for batch in filling(case, device):
            model.forward(batch)
    model.model.train(case.train)
    return model


def constant(case: ShardedCase, device: torch.device) -> Model:
    """Shard our collection with a constant in the place of its lookups: what is left is TorchRec's own time."""
    model = _dynamic(case, device, tuple(min(rows, _FEW_ROWS) for rows in case.rows))
    for module in model.tables:
        # The module that TorchRec calls stays, with all that it is asked besides.
        object.__setattr__(module, "forward", _ConstantLookup(case.pooled, module.total_D, module.max_D, device))
    model.model.train(case.train)
    return model


class _ConstantLookup:
    """Returns the same values for every batch, and drops their gradients.

    Args:
        pooled: one value for each bag, else for each id.
        total_dim: columns of the pooled values.
        dim: columns of a row.
        device: of the values.
    """

    def __init__(self, pooled: bool, total_dim: int, dim: int, device: torch.device) -> None:
        self._pooled = pooled
        self._num_columns = total_dim if pooled else dim
        self._total_dim, self._dim = total_dim, dim
        self._values = torch.empty(0, device=device)
        self._anchor = torch.empty(0, device=device, requires_grad=True)

    def __call__(self, indices: torch.Tensor, offsets: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        num_features = self._total_dim // self._dim
        count = (offsets.numel() - 1) // num_features if self._pooled else indices.numel()
        if self._values.numel() < count * self._num_columns:
            self._values = torch.full((count * self._num_columns,), FIRST_VALUE, device=indices.device)
        values = self._values[: count * self._num_columns].view(count, self._num_columns)
        if not torch.is_grad_enabled():
            return values
        looked_up: torch.Tensor = _Constant.apply(self._anchor, values)
        return looked_up


class _Constant(torch.autograd.Function):
    """Values that want a gradient, and do nothing with it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None


BUILDERS: dict[str, Callable[[ShardedCase, torch.device], Model]] = {
    STATIC[0]: functools.partial(static, row_wise_plan=False),
    STATIC[1]: functools.partial(static, row_wise_plan=True),
    OURS: ours,
    CONSTANT: constant,
}


def _dynamic(case: ShardedCase, device: torch.device, rows: tuple[int, ...]) -> Model:
    sharders = {True: DynamicEmbeddingBagCollectionSharder, False: DynamicEmbeddingCollectionSharder}
    sharder = sharders[case.pooled](fused_params=_fused_params(case))
    collection, configs = _collection(case, rows)
    first = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=FIRST_VALUE)
    options = DynamicEmbTableOptions(initializer_args=first)
    constraint = DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        planner = DynamicEmbeddingShardingPlanner(
            configs,
            topology=_topology(device),
            constraints={config.name: constraint for config in configs},
        )
        plan = planner.collective_plan(collection, [sharder], dist.group.WORLD)
    return _sharded(case, collection, device, plan, sharder)


def _topology(device: torch.device) -> Topology:
    if device.type == "cpu":
        return Topology(dist.get_world_size(), "cpu")
    total = torch.cuda.get_device_properties(device).total_memory
    return Topology(dist.get_world_size(), "cuda", hbm_cap=total)


def _sharded(case: ShardedCase, collection: Any, device: torch.device, plan: Any, sharder: Any) -> Model:
    model = DistributedModelParallel(collection, device=device, plan=plan, sharders=[sharder])
    model.train(case.train)
    return Model(model, case)


def _collection(case: ShardedCase, rows: tuple[int, ...]) -> tuple[Any, list[Any]]:
    first = functools.partial(torch.nn.init.constant_, val=FIRST_VALUE)
    config = EmbeddingBagConfig if case.pooled else EmbeddingConfig
    configs: list[Any] = [
        config(
            name=f"table_{number}",
            embedding_dim=case.dim,
            num_embeddings=count,
            feature_names=[case.features[number]],
            init_fn=first,
        )
        for number, count in enumerate(rows)
    ]
    meta = torch.device("meta")
    collection: Any = (
        EmbeddingBagCollection(configs, device=meta) if case.pooled else EmbeddingCollection(configs, device=meta)
    )
    return collection, configs


def _fused_params(case: ShardedCase) -> dict[str, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return {"optimizer": EmbOptimType(case.optimizer), "learning_rate": LEARNING_RATE}
