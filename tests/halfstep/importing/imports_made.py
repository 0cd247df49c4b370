"""Shared helpers of the tests of imports."""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

RECORDED = Path(__file__).parents[1] / "imported"


MOMENT = 1_700_000_000.0


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
