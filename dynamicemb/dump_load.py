"""Dump and load of a model's dynamic tables, and what its ``state_dict`` has of them."""

from dynamicemb.checkpoint.dump import DynamicEmbDump
from dynamicemb.checkpoint.load import DynamicEmbLoad, TableReport
from dynamicemb.checkpoint.state_dict.entries import state_dict_without_rows
from dynamicemb.checkpoint.state_dict.planner import DynamicEmbLoadPlanner
from dynamicemb.checkpoint.static.import_static import StaticTableReport, import_static
from dynamicemb.checkpoint.tables import check_emb_collection_modules, find_sharded_modules, get_dynamic_emb_module
from dynamicemb.checkpoint.writing.background import DumpHandle

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
