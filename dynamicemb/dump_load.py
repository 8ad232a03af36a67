"""Dump and load of a model's dynamic tables, and what its ``state_dict`` has of them."""

from dynamicemb.checkpoint.background import DumpHandle
from dynamicemb.checkpoint.dump import DynamicEmbDump
from dynamicemb.checkpoint.load import DynamicEmbLoad, TableReport
from dynamicemb.checkpoint.sources import check_emb_collection_modules, find_sharded_modules, get_dynamic_emb_module
from dynamicemb.checkpoint.state_dict import state_dict_without_rows
from dynamicemb.checkpoint.state_dict_planner import DynamicEmbLoadPlanner
from dynamicemb.checkpoint.static.import_static import StaticTableReport, import_static

__all__ = [
    "DumpHandle",
    "DynamicEmbDump",
    "DynamicEmbLoad",
    "DynamicEmbLoadPlanner",
    "StaticTableReport",
    "TableReport",
    "check_emb_collection_modules",
    "find_sharded_modules",
    "get_dynamic_emb_module",
    "import_static",
    "state_dict_without_rows",
]
