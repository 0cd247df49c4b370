"""Pages of runs without steps: commands, and scripts that only log numbers."""

import re

import pytest
from fastapi.testclient import TestClient

from db.database import Database
from db.queue import queue
from db.tables import Run, Status, User
from tests.db.conftest import CPU, add_worker, claim, submit_command
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


@pytest.fixture
def command(database: Database, ada: User) -> Run:
    """A command with a parameter, which a worker has claimed."""
    worker = add_worker(database, "w", [], [CPU], offers_commands=True)
    with database.writing() as session:
        submit_command(session, ada, "python it.py {lr}", config={"lr": 0.1})
        run = claim(session, worker, commands=True)
        assert run is not None
        return run


def end(database: Database, run: Run, status: Status, reason: str | None = None) -> None:
    with database.writing() as session:
        queue.end(session, run.id, run.attempt, status, reason=reason)


def tiles(page: str) -> list[str]:
    """Return the labels of the page's tiles."""
    facts = page.partition('<dl class="facts"')[2].partition("</dl>")[0]
    return [re.sub("<[^>]*>", "", each).strip() for each in re.findall(r"<dt.*?</dt>", facts)]


@pytest.mark.parametrize(
    ("status", "reason", "labels"),
    [
        (Status.FINISHED, None, ["Duration", "Exit code", "lr"]),
        (Status.FAILED, "exit code 3: no such data", ["Duration", "Exit code", "lr"]),
        (
            Status.FAILED,
            "the command exited with code 3; last line: no such data",
            ["Duration", "Exit code", "lr"],
        ),
        (Status.CANCELLED, None, ["Duration", "lr"]),
    ],
)
def test_a_command_opens_on_its_log(
    database: Database,
    command: Run,
    browser: TestClient,
    status: Status,
    reason: str | None,
    labels: list[str],
) -> None:
    """A command's page has its duration, exit code and parameters, and nothing about steps."""
    end(database, command, status, reason)
    page = browser.get(f"/runs/{command.id}").text
    assert tiles(page) == labels
    assert 'data-row="loss"' not in page
    assert "<b>Not scaled.</b>" not in page
    assert 'data-panel="log" data-shown' in page
    assert 'id="tab-skips"' not in page


def list_shown(page: str) -> list[str]:
    """Return the visible tabs and tools, and the note in place of them."""
    parts = {
        "skips": r'id="tab-skips"[^>]*>',
        "gradients": r'id="tab-gradients"[^>]*>',
        "toolbar": r'<div class="toolbar"[^>]*>',
        "applied": r'<label[^>]*><input type="radio" name="x" value="applied"',
        "loss axis": r'<fieldset class="segments small"[^>]*><legend[^>]*>Loss axis',
        "note": r"<p[^>]*data-no-points[^>]*>",
    }
    found = {name: re.search(pattern, page) for name, pattern in parts.items()}
    return [name for name, match in found.items() if match and " hidden" not in match[0]]


def test_a_run_without_steps_shows_only_tabs_and_tools_that_it_can_have(
    database: Database, command: Run, browser: TestClient
) -> None:
    """Before its first number a run without steps has only a note, then tabs and tools of metrics,
    and after its first step those of steps.
    """
    address = f"/runs/{command.id}"
    page = browser.get(address).text
    assert list_shown(page) == ["note"]
    assert "appear here when the command logs the first ones" in page
    record(database, command, events=[make_metric(1, 0.5, "val/acc")])
    assert list_shown(browser.get(address).text) == ["toolbar"]
    record(database, command, make_steps([1.0]))
    with database.writing() as session:
        session.get_one(Run, command.id).precision = "fp16"  # as its first step reports it
    of_steps = ["skips", "gradients", "toolbar", "applied", "loss axis"]
    assert list_shown(browser.get(address).text) == of_steps


def test_a_script_that_only_logs_numbers_shows_them(
    database: Database, command: Run, browser: TestClient
) -> None:
    """For a script that only logs numbers the tiles show them until its first step."""
    events = [make_metric(1, 0.5, "val/acc"), make_metric(1, 2.0, "x")]
    record(database, command, events=events)
    page = browser.get(f"/runs/{command.id}").text
    assert tiles(page) == ["Duration", "val/acc", "x", "lr"]
    record(database, command, make_steps([1.0]))
    assert "Training loss" in tiles(browser.get(f"/runs/{command.id}").text)
