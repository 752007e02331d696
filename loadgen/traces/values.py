"""Single fields of a trace file to numbers: exact, or the reason why not.

Owns what counts as a stamp and as a token count.  Must always hold: a stamp keeps every digit it has (nanoseconds), a
count is a whole number written as one, and what cannot be used raises BadValueError with the reason of the drop.
"""

from __future__ import annotations

import math
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from loadgen.traces.trace import BadValueError

MAX_TOKENS: Final = 2**31 - 1
MAX_NS: Final = 2**62
EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
MAX_DAYS: Final = 36_000  # either side of 1970, about: what fits 62 bits of nanoseconds
SECOND_NS: Final = 1_000_000_000
UNITS_NS: Final = {"s": SECOND_NS, "ms": 1_000_000, "us": 1_000, "ns": 1}


def stamp_ns(text: str, days: dict[str, int]) -> int:
    """Nanoseconds of `YYYY-MM-DD HH:MM:SS[.fraction]` since 1970, exact.  days: a cache of dates, kept by the caller.

    Raises BadValueError("bad_stamp").
    """
    text = text.strip()
    day_text = text[:10]
    day = days.get(day_text)
    if day is None:
        try:
            day = days[day_text] = date.fromisoformat(day_text).toordinal() - EPOCH_DAY
        except ValueError:
            raise BadValueError("bad_stamp") from None
    if abs(day) > MAX_DAYS:
        raise BadValueError("bad_stamp")
    clock, dot, fraction = text[10:].partition(".")
    parts = clock[1:].split(":")
    if clock[:1] not in (" ", "T") or len(parts) != 3 or not all(len(part) == 2 and part.isdigit() for part in parts):
        raise BadValueError("bad_stamp")
    if dot and not (fraction.isascii() and fraction.isdigit() and len(fraction) <= 9):
        raise BadValueError("bad_stamp")
    hour, minute, second = (int(part) for part in parts)
    if hour > 23 or minute > 59 or second > 60:
        raise BadValueError("bad_stamp")
    return (day * 86_400 + hour * 3600 + minute * 60 + second) * SECOND_NS + int(fraction.ljust(9, "0") or 0)


def zoned_stamp_ns(text: str, days: dict[str, int]) -> int:
    """The same with a zone behind it (`Z`, `+05:30`, `-0800`): nanoseconds in UTC.  Raises BadValueError."""
    text = text.strip()
    if text.endswith(("Z", "z")):
        return stamp_ns(text[:-1], days)
    at = max(text.rfind("+"), text.rfind("-", 11))
    zone = text[at + 1 :].replace(":", "")
    if at < 11 or len(zone) not in (2, 4) or not zone.isdigit():
        raise BadValueError("no_zone" if at < 11 else "bad_stamp")
    hours, minutes = int(zone[:2]), int(zone[2:] or 0)
    if hours > 23 or minutes > 59:
        raise BadValueError("bad_stamp")
    offset = (hours * 3600 + minutes * 60) * SECOND_NS
    return stamp_ns(text[:at], days) - (offset if text[at] == "+" else -offset)


def has_zone(stamp: str) -> bool:
    """Does this written stamp carry a zone?"""
    stamp = stamp.strip()
    return stamp.endswith(("Z", "z")) or "+" in stamp or "-" in stamp[10:]


def number_ns(value: Any, unit_ns: int) -> int:
    """A number of time units, as text or as JSON gives it, in nanoseconds.  Raises BadValueError("bad_stamp")."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValueError("bad_stamp")
    try:
        exact = Decimal(value.strip() if isinstance(value, str) else str(value))
    except InvalidOperation:
        raise BadValueError("bad_stamp") from None
    if not exact.is_finite() or abs(exact.adjusted()) > 30:
        raise BadValueError("bad_stamp")
    found = int((exact * unit_ns).to_integral_value())
    if abs(found) > MAX_NS:
        raise BadValueError("bad_stamp")
    return found


def token_count(text: str) -> int:
    """A count of tokens as text, an integer >= 1.  Raises BadValueError with the reason of the drop."""
    value = count_or_zero(text)
    if value == 0:
        raise BadValueError("zero_tokens")
    return value


def count_or_zero(text: str) -> int:
    """A count of tokens as text, an integer >= 0.  Raises BadValueError with the reason of the drop."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        value = int(text[:20])
        if value > MAX_TOKENS:
            raise BadValueError("count_too_large")
        return value
    if text.startswith("-"):
        raise BadValueError("negative_count")
    if text.lower() in ("nan", "null", "none", ""):
        raise BadValueError("missing_count")
    raise BadValueError("not_a_count")


def json_count(value: Any) -> int:
    """A count of tokens as JSON gives it, an integer >= 0.  Raises BadValueError with the reason of the drop."""
    if type(value) is int:
        if value < 0:
            raise BadValueError("negative_count")
        if value > MAX_TOKENS:
            raise BadValueError("count_too_large")
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise BadValueError("missing_count")
    raise BadValueError("not_a_count")


def json_tokens(value: Any) -> int:
    """The same, an integer >= 1."""
    found = json_count(value)
    if found == 0:
        raise BadValueError("zero_tokens")
    return found
