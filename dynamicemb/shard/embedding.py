"""The sharder of EmbeddingCollection and the sharded collection, under the path of their own."""

from dynamicemb.sharding.collection import DynamicEmbeddingCollectionSharder, ShardedDynamicEmbeddingCollection

__all__ = ["DynamicEmbeddingCollectionSharder", "ShardedDynamicEmbeddingCollection"]
