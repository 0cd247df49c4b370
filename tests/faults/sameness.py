"""Comparison of disturbed runs with an undisturbed one."""

from typing import Any

import torch

from db.files import checkpoints
from db.runs import runs
from db.tables import Status
from db.telemetry import step_rows
from db.telemetry.pyramid import END
from tests.site import Site


def config(steps: int) -> dict[str, Any]:
    """Return a configuration of digits in which all that a resume could forget has an effect."""
    return {
        "precision": "fp16",
        "training": {"steps": steps, "schedule": "cosine"},
        "checkpoints": {"every_steps": 100},
        "recipe": {"dropout": 0.1, "shift_pixels": 1},
    }


def assert_same(site: Site, run_id: int, other_id: int) -> None:
    """Assert that two runs have equal records and end states, bit by bit."""
    assert site.run(run_id).status == site.run(other_id).status == Status.FINISHED
    assert records(site, run_id) == records(site, other_id)
    state, other = final_state(site, run_id), final_state(site, other_id)
    for part in ("modules", "optimizers", "scaler", "random", "progress"):
        assert_equal(state[part], other[part])


def records(site: Site, run_id: int) -> list[tuple[Any, ...]]:
    """Return all recorded values of each step except times, which differ."""
    with site.database.reading() as session:
        rows = step_rows.read_rows(session, run_id, most=END)
    return [row._replace(elapsed_ms=0, step_us=0, data_us=None) for row in rows]


def final_state(site: Site, run_id: int) -> dict[str, Any]:
    with site.database.reading() as session:
        newest = checkpoints.to_resume(session, runs.get(session, run_id))[0]
    state: dict[str, Any] = torch.load(site.data / newest.key, weights_only=True)
    return state


def assert_equal(one: Any, other: Any) -> None:
    """Compare nested containers of tensors bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other
