"""Documented import path of the row-wise shardings of dynamic tables, and of their lookups.

The sharded collections make them. They are here for code that asks what a sharding or a lookup is.
"""

from dynamicemb.sharding.shardings import DynamicPooledLookup as GroupedPooledEmbeddingsLookup
from dynamicemb.sharding.shardings import DynamicRwPooledSharding as RwPooledDynamicEmbeddingSharding
from dynamicemb.sharding.shardings import DynamicRwSequenceSharding as RwSequenceDynamicEmbeddingSharding
from dynamicemb.sharding.shardings import DynamicSequenceLookup as GroupedEmbeddingsLookup

__all__ = [
    "GroupedEmbeddingsLookup",
    "GroupedPooledEmbeddingsLookup",
    "RwPooledDynamicEmbeddingSharding",
    "RwSequenceDynamicEmbeddingSharding",
]
