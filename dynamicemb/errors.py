"""Run-time errors of the package. Bad arguments raise ``ValueError`` or ``TypeError`` instead."""

from os import PathLike


class DynamicEmbError(RuntimeError):
    """Base of every run-time error that this package raises."""


class CheckpointCorruptError(DynamicEmbError):
    """A file of a dump is missing, damaged, or does not belong to it."""

    def __init__(self, path: str | PathLike[str], expected: object, got: object) -> None:
        """Keep which file is wrong and how.

        Args:
            path: the offending file.
            expected: what the dump says about it (size, checksum, presence).
            got: what was found instead.
        """
        super().__init__(path, expected, got)
        self.path = path
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return (
            f"checkpoint file {str(self.path)!r} is damaged: expected {self.expected}, got {self.got}; "
            "restore the file or load another dump"
        )


class InsertFailedError(DynamicEmbError):
    """Ids found no slot: their buckets hold only ids that must not be evicted now."""

    def __init__(self, table: str, failed: int, total: int) -> None:
        """Keep how many ids of which table failed.

        Args:
            table: name of the table.
            failed: distinct ids without a slot.
            total: distinct ids of the batch that needed one.
        """
        super().__init__(table, failed, total)
        self.table = table
        self.failed = failed
        self.total = total

    def __str__(self) -> str:
        return (
            f"table {self.table!r}: {self.failed} of {self.total} new ids found no slot that may be evicted; "
            "raise max_capacity (with a planner num_embeddings), lower protect_steps, or send fewer distinct ids "
            "per step"
        )


class UnsupportedOptionError(DynamicEmbError, NotImplementedError):
    """An option is legal but this version cannot honour it."""
