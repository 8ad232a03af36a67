"""Rows that a managed-collision collection of TorchRec has trained, for one rank and for two."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dynamicemb import import_static
from tests.support.checkpoints import records
from tests.support.ranks import RankPool, local_world_size, ranks  # noqa: F401
from tests.support.sharded_model import dynamic_modules
from tests.support.static_model import Kind, build

pytestmark = pytest.mark.distributed

DIM, ROWS = 4, 16
RAW = torch.tensor([-(2**40), -3, 7, 8, 9, 2**40, 2**62 + 1, 11, 12, 13])


def managed(world_size: int) -> Any:
    """Return a managed collection that is trained by rows, under DistributedModelParallel."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.manual_seed(3)
    configs = [EmbeddingConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])]
    device = torch.device("cpu")
    module = MCHManagedCollisionModule(
        zch_size=ROWS, device=device, eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=1,
        input_hash_size=2**63 - 1, buckets=2,
    )  # fmt: skip
    model = torch.nn.ModuleDict(
        {
            "mc": ManagedCollisionEmbeddingCollection(
                EmbeddingCollection(tables=configs, device=device), ManagedCollisionCollection({"t": module}, configs)
            )
        }
    )
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    sharders = [
        ManagedCollisionEmbeddingCollectionSharder(
            EmbeddingCollectionSharder(fused_params=params), ManagedCollisionCollectionSharder()
        )
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size, "cpu", local_world_size=local_world_size()),
            constraints={"t": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])},
        )
        plan = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
        return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def features(ids: torch.Tensor) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(ids.numel(), dtype=torch.int32))


def read(output: Any) -> torch.Tensor:
    return output["f"].values()


def trained(rank: int, world_size: int, folder: str) -> tuple[Any, torch.Tensor]:
    """Return a collection that has trained and was saved, and the rows that it reads for the raw ids."""
    model = managed(world_size)
    for _ in range(5):
        out, _ = model.module["mc"](features(RAW[rank::world_size]))
        read(out).square().sum().backward()
    dcp.save({"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}, checkpoint_id=folder)
    model.eval()
    out, _ = model.module["mc"](features(RAW))
    return model, read(out).detach()


def imported(rank: int, world_size: int, folder: str) -> Any:
    static, rows = trained(rank, world_size, folder)
    found = []
    key = "mc._embedding_module.embeddings.t.weight"
    for *source, source_key in (
        (static.state_dict(), static.fused_optimizer.state_dict(), key),
        (folder, None, f"model.{key}"),
    ):
        dynamic = build(Kind(bags=(), sequences=("row_wise",), dim=DIM), world_size, dynamic=True)
        report = import_static(dynamic, *source, table_names={"model.sequences": {"seq0": source_key}})
        held = {k: v for module in dynamic_modules(dynamic) for k, v in records(module, "seq0").items()}
        found.append((report["model.sequences"]["seq0"], held))
    return rows, found


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_keep_their_raw_ids(ranks: RankPool, world_size: int, tmp_path: Path) -> None:  # noqa: F811
    parts = ranks.run(world_size, imported, str(tmp_path / "step"))
    static = dict(zip(RAW.tolist(), parts[0][0], strict=True))
    for source in (0, 1):
        report = parts[0][1][source][0]
        held = {k: v for _, found in parts for k, v in found[source][1].items()}
        # A shard keeps one row for the ids that found none.
        assert len(RAW) - 2 <= len(held) <= len(RAW) and set(held) <= set(static)
        assert all(row[0] == static[i].numpy().tobytes() for i, row in held.items())
        assert all(any(row[1]) for row in held.values())
        assert (report.num_rows, report.num_without_id, report.has_state) == (ROWS, ROWS - len(held), True)
