"""Kernels in numba, for tables on the CPU."""
