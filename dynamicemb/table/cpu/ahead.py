"""The CPU has nothing to group beside: its threads all read rows. ``update`` groups when it needs to."""

from dynamicemb.table.lookup import Lookup
from dynamicemb.table.rows import RowStore


def start_grouping(store: RowStore, lookup: Lookup) -> None:
    """Do nothing: ``update`` takes None for groups it has to make."""


def finish_grouping(groups: None) -> None:
    """Do nothing."""
