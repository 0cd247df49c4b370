"""Slices of the corpus by HALFSTEP_DIAGNOSIS_SLICE=3/8, see tests.diagnosis.slices."""

import math
import os

import pytest

from halfstep.shadow import armed_steps
from tests.diagnosis.slices import VARIABLE, has_place


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a slice's loops; tests without a loop are in the first slice."""
    if not (part := os.environ.get(VARIABLE)):
        return
    from tests.diagnosis.corpus import LOOPS
    from tests.diagnosis.registry import Loop

    places = {name: place for place, name in enumerate(LOOPS)}
    kept, others = [], []
    for item in items:
        loop = item.callspec.params.get("loop") if hasattr(item, "callspec") else None
        place = places[loop.name] if isinstance(loop, Loop) else 0
        (kept if has_place(part, place) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give slow machines enough time to arm each step."""
    monkeypatch.setattr(armed_steps, "FREE_SECONDS", math.inf)
