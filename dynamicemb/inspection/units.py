"""Times, sizes and counts as people read them."""

from datetime import datetime, timezone

_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

SECOND = _NS["s"]
MINUTE = _NS["min"]
HOUR = _NS["h"]
DAY = _NS["d"]


def duration(nanoseconds: int) -> str:
    """Return a length of time with three digits, such as ``1.5 h``."""
    unit = next((unit for unit in reversed(_NS) if nanoseconds >= _NS[unit]), "ns")
    return f"{_short(nanoseconds / _NS[unit])} {unit}"


def date(nanoseconds: int) -> str:
    """Return Unix nanoseconds as a date; as a number where no calendar has it."""
    try:
        moment = datetime.fromtimestamp(nanoseconds // SECOND, tz=timezone.utc)
    except (OverflowError, OSError, ValueError):
        return f"{nanoseconds} ns"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def size(num_bytes: int) -> str:
    """Return bytes with three digits, such as ``1.5 MiB``."""
    power = min(len(_BYTES) - 1, max(0, num_bytes.bit_length() - 1) // 10)
    return f"{_short(num_bytes / 2 ** (10 * power))} {_BYTES[power]}"


def number(value: int) -> str:
    """Return a whole number with separators."""
    return f"{value:,}"


def _short(value: float) -> str:
    """Return a number with three digits, or more before the point, without zeros behind it."""
    text = f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
