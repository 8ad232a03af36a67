"""A sharded collection inside another module, which may call it part by part and with a context of its own."""

from typing import Any

from dynamicemb.errors import UnsupportedOptionError


def check_input_dist(ctx: Any, dynamic_tables: list[str]) -> None:
    """Check that a batch came through the collection's own exchange, if the collection has dynamic tables.

    Managed collisions exchange ids by themselves, by the blocks of a static table, and change them.

    Args:
        ctx: context of the batch; `WithDynamicTables.input_dist` sets its ``is_padded``.
        dynamic_tables: of the collection.

    Raises:
        UnsupportedOptionError: it did not; on all ranks alike.
    """
    if dynamic_tables and not hasattr(ctx, "is_padded"):
        raise UnsupportedOptionError(
            f"ids of dynamic tables {dynamic_tables} were not exchanged by their own collection, but by a module "
            f"around it (its context is a {type(ctx).__name__}), as a managed collision does; a dynamic table needs "
            "none: every int64 id gets a row of its own; use the collection itself, or leave the tables static"
        )
