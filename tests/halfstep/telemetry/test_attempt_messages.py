"""Files of an attempt: those of the previous version are read, and errors are named."""

import json
import math
from pathlib import Path

import pytest

from halfstep.telemetry.attempt_messages import (
    FORMAT,
    AttemptEntry,
    CommandJob,
    ControlRequest,
    ControlState,
    Job,
    Lease,
    Message,
    Rendezvous,
    RunFile,
    TrainingJob,
    TrainingOutcome,
    WatchedOutcome,
    read_message,
    write_message,
)

#: Files as json.dumps wrote them before these classes, and as they are read.
BEFORE: list[tuple[str, Message]] = [
    (
        '{"run": 3, "attempt": 2, "recipe": "digits", "config": {"precision": "fp16"}, '
        '"started_at": 12.5, "seconds_before": 1.5, "resume": null, "weights": {}, '
        '"device": "cuda", "host": "10.0.0.1", "timeout_seconds": 60.0}',
        TrainingJob(
            run=3,
            attempt=2,
            recipe="digits",
            config={"precision": "fp16"},
            started_at=12.5,
            seconds_before=1.5,
            resume=None,
            weights={},
            device="cuda",
            host="10.0.0.1",
            timeout_seconds=60.0,
        ),
    ),
    (
        '{"run": 3, "attempt": 1, "recipe": "digits", "config": {}, "started_at": 1.0, '
        '"seconds_before": 0.0, "resume": "/a/step-00000010.pt", "weights": {"": "/w.pt"}, '
        '"device": "cpu"}',
        TrainingJob(
            run=3,
            attempt=1,
            recipe="digits",
            config={},
            started_at=1.0,
            resume="/a/step-00000010.pt",
            weights={"": "/w.pt"},
            device="cpu",
        ),
    ),
    (
        '{"argv": ["python", "a.py"], "folder": "/work", "started_at": 12.5}',
        CommandJob(argv=["python", "a.py"], folder="/work", started_at=12.5),
    ),
    ('{"stop": null, "requests": []}', ControlState()),
    (
        '{"stop": "pause", "requests": [{"id": 7, "kind": "scale", "value": 64.0}]}',
        ControlState(stop="pause", requests=[ControlRequest(id=7, kind="scale", value=64.0)]),
    ),
    ('{"ask": 3.5, "kill": 4.5}', Lease(ask=3.5, kill=4.5)),
    ('{"host": "10.0.0.1", "port": 2048}', Rendezvous(host="10.0.0.1", port=2048)),
    (
        '{"status": "failed", "step": 7, "error": "KeyError: 1", "failure_kind": "code"}',
        TrainingOutcome(status="failed", step=7, error="KeyError: 1", failure_kind="code"),
    ),
    (
        '{"format": 1, "id": "ab12", "name": "my run/1", "run": "my run/1", "project": null, '
        '"config": {"lr": 0.1, "bound": "Infinity"}, "tags": ["fp16"], '
        '"started": "2026-11-26T12:00:00.000+00:00", "attempts": [{"attempt": 1, '
        '"started": "2026-11-26T12:00:00.000+00:00", "host": "gpu-1", "pid": 7, '
        '"pid_started": 12345, "pid_space": "boot pid:[4026531836]", "command": ["a.py"], '
        '"folder": "/work", "versions": {"python": "3.11.7"}}]}',
        RunFile(
            format=1,
            id="ab12",
            name="my run/1",
            run="my run/1",
            project=None,
            config={"lr": 0.1, "bound": "Infinity"},
            tags=["fp16"],
            started="2026-11-26T12:00:00.000+00:00",
            attempts=[
                AttemptEntry(
                    attempt=1,
                    started="2026-11-26T12:00:00.000+00:00",
                    host="gpu-1",
                    pid=7,
                    pid_started=12345,
                    pid_space="boot pid:[4026531836]",
                    command=["a.py"],
                    folder="/work",
                    versions={"python": "3.11.7"},
                )
            ],
        ),
    ),
    (
        '{"status": "failed", "step": 7, "error": "KeyError: 1", "exit_code": 1, '
        '"spool_bytes": 4096, "ended": "2026-11-26T12:00:00.000+00:00"}',
        WatchedOutcome(
            status="failed",
            step=7,
            error="KeyError: 1",
            exit_code=1,
            spool_bytes=4096,
            ended="2026-11-26T12:00:00.000+00:00",
        ),
    ),
]


@pytest.mark.parametrize(("text", "message"), BEFORE)
def test_a_file_of_the_version_before_is_read(tmp_path: Path, text: str, message: Message) -> None:
    """A file of the previous version is read, as a training outlives its supervisor's upgrade."""
    path = tmp_path / "file.json"
    path.write_text(text)
    assert read_message(path, type(message)) == message


@pytest.mark.parametrize("message", [message for _text, message in BEFORE])
def test_a_file_has_every_field(tmp_path: Path, message: Message) -> None:
    """A file has every field of its message, as the previous version expects."""
    path = tmp_path / "file.json"
    write_message(path, message)
    assert read_message(path, type(message)) == message
    assert json.loads(path.read_text()).keys() == set(message.__struct_fields__)
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_a_configuration_keeps_its_numbers(tmp_path: Path) -> None:
    """Configuration numbers that JSON lacks, but Python's json module writes, are preserved."""
    config = {"a": math.inf, "b": 2.0, "c": 2}
    job = TrainingJob(
        run=1, attempt=1, recipe="x", config=config, started_at=0, resume=None, device="cpu"
    )
    write_message(tmp_path / "job-1.json", job)
    read = read_message(tmp_path / "job-1.json", TrainingJob)
    assert read.config == config
    assert type(read.config["c"]) is int
    assert read_message(tmp_path / "job-1.json", Job).started_at == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"requests": [{"id": 7, "kind": "jump"}]}', "requests.0.kind is 'jump'; allowed: one of"),
        ('{"requests": [{"kind": "scale"}]}', "requests.0.id is missing"),
        ('{"stop": 7}', "stop is 7; allowed: one of cancel, pause, preempt, or nothing"),
        ('{"requests": 7}', "requests is 7; allowed: a list"),
        ("[]", r"is \[\]; allowed: an object"),
        ('{"stop": ', "is damaged"),
        ("[" * 9000, "is damaged"),
    ],
)
def test_errors_are_named(tmp_path: Path, text: str, message: str) -> None:
    """Errors name the run's folder, the file, the field and its value."""
    (tmp_path / "3").mkdir()
    path = tmp_path / "3" / "control-1.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^3/control-1.json.*{message}"):
        read_message(path, ControlState)


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    """Unknown fields are ignored, since a later version's supervisor may write more."""
    path = tmp_path / "lease-1.json"
    path.write_text('{"ask": 1.0, "kill": 2.0, "warn": 0.5}')
    assert read_message(path, Lease) == Lease(ask=1.0, kill=2.0)


def test_a_newer_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """A file of a newer format is refused with both numbers; one without is an earlier file."""
    path = tmp_path / "lease-1.json"
    write_message(path, Lease(ask=1.0, kill=2.0))
    assert json.loads(path.read_text())["format"] == FORMAT
    path.write_text('{"format": 99, "ask": 1.0, "kill": 2.0}')
    with pytest.raises(ValueError, match=rf"lease-1\.json has format 99; .* reads {FORMAT}"):
        read_message(path, Lease)
