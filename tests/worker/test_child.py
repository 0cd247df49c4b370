"""The training process as its supervisor starts it."""

from pathlib import Path

import psutil
import pytest

from tests.site import until
from worker.child import Child


def test_a_training_does_not_learn_how_to_reach_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passwords stay with the supervisor; the rest of its environment is passed on."""
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", "postgresql://h:sesame@host/h")
    monkeypatch.setenv("HALFSTEP_STORAGE_URL", "s3://sesame@bucket")
    monkeypatch.setenv("PGPASSWORD", "sesame")
    monkeypatch.setenv("HALFSTEP_RECIPES", "gan.py:GAN")
    child = Child(tmp_path, 1, 1, {"OMP_NUM_THREADS": "1"})
    environment = psutil.Process(child.pid).environ()
    child.kill()
    until(lambda: child.exit_code() is not None)
    child.finish_listening()
    assert "sesame" not in "".join(environment.values())
    assert environment["HALFSTEP_RECIPES"] == "gan.py:GAN"
    assert environment["OMP_NUM_THREADS"] == "1"
