"""The version of the package; dumps name it."""

__version__ = "0.1.0"
