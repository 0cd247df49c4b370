"""Parts of the tests of imports that other tests use, too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tests.site import type_command

RECORDED = Path(__file__).parents[1] / "imported"


MOMENT = 1_700_000_000.0


Import = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Import:
    """Run `halfstep import`; return its message on each run. code: its exit code."""

    def type_it(source: str, path: Path, *words: str, code: int = 0) -> list[dict[str, Any]]:
        folder = str(tmp_path / "halfstep")
        options = ("--folder", folder, "--offline", "--json", *words)
        assert type_command("import", source, str(path), *options) == code
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return type_it


def scalar(tag: str, step: int, value: float) -> Event:
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    return Event(step=step, wall_time=MOMENT + step, summary=summary)


def event_file(folder: Path, *events: Event) -> Path:
    """Write an event file with TensorBoard's own writer."""
    writer = EventFileWriter(str(folder))
    for event in events:
        writer.add_event(event)
    writer.close()
    return max(folder.glob("*tfevents*"))
