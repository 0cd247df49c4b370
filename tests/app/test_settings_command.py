"""`halfstep settings`: the values in effect, without secrets."""

import json

import pytest

from db import variables
from db.settings import Settings
from tests.site import type_command

VARIABLES = [f"HALFSTEP_{name.upper()}" for name in Settings.model_fields]


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all HALFSTEP_* variables from the environment."""
    for name in [*VARIABLES, *(f"HALFSTEP_{each}" for each in variables.OF_SCRIPTS)]:
        monkeypatch.delenv(name, raising=False)


def test_values_have_their_source_and_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every setting is listed with source and default, and so are variables of scripts."""
    monkeypatch.setenv("HALFSTEP_TRASH_DAYS", "90")
    monkeypatch.setenv("HALFSTEP_SANDBOX", "yes")
    monkeypatch.setenv("HALFSTEP_MODE", "offline")
    assert type_command("settings", "--json") == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = {row.pop("variable"): row for row in listed}
    assert set(rows) == {*VARIABLES, "HALFSTEP_MODE"}
    assert rows["HALFSTEP_TRASH_DAYS"] == {"value": "90", "source": "environment", "default": "7"}
    assert rows["HALFSTEP_SANDBOX"] == {"value": "yes", "source": "environment", "default": "no"}
    assert rows["HALFSTEP_PORT"] == {"value": "8000", "source": "default", "default": "8000"}
    assert type_command("settings") == 0
    assert "HALFSTEP_TRASH_DAYS" in capsys.readouterr().out


def test_secrets_are_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`halfstep settings` hides tokens, and passwords within URLs."""
    secret = "correct-horse"
    for name in ("SMTP_URL", "METRICS_TOKEN", "OIDC_CLIENT_SECRET", "TOKEN"):
        monkeypatch.setenv(f"HALFSTEP_{name}", secret)
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", f"postgresql://halfstep:{secret}@host/name")
    assert type_command("settings") == 0
    shown = capsys.readouterr().out
    assert secret not in shown
    assert "postgresql+psycopg://halfstep:***@host/name" in shown
    assert shown.count("(hidden)") == 4


def test_an_unknown_variable_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown HALFSTEP_* variable ends each command of the service with the correct name."""
    monkeypatch.setenv("HALFSTEP_BIN_DAYS", "90")
    for command in ("settings", "up", "server", "migrate"):
        ended = type_command(command)
        assert "HALFSTEP_BIN_DAYS: renamed to HALFSTEP_TRASH_DAYS" in str(ended), command
