"""Kernels in Triton, for tables on a GPU; they also run in the interpreter."""
