"""Kernels in Triton, for tables on a GPU; they also run in Triton's interpreter."""

from dynamicemb.table.triton.find import find
from dynamicemb.table.triton.gather import gather
from dynamicemb.table.triton.pool import pool, pool_weights_grad
from dynamicemb.table.triton.transfer import read_rows, write_rows
from dynamicemb.table.triton.update import update

__all__ = ["find", "gather", "pool", "pool_weights_grad", "read_rows", "update", "write_rows"]
