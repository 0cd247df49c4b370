"""The training process as its supervisor starts it."""

import sys
from pathlib import Path

import psutil
import pytest

from db.settings import Settings
from halfstep.sidecar.lines import LINE_BYTES
from tests.site import until
from worker.attempts.child import Child
from worker.sandbox import run_environment


def test_a_training_cannot_reach_the_database(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A training's environment has only harmless variables and those that the admin allows."""
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", "postgresql://h:sesame@host/h")
    monkeypatch.setenv("HALFSTEP_STORAGE_URL", "s3://sesame@bucket")
    for name in ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "MINED"):
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("HTTPS_PROXY", "http://ada:sesame@proxy:80")
    for name in ("http_proxy", "MINE", "OURS_A", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "/well")
    settings = Settings(data=tmp_path, run_environment="MINE, OURS_*")
    monkeypatch.setenv("HALFSTEP_RECIPES", "gan.py:GAN")
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = Child(argv, run_environment.of_recipes(settings) | {"OMP_NUM_THREADS": "1"})
    environment = psutil.Process(child.pid).environ()
    child.kill()
    until(lambda: child.exit_code() is not None)
    child.finish_listening()
    assert "sesame" not in "".join(environment.values())
    assert environment["HALFSTEP_RECIPES"] == "gan.py:GAN"
    result = {name for name, value in environment.items() if value == "/well"}
    assert result == {"http_proxy", "MINE", "OURS_A", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR"}
    assert environment["OMP_NUM_THREADS"] == "1"


def test_secrets_are_hidden_however_lines_are_cut() -> None:
    """A secret is replaced by *** even in a line that is longer than the limit."""
    secret = "sesame-open"
    for before in (0, LINE_BYTES - len(secret) + 3, 2 * LINE_BYTES - 4):
        said = f"import sys; sys.stdout.write('x' * {before} + 'sesame' + '-open' + 'y')"
        child = Child([sys.executable, "-c", said], run_environment.of_commands(), hidden=[secret])
        until(lambda child=child: child.exit_code() is not None)  # type: ignore[misc]
        child.finish_listening()
        text = "".join(line.text for line in child.take_lines())
        assert text == "x" * before + "***y"
        assert all(len(line) < LINE_BYTES + len(secret) for line in child.last_lines["stdout"])
