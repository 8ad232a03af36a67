"""Switches of a call."""

from dataclasses import fields
from typing import Any


def check_flags(request: Any) -> None:
    """Check that every field of a dataclass that is declared as bool is one.

    Raises:
        TypeError: one is not.
    """
    for field in fields(request):
        value = getattr(request, field.name)
        if field.type in (bool, "bool") and not isinstance(value, bool):
            raise TypeError(f"{field.name} must be True or False, got {value!r}")
