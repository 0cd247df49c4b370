"""Shared helpers of the tests of leases."""

from pathlib import Path

RECIPE = f"{Path(__file__).with_name('clocked.py')}:Clocked"


LEASE = {"HALFSTEP_LEASE_SECONDS": "6"}


def add_clock(tmp_path: Path) -> dict[str, str]:
    clock = tmp_path / "clock"
    clock.touch()  # a run creates nothing outside of the data folder
    return {"HALFSTEP_RECIPES": RECIPE, "HALFSTEP_TEST_CLOCK": str(clock)}
