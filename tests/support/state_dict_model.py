"""A model whose state_dict has all sorts of entries: a collection of bags, one of sequences, dense weights."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.support.checkpoints import Records, records
from tests.support.ranks import local_world_size
from tests.support.sharded_model import EXTREME_IDS, dynamic_modules

SEED = 77
KEYS = ("u", "i", "s")
BATCH_SIZE = 6


@dataclass(frozen=True)
class Kind:
    """What a model is like.

    Attributes:
        dist_type: routing of both dynamic tables.
        score: strategy of "users"; names joined by "+" are a tuple.
        optimizer: name in ``EmbOptimType``.
        static: sharding type of the static table.
        admit: occurrences that admit an id of "things"; 0 admits all.
        dims: of "users" and "things".
        users: further options of "users".
        device: "cpu" or "cuda".
        seed: of first values.
        num_embeddings: of each dynamic table.
        learning_rate: of all tables.
    """

    dist_type: str = "roundrobin"
    score: str = "TIMESTAMP"
    optimizer: str = "ADAM"
    static: str = "data_parallel"
    admit: int = 0
    dims: tuple[int, int] = (4, 6)
    users: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    seed: int = SEED
    num_embeddings: int = 300
    learning_rate: float = 0.1


class Model(nn.Module):
    """Bags and sequences below a dense layer."""

    def __init__(self, bags: nn.Module, sequences: nn.Module, dim: int) -> None:
        super().__init__()
        self.bags = bags
        self.sequences = sequences
        self.over = nn.Linear(dim, 3)

    def forward(self, features: Any) -> torch.Tensor:
        pooled = self.bags(features).to_dict()
        bags = torch.cat([pooled[name] for name in ("u", "s")], 1)
        found = self.sequences(features)["i"]
        rows = found.values()
        owner = torch.repeat_interleave(torch.arange(len(bags), device=rows.device), found.lengths())
        summed = torch.zeros(len(bags), rows.shape[1], device=rows.device).index_add(0, owner, rows)
        return self.over(torch.cat([bags, summed], 1))


def options_of(kind: Kind, table: str) -> Any:
    from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions, FrequencyAdmissionStrategy, KVCounter

    more: dict[str, Any] = {}
    if table == "users":
        parts = tuple(DynamicEmbScoreStrategy[name] for name in kind.score.split("+"))
        more = {"score_strategy": parts if len(parts) > 1 else parts[0], **kind.users}
    elif kind.admit:
        more = {"admit_strategy": FrequencyAdmissionStrategy(kind.admit), "admission_counter": KVCounter(256, 16)}
    return DynamicEmbTableOptions(dist_type=kind.dist_type, **more)


def build(kind: Kind, world_size: int) -> Any:
    """Return the model under DistributedModelParallel."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

    device = torch.device("cuda", torch.cuda.current_device()) if kind.device == "cuda" else torch.device("cpu")

    def config(make: Any, name: str, dim: int, feature: str, num: int) -> Any:
        return make(name=name, embedding_dim=dim, num_embeddings=num, feature_names=[feature])

    users, things = kind.dims
    bags = [config(EmbeddingBagConfig, "users", users, "u", kind.num_embeddings)]
    bags += [config(EmbeddingBagConfig, "static", 4, "s", 20)]
    sequences = [config(EmbeddingConfig, "things", things, "i", kind.num_embeddings)]
    constraints = {
        name: DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options_of(kind, name))
        for name in ("users", "things")
    } | {"static": ParameterConstraints(sharding_types=[kind.static])}
    params = {"optimizer": EmbOptimType[kind.optimizer], "learning_rate": kind.learning_rate, "seed": kind.seed}
    sharders = [
        DynamicEmbeddingCollectionSharder(fused_params=dict(params)),
        DynamicEmbeddingBagCollectionSharder(fused_params=dict(params)),
    ]
    torch.manual_seed(kind.seed)
    meta = torch.device("meta")
    model = Model(
        EmbeddingBagCollection(tables=bags, device=meta), EmbeddingCollection(tables=sequences, device=meta),
        users + 4 + things,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DynamicEmbeddingShardingPlanner(
            [*bags, *sequences],
            topology=Topology(world_size, kind.device, local_world_size=local_world_size()),
            constraints=constraints,
        )
        plan = planner.collective_plan(model, sharders)
        model.over.to(device)
        made = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    if kind.score == "CUSTOMIZED":
        made.module.bags.dynamic_embedding_modules[0].set_score({"users": 5})
    return made


def batch(step: int, rank: int, device: str) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 5, (len(KEYS) * BATCH_SIZE,), generator=generator)
    pool = torch.tensor(EXTREME_IDS + list(range(-40, 40)))
    values = pool[torch.randint(0, len(pool), (int(lengths.sum()),), generator=generator)]
    first_static = int(lengths[: 2 * BATCH_SIZE].sum())
    values[first_static:] %= 20
    made = KeyedJaggedTensor(keys=list(KEYS), values=values, lengths=lengths, stride=BATCH_SIZE)
    return made.to(torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu"))


def train(model: Any, kind: Kind, rank: int, numbers: Iterable[int]) -> list[bytes]:
    """Train; return the bits of the losses."""
    losses = []
    for step in numbers:
        out = model(batch(step, rank, kind.device))
        model.zero_grad()
        loss = ((out - torch.linspace(-1, 1, 3, device=out.device)) ** 2).sum()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
        losses.append(loss.detach().cpu().numpy().tobytes())
    return losses


def held(model: Any) -> dict[str, Records]:
    """Return what the dynamic tables of this rank hold."""
    return {name: records(tables, name) for tables in dynamic_modules(model) for name in tables.table_names}


def counted(model: Any) -> dict[int, int]:
    """Return what the counter of "things" knows on this rank."""
    from tests.support.admitting import lengths_of

    (tables,) = model.module.sequences.dynamic_embedding_modules
    return lengths_of(tables)


def others(model: Any) -> dict[str, bytes]:
    """Return the bits of all that is not dynamic, on this rank."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    from dynamicemb import state_dict_without_rows

    found = {}
    with state_dict_without_rows():
        for name, value in model.state_dict().items():
            parts = [s.tensor for s in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
            found[name] = b"".join(part.detach().cpu().numpy().tobytes() for part in parts)
    return found


def joined(parts: list[dict[Any, Any]]) -> dict[Any, Any]:
    """Return the contents of all ranks, no key of which may be on two."""
    whole = {key: value for part in parts for key, value in part.items()}
    assert len(whole) == sum(map(len, parts)), "an id is on two ranks"
    return whole


def joined_tables(parts: list[dict[str, Records]]) -> dict[str, Records]:
    return {name: joined([part[name] for part in parts]) for name in parts[0]}
