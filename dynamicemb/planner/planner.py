"""The same names as `dynamicemb.planner`, under a longer path."""

from dynamicemb.sharding.constraints import DynamicEmbParameterConstraints, DynamicEmbParameterSharding
from dynamicemb.sharding.enumerator import DynamicEmbeddingEnumerator
from dynamicemb.sharding.planner import DynamicEmbeddingShardingPlanner

__all__ = [
    "DynamicEmbParameterConstraints",
    "DynamicEmbParameterSharding",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
]
