"""Kernels in numba, for tables on the CPU."""

from dynamicemb.table.cpu.admit import add_counts
from dynamicemb.table.cpu.advance import advance, observe_time, rebase
from dynamicemb.table.cpu.erase import erase
from dynamicemb.table.cpu.find import find
from dynamicemb.table.cpu.find_and_gather import find_and_gather
from dynamicemb.table.cpu.find_or_insert import find_or_insert
from dynamicemb.table.cpu.gather import gather
from dynamicemb.table.cpu.initialize import initialize
from dynamicemb.table.cpu.open_batch import open_batch
from dynamicemb.table.cpu.place import place
from dynamicemb.table.cpu.pool import pool, pool_weights_grad
from dynamicemb.table.cpu.relocate import relocate
from dynamicemb.table.cpu.scan import scan
from dynamicemb.table.cpu.transfer import read_rows, write_rows
from dynamicemb.table.cpu.update import update

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
