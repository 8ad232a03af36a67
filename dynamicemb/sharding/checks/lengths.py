"""Compare the lengths of a batch with its ids, and add them up for each feature, in one pass."""

from typing import Any

import numpy as np
import torch
from numba import njit

CONTRADICTION = (
    "features: lengths must be non-negative and sum to the number of ids, and offsets, if there are any, must start at "
    "0 and be their running sum"
)


def ends_on_cpu(lengths: torch.Tensor, num_ids: int, batch_size: int) -> tuple[torch.Tensor, list[int]]:
    """Return where each bag ends, and before them 0.

    Args:
        lengths: i64 ``[F*B]`` on the CPU, ids of each bag.
        num_ids: N.
        batch_size: B.

    Returns:
        ``(ends i64 [F*B+1], starts)``: the running sums, and the F+1 of them at which a feature begins or the last
        ends; just 0 where there are no bags.

    Raises:
        ValueError: a length is negative, or they do not sum to N.

    Example::

        lengths [2, 0, 1, 4], num_ids 7, batch_size 2 -> ends [0, 2, 2, 3, 7], starts [0, 2, 7]
    """
    ends = np.empty(lengths.numel() + 1, dtype=np.int64)
    if _running_sums(lengths.contiguous().numpy(), num_ids, ends):
        return torch.from_numpy(ends), ends[:: batch_size or 1].tolist()
    lowest, highest = (int(bound) for bound in lengths.aminmax()) if lengths.numel() else (0, 0)
    # No sum overflows while no length is more than the ids.
    total = int(lengths.sum()) if highest <= num_ids else highest
    raise ValueError(
        f"features: lengths must be non-negative and sum to the {num_ids} ids, "
        f"got a minimum of {lowest} and a sum of {total}"
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _running_sums(lengths: Any, num_ids: int, ends: Any) -> bool:
    """Write the running sums; return whether they are those of `num_ids` ids. Stops where they are not."""
    end = 0
    ends[0] = 0
    for bag in range(lengths.size):
        # No sum overflows: none is beyond the ids.
        if lengths[bag] < 0 or lengths[bag] > num_ids - end:
            return False
        end += lengths[bag]
        ends[bag + 1] = end
    return end == num_ids


def ends_on_device(
    lengths: torch.Tensor, offsets: torch.Tensor | None, num_ids: int, batch_size: int
) -> tuple[torch.Tensor, list[int]]:
    """Do what `ends_on_cpu` does, with torch operators.

    Args:
        lengths: i64 ``[F*B]``, ids of each bag.
        offsets: i32 or i64 ``[F*B+1]``, what the batch says of the running sums; None is nothing.
        num_ids: N.
        batch_size: B.

    Returns:
        What `ends_on_cpu` returns.

    Raises:
        ValueError: a length is negative, they do not sum to N, or the offsets are others.

    Host sync: one.
    """
    if not lengths.numel():
        if num_ids:
            raise ValueError(CONTRADICTION)
        return lengths.new_zeros(1), [0]
    ends = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    numbers = [ends[::batch_size], *torch.aminmax(lengths, dim=0, keepdim=True)]
    if offsets is not None:
        numbers.append((offsets != ends).any(0, keepdim=True))
    told: list[int] = torch.cat(numbers).tolist()
    num_starts = lengths.numel() // batch_size + 1
    starts, (lowest, highest, *differ) = told[:num_starts], told[num_starts:]
    if lowest < 0 or highest > num_ids or starts[-1] != num_ids or any(differ):
        raise ValueError(CONTRADICTION)
    return ends, starts
