"""Flags of a step are defined once in Python, with equal values in JavaScript."""

import re
from pathlib import Path

from halfstep.telemetry import flags
from halfstep.telemetry.flags import StepFlag, optimizer_skipped

STATIC = Path(__file__).parents[3] / "app" / "static"


def test_javascript_has_the_same_flags() -> None:
    """JavaScript constants named like flags have the same values, SKIPPED among them."""
    names = "|".join(StepFlag.__members__)
    found = {
        (name, int(value))
        for script in STATIC.rglob("*.js")
        for name, value in re.findall(rf"\bconst ({names}) = (\d+)", script.read_text())
    }
    assert ("SKIPPED", 1) in found
    assert found <= {(flag.name, flag.value) for flag in StepFlag}


def test_constants_are_the_flags() -> None:
    """The flags are plain integers with fixed values, because they are stored."""
    values = {"SKIPPED": 1, "NONFINITE_LOSS": 2, "NORM_OVERFLOW": 4}
    values |= {"NOT_STEPPED": 8, "UNKNOWN_LOSS": 16, "UNKNOWN_NORM": 32}
    assert {flag.name: flag.value for flag in StepFlag} == values
    assert {name: getattr(flags, name) for name in values} == values
    assert all(type(getattr(flags, name)) is int for name in values)


def test_an_optimizers_flag_is_none_of_the_others() -> None:
    """Each optimizer has its own flag in bits 8 to 31; optimizers beyond these have none."""
    bits = [optimizer_skipped(index) for index in range(flags.FLAGGED_OPTIMIZERS)]
    assert not sum(StepFlag) & sum(bits)
    assert sum(bits) < 2**32
    assert optimizer_skipped(flags.FLAGGED_OPTIMIZERS) == 0
