"""The module: batched lookups with autograd over a group of tables."""
