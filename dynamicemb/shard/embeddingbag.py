"""The sharder of EmbeddingBagCollection and the sharded collection, under the path of their own."""

from dynamicemb.sharding.bag_collection import (
    DynamicEmbeddingBagCollectionSharder,
    ShardedDynamicEmbeddingBagCollection,
)

__all__ = ["DynamicEmbeddingBagCollectionSharder", "ShardedDynamicEmbeddingBagCollection"]
