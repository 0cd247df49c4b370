"""Extent of the fault tests: short in `make test`, full in `make test-faults`."""

import os
import random

import pytest

IS_FULL = os.environ.get("HALFSTEP_FAULTS") == "full"


def often(full: int, short: int) -> int:
    """Return the number of repetitions for the full or the short suite."""
    return full if IS_FULL else short


only_in_full = pytest.mark.skipif(not IS_FULL, reason="minutes long: make test-faults")


@pytest.fixture
def moments() -> random.Random:
    """Random moments, with a printed seed to reproduce failures."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in COUNTS:
        terminalreporter.write_line(f"faults: {line}")


#: What was broken how often, for the end of the run.
COUNTS: list[str] = []
