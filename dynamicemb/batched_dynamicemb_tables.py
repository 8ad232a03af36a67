"""Documented import path of the module, and of the names of its files."""

from dynamicemb.checkpoint.format import (
    encode_checkpoint_file_path,
    encode_counter_checkpoint_file_path,
    encode_meta_json_file_path,
)
from dynamicemb.checkpoint.module import BatchedDynamicEmbeddingTablesV2
from dynamicemb.checkpoint.table_files import find_files, get_loading_files

__all__ = [
    "BatchedDynamicEmbeddingTablesV2",
    "encode_checkpoint_file_path",
    "encode_counter_checkpoint_file_path",
    "encode_meta_json_file_path",
    "find_files",
    "get_loading_files",
]
