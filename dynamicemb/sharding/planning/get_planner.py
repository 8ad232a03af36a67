"""A planner in one call, for the usual mixture of data-parallel, dynamic and row-wise tables."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import BoundsCheckMode, ShardingType

from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.sharding.planning.constraints import DynamicEmbParameterConstraints
from dynamicemb.sharding.planning.enumerator import DynamicEmbeddingEnumerator
from dynamicemb.sharding.planning.planner import DynamicEmbeddingShardingPlanner
from dynamicemb.sharding.torchrec_compat import make_topology

_GIB = 2**30
_RESERVED_SHARE = 0.05
_KERNELS = {
    "none": None,
    "native": [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.FUSED_UVM.value],
    "prefetch": [EmbeddingComputeKernel.FUSED_UVM_CACHING.value],
}


def get_planner(
    eb_configs: list[Any],
    data_parallel_embedding_table_names: set[str],
    dynamicemb_options_dict: dict[str, DynamicEmbTableOptions],
    device: torch.device,
    pipeline_type: str = "none",
    ddr_cap: int = 512 * _GIB,
    intra_host_bw: float = 450e9,
    inter_host_bw: float = 25e9,
) -> DynamicEmbeddingShardingPlanner:
    """Return a planner: the named tables data-parallel or dynamic, all others row-wise.

    Args:
        eb_configs: embedding configs of all tables.
        data_parallel_embedding_table_names: tables that every rank holds in full.
        dynamicemb_options_dict: options of the dynamic tables, by name.
        device: device of this rank.
        pipeline_type: ``none``, ``native`` or ``prefetch``: which kernels the other tables may use.
        ddr_cap: host memory of a rank in bytes.
        intra_host_bw: bytes per second between devices of a host.
        inter_host_bw: bytes per second between hosts.

    Raises:
        ValueError: an unknown table or pipeline type, or a table that is both data-parallel and dynamic.
    """
    if pipeline_type not in _KERNELS:
        raise ValueError(f"pipeline_type must be one of {', '.join(_KERNELS)}, got {pipeline_type!r}")
    names = {config.name for config in eb_configs}
    for argument, given in (
        ("data_parallel_embedding_table_names", set(data_parallel_embedding_table_names)),
        ("dynamicemb_options_dict", set(dynamicemb_options_dict)),
    ):
        if not given <= names:
            raise ValueError(f"{argument} names {sorted(given - names)}, which are no tables of eb_configs")
    both = sorted(set(data_parallel_embedding_table_names) & set(dynamicemb_options_dict))
    if both:
        raise ValueError(f"tables {both} cannot be both data-parallel and dynamic; remove them from one argument")
    constraints: dict[str, ParameterConstraints] = {
        name: _constraint(name, data_parallel_embedding_table_names, dynamicemb_options_dict, pipeline_type)
        for name in sorted(names)
    }
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    topology = _topology(device, world_size, ddr_cap, intra_host_bw, inter_host_bw)
    return DynamicEmbeddingShardingPlanner(
        eb_configs=eb_configs,
        topology=topology,
        constraints=constraints,
        enumerator=DynamicEmbeddingEnumerator(topology, constraints=constraints),
        storage_reservation=HeuristicalStorageReservation(percentage=_RESERVED_SHARE),
    )


def _constraint(
    name: str, data_parallel: set[str], dynamic: dict[str, DynamicEmbTableOptions], pipeline_type: str
) -> ParameterConstraints:
    if name in dynamic:
        return DynamicEmbParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value],
            use_dynamicemb=True,
            dynamicemb_options=dynamic[name],
        )
    if name in data_parallel:
        return ParameterConstraints(
            sharding_types=[ShardingType.DATA_PARALLEL.value],
            compute_kernels=None if pipeline_type == "none" else [EmbeddingComputeKernel.DENSE.value],
            bounds_check_mode=BoundsCheckMode.NONE,
        )
    return ParameterConstraints(
        sharding_types=[ShardingType.ROW_WISE.value],
        compute_kernels=_KERNELS[pipeline_type],
        bounds_check_mode=BoundsCheckMode.NONE,
    )


def _topology(
    device: torch.device, world_size: int, ddr_cap: int, intra_host_bw: float, inter_host_bw: float
) -> Topology:
    hbm_cap = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return make_topology(
        world_size=world_size,
        local_world_size=get_local_size(world_size),
        compute_device=device.type,
        hbm_cap=hbm_cap,
        ddr_cap=ddr_cap,
        intra_host_bw=intra_host_bw,
        inter_host_bw=inter_host_bw,
    )
