"""The table: index, rows, and the kernels on them. Knows nothing of autograd, TorchRec or files."""
