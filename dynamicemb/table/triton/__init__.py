"""Kernels in Triton, for tables on a GPU; they also run in Triton's interpreter."""

from dynamicemb.table.triton.admit import add_counts
from dynamicemb.table.triton.advance import advance, observe_time, rebase
from dynamicemb.table.triton.erase import erase
from dynamicemb.table.triton.find import find
from dynamicemb.table.triton.find_and_gather import find_and_gather
from dynamicemb.table.triton.find_or_insert import find_or_insert
from dynamicemb.table.triton.gather import gather
from dynamicemb.table.triton.initialize import initialize
from dynamicemb.table.triton.open_batch import open_batch
from dynamicemb.table.triton.place import place
from dynamicemb.table.triton.pool import pool, pool_weights_grad
from dynamicemb.table.triton.relocate import relocate
from dynamicemb.table.triton.scan import scan
from dynamicemb.table.triton.transfer import read_rows, write_rows
from dynamicemb.table.triton.update import update

__all__ = [
    "add_counts",
    "advance",
    "erase",
    "find",
    "find_and_gather",
    "find_or_insert",
    "gather",
    "initialize",
    "observe_time",
    "open_batch",
    "place",
    "pool",
    "pool_weights_grad",
    "read_rows",
    "rebase",
    "relocate",
    "scan",
    "update",
    "write_rows",
]
