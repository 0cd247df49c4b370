"""The flags of a step: one definition for Python, and equal ones in JavaScript."""

import re
from pathlib import Path

from halfstep.telemetry import flags
from halfstep.telemetry.flags import StepFlag, optimizer_skipped

STATIC = Path(__file__).parents[3] / "app" / "static"


def test_javascript_has_the_same_flags() -> None:
    """Each constant of a script that is named like a flag has its value; SKIPPED is one of them."""
    names = "|".join(StepFlag.__members__)
    found = {
        (name, int(value))
        for script in STATIC.rglob("*.js")
        for name, value in re.findall(rf"\bconst ({names}) = (\d+)", script.read_text())
    }
    assert ("SKIPPED", 1) in found
    assert found <= {(flag.name, flag.value) for flag in StepFlag}


def test_constants_are_the_flags() -> None:
    """The plain integers that arrays are compared with; stored values, which must not change."""
    values = {"SKIPPED": 1, "NONFINITE_LOSS": 2, "NORM_OVERFLOW": 4}
    values |= {"NOT_STEPPED": 8, "UNKNOWN_LOSS": 16, "UNKNOWN_NORM": 32}
    assert {flag.name: flag.value for flag in StepFlag} == values
    assert {name: getattr(flags, name) for name in values} == values
    assert all(type(getattr(flags, name)) is int for name in values)


def test_an_optimizers_flag_is_none_of_the_others() -> None:
    """Bits 8 to 31 are optimizers'; one beyond has none."""
    bits = [optimizer_skipped(index) for index in range(flags.FLAGGED_OPTIMIZERS)]
    assert not sum(StepFlag) & sum(bits)
    assert sum(bits) < 2**32
    assert optimizer_skipped(flags.FLAGGED_OPTIMIZERS) == 0
