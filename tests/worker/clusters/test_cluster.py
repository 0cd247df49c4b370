"""`halfstep cluster check` names missing requirements."""

from pathlib import Path

import pytest

from db.database import Database
from db.errors import Invalid
from db.settings import Settings
from tests.db.conftest import DIGITS, add_worker
from worker.clusters import cluster


def found(settings: Settings) -> dict[str, tuple[bool, str]]:
    return {each.what: (each.is_fine, each.text) for each in cluster.findings(settings)}


def test_a_volume_that_others_cannot_reach_is_reported(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    """SQLite, a database on localhost, a loopback interface and another torch are reported."""
    add_worker(database, "old", [DIGITS])
    said = found(Settings(data=tmp_path, database_url=database_url))
    is_file = database_url.startswith("sqlite")
    words = "a file on one machine" if is_file else "on no other machine"
    assert said["database"][0] is False
    assert words in said["database"][1]
    assert said["storage"][0] is True
    assert str(tmp_path) in said["storage"][1]
    assert not list((tmp_path / "checks").iterdir())
    assert said["interface"] == (
        False,
        "lo (127.0.0.1) is a loopback interface, not reachable from other machines: "
        "set HALFSTEP_NETWORK_INTERFACE",
    )
    assert said["torch"][0] is False
    assert "but old has None: a run's nodes need one" in said["torch"][1]


def test_what_does_not_answer_is_named(tmp_path: Path) -> None:
    """A missing database and a missing network interface are named."""
    url = "postgresql://halfstep:secret@127.0.0.1:9/none"
    said = found(Settings(data=tmp_path, database_url=url, network_interface="wires"))
    assert said["database"][0] is False
    assert said["torch"][0] is True
    assert "'wires' has no IPv4 address here; there are" in said["interface"][1]
    assert "secret" not in repr(said)


def test_options_that_no_shell_would_parse_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that a shell could not parse are rejected before any run is placed."""
    monkeypatch.setenv("HALFSTEP_SLURM_OPTIONS", "--comment='it")
    with pytest.raises(Invalid, match=r"HALFSTEP_SLURM_OPTIONS.*--comment='it.*No closing quot"):
        Settings.read()
