"""Numbers as text for pages, tables and sentences; formats.js has the same in the browser.

tests/number_formats.json has values and texts that the tests of both languages read.
"""

import json
import math
import re
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cache
from typing import Any

UNKNOWN = "–"
DIGITS = 4  # significant ones of a number
SHORT_DIGITS = 3  # of a number with a unit
#: From the first number on and below the second, a number is written without an exponent.
SMALLEST_PLAIN, LARGEST_PLAIN = Decimal("0.0001"), Decimal(1_000_000)
WHOLE_FROM = Decimal(10_000)  # from here on all digits before the point are shown
BYTE_UNITS = ("KiB", "MiB", "GiB", "TiB")
_POWER = re.compile(r"2\^(-?\d{1,4})", re.ASCII)
_context = cache(lambda digits: Context(digits, ROUND_HALF_UP))


def count(value: int | None) -> str:
    """Format an integer with thousands separators."""
    return UNKNOWN if value is None else f"{value:,}"


def number(value: float | str | None, digits: int = DIGITS) -> str:
    """Format a number with significant digits; None is unknown, NaN is a value.

    A text is a number of JSON that is not finite, such as "Infinity".
    """
    if value is None:
        return UNKNOWN
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    rounded = _context(digits).create_decimal_from_float(value)
    if abs(rounded) >= WHOLE_FROM:
        whole = Decimal(value).to_integral_value(ROUND_HALF_UP)
        if abs(whole) < LARGEST_PLAIN:
            return f"{whole:,}"
    if rounded == 0 or SMALLEST_PLAIN <= abs(rounded) < LARGEST_PLAIN:
        return _without_zeros(f"{rounded:,f}")
    mantissa, _, exponent = f"{rounded:e}".partition("e")
    return f"{_without_zeros(mantissa)}e{int(exponent)}"


def _without_zeros(digits: str) -> str:
    text = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if text == "-0" else text


def metric(value: float | str | None, name: str) -> str:
    """Format a metric; its name may end with its unit."""
    if name.endswith("_bytes") and isinstance(value, int | float) and math.isfinite(value):
        return size(value)
    return number(value)


def percent(share: float | None) -> str:
    """Format a share of 1 in per cent; only the whole is 100 %."""
    if share is None:
        return UNKNOWN
    text = number(100 * share, SHORT_DIGITS)
    return f"{'99.9' if text == '100' and share < 1 else text} %"


def size(size_bytes: float | None) -> str:
    """Format a number of bytes in the binary unit that fits."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return number(size_bytes)
    if size_bytes < 1024:
        return f"{number(size_bytes)} B"
    value = float(size_bytes)
    for unit in BYTE_UNITS:  # noqa: B007 - used after the loop
        value /= 1024
        if value < 1024:
            break
    return f"{number(value, SHORT_DIGITS if value < 1000 else DIGITS)} {unit}"


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units."""
    if seconds is None:
        return UNKNOWN
    if not math.isfinite(seconds):
        return number(seconds)
    seconds = max(seconds, 0.0)
    for below, factor, unit in ((0.0009995, 1e6, "µs"), (0.9995, 1e3, "ms"), (9.995, 1, "s")):
        if 0 < seconds < below:
            return f"{number(seconds * factor, SHORT_DIGITS)} {unit}"
    whole = int(Decimal(seconds).to_integral_value(ROUND_HALF_UP))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{count(whole // 86400)} d {whole % 86400 // 3600} h"


def scale_exponent(value: float | None) -> int | None:
    """Return the exponent of a power-of-two scale if that reads better than digits."""
    if value is None or not 0 < value < math.inf:
        return None
    power = math.log2(value)
    return int(power) if power.is_integer() and abs(power) > 3 else None


def scale(value: float | str | None) -> str:
    """Format a loss scale as a power of two (2^-126), since a scaler halves and doubles it."""
    power = None if value is None else scale_exponent(float(value))
    return number(value) if power is None else f"2^{power}"


def power_of_two(value: object) -> float | None:
    """Return the number that a text such as 2^-14 stands for; None for anything else."""
    match = _POWER.fullmatch(value) if isinstance(value, str) else None
    return math.ldexp(1.0, int(match[1])) if match and abs(int(match[1])) < 1024 else None


def setting(value: Any) -> str:
    """Format a value of a configuration with all its digits, as JSON; a text without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        if value.is_integer() and abs(value) < 1e16:
            return str(int(value))
        mantissa, _, exponent = repr(value).partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return json.dumps(value, ensure_ascii=False)


def quantity(value: int, noun: str) -> str:
    """Format a number of things: 1 step, 2,000 steps."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"
