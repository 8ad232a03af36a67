"""A model with static tables, and its twin with dynamic ones, trained with the same batches."""

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.support.ranks import local_world_size

SEED = 31
BATCH_SIZE = 6
# Ids, and so rows of the static tables.
NUM_IDS = 23


@dataclass(frozen=True)
class Kind:
    """What both models are like.

    Attributes:
        optimizer: name in ``EmbOptimType``.
        bags: sharding types of the static tables "bag0", "bag1", ... of an EmbeddingBagCollection.
        sequences: those of "seq0", "seq1", ... of an EmbeddingCollection.
        dim: of all tables.
        options: of the dynamic tables.
        num_embeddings: of the dynamic tables.
        device: "cpu" or "cuda".
    """

    optimizer: str = "EXACT_ADAGRAD"
    bags: tuple[str, ...] = ("row_wise", "table_wise")
    sequences: tuple[str, ...] = ("row_wise",)
    dim: int = 8
    options: tuple[tuple[str, Any], ...] = ()
    num_embeddings: int = 512
    device: str = "cpu"


class Net(nn.Module):
    """Both collections below the root."""

    def __init__(self, bags: nn.Module | None, sequences: nn.Module | None) -> None:
        super().__init__()
        if bags is not None:
            self.bags = bags
        if sequences is not None:
            self.sequences = sequences

    def forward(self, features: Any) -> dict[str, torch.Tensor]:
        found = {}
        if hasattr(self, "bags"):
            found |= self.bags(features).to_dict()
        if hasattr(self, "sequences"):
            found |= {name: jagged.values() for name, jagged in self.sequences(features).items()}
        return found


def _collections(kind: Kind, num_rows: int) -> tuple[list[Any], list[Any]]:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

    def config(make: Any, name: str, feature: str) -> Any:
        return make(name=name, embedding_dim=kind.dim, num_embeddings=num_rows, feature_names=[feature])

    bags = [config(EmbeddingBagConfig, f"bag{i}", f"b{i}") for i in range(len(kind.bags))]
    sequences = [config(EmbeddingConfig, f"seq{i}", f"s{i}") for i in range(len(kind.sequences))]
    return bags, sequences


def build(kind: Kind, world_size: int, dynamic: bool, env: Any = None) -> Any:
    """Return the model under DistributedModelParallel."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    from dynamicemb import DynamicEmbTableOptions
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.manual_seed(SEED)
    meta = torch.device("meta")
    bags, sequences = _collections(kind, kind.num_embeddings if dynamic else NUM_IDS)
    model = Net(
        EmbeddingBagCollection(tables=bags, device=meta) if bags else None,
        EmbeddingCollection(tables=sequences, device=meta) if sequences else None,
    )
    types = dict(zip([c.name for c in bags], kind.bags)) | dict(zip([c.name for c in sequences], kind.sequences))
    constraints: dict[str, Any] = {}
    for name, sharding in types.items():
        if dynamic:
            options = DynamicEmbTableOptions(**dict(kind.options))
            constraints[name] = DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)
        else:
            constraints[name] = ParameterConstraints(sharding_types=[sharding], min_partition=4)
    params = {"optimizer": EmbOptimType[kind.optimizer], "learning_rate": 0.1, "seed": SEED}
    if not dynamic:
        del params["seed"]

    def all_types(self: Any, compute_device_type: str) -> list[str]:
        return ["data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard"]

    bag_sharder = type("BagSharder", (DynamicEmbeddingBagCollectionSharder,), {"sharding_types": all_types})
    sharders = [DynamicEmbeddingCollectionSharder(fused_params=dict(params)), bag_sharder(fused_params=dict(params))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DynamicEmbeddingShardingPlanner(
            [*bags, *sequences],
            topology=Topology(world_size, kind.device, local_world_size=local_world_size()),
            constraints=constraints,
        )
        plan = planner.collective_plan(model, sharders)
        made = DistributedModelParallel(model, env=env, device=torch.device(kind.device), plan=plan, sharders=sharders)
    return made


def batch(kind: Kind, step: int, rank: int, ids: torch.Tensor | None = None) -> Any:
    """Return a rank's batch; row r is looked up as ``ids[r]``, by default as r."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(1000 * step + rank)
    keys = [f"b{i}" for i in range(len(kind.bags))] + [f"s{i}" for i in range(len(kind.sequences))]
    lengths = torch.randint(0, 5, (len(keys) * BATCH_SIZE,), generator=generator)
    rows = torch.randint(0, NUM_IDS, (int(lengths.sum()),), generator=generator)
    values = rows if ids is None else ids[rows]
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, stride=BATCH_SIZE).to(kind.device)


def train(
    model: Any, kind: Kind, rank: int, steps: range, ids: torch.Tensor | None = None
) -> list[dict[str, torch.Tensor]]:
    """Train; return what each step read."""
    outputs = []
    for step in steps:
        found = model(batch(kind, step, rank, ids))
        model.zero_grad()
        weights = torch.linspace(-1, 2, kind.dim, device=kind.device)
        sum((value * weights).square().sum() for value in found.values()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    # A data-parallel table, which its optimizer does not train by itself.
                    parameter -= 0.1 * parameter.grad
        outputs.append({name: value.detach().clone() for name, value in found.items()})
    return outputs


def assert_equal(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]], tolerance: float = 1e-6) -> None:
    """Compare what steps read."""
    assert len(a) == len(b) > 0
    for of_a, of_b in zip(a, b):
        assert list(of_a) == list(of_b)
        for name in of_a:
            torch.testing.assert_close(of_a[name], of_b[name], rtol=tolerance, atol=tolerance)
