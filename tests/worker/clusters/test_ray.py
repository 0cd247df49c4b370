"""Pilots by Ray, tested without a real one, which tests/clusters has."""

from contextlib import closing
from pathlib import Path

import pytest

from db.errors import Invalid
from db.settings import Settings
from worker.clusters import ray
from worker.clusters.placement import Pilots


def test_an_unresponsive_ray_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unresponsive Ray is retried in a new process, and the message names the log."""
    monkeypatch.setattr(ray, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(ray.importlib.util, "find_spec", lambda name: name)
    settings = Settings(data=tmp_path, placement="ray", ray_address="127.0.0.1:9")
    with closing(ray.Ray(settings)) as engine:
        for _ in range(2):
            with pytest.raises(ConnectionError, match=f"127.0.0.1:9 .*{tmp_path}"):
                engine.poll(Pilots(1, 1, 2, 1))
    assert (tmp_path / "placements" / "ray.log").exists()


def test_an_address_is_needed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or invalid Ray address is rejected before anything is placed."""
    monkeypatch.setenv("HALFSTEP_PLACEMENT", "ray")
    with pytest.raises(Invalid, match=r"HALFSTEP_RAY_ADDRESS.*required by HALFSTEP_PLACEMENT=ray"):
        Settings.read()
    monkeypatch.setenv("HALFSTEP_RAY_ADDRESS", "http://head:8265")
    with pytest.raises(Invalid, match="HALFSTEP_RAY_ADDRESS: 'http://head:8265'"):
        Settings.read()
