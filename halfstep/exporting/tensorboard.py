"""Export to a TensorBoard event file in a new folder, by TensorBoard's own writer."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from halfstep.exporting.points import Point

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunDetail

SECONDS = 120  # between two flushes
WAITING = 100  # queued events


def write(run: "RunDetail", points: Iterable[Point], folder: Path) -> Path:
    """Write the run to a new subfolder; return it. Raises FileExistsError."""
    place = folder / f"run{run['id']}"
    place.mkdir(parents=True)
    writer = EventFileWriter(str(place), max_queue_size=WAITING, flush_secs=SECONDS)
    try:
        writer.add_event(_text("run", _words(run), run["created_at"]))
        for point in points:
            summary = Summary(value=[Summary.Value(tag=point.name, simple_value=point.value)])
            writer.add_event(Event(step=point.step, wall_time=point.time, summary=summary))
    finally:
        writer.close()
    return place


def _words(run: "RunDetail") -> str:
    """Describe a run in Markdown: status, tags and configuration."""
    config = json.dumps(run["config"], indent=4)
    tags = ", ".join(run["tags"]) or "none"
    head = (
        f"**{run['name']}**: {run['status']}, {run['skipped']:,} of {run['step']:,} steps skipped"
    )
    indented = "\n".join(f"    {line}" for line in config.splitlines())
    return f"{head}\n\nTags: {tags}\n\n{indented}"


def _text(tag: str, words: str, time: float) -> Event:
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[words.encode()], tensor_shape=shape)
    value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
    return Event(step=0, wall_time=time, summary=Summary(value=[value]))
