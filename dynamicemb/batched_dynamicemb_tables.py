"""Documented import path of the module."""

from dynamicemb.embedding.module import BatchedDynamicEmbeddingTablesV2

__all__ = ["BatchedDynamicEmbeddingTablesV2"]
