"""Documented import path of the compute kernels, which TorchRec's lookups make, and of their optimizer."""

from dynamicemb.sharding.compute_kernels import (
    BatchedDynamicEmbedding,
    BatchedDynamicEmbeddingBag,
    DynamicEmbeddingFusedOptimizer,
)

__all__ = ["BatchedDynamicEmbedding", "BatchedDynamicEmbeddingBag", "DynamicEmbeddingFusedOptimizer"]
