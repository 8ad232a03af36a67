"""Dumps of tables: the format, writing, verified loading, increments."""
