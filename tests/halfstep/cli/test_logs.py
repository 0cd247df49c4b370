"""Logging of server, worker and placer."""

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfstep.cli import logs
from tests.marks import looped

logger = logging.getLogger("worker.test_logs")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore log handlers and levels after the test."""
    root = logging.getLogger()
    packages = [logging.getLogger(package) for package in logs.PACKAGES]
    handlers, levels = root.handlers[:], [each.level for each in (root, *packages)]
    yield
    root.handlers[:] = handlers
    for each, level in zip((root, *packages), levels, strict=True):
        each.setLevel(level)


def log_messages(level: str = "info", form: str = "text") -> list[str]:
    """Log one message of each kind, and return the lines."""
    stream = io.StringIO()
    logs.configure("worker", level, form, stream)
    logger.debug("looks")
    logger.info("offers %s", "digits")
    logger.warning("it cannot be claimed", extra={"run": 7})
    logging.getLogger("sqlalchemy").info("of others")
    logging.getLogger("alembic").warning("of others, but a warning")
    try:
        raise ValueError("2\n3")
    except ValueError:
        logger.exception("closing failed", extra={"run": 8})
    return stream.getvalue().splitlines()


def test_a_line_of_text_names_process_and_run() -> None:
    """A text line names process and run, and a traceback follows its message."""
    lines = log_messages()
    assert lines[:5] == [
        "worker: offers digits",
        "worker: run 7: it cannot be claimed",
        "worker: of others, but a warning",
        "worker: run 8: closing failed",
        "Traceback (most recent call last):",
    ]
    assert lines[-2:] == ["ValueError: 2", "3"]


@looped(
    "level, messages",
    [
        ("debug", ["looks", "offers digits", "it cannot", "of others", "closing failed"]),
        ("info", ["offers digits", "it cannot", "of others", "closing failed"]),
        ("warning", ["it cannot", "of others", "closing failed"]),
        ("error", ["of others", "closing failed"]),
    ],
)
def test_messages_below_the_level_are_left_out(level: str, messages: list[str]) -> None:
    """Our packages log at the given level; other packages log warnings at any level."""
    lines = [json.loads(line)["message"] for line in log_messages(level, "json")]
    assert len(lines) == len(messages)
    assert all(map(str.startswith, lines, messages))


def test_json_has_a_line_per_message_with_level_and_run() -> None:
    """A JSON log has one line per message, also with a traceback."""
    first, second, _third, last = map(json.loads, log_messages(form="json"))
    assert first | {"time": ""} == {
        "time": "",
        "level": "info",
        "process": "worker",
        "logger": "worker.test_logs",
        "message": "offers digits",
    }
    assert first["time"].endswith("+00:00")
    assert (second["level"], second["run"]) == ("warning", 7)
    assert (last["level"], last["run"]) == ("error", 8)
    assert last["error"].endswith("ValueError: 2\n3")


def test_a_full_disk_ends_nothing() -> None:
    """A full disk costs the log line and raises nothing."""
    with Path("/dev/full").open("w") as stream:
        logs.configure("worker", "info", "text", stream)
        logger.info("lost")
        logging.getLogger().handlers.clear()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_a_reader_who_has_gone_ends_nothing() -> None:
    """A closed log reader ends nothing, and nothing is written to it again."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        logs.configure("worker", "info", "text", stream)
        logger.info("lost")
        logger.info("lost too")
