"""Where a table is: which rank has which rows and columns. Whoever sends, sizes, stores or reads rows asks here.

A rule divides the ids into P parts. An id is read as an unsigned 64-bit number ``k``::

    roundrobin       k % P
    hash_roundrobin  fmix64(k) % P
    continuous       block = ceil(num_embeddings / P):  k // block if k < block * P, else k % P

Ids keep their value under every rule: a rank stores the id that the user gave, so files hold it too.

A placement gives the parts to ranks, and may cut the columns as well::

    row-wise         ranks (0, 1, .., W-1)   columns ((0, 64),)
    table-row-wise   ranks (4, 5, 6, 7)      columns ((0, 64),)            the ranks of one host
    table-wise       ranks (3,)              columns ((0, 64),)
    column-wise      ranks (1, 3)            columns ((0, 32), (32, 64))
    grid             ranks (0, 1, 4, 5)      columns ((0, 32), (32, 64))   two parts of the rows, each cut in two
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dynamicemb.table.ids import as_int64, fmix64, unsigned_remainder

ROUNDROBIN = "roundrobin"
HASH_ROUNDROBIN = "hash_roundrobin"
CONTINUOUS = "continuous"
DIST_TYPES = (CONTINUOUS, ROUNDROBIN, HASH_ROUNDROBIN)

# Keeps block * P below 2^63, so that ids with the top bit set are always outside.
_MAX_CONTINUOUS = 2**62
# One random draw serves so many columns, see docs/random.md.
_COLUMNS_PER_DRAW = 4


@dataclass(frozen=True)
class Rule:
    """How ids are divided into parts.

    Attributes:
        dist_type: ``roundrobin``, ``hash_roundrobin`` or ``continuous``.
        num_embeddings: rows of the whole table, which ``continuous`` over several parts needs; None with the others,
            so that tables of any size have equal rules.

    Raises:
        ValueError: an argument is out of range.
    """

    dist_type: str = ROUNDROBIN
    num_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.dist_type not in DIST_TYPES:
            raise ValueError(f"dist_type must be one of {', '.join(DIST_TYPES)}, got {self.dist_type!r}")
        if self.dist_type != CONTINUOUS:
            object.__setattr__(self, "num_embeddings", None)
        elif self.num_embeddings is not None:
            self._check_size()

    def check(self, num_parts: int) -> None:
        """Check that the rule can divide ids into so many parts.

        Raises:
            ValueError: it cannot.
        """
        if num_parts < 1:
            raise ValueError(f"num_parts must be at least 1, got {num_parts}")
        if self.dist_type == CONTINUOUS and num_parts > 1:
            self._check_size()

    def _check_size(self) -> None:
        if self.num_embeddings is None or not 1 <= self.num_embeddings <= _MAX_CONTINUOUS:
            raise ValueError(
                f"num_embeddings must be 1..2^62 for dist_type 'continuous', got {self.num_embeddings}; "
                "give the table's number of rows or use 'roundrobin'"
            )

    def parts(self, ids: torch.Tensor, num_parts: int) -> torch.Tensor:
        """Return the part that each id is in.

        Args:
            ids: int64 (or int32, or uint64, whose bit pattern counts) of any shape, on any device.
            num_parts: P.

        Returns:
            int64, same shape and device, values 0..P-1.

        Raises:
            TypeError: ids are not integers of these types.
            ValueError: the rule cannot divide ids into so many parts.

        Example::

            Rule().parts(tensor([-1, 0, 5]), 3)                    # [0, 0, 2]: 2^64 - 1 is divisible by 3
            Rule("continuous", 7).parts(tensor([0, 3, 4, 9]), 3)   # block 3: [0, 1, 1, 0]: 9 is outside, 9 % 3

        Host sync: none.
        """
        self.check(num_parts)
        keys = as_int64(ids)
        if num_parts == 1:
            return torch.zeros_like(keys)
        if self.dist_type == HASH_ROUNDROBIN:
            return unsigned_remainder(fmix64(keys), num_parts)
        remainder = unsigned_remainder(keys, num_parts)
        if self.dist_type == ROUNDROBIN:
            return remainder
        assert self.num_embeddings is not None
        block = -(-self.num_embeddings // num_parts)
        inside = (keys >= 0) & (keys < block * num_parts)
        return torch.where(inside, torch.div(keys, block, rounding_mode="floor"), remainder)


class Part(NamedTuple):
    """What one rank has of a table.

    Attributes:
        number: which part of the rows.
        columns: first column, and the one behind the last.
    """

    number: int
    columns: tuple[int, int]


@dataclass(frozen=True)
class Placement:
    """Which rank has which part of a table.

    Attributes:
        rule: divides the ids into P parts.
        ranks: the rank of each part, in the process group that shares the table; of a table with C column shards the
            P ranks of the first shard, then those of the second one, and so on. No rank is named twice.
        columns: the columns ``(begin, end)`` of each column shard, in order; all but the last end at a multiple of 4.

    Raises:
        ValueError: the attributes contradict each other.

    Example::

        grid = Placement(Rule(), (0, 1, 4, 5), ((0, 32), (32, 64)))
        grid.num_parts             # 2
        grid.owner(tensor([6, 7]))     # [0, 1]: the ranks with columns 0..31
        grid.owner(tensor([6, 7]), 1)  # [4, 5]: the ranks with columns 32..63
        grid.part_of(5)            # Part(number=1, columns=(32, 64))
        grid.part_of(2)            # None
    """

    rule: Rule
    ranks: tuple[int, ...]
    columns: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        begins, ends = [begin for begin, _ in self.columns], [end for _, end in self.columns]
        cuts = ends[:-1]
        if begins != [0, *cuts] or any(end <= begin for begin, end in self.columns):
            raise ValueError(f"columns must follow each other from 0 on, got {self.columns}")
        if any(cut % _COLUMNS_PER_DRAW for cut in cuts):
            raise ValueError(
                f"columns must be cut at multiples of {_COLUMNS_PER_DRAW}, since one random draw serves so many, "
                f"got {self.columns}"
            )
        if not self.ranks or len(self.ranks) % len(self.columns):
            raise ValueError(
                f"ranks must name a rank for each part of the rows of each of {len(self.columns)} column shards, got "
                f"{self.ranks}"
            )
        if min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks must be different numbers from 0 on, got {self.ranks}")
        self.rule.check(self.num_parts)

    @classmethod
    def row_wise(cls, rule: Rule, world_size: int, dim: int) -> "Placement":
        """Return the usual placement: a part of the rows on each rank, with all columns.

        Args:
            rule: divides the ids.
            world_size: how many ranks there are.
            dim: D.
        """
        return cls(rule, tuple(range(world_size)), ((0, dim),))

    @property
    def num_parts(self) -> int:
        """P, into how many parts the rows are divided."""
        return len(self.ranks) // len(self.columns)

    @property
    def dim(self) -> int:
        """D, the columns of all shards."""
        return self.columns[-1][1]

    def is_row_wise_over(self, world_size: int) -> bool:
        """Return whether this is the usual placement on so many ranks."""
        return len(self.columns) == 1 and self.ranks == tuple(range(world_size))

    def parts(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the part of the rows that each id is in, see ``Rule.parts``."""
        return self.rule.parts(ids, self.num_parts)

    def owner(self, ids: torch.Tensor, shard: int = 0) -> torch.Tensor:
        """Return the rank that has each id, in one column shard.

        Args:
            ids: int64 (or int32, or uint64, whose bit pattern counts) of any shape, on any device.
            shard: the column shard.

        Returns:
            int64, same shape and device.

        Host sync: none if the ranks of the shard are 0..P-1, else a copy of their numbers to the device.
        """
        parts = self.parts(ids)
        ranks = self.ranks[shard * self.num_parts : (shard + 1) * self.num_parts]
        return parts if ranks == tuple(range(self.num_parts)) else parts.new_tensor(ranks)[parts]

    def part_of(self, rank: int) -> Part | None:
        """Return what a rank has of the table, None if it has no part."""
        if rank not in self.ranks:
            return None
        shard, number = divmod(self.ranks.index(rank), self.num_parts)
        return Part(number, self.columns[shard])

    def owns(self, ids: torch.Tensor, rank: int) -> torch.Tensor:
        """Return which ids are in a rank's part of the rows, bool of the same shape."""
        part = self.part_of(rank)
        if part is None:
            return torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        return self.parts(ids) == part.number

    def __str__(self) -> str:
        text = f"{self.rule.dist_type!r} routing over "
        numbers = tuple(range(self.num_parts))
        text += f"{self.num_parts} ranks" if self.ranks == numbers else f"the ranks {list(self.ranks)}"
        return text if len(self.columns) == 1 else f"{text}, columns {list(self.columns)}"
