"""How large the tables are."""

from dataclasses import dataclass, replace

# Buckets this full lose no id to speak of: one in 20,000 by the time the table has its rows.
LOAD = 0.8


@dataclass(frozen=True)
class SizeCase:
    """One table of each of several sizes, as far as memory goes, and the same ids in all of them.

    Attributes:
        name: unique.
        rows: slots of each table, the smallest first.
        dim: D.
        num_ids: N, uniform over ids that the smallest table holds.
        train: forward and backward with SGD, else an evaluation forward.
        device: ``cpu`` or ``cuda``.
    """

    name: str
    rows: tuple[int, ...]
    dim: int
    num_ids: int
    train: bool
    device: str

    def shrink(self, rows: int, num_ids: int) -> "SizeCase":
        """Return the same case with tables of at most so many rows, of different sizes still, and so many ids."""
        scale = min(1.0, rows / self.rows[-1])
        shrunk = tuple(sorted({max(256, round(scale * size)) for size in self.rows}))
        return replace(self, rows=shrunk, num_ids=min(num_ids, self.num_ids))


_MODES = {"find": False, "train": True}

GPU_SIZES = [
    SizeCase(f"size_dim_{dim}_{mode}", rows, dim, 1_000_000, train, "cuda")
    for dim, rows in ((16, (10**6, 10**7, 10**8, 10**9)), (128, (10**6, 10**7, 10**8)))
    for mode, train in _MODES.items()
]
CPU_SIZES = [
    SizeCase(f"cpu_size_dim_16_{mode}", (10**5, 10**6, 10**7), 16, 65_536, train, "cpu")
    for mode, train in _MODES.items()
]
