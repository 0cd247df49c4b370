"""Messages from a training to its supervisor."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import TrainingOutcome
from worker.attempts.training import Training


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """Files of an attempt that has been trained."""
    training = Training.__new__(Training)
    log: list[str] = []
    files = AttemptFiles(tmp_path, 1)
    training._attempt = SimpleNamespace(files=files, append_log=log.append, log=log)  # type: ignore[assignment]
    return training


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"status": "won", "step": 3}', "status is 'won'; allowed: one of finished, failed"),
        ('{"status": "finished", "step": "3"}', "step is '3'; allowed: a whole number"),
        ('{"status": "finished"}', "step is missing"),
        ("{", "is damaged"),
        ("7", "is 7; allowed: an object"),
    ],
)
def test_an_outcome_that_cannot_be_read_is_none(training: Training, text: str, words: str) -> None:
    """An unreadable outcome, which a recipe may write, counts as none; the log names the field."""
    files = training._attempt.files
    assert training._read_outcome() is None
    files.outcome.write_text(text)
    assert training._read_outcome() is None
    [line] = training._attempt.log  # type: ignore[misc]
    assert "outcome-1.json" in line
    assert words in line
    files.outcome.write_text('{"status": "finished", "step": 3, "error": null}')
    assert training._read_outcome() == TrainingOutcome(status="finished", step=3)
