"""Options that ask for rows in several memories: refused, or idle where all rows are in one."""

from collections.abc import Sequence
from typing import Any

import torch

from dynamicemb.capacity import nominal_row_bytes
from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.errors import UnsupportedOptionError
from dynamicemb.warn import warn


def check_memories(
    options: Sequence[DynamicEmbTableOptions], names: Sequence[str], optimizer: Any, device: torch.device
) -> None:
    """Warn about ``caching`` and ``external_storage`` where no row would be elsewhere, else refuse them.

    No row would be elsewhere where ``max_capacity`` rows of weights and optimizer state of all tables fit the sum of
    their ``local_hbm_for_values``. Their measure is that of ``get_table_value_bytes``. A table without a limit counts
    by its first size. On the CPU there is nothing to cache, whatever the budget.

    Args:
        options: of each table.
        names: of each table.
        optimizer: of all of them, see ``optimizer_kind``.
        device: where the tables will be.

    Raises:
        UnsupportedOptionError: rows would be in several memories.
    """
    asking = [
        (name, field, value)
        for name, option in zip(names, options, strict=True)
        for field, value in (("caching", option.caching or None), ("external_storage", option.external_storage))
        if value is not None
    ]
    if not asking:
        return
    wanted = sum(_value_bytes(option, optimizer) for option in options)
    budget = sum(option.local_hbm_for_values for option in options)
    for name, field, value in asking:
        off = "False" if field == "caching" else "None"
        given = f"table {name!r}: {field}={value!r}"
        if wanted <= budget:
            warn(
                f"{given} has no effect: the {wanted} bytes of all rows of the module fit its {budget} bytes of "
                f"local_hbm_for_values; use {off}"
            )
        elif field == "caching" and device.type == "cpu":
            warn(f"{given} has no effect: on the CPU all rows are in host memory; use {off}")
        else:
            raise UnsupportedOptionError(
                f"{given}: the {wanted} bytes of all rows of the module do not fit its {budget} bytes of "
                "local_hbm_for_values, and rows do not move between memories yet; raise it to that number (with a "
                f"planner global_hbm_for_values, over all ranks), or use {off}"
            )


def _value_bytes(option: DynamicEmbTableOptions, optimizer: Any) -> int:
    dim, rows = option.dim, option.max_capacity or option.init_capacity
    assert dim is not None and rows is not None
    dtype = option.embedding_dtype or torch.float32
    # Tables that are only read have no optimizer state.
    return rows * nominal_row_bytes(dtype, dim, optimizer if option.training else "sgd")
