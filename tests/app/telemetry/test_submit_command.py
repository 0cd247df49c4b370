"""The command line that queues a recipe's run again."""

import shlex
from typing import Any

import pytest

from app.telemetry.submit_command import submit_command
from db.database import Database
from db.tables import Run, User
from halfstep.cli.options import configuration
from tests.app.conftest import CONFIG, submit

CHANGES: dict[str, dict[str, Any]] = {
    "training": {"steps": 70, "max_grad_norm": None, "batch_size": 32},
    "modules": {"fp32": ["model.1", "it's"]},
}


def parse(database: Database, run_id: int) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments of a run's command without settings, and its configuration."""
    with database.reading() as session:
        command = submit_command(session, session.get_one(Run, run_id))
    assert command is not None
    words = shlex.split(command)
    first = words.index("--set") if "--set" in words else len(words)
    return words[:first], configuration(words[first + 1 :: 2], None)


@pytest.mark.usefixtures("offered")
def test_a_run_has_the_settings_that_differ_from_the_defaults(
    database: Database, ada: User
) -> None:
    """A run's command has the differing settings for --set, and its name, tags and devices."""
    config = {**CONFIG, **{group: CONFIG.get(group, {}) | CHANGES[group] for group in CHANGES}}
    submit(database, ada, config=config, name="it's mine", tags="a, b", devices_per_node=2)
    words, settings = parse(database, 1)
    assert words == [
        *("halfstep", "run", "submit", "digits", "--precision", "fp16", "--name", "it's mine"),
        *("--tag", "a", "--tag", "b", "--devices", "2"),
    ]
    assert {group: settings[group] for group in CHANGES} == CHANGES


@pytest.mark.usefixtures("offered")
def test_a_fork_starts_from_the_same_checkpoint(database: Database, ada: User) -> None:
    """A fork's command has its checkpoint, and the settings that differ from the parent's."""
    submit(database, ada)
    config = {**CONFIG, "training": CONFIG["training"] | {"steps": 800}}
    submit(database, ada, config=config, name="more")
    with database.writing() as session:
        run = session.get_one(Run, 2)
        run.parent_id, run.parent_step = 1, 400
    words, settings = parse(database, 2)
    assert words == [
        *("halfstep", "run", "fork", "1", "--step", "400", "--precision", "fp16"),
        *("--name", "more"),
    ]
    assert settings == {"training": {"steps": 800}}


def test_a_watched_run_has_none(database: Database, ada: User) -> None:
    """A watched run has no command, because its script is no recipe."""
    submit(database, ada, source="watch")
    with database.reading() as session:
        assert submit_command(session, session.get_one(Run, 1)) is None
