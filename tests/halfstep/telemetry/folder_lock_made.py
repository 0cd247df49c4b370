"""Shared helpers of the tests of folder lock."""

import subprocess
from pathlib import Path


def no_locks_library(folder: Path) -> Path:
    """Compile a preloaded library that makes every flock of a process fail."""
    source, library = Path(__file__).with_name("no_locks.c"), folder / "no_locks.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library
