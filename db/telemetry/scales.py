"""A loss scale as people read it: a power of two as such, since the scaler halves and doubles."""

import math


def exponent(scale: float) -> int | None:
    """Return the power of two that a scale is, if it reads better so than in digits."""
    if not 0 < scale < math.inf:
        return None
    power = math.log2(scale)
    return int(power) if power.is_integer() and abs(power) > 3 else None


def in_words(scale: float) -> str:
    """Return a scale as a sentence has it: 2^-126, or in digits."""
    power = exponent(scale)
    return f"{scale:g}" if power is None else f"2^{power}"
