"""Rows of dynamic tables in a ``state_dict``."""
