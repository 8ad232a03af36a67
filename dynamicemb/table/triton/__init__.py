"""Kernels in Triton, for tables on a GPU; they also run in Triton's interpreter."""

from dynamicemb.table.triton.advance import advance, rebase
from dynamicemb.table.triton.erase import erase, rebuild
from dynamicemb.table.triton.find import find
from dynamicemb.table.triton.find_or_insert import find_or_insert
from dynamicemb.table.triton.initialize import initialize
from dynamicemb.table.triton.scan import scan

__all__ = ["advance", "erase", "find", "find_or_insert", "initialize", "rebase", "rebuild", "scan"]
