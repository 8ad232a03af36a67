"""Incremental dumps as tensors, and scores of a whole model."""

from dynamicemb.checkpoint.rows_since import get_score, incremental_dump, is_valid_score_threshold, set_score

__all__ = ["get_score", "incremental_dump", "is_valid_score_threshold", "set_score"]
