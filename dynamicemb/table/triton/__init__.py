"""Kernels in Triton, for tables on a GPU; they also run in Triton's interpreter.

So far this backend has ``find`` only.
"""

from dynamicemb.table.triton.find import find

__all__ = ["find"]
