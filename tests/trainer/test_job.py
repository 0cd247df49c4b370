"""Files that a running training reads."""

import json
from pathlib import Path

import pytest

from trainer.distributed.ranks import Control, Request
from trainer.job import ControlFile


def test_a_control_file_that_cannot_be_read_costs_itself_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unreadable control file is logged with field and value; an earlier stop still applies."""
    path = tmp_path / "control-1.json"
    control = ControlFile(path)
    _replace(path, {"stop": "pause", "requests": []})
    assert control.read() == Control("pause")
    _replace(path, {"stop": "jump", "requests": []})
    assert control.read() == Control("pause")
    assert control.read() == Control("pause")
    [line] = capsys.readouterr().err.splitlines()
    assert "control-1.json: stop is 'jump'; allowed: one of cancel, pause, preempt" in line
    _replace(path, {"stop": None, "requests": [{"id": 7, "kind": "replay", "value": 3}]})
    assert control.read() == Control(None, Request(7, "replay", 3.0))


def _replace(path: Path, content: object) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
