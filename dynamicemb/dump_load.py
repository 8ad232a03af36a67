"""Dump and load of a model's dynamic tables."""

from dynamicemb.checkpoint.background import DumpHandle
from dynamicemb.checkpoint.dump import DynamicEmbDump
from dynamicemb.checkpoint.load import DynamicEmbLoad, TableReport
from dynamicemb.checkpoint.sources import find_sharded_modules, get_dynamic_emb_module

__all__ = [
    "DumpHandle",
    "DynamicEmbDump",
    "DynamicEmbLoad",
    "TableReport",
    "find_sharded_modules",
    "get_dynamic_emb_module",
]
