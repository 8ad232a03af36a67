"""Documented import path of the planner."""

from dynamicemb.sharding.constraints import DynamicEmbParameterConstraints, DynamicEmbParameterSharding
from dynamicemb.sharding.enumerator import DynamicEmbeddingEnumerator
from dynamicemb.sharding.planner import DynamicEmbeddingShardingPlanner

__all__ = [
    "DynamicEmbParameterConstraints",
    "DynamicEmbParameterSharding",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
]
