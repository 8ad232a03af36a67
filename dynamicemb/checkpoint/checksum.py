"""CRC-32, as in zlib and gzip."""

try:
    # The same values in a third of the time.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
