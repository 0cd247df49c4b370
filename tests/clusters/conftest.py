"""Fixtures of several machines, and of a cluster's engine."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HALFSTEP_CLUSTERS") == "yes":
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason="minutes long: make test-clusters"))
