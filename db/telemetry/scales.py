"""Readable loss scales: powers of two as such, since the scaler halves and doubles."""

from halfstep.telemetry.scaling_health import scale_exponent as exponent
from halfstep.telemetry.scaling_health import scale_in_words as in_words

__all__ = ["exponent", "in_words"]
