"""Documented import path of the module."""

from dynamicemb.checkpoint.module import BatchedDynamicEmbeddingTablesV2

__all__ = ["BatchedDynamicEmbeddingTablesV2"]
