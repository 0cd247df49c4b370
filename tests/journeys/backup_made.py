"""Shared helpers of the tests of backup."""

from pathlib import Path

SCRIPT = Path(__file__).with_name("script.py")
