"""Documented import path of the sharders and the sharded collections."""

from dynamicemb.sharding.bag_collection import (
    DynamicEmbeddingBagCollectionSharder,
    ShardedDynamicEmbeddingBagCollection,
)
from dynamicemb.sharding.collection import DynamicEmbeddingCollectionSharder, ShardedDynamicEmbeddingCollection

__all__ = [
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionSharder",
    "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
]
