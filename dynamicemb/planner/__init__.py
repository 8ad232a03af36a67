"""Documented import path of the planner."""

from dynamicemb.sharding.planning.constraints import DynamicEmbParameterConstraints, DynamicEmbParameterSharding
from dynamicemb.sharding.planning.enumerator import DynamicEmbeddingEnumerator
from dynamicemb.sharding.planning.planner import DynamicEmbeddingShardingPlanner

__all__ = [
    "DynamicEmbParameterConstraints",
    "DynamicEmbParameterSharding",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
]
