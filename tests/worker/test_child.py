"""The training process as its supervisor starts it."""

import sys

import psutil
import pytest

from tests.site import until
from worker.child import LINE_BYTES, Child, without_secrets


def test_a_training_does_not_learn_how_to_reach_the_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passwords stay with the supervisor; the rest of its environment is passed on."""
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", "postgresql://h:sesame@host/h")
    monkeypatch.setenv("HALFSTEP_STORAGE_URL", "s3://sesame@bucket")
    monkeypatch.setenv("PGPASSWORD", "sesame")
    monkeypatch.setenv("HALFSTEP_RECIPES", "gan.py:GAN")
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = Child(argv, {**without_secrets(), "OMP_NUM_THREADS": "1"})
    environment = psutil.Process(child.pid).environ()
    child.kill()
    until(lambda: child.exit_code() is not None)
    child.finish_listening()
    assert "sesame" not in "".join(environment.values())
    assert environment["HALFSTEP_RECIPES"] == "gan.py:GAN"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_what_is_hidden_is_in_no_line_however_lines_are_cut() -> None:
    """A secret stands as ***, also where a line is longer than one can be."""
    secret = "sesame-open"
    for before in (0, LINE_BYTES - len(secret) + 3, 2 * LINE_BYTES - 4):
        said = f"import sys; sys.stdout.write('x' * {before} + 'sesame' + '-open' + 'y')"
        child = Child([sys.executable, "-c", said], without_secrets(), hidden=[secret])
        until(lambda child=child: child.exit_code() is not None)  # type: ignore[misc]
        child.finish_listening()
        text = "".join(line["text"] for line in child.take_lines())
        assert text == "x" * before + "***y"
        assert all(len(line) < LINE_BYTES + len(secret) for line in child.last_lines["stdout"])
