"""Readable loss scales: powers of two as such, since the scaler halves and doubles."""

import math


def exponent(scale: float) -> int | None:
    """Return the exponent of a power-of-two scale if that reads better than digits."""
    if not 0 < scale < math.inf:
        return None
    power = math.log2(scale)
    return int(power) if power.is_integer() and abs(power) > 3 else None


def in_words(scale: float) -> str:
    """Format a scale for a sentence: as a power of two (2^-126) or in digits."""
    power = exponent(scale)
    return f"{scale:g}" if power is None else f"2^{power}"
