"""What a planner writes into the options that a user gave, and what the user had given.

NVIDIA's planner completes the options in place, and scripts read them afterwards. The same object may go to several
tables, and to another planner, for another number of ranks or rows: a planner goes by what the user gave, and replaces
what planners wrote.
"""

import copy
from collections.abc import Iterable
from typing import Any

from dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from dynamicemb.types import DynamicEmbInitializerArgs, Planned

# What is written. Fields that contradict each other, if tables agree in some of them only, are written together.
_UNITS = (
    ("dim",),
    ("embedding_dtype",),
    ("index_type",),
    ("bucket_capacity", "max_capacity", "init_capacity"),
    ("local_hbm_for_values",),
    ("initializer_args",),
)
# Numbers are marked by their type. These are marked in the options and in the numbers beside them, and initializers in
# themselves: what was given before, and what was written.
_DTYPES = ("embedding_dtype", "index_type")
_MARK = "_planned"


def given_options(options: DynamicEmbTableOptions) -> DynamicEmbTableOptions:
    """Return options as the user gave them: without what planners wrote, unless the user has changed that since.

    Args:
        options: not changed.

    Returns:
        A copy; the object itself if no planner wrote into it.
    """
    given = {field: _given_value(options, field) for unit in _UNITS for field in unit}
    changed = {field: value for field, value in given.items() if value is not getattr(options, field)}
    if not changed:
        return options
    # No new object of the class: its constructor would warn once more.
    result = copy.copy(options)
    result.__dict__.pop(_MARK, None)
    for field, value in changed.items():
        setattr(result, field, value)
    return result


def write_options(tables: Iterable[tuple[DynamicEmbTableOptions, DynamicEmbTableOptions]]) -> None:
    """Write what is planned into the options that the user gave.

    Where one object is given for several tables, it gets the values in which all of them agree; of the others it has
    what the user gave. Nothing is written where the plan has no number (``max_capacity`` of NO_EVICTION).

    Args:
        tables: the options that the user gave, changed in place, and those that are planned; one pair a table.
    """
    plans: dict[int, tuple[DynamicEmbTableOptions, list[DynamicEmbTableOptions]]] = {}
    for options, planned in tables:
        plans.setdefault(id(options), (options, []))[1].append(planned)
    for options, planned_options in plans.values():
        given = given_options(options)
        dtypes: dict[str, tuple[Any, Any]] = {}
        for unit in _UNITS:
            values = _agreed(unit, given, planned_options)
            for field, value in values.items():
                asked = getattr(given, field)
                if field in _DTYPES:
                    dtypes[field] = (asked, value)
                setattr(options, field, _marked(value, asked, field))
        options.__dict__[_MARK] = dtypes
        for number in _planned_numbers(options):
            number.beside = dtypes


def _agreed(
    unit: tuple[str, ...], given: DynamicEmbTableOptions, plans: list[DynamicEmbTableOptions]
) -> dict[str, Any]:
    """Return the values of some fields in which all plans agree, else those that were given."""
    asked = {field: getattr(given, field) for field in unit}
    if any(getattr(plan, field) != getattr(plans[0], field) for plan in plans for field in unit):
        return asked
    planned = {field: getattr(plans[0], field) for field in unit}
    planned = {field: asked[field] if value is None else value for field, value in planned.items()}
    init, most = planned.get("init_capacity"), planned.get("max_capacity")
    # A table that grows without a limit may begin with more than a limit that somebody gave.
    return asked if init is not None and most is not None and init > most else planned


def _planned_numbers(options: DynamicEmbTableOptions) -> list[Planned]:
    """Return the numbers that planners wrote into these options."""
    values = [(field, getattr(options, field)) for unit in _UNITS for field in unit]
    return [value for field, value in values if isinstance(value, Planned) and value.field == field]


def _marked(value: Any, given: Any, field: str) -> Any:
    """Return a planned value with the mark of what was given; what was given itself if they are equal."""
    if value is given or (value == given and type(value) is type(given)):
        return given
    if isinstance(value, DynamicEmbInitializerArgs):
        marked = copy.copy(value)
        marked.__dict__[_MARK] = (given, value)
        return marked
    return Planned(value, given, field) if isinstance(value, int) else value


def _given_value(options: DynamicEmbTableOptions, field: str) -> Any:
    value = getattr(options, field)
    if isinstance(value, Planned):
        # What was planned for one option and given as another is the user's wish.
        return value.given if value.field == field else int(value)
    mark = None
    if field in _DTYPES:
        # A constructor copies numbers and not the mark of the options.
        marks = [options.__dict__.get(_MARK, {}), *(number.beside for number in _planned_numbers(options))]
        mark = next((found[field] for found in marks if field in found), None)
    elif isinstance(value, DynamicEmbInitializerArgs):
        mark = value.__dict__.get(_MARK)
    if mark is None:
        return value
    given, written = mark
    return given if value == written else value
