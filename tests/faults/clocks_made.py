"""Shared helpers of the tests of clocks."""

import subprocess
from pathlib import Path

HOUR = 3600


def jump(offset: Path, seconds: int) -> None:
    """Set the offset from the real clock for all processes that read it."""
    written = offset.with_suffix(".new")
    written.write_text(str(seconds))
    written.replace(offset)


def fake_clock(offset: Path) -> dict[str, str]:
    """Let the wall clock, and no other clock, follow a file."""
    source, library = Path(__file__).with_name("jumping_clock.c"), offset.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library), "HALFSTEP_TEST_OFFSET": str(offset)}
