"""Parts of the tests of backup that other tests use, too."""

from pathlib import Path

SCRIPT = Path(__file__).with_name("script.py")
